"""The collectives as functions over the ranks that allred.init() joined. Blocking; in the same order on every rank.

Arrays may be of any layout; numbers and lists count as arrays except in place. Results are the same on every rank, bit
for bit. `name` is for error messages. All raise, on every rank and with the same text: InputError if a rank's argument
cannot be used, MismatchError if the ranks' calls differ; and on a rank that waits too long, CollectiveTimeout.
`process_set`: the ranks that take part, all of them without; a root is one of these, by its number allred.rank().
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from allred.arrays import Array
from allred.cluster import topology
from allred.comm.communicator import Communicator
from allred.comm.ops import ReduceOp
from allred.comm.process_set import ProcessSet, communicators
from allred.compression import Compression
from allred.config import Config
from allred.errors import InputError

_communicator: Communicator | None = None
_config = Config()
_reason = ""


def install(communicator: Communicator | None, config: Config | None = None, reason: str = "") -> None:
    """What init() made, for everything that comes after; None takes it away."""
    global _communicator, _config, _reason
    _communicator, _config, _reason = communicator, config or Config(), reason


def installed() -> bool:
    """Whether there is a communicator."""
    return _communicator is not None


def current(process_set: ProcessSet | None = None) -> Communicator:
    """The communicator of the running world, or of a set of ranks. Raises NotInitializedError before allred.init()."""
    if process_set is not None:
        if not isinstance(process_set, ProcessSet):
            raise InputError(f"process_set={process_set!r} must be an allred.ProcessSet, or None for all ranks")
        return process_set.communicator()
    if _communicator is None:
        topology.current()  # raises
    assert _communicator is not None
    return _communicator


def config() -> Config:
    """The settings in force; the defaults before allred.init()."""
    return _config


def reason() -> str:
    """Why this backend serves."""
    return _reason


class within:  # noqa: N801  (a context manager that costs next to nothing, for every step)
    """Inside this block `current` is the communicator of the set. Raises InputError if this rank is not in it."""

    def __init__(self, process_set: ProcessSet | None) -> None:
        self._set = process_set

    def __enter__(self) -> None:
        global _communicator
        if self._set is not None:
            self._before, _communicator = _communicator, current(self._set)

    def __exit__(self, *_: object) -> None:
        global _communicator
        if self._set is not None:
            _communicator = self._before


@contextlib.contextmanager
def patience(timeout_s: float) -> Iterator[None]:
    """Inside this block an operation may wait for `timeout_s` seconds on this rank, and nobody is warned of it.

        with allred.patience(3600):
            allred.barrier()            # the chief writes a large file meanwhile

    Raises InputError if it is not a positive number.
    """
    if not isinstance(timeout_s, (int, float)) or not timeout_s > 0:
        raise InputError(f"patience({timeout_s!r}) must be a positive number of seconds")
    queues = [communicator.queue for communicator in (current(), *communicators())]
    before = {queue: (queue.timeout_s, queue.quiet) for queue in queues}
    for queue in queues:
        queue.timeout_s, queue.quiet = float(timeout_s), True
    try:
        yield
    finally:
        for queue in (*queues, *(communicator.queue for communicator in communicators())):  # some are new
            queue.timeout_s, queue.quiet = before.get(queue, before[queues[0]])


def allreduce(
    value: Any,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str = "",
    compression: Compression = Compression.none,
    process_set: ProcessSet | None = None,
) -> Array:
    """The reduction of every rank's `value` with `op`: a new array of the same shape and dtype.

    compression: what float32 and float64 numbers travel as, `allred.Compression`; docs/modes.md has what that costs.
    """
    return current(process_set).allreduce_now(value, False, op, name, compression)


def allreduce_(
    array: Array,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str = "",
    compression: Compression = Compression.none,
    process_set: ProcessSet | None = None,
) -> Array:
    """The same in place: `array` is overwritten, and returned."""
    return current(process_set).allreduce_now(array, True, op, name, compression)


def grouped_allreduce(
    group: Sequence[Any],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str = "",
    compression: Compression = Compression.none,
    process_set: ProcessSet | None = None,
) -> list[Array]:
    """allreduce of several arrays as one operation: new arrays."""
    return current(process_set).grouped_allreduce_now(group, False, op, name, compression)


def grouped_allreduce_(
    group: Sequence[Array],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str = "",
    compression: Compression = Compression.none,
    process_set: ProcessSet | None = None,
) -> list[Array]:
    """The same in place."""
    return current(process_set).grouped_allreduce_now(group, True, op, name, compression)


def broadcast(value: Any, root: int = 0, name: str = "", process_set: ProcessSet | None = None) -> Array:
    """The root's `value`, as a new array; every rank passes one of the same shape and dtype."""
    return current(process_set).broadcast(value, root, name).wait()


def broadcast_(array: Array, root: int = 0, name: str = "", process_set: ProcessSet | None = None) -> Array:
    """The same in place."""
    return current(process_set).broadcast_(array, root, name).wait()


def allgather(value: Any, name: str = "", process_set: ProcessSet | None = None) -> Array:
    """All ranks' arrays joined along the first dimension, in which they may differ: a new array. 0-d counts as (1,)."""
    return current(process_set).allgather(value, name).wait()


def reducescatter(
    value: Any, op: ReduceOp = ReduceOp.AVERAGE, name: str = "", process_set: ProcessSet | None = None
) -> Array:
    """This rank's rows of the reduction: a new array. The first ranks get one row more where they do not divide."""
    return current(process_set).reducescatter(value, op, name).wait()


def alltoall(
    value: Any, splits: Sequence[int] | None = None, name: str = "", process_set: ProcessSet | None = None
) -> tuple[Array, Array]:
    """splits[r] rows to each rank r, and theirs to this one: (new array, int64 array of the rows each rank sent).

    Without `splits` the rows must divide evenly by the number of ranks.
    """
    return current(process_set).alltoall(value, splits, name).wait()


def barrier(process_set: ProcessSet | None = None) -> None:
    """Wait until every rank is here."""
    current(process_set).barrier().wait()


def broadcast_object(value: Any, root: int = 0, name: str = "", process_set: ProcessSet | None = None) -> Any:
    """The root's picklable object; other ranks' `value` is ignored."""
    return current(process_set).broadcast_object(value, root, name).wait()


def allgather_object(value: Any, name: str = "", process_set: ProcessSet | None = None) -> list[Any]:
    """Every rank's picklable object, in rank order."""
    return current(process_set).allgather_object(value, name).wait()
