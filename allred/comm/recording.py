"""Starting a timeline when a world begins, on all ranks or on none, and ending it with that world."""

import os
import secrets
import socket
import time
from collections.abc import Sequence
from typing import Any

from allred.comm.communicator import Communicator
from allred.errors import InputError
from allred.timeline import recorder
from allred.timeline.track import Track

_compared: tuple[Communicator, Any, range] | None = None  # whose clocks are, while there is a timeline; see `start`


def start(directory: str, control: Communicator, comm: Any, workers: range) -> None:
    """Into a file of this rank's own in `directory`, if that is the name of one. Collective.

    control: the communicator of all ranks, to which `comm` belongs; before its workers there may be parameter servers,
    behind them clients.
    Raises InputError on all ranks.
    """
    global _compared
    stop()  # what an init() that failed has left
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
    mine.begin(
        {
            "job": told[0][1], "rank": control.rank, "size": control.size, "time": time.time(),
            "start": time.perf_counter_ns(), "name": _name(control.rank, workers, control.size),
            "host": socket.gethostname(), "pid": os.getpid(),
        }
    )  # fmt: skip
    recorder.install(mine)
    _compared = control, comm, workers
    _compare_clocks(control, comm, [*workers, *(rank for rank in range(control.size) if rank not in workers)])


def _name(rank: int, workers: range, size: int) -> str:
    """How messages call a rank."""
    if rank < workers.start:
        return f"parameter server {rank}"
    if rank >= workers.stop:
        return f"client {rank - workers.stop}"
    return f"worker {rank - workers.start}" if len(workers) < size else f"rank {rank}"


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
    if _compared is not None and _compared[0].rank in _compared[2]:
        _compare_clocks(*_compared)


def _compare_clocks(control: Communicator, comm: Any, ranks: Sequence[int]) -> None:
    assert recorder.current is not None
    found = time.perf_counter_ns(), 0, 0
    if len(ranks) > 1:
        from allred.comm import clock  # imports MPI

        found = control.queue.start("the comparison of clocks", clock.measure(comm, ranks)).wait()
    recorder.current.add(("clock", *found))


def stop() -> None:
    """Write what is left, and no more."""
    global _compared
    recorder.install(None)
    _compared = None
