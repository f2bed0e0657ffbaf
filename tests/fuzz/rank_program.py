"""One rank of a fuzz job: `mpirun -np N python rank_program.py SEED`.

It runs the operations of the plan and checks each result. At the end it prints one line with a digest of everything
that must be equal on all ranks, including error texts. An error that ends it earlier is printed for the driver.
"""

import hashlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import join_rounds
import numpy as np
from arithmetic import difference, expected, inputs, without_nan_payload
from calls import Call
from plan import Fault, Job, called, job_of

import allred
from allred import testing


class Wrong(Exception):  # noqa: N818  (a test failure, not an error of allred)
    """allred returned a wrong result."""


class Digest:
    """Digest of data that must be equal on all ranks. Operations may be added in any order."""

    def __init__(self) -> None:
        self._parts: dict[int, bytes] = {}

    def update(self, index: int, data: bytes) -> None:
        """Add data of an operation."""
        self._parts[index] = hashlib.blake2b(self._parts.get(index, b"") + data).digest()

    def hexdigest(self) -> str:
        """Digest of all operations in their order."""
        return hashlib.blake2b(b"".join(self._parts[index] for index in sorted(self._parts)), digest_size=6).hexdigest()


def print_line(text: str) -> None:
    """Print a line to stdout in one write."""
    os.write(1, f"rank {allred.rank()} {text}\n".encode())


def fault_of(job: Job) -> testing.Fault:
    """Fault of the job, to be called once per operation."""
    fault, step = job.fault, job.fault.operation + 1
    error = ValueError(f"the fault of seed {job.seed}")
    if fault.kind in ("none", "wrong"):
        return testing.slow(0, 0.0)
    if fault.kind == "raise":
        return testing.fail_at(fault.rank, step, error)
    if fault.kind == "sys.exit":
        return testing.exit_at(fault.rank, step, fault.code)
    if fault.kind == "SystemExit":
        return testing.fail_at(fault.rank, step, SystemExit(fault.code))
    if fault.kind == "interrupt":
        return testing.Fault("interrupt", fault.rank, step, lambda: signal.raise_signal(signal.SIGINT))
    if fault.kind == "_exit":
        return testing.Fault("_exit", fault.rank, step, lambda: os._exit(0))
    number = signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP
    return testing.Fault(fault.kind, fault.rank, step, lambda: _signal(number, fault.midway_s))


def _signal(number: int, midway_s: float) -> None:
    if midway_s:
        threading.Timer(midway_s, os.kill, (os.getpid(), number)).start()
    else:
        os.kill(os.getpid(), number)


def is_wrong(fault: Fault, index: int) -> bool:
    """Whether one rank makes a wrong call at this operation."""
    return fault.kind == "wrong" and fault.operation == index


def run(job: Job, digest: Digest) -> None:
    """Run all operations of the plan."""
    rank, fault = allred.rank(), fault_of(job)
    started: list[
        tuple[int, Call, Callable[[], list[Any]]]
    ] = []  # started operations; ranks wait for them independently
    for index, operation in enumerate(job.operations):
        time.sleep(operation.delays[rank])
        fault()
        rng = rng_of(job, index)
        if is_wrong(job.fault, index) or rng.random() < 0.3:
            wait_for(job, started, rng, digest)
        if is_wrong(job.fault, index):
            text = run_wrong(job, index)
            digest.update(index, text.encode())
            continue
        call = Call(operation, inputs(job, index, operation, rank), rank, job.ranks, rng_of(job, index))
        if rng.random() < 0.4 and (wait := call.start()):
            started.append((index, call, wait))
        else:
            check(job, index, call, call.run(), digest)
        if job.fault.midway_s and (job.fault.rank, job.fault.operation) == (rank, index):
            time.sleep(60)  # until the signal arrives
    wait_for(job, started, rng_of(job, -1), digest)


def wait_for(
    job: Job, started: list[tuple[int, Call, Callable[[], list[Any]]]], rng: random.Random, digest: Digest
) -> None:
    """Wait for all started operations in random order."""
    rng.shuffle(started)
    while started:
        index, call, wait = started.pop()
        check(job, index, call, wait(), digest)


def rng_of(job: Job, index: int) -> random.Random:
    return random.Random(f"{job.seed} {index} {allred.rank()}")


def check(job: Job, index: int, call: Call, results: list[Any], digest: Digest) -> None:
    """Compare results with numpy, and add those that must be equal on all ranks to the digest."""
    operation = call.operation
    wanted = expected(job, index, operation, call.rank)
    where = f"seed {job.seed}, operation {index}, {operation}, rank {call.rank}"
    if len(results) != len(wanted):
        raise Wrong(f"{where}: {len(results)} results, expected {len(wanted)}")
    for number, (got, want) in enumerate(zip(results, wanted, strict=True)):
        if text := difference(got, want, exactly=job.rank_order):
            raise Wrong(f"{where}: result {number} {text}")
        if want.everywhere:
            digest.update(index, without_nan_payload(got))
    if not call.right_memory(results):
        raise Wrong(f"{where}: {'not in place' if call.in_place else 'the argument was changed'}")


def run_wrong(job: Job, index: int) -> str:
    """Run an operation that one rank calls wrongly: all ranks must raise the same error and change no argument."""
    rank, where = allred.rank(), f"seed {job.seed}, operation {index}"
    operation = called(job, rank, index)
    place = index + (operation is not job.operations[index] and job.fault.change == "next")
    call = Call(operation, inputs(job, place, operation, rank), rank, job.ranks, rng_of(job, place))
    try:
        results = call.run()
    except (allred.MismatchError, allred.InputError) as error:
        unusable = job.fault.change == "unusable"
        if type(error) is not (allred.InputError if unusable else allred.MismatchError):
            raise Wrong(f"{where}: the wrong kind of error") from error
        if not call.untouched():
            raise Wrong(f"{where}: an operation that raised an error changed its arguments") from error
        if not job.fault.caught:
            raise
        return f"{type(error).__name__}: {error}"
    raise Wrong(
        f"{where}: no error, although rank {job.fault.rank} called it wrongly ({job.fault.change}): {results!r:.200}"
    )


def description(error: allred.AllredError, job: Job) -> str:
    """Error that ended this rank; for RemoteRankError with failed rank, code, and whether it has a traceback."""
    if type(error).__name__ != "RemoteRankError":
        return f"raised {type(error).__name__}"
    shown = "with" if f"the fault of seed {job.seed}" in error.traceback else "without"
    return f"raised RemoteRankError of rank {error.rank} code {error.code} {shown} its traceback"


def main() -> None:
    job, digest = job_of(int(sys.argv[1])), Digest()
    allred.init()
    try:
        run(job, digest)
        if text := join_rounds.run(job.seed, allred.rank(), job.ranks):
            raise Wrong(f"seed {job.seed}, {text}")
        allred.barrier()
    except allred.AllredError as error:
        print_line(description(error, job))
        raise
    assert np.array_equal(allred.allgather(allred.rank()), np.arange(job.ranks))
    print_line(f"done {digest.hexdigest()}")


if __name__ == "__main__":
    main()
