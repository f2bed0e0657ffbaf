"""The collectives as functions over the ranks that allred.init() joined. Every rank calls them in the same order.

Arrays may have any layout and any dtype in arrays.DTYPES; numbers and lists count as arrays except in place. Results
are the same on every rank, bit for bit. `name` is shown in messages. `process_set`: the ranks that take part (default:
all); a root is one of them, by its number allred.rank().

All functions raise InputError if the arguments of a rank cannot be used, and MismatchError if the calls of the ranks
differ, on every rank and with the same text; and CollectiveTimeout on a rank that waits longer than ALLRED_TIMEOUT_S.

The functions named ..._async start an operation and return a Work:

    work = allred.allreduce_async_(gradient)
    ...                                         # compute something else
    work.wait()                                 # or allred.synchronize(work)

Until it is complete, the arguments belong to the operation: do not write to them, and do not read what is reduced in
place. Any number may be under way. They complete in the order in which they were started, together with the blocking
functions; this order must be the same on all ranks. Errors are raised by `wait`.

Who makes progress: on one node (backend shm) a C thread, if ALLRED_PROGRESS is thread. It needs no GIL, starts with the
first ..._async call, and sleeps while there is nothing to do. It cannot run the Python parts: between the two phases of
allgather and alltoall (sizes first), and when ranks disagree. Otherwise, and always between nodes and on backend mpi,
operations make progress when the program waits for one, calls `done`, or starts another.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

from allred import world
from allred.arrays import Array
from allred.comm import replicas
from allred.comm.communicator import Communicator
from allred.comm.ops import Compression, ReduceOp
from allred.comm.process_set import ProcessSet, communicators
from allred.comm.work import Work, call_site
from allred.errors import InputError

T = TypeVar("T")


_JOIN_OBSERVERS = world.Slot(list[Callable[[int], None]])  # called with the rank that joined last


def current(process_set: ProcessSet | None = None) -> Communicator:
    """Return the communicator of all ranks, or of a process set. Raises NotInitializedError before allred.init()."""
    if process_set is not None:
        if not isinstance(process_set, ProcessSet):
            raise InputError(f"process_set={process_set!r} must be an allred.ProcessSet, or None for all ranks")
        return process_set.communicator()
    return world.current().communicator  # type: ignore[no-any-return]


class within:  # noqa: N801  (a cheap context manager, used in every step)
    """Inside this block `current` returns the communicator of the set. Raises InputError if this rank is not in it."""

    def __init__(self, process_set: ProcessSet | None) -> None:
        self._set = process_set

    def __enter__(self) -> None:
        if self._set is not None:
            self._world = world.current()
            self._before, self._world.communicator = self._world.communicator, current(self._set)

    def __exit__(self, *_: object) -> None:
        if self._set is not None:
            self._world.communicator = self._before


@contextlib.contextmanager
def patience(timeout_s: float) -> Iterator[None]:
    """Set the time limit of operations inside this block on this rank, in seconds, and show no warnings about waits.

        with allred.patience(3600):
            allred.barrier()            # the chief is writing a large file

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
    """Reduce `value` over all ranks with `op`. Returns a new array of the same shape and dtype.

    value: of floats, complex numbers, integers or bools; `op` says which it takes.
    compression: how floats are sent, an `allred.Compression` (docs/precision.md, docs/slow-links.md).

    Example: on 2 ranks, `allred.allreduce(np.full(3, float(allred.rank())))` returns `[0.5, 0.5, 0.5]`.
    """
    return current(process_set).allreduce_blocking(value, False, op, name, compression)


def allreduce_(
    array: Array,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str = "",
    compression: Compression = Compression.none,
    process_set: ProcessSet | None = None,
) -> Array:
    """As `allreduce`, in place: overwrite the writable array `array` and return it."""
    return current(process_set).allreduce_blocking(array, True, op, name, compression)


def grouped_allreduce(
    group: Sequence[Any],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str = "",
    compression: Compression = Compression.none,
    process_set: ProcessSet | None = None,
) -> list[Array]:
    """Reduce a list of arrays of any shapes and dtypes as one operation. Returns a list of new arrays.

    Example: on 2 ranks, `allred.grouped_allreduce([1.0, np.ones(2)], allred.Sum)` returns `[2.0, [2.0, 2.0]]`.
    """
    return current(process_set).grouped_allreduce_blocking(group, False, op, name, compression)


