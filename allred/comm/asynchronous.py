"""The collectives as functions that start an operation, and do not wait: each returns a Work.

    work = allred.allreduce_async_(gradient)
    ...                                         # compute something else
    work.wait()                                 # or allred.synchronize(work)

What was passed belongs to the operation until it is complete: it must not be written to, and what is reduced in place
not read either. Any number may be under way; they complete in the order in which they were started, which has to be the
same on all ranks, blocking ones among them. Arguments, results and errors are those of the function without `_async`;
errors are raised by `wait`.

Who sees to it that they go on. On one node (backend shm) a thread of C's, if ALLRED_PROGRESS is thread: it needs no
GIL, starts with the first operation here, and sleeps while there is nothing to do. It stops where Python is needed:
between the two parts of allgather and alltoall (sizes first), and where ranks disagree. Else, and always between nodes
and on backend mpi, the callers do: in every wait, in `done`, and when they start another.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

from allred.arrays import Array
from allred.comm import header
from allred.comm.communicator import Communicator
from allred.comm.functions import config, current
from allred.comm.ops import ReduceOp
from allred.comm.process_set import ProcessSet
from allred.comm.work import Work
from allred.compression import Compression
from allred.errors import InputError

T = TypeVar("T")


def allreduce_async(
    value: Any,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str = "",
    compression: Compression = Compression.none,
    process_set: ProcessSet | None = None,
) -> Work[Array]:
    """Start `allreduce`; the result is a new array."""
    return _here(_attended(process_set).allreduce(value, op, name, compression))


def allreduce_async_(
    array: Array,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str = "",
    compression: Compression = Compression.none,
    process_set: ProcessSet | None = None,
) -> Work[Array]:
    """Start `allreduce_`, which overwrites `array`; it is the result too."""
    return _here(_attended(process_set).allreduce_(array, op, name, compression))


def grouped_allreduce_async(
    group: Sequence[Any],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str = "",
    compression: Compression = Compression.none,
    process_set: ProcessSet | None = None,
) -> Work[list[Array]]:
    """Start `grouped_allreduce`: several arrays as one operation, which is how to have small ones travel together."""
    return _here(_attended(process_set).grouped_allreduce(group, op, name, compression))


def grouped_allreduce_async_(
    group: Sequence[Array],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str = "",
    compression: Compression = Compression.none,
    process_set: ProcessSet | None = None,
) -> Work[list[Array]]:
    """The same in place."""
    return _here(_attended(process_set).grouped_allreduce_(group, op, name, compression))


def broadcast_async(value: Any, root: int = 0, name: str = "", process_set: ProcessSet | None = None) -> Work[Array]:
    """Start `broadcast`; the result is a new array."""
    return _here(_attended(process_set).broadcast(value, root, name))


def broadcast_async_(array: Array, root: int = 0, name: str = "", process_set: ProcessSet | None = None) -> Work[Array]:
    """The same in place."""
    return _here(_attended(process_set).broadcast_(array, root, name))


def allgather_async(value: Any, name: str = "", process_set: ProcessSet | None = None) -> Work[Array]:
    """Start `allgather`; the result is a new array."""
    return _here(_attended(process_set).allgather(value, name))


def reducescatter_async(
    value: Any, op: ReduceOp = ReduceOp.AVERAGE, name: str = "", process_set: ProcessSet | None = None
) -> Work[Array]:
    """Start `reducescatter`; the result is a new array, this rank's rows."""
    return _here(_attended(process_set).reducescatter(value, op, name))


def alltoall_async(
    value: Any, splits: Sequence[int] | None = None, name: str = "", process_set: ProcessSet | None = None
) -> Work[tuple[Array, Array]]:
    """Start `alltoall`; the result is (new array, int64 array of the rows each rank sent)."""
    return _here(_attended(process_set).alltoall(value, splits, name))


def barrier_async(process_set: ProcessSet | None = None) -> Work[None]:
    """Start `barrier`: complete once every rank has started it."""
    return _here(_attended(process_set).barrier())


def poll(work: Work[Any]) -> bool:
    """Whether an operation is complete, with whatever outcome; does not wait."""
    return _checked(work, "poll").done()


def synchronize(work: Work[T]) -> T:
    """Wait for an operation: its result, or the error that all ranks raise. The same as `work.wait()`."""
    return _checked(work, "synchronize").wait()


def _attended(process_set: ProcessSet | None) -> Communicator:
    communicator = current(process_set)
    if config().progress == "thread":
        communicator.attend()
    return communicator


def _here(work: Work[T]) -> Work[T]:
    """Note for messages where the program started it: they come when it waits, somewhere else."""
    work.place = header.call_site()
    return work


def _checked(work: Work[T], function: str) -> Work[T]:
    if not isinstance(work, Work):
        raise InputError(f"{function}({type(work).__name__}): expected what a function named ..._async has returned")
    return work
