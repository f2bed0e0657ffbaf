"""Starts the timeline of a job on all ranks or on none, compares the clocks of the ranks, and ends the timeline."""

import os
import secrets
import socket
import time
from collections.abc import Sequence

import numpy as np

from allred.comm.bootstrap import Bootstrap
from allred.comm.communicator import Communicator
from allred.comm.messages import Messages
from allred.comm.work import Steps, WorkQueue
from allred.errors import InputError
from allred.timeline import recorder
from allred.timeline.recorder import Track

_REQUESTS = 20  # to each rank; the first ones are slower

_compared: tuple[Bootstrap, range, float] | None = None  # the arguments of `start`, during a timeline


def start(directory: str, bootstrap: Bootstrap, workers: range, timeout_s: float) -> None:
    """Start a timeline in a file of this rank in `directory`; "none" and "": no timeline. Collective.

    bootstrap: of all ranks. workers: the ranks of the workers; parameter servers have lower ranks, clients higher ones.
    timeout_s: the setting of this name.
    Raises InputError on all ranks if one of them cannot write to the directory.
    """
    global _compared
    stop()  # one that was left by a failed init()
    if directory in ("none", ""):
        return
    mine, problem = None, ""
    try:
        os.makedirs(os.path.abspath(directory), exist_ok=True)
        mine = recorder.Recorder(os.path.join(os.path.abspath(directory), f"rank-{bootstrap.rank}.timeline"))
    except OSError as error:
        problem = f"{error.strerror}: {error.filename}"
    gathered = bootstrap.allgather_object((problem, secrets.token_hex(8), socket.gethostname()))
    problems = [f"rank {rank} on {host}: {text}" for rank, (text, _, host) in enumerate(gathered) if text]
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
            "job": gathered[0][1], "rank": bootstrap.rank, "size": bootstrap.size, "time": time.time(),
            "start": time.perf_counter_ns(), "name": _name(bootstrap.rank, workers, bootstrap.size),
            "host": socket.gethostname(), "pid": os.getpid(),
        }
    )  # fmt: skip
    recorder.install(mine)
    _compared = bootstrap, workers, timeout_s
    everyone = [*workers, *(rank for rank in range(bootstrap.size) if rank not in workers)]
    _compare_clocks(bootstrap, everyone, timeout_s)


def _name(rank: int, workers: range, size: int) -> str:
    """Return the name of a rank in messages."""
    if rank < workers.start:
        return f"parameter server {rank}"
    if rank >= workers.stop:
        return f"client {rank - workers.stop}"
    return f"worker {rank - workers.start}" if len(workers) < size else f"rank {rank}"


def attach(communicator: Communicator, members: str) -> None:
    """Record the operations of a communicator, if there is a timeline. members: see Track."""
    if recorder.current is not None:
        communicator.record(Track(recorder.current, members))


def compare_clocks_again() -> None:
    """Compare the clocks at the end of the job. Collective among the workers."""
    if _compared is not None and _compared[0].rank in _compared[1]:
        _compare_clocks(*_compared)


def _compare_clocks(bootstrap: Bootstrap, ranks: Sequence[int], timeout_s: float) -> None:
    assert recorder.current is not None
    found = time.perf_counter_ns(), 0, 0
    if (messages := bootstrap.messages()) is not None and len(ranks) > 1:
        queue = WorkQueue(timeout_s)
        found = queue.start("the comparison of clocks", measure_clock(messages, ranks)).wait()
    recorder.current.add(("clock", *found))


def stop() -> None:
    """Write the remaining records and end the timeline."""
    global _compared
    recorder.install(None)
    _compared = None


def measure_clock(messages: Messages, ranks: Sequence[int]) -> Steps[tuple[int, int, int]]:
    """Compare this rank's clock with that of the first of `ranks`, the chief. Returns (time, offset, error) in ns.

    The chief sends its clock to each rank several times. A request sent at time a whose reply c arrives at time b, by
    the clock of the rank, shows that the clock of the chief is ahead by

        c - (a + b) / 2  +-  (b - a) / 2

    The fastest reply gives the smallest error. An offset within the error may be 0: both clocks are of one machine.
    """
    chief, *others = ranks
    rank, tag, word = messages.rank, messages.last_tag, np.zeros(1, np.int64)
    best = time.perf_counter_ns(), 0, 0 if rank == chief else 2**62
    for other in others:
        if rank not in (chief, other):
            continue
        for _ in range(_REQUESTS):
            sent = time.perf_counter_ns()
            if rank == chief:
                yield messages.receive(word, other, tag)
                word[0] = time.perf_counter_ns()
                yield messages.send(word, other, tag)
            else:
                yield messages.send(word, chief, tag)
                yield messages.receive(word, chief, tag)
                now = time.perf_counter_ns()
                error = (now - sent) // 2
                best = min(best, (now, int(word[0]) - (sent + error), error), key=lambda found: found[2])
    return best