def grouped_allreduce_(
    group: Sequence[Array],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str = "",
    compression: Compression = Compression.none,
    process_set: ProcessSet | None = None,
) -> list[Array]:
    """As `grouped_allreduce`, in place: overwrite the arrays and return them."""
    return current(process_set).grouped_allreduce_blocking(group, True, op, name, compression)


def broadcast(value: Any, root: int = 0, name: str = "", process_set: ProcessSet | None = None) -> Array:
    """Copy the root's `value` to every rank. Returns a new array; all ranks pass the same shape and dtype.

    Any dtype but object: also dates, strings of fixed width, records and longdouble, as in `allgather` and `alltoall`.

    Example: on 2 ranks, `allred.broadcast(np.array([allred.rank()]), root=1)` returns `[1]`.
    """
    return current(process_set).broadcast(value, root, name).wait()


def broadcast_(array: Array, root: int = 0, name: str = "", process_set: ProcessSet | None = None) -> Array:
    """As `broadcast`, in place: overwrite the writable array `array` and return it."""
    return current(process_set).broadcast(array, root, name, in_place=True).wait()


def allgather(value: Any, name: str = "", process_set: ProcessSet | None = None) -> Array:
    """Concatenate the arrays of all ranks along the first dimension, in rank order. Returns a new array.

    Ranks may differ in the first dimension only. A 0-d array counts as one of shape (1,).

    Example: on 2 ranks, `allred.allgather([allred.rank(), 5])` returns `[0, 5, 1, 5]`.
    """
    return current(process_set).allgather(value, name).wait()


def reducescatter(
    value: Any, op: ReduceOp = ReduceOp.AVERAGE, name: str = "", process_set: ProcessSet | None = None
) -> Array:
    """Reduce `value` over all ranks and return this rank's rows of the result, a new array.

    If the number of rows is not a multiple of the number of ranks, the first ranks get one more.

    Example: on 2 ranks, `allred.reducescatter([1, 2, 3], allred.Sum)` returns `[2, 4]` on rank 0 and `[6]` on rank 1.
    """
    return current(process_set).reducescatter(value, op, name).wait()


def alltoall(
    value: Any, splits: Sequence[int] | None = None, name: str = "", process_set: ProcessSet | None = None
) -> tuple[Array, Array]:
    """Send splits[r] rows to each rank r. Returns (new array of the rows received in rank order, int64 array of their
    numbers by rank). Without `splits` the number of rows must be a multiple of the number of ranks.

    Example: on 2 ranks, `allred.alltoall([allred.rank(), 5])` returns `([0, 1], [1, 1])` on rank 0.
    """
    return current(process_set).alltoall(value, splits, name).wait()


def barrier(process_set: ProcessSet | None = None) -> None:
    """Wait until every rank has called this function."""
    current(process_set).barrier().wait()


def broadcast_object(value: Any, root: int = 0, name: str = "", process_set: ProcessSet | None = None) -> Any:
    """Return the root's picklable object; the `value` of other ranks is ignored. An exception while the object is
    unpickled is raised on that rank only, and allred can be used afterwards."""
    return current(process_set).broadcast_object(value, root, name).wait()


def allgather_object(value: Any, name: str = "", process_set: ProcessSet | None = None) -> list[Any]:
    """Return the picklable objects of all ranks, in rank order. An exception of unpickling: see `broadcast_object`."""
    return current(process_set).allgather_object(value, name).wait()


def allreduce_async(
    value: Any,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str = "",
    compression: Compression = Compression.none,
    process_set: ProcessSet | None = None,
) -> Work[Array]:
    """Start `allreduce`. Returns a Work; its result is a new array."""
    return _started(_current(process_set).allreduce(value, op, name, compression))


def allreduce_async_(
    array: Array,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str = "",
    compression: Compression = Compression.none,
    process_set: ProcessSet | None = None,
) -> Work[Array]:
    """Start `allreduce_`. Returns a Work; its result is `array`."""
    return _started(_current(process_set).allreduce(array, op, name, compression, in_place=True))


