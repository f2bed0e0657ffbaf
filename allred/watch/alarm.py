"""A word about ranks that do not come: MPI's start, in which init() waits for all of them, holds the GIL and can
neither be looked into nor given up. A thread of the C extension warns, and ends this rank at the time limit.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

from allred import native
from allred.config import Config

SHORTEST_S = 60.0  # ALLRED_TIMEOUT_S is about a running job, and may be short; a start over many hosts takes its time

_RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")

_WHAT = (
    "in allred.init() for the other ranks: one has not started, ended before it came there, or cannot be reached over "
    "the network (python -m allred doctor, under the same mpirun, tells which)"
)
_WHAT_BY_HAND = (
    "in allred.Server() for the other tasks, which had all come: one has been stopped since, or MPI cannot reach it "
    "over the network"
)


@contextlib.contextmanager
def waiting_for_ranks(settings: dict[str, Any] | str, life: int = -1) -> Iterator[None]:
    """Around what waits for the other ranks. `settings`: what was set on this rank, or why that cannot be used. `life`:
    a descriptor on which a line comes if one of them has died; then this rank ends, too."""
    known = settings if isinstance(settings, dict) else {}
    rank = next((os.environ[name] for name in _RANK if os.environ.get(name, "").isdigit()), None)
    if native.alarm is None or native.cancel_alarm is None or rank is None:
        yield
        return
    what = _WHAT if life < 0 else _WHAT_BY_HAND
    warn_s, limit_s = (float(known.get(name, getattr(Config, name))) for name in ("stall_warning_s", "timeout_s"))
    native.alarm(warn_s, max(limit_s, SHORTEST_S), f"rank {rank} on {socket.gethostname()}", what, life)
    try:
        yield
    finally:
        native.cancel_alarm()
