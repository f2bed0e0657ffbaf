"""Starting a timeline when a world begins, on all ranks or on none, and ending it with that world."""

import os
import secrets
import socket
import time
from collections.abc import Sequence
from typing import Any

from allred.comm.base import Communicator
from allred.errors import InputError
from allred.timeline import recorder
from allred.timeline.track import Track

_control: Communicator | None = None
_comm: Any = None
_workers: Sequence[int] = ()


def start(directory: str, control: Communicator, comm: Any, servers: int) -> None:
    """Into a file of this rank's own in `directory`, if that is the name of one. Collective.

    control: the communicator of all ranks, to which `comm` belongs; the first `servers` of them are parameter servers.
    Raises InputError on all ranks.
    """
    global _control, _comm, _workers
    if directory in ("none", ""):
        return
    mine, problem = _file(os.path.join(os.path.abspath(directory), f"rank-{control.rank}.timeline"))
    told = control.allgather_object((problem, secrets.token_hex(8), socket.gethostname())).wait()
    problems = [f"rank {rank} on {host}: {text}" for rank, (text, _, host) in enumerate(told) if text]
    if problems:
        if mine is not None:
            mine.give_up()
        raise InputError(
            f"ALLRED_TIMELINE={directory!r} cannot be used ({problems[0]}); give a directory that every rank "
            "can write to"
        )
    assert mine is not None
    role = f"parameter server {control.rank}" if control.rank < servers else f"worker {control.rank - servers}"
    mine.begin(
        {
            "job": told[0][1], "rank": control.rank, "size": control.size, "time": time.time(),
            "start": time.perf_counter_ns(), "name": role if servers else f"rank {control.rank}",
            "host": socket.gethostname(), "pid": os.getpid(),
        }
    )  # fmt: skip
    recorder.install(mine)
    _control, _comm, _workers = control, comm, range(servers, control.size)
    _compare_clocks([*_workers, *range(servers)])


def _file(path: str) -> tuple[recorder.Recorder | None, str]:
    """What writes it; or why it cannot be written."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return recorder.Recorder(path), ""
    except OSError as error:
        return None, f"{error.strerror}: {error.filename}"


def attach(communicator: Communicator, members: str) -> None:
    """Have what passes through a communicator noted, if there is a timeline. members: as Track has it."""
    if recorder.current is not None:
        communicator.record(Track(recorder.current, members))


def compare_clocks_again() -> None:
    """The workers are about to part; collective among them."""
    if recorder.current is not None:
        _compare_clocks(_workers)


def _compare_clocks(ranks: Sequence[int]) -> None:
    assert recorder.current is not None
    assert _control is not None
    found = time.perf_counter_ns(), 0, 0
    if len(ranks) > 1:
        from allred.comm import clock  # imports MPI

        found = _control.queue.start("the comparison of clocks", clock.measure(_comm, ranks)).wait()
    recorder.current.add(("clock", *found))


def stop() -> None:
    """Write what is left, and no more."""
    global _control, _comm
    recorder.install(None)
    _control = _comm = None