def grouped_allreduce_async(
    group: Sequence[Any],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str = "",
    compression: Compression = Compression.none,
    process_set: ProcessSet | None = None,
) -> Work[list[Array]]:
    """Start `grouped_allreduce`. Returns a Work; its result is a list of new arrays."""
    return _started(_current(process_set).grouped_allreduce(group, op, name, compression))


def grouped_allreduce_async_(
    group: Sequence[Array],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str = "",
    compression: Compression = Compression.none,
    process_set: ProcessSet | None = None,
) -> Work[list[Array]]:
    """Start `grouped_allreduce_`. Returns a Work; its result is the list of arrays."""
    return _started(_current(process_set).grouped_allreduce(group, op, name, compression, in_place=True))


def broadcast_async(value: Any, root: int = 0, name: str = "", process_set: ProcessSet | None = None) -> Work[Array]:
    """Start `broadcast`. Returns a Work; its result is a new array."""
    return _started(_current(process_set).broadcast(value, root, name))


def broadcast_async_(array: Array, root: int = 0, name: str = "", process_set: ProcessSet | None = None) -> Work[Array]:
    """Start `broadcast_`. Returns a Work; its result is `array`."""
    return _started(_current(process_set).broadcast(array, root, name, in_place=True))


def allgather_async(value: Any, name: str = "", process_set: ProcessSet | None = None) -> Work[Array]:
    """Start `allgather`. Returns a Work; its result is a new array."""
    return _started(_current(process_set).allgather(value, name))


def reducescatter_async(
    value: Any, op: ReduceOp = ReduceOp.AVERAGE, name: str = "", process_set: ProcessSet | None = None
) -> Work[Array]:
    """Start `reducescatter`. Returns a Work; its result is a new array, this rank's rows."""
    return _started(_current(process_set).reducescatter(value, op, name))


def alltoall_async(
    value: Any, splits: Sequence[int] | None = None, name: str = "", process_set: ProcessSet | None = None
) -> Work[tuple[Array, Array]]:
    """Start `alltoall`. Returns a Work; its result is (new array, int64 array of the rows that each rank sent)."""
    return _started(_current(process_set).alltoall(value, splits, name))


def barrier_async(process_set: ProcessSet | None = None) -> Work[None]:
    """Start `barrier`. Returns a Work, which is complete once every rank has started the barrier."""
    return _started(_current(process_set).barrier())


def send(value: Any, dest: int, tag: int = 0, process_set: ProcessSet | None = None) -> None:
    """Send an array to rank `dest`, which receives it with `recv`. Returns when the receiver has begun to receive the
    last MiB; `value` may then be overwritten.

    Not collective: messages are independent of collectives and their order; those with equal sender, receiver and tag
    arrive in order. Needs MPI and several ranks. Raises MismatchError or InputError on both ranks if they differ in
    dtype or shape, or if the array of one of them cannot be used.

    Example: on 2 ranks, `allred.send(x, 1) if allred.rank() == 0 else allred.recv(x, 0)` copies x to rank 1.
    """
    current(process_set).send(value, dest, tag).wait()


def recv(array: Array, source: int | None = None, tag: int = 0, process_set: ProcessSet | None = None) -> int:
    """Receive a message from rank `source` (None: from any rank) into the writable array `array`. Returns the sender.
    Errors: see `send`."""
    return current(process_set).recv(array, source, tag).wait()


def send_async(value: Any, dest: int, tag: int = 0, process_set: ProcessSet | None = None) -> Work[None]:
    """Start `send`. Returns a Work."""
    return _started(current(process_set).send(value, dest, tag))


def recv_async(
    array: Array, source: int | None = None, tag: int = 0, process_set: ProcessSet | None = None
) -> Work[int]:
    """Start `recv`. Returns a Work; its result is the sender."""
    return _started(current(process_set).recv(array, source, tag))


def poll(work: Work[Any]) -> bool:
    """Return whether an operation is complete, successfully or not; does not wait."""
    return _checked(work, "poll").done()


def synchronize(work: Work[T]) -> T:
    """Wait for an operation and return its result, or raise the error that all ranks raise: `work.wait()`."""
    return _checked(work, "synchronize").wait()


def _current(process_set: ProcessSet | None) -> Communicator:
    """As `current`, with a progress thread if the settings ask for it."""
    communicator = current(process_set)
    enable_progress(communicator)
    return communicator


def enable_progress(communicator: Communicator) -> None:
    """Start the progress thread of a communicator if the settings ask for it and the backend has one."""
    if world.config().progress == "thread":
        communicator.backend.start_progress_thread()


def _started(work: Work[T]) -> Work[T]:
    """Keep the line of the program that started the operation, for messages."""
    work.place = call_site()
    return work


def _checked(work: Work[T], function: str) -> Work[T]:
    if not isinstance(work, Work):
        raise InputError(f"{function}({type(work).__name__}): expected the Work that an ..._async function returned")
    return work


def add_observer(observer: Callable[[int], None]) -> None:
    """Call `observer` on this rank with the number of the rank that joined last, when all ranks have joined and before
    parameters are copied from it."""
    _JOIN_OBSERVERS.of(world.current()).append(observer)


def remove_observer(observer: Callable[[int], None]) -> None:
    """Remove an observer."""
    if (here := world.current_or_none()) is not None and observer in (observers := _JOIN_OBSERVERS.of(here)):
        observers.remove(observer)


def join(process_set: ProcessSet | None = None) -> int:
    """Take part in the operations of the other ranks, without data, until all ranks have joined.

        allreduce        the arrays of the others; Average divides by their number
        allgather        the result has no part of this rank
        broadcast        this rank receives nothing; InputError if it is the root
        alltoall         no rows come from this rank; InputError for rows to it
        reducescatter    InputError, because this rank would receive rows
        barrier          is complete once all others have called it

    `size` does not change. Each operation costs the others a second header exchange meanwhile.

    Returns the number of the rank that joined last (the lowest of several), the same on all ranks. There is no time
    limit while the other ranks live; a long wait for their next operation is shown. Errors of the other ranks, such as
    MismatchError, are not raised here.

    When all ranks have joined, each distributed optimizer whose ranks have made different numbers of steps copies
    parameters, state and scaler from the rank that joined last to all ranks, in place. The parameters are those of its
    last `broadcast` and of the steps after it; of a torch optimizer, all that it has. Not copied: parameters of an
    optimizer with a process_set, buffers of torch modules, and the program's own state. Nor parameters that a rank has
    neither stepped nor broadcast before it joined: a warning names the rank, and `opt.broadcast(params, root=last)`
    copies them.

    process_set: the ranks whose operations these are; default: all ranks. Nothing is copied when a process set
        has joined.

    Raises InputError in a job of `allred run --elastic`, and in mode local.

    Example: after a loop over batches whose number differs between ranks, `last = allred.join()`.
    """
    if world.current().recovery is not None:
        raise InputError(
            "join() cannot be used with `allred run --elastic`: the ranks may change meanwhile. Use a loop over "
            "allred.data, which has the same number of batches on all ranks"
        )
    if world.config().mode == "local":
        raise InputError(
            "join() cannot be used in mode local, whose rounds need all ranks. Use a loop over allred.data, which has "
            "the same number of batches on all ranks"
        )
    communicator, first = current(process_set), True
    joined_at = communicator.operations
    while (last := communicator.join(first).wait(math.inf)) is None:
        first = False
    if process_set is None:
        with communicator.at_any_place():
            for observer in list(_JOIN_OBSERVERS.of(world.current())):
                observer(last)
            replicas.refresh(communicator, joined_at, last)
    return last


class Join:
    """A context manager that calls `join` at its end, but not after an exception.

        with allred.Join() as joined:
            for x, y in loader:                        # of another length on every rank
                opt.step(params, gradients(params, x, y))
        # here all ranks have the parameters of rank joined.last

    Call `opt.broadcast(params)` before the block: then `join` knows the parameters also on ranks without a batch.

    process_set: as for `join`. `joined.last` is the result of `join`; inside the block it raises InputError.
    """

    def __init__(self, process_set: ProcessSet | None = None) -> None:
        self._set = process_set
        self._last: int | None = None

    def __enter__(self) -> "Join":
        current(self._set)  # raises early what `join` would raise at the end
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self._last = join(self._set)

    @property
    def last(self) -> int:
        """The rank that joined last."""
        if self._last is None:
            raise InputError("Join.last is known after the block, when all ranks have joined")
        return self._last
