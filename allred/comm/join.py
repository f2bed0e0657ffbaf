"""Join: ranks without batches left wait for ranks that still have some.

    with allred.Join() as joined:
        for x, y in loader:                        # of another length on every rank
            opt.step(params, gradients(params, x, y))
    opt.broadcast(params, root=joined.last)        # ranks that joined early have older parameters

A rank that has joined takes part in every operation of the others, without data, until all have joined:

    allreduce, also grouped    reduces the arrays of the others; Average divides by their number
    allgather, also objects    has no part from it
    broadcast                  it receives nothing; if it is the root, InputError on the others
    alltoall                   no rows come from it; rows for it are an InputError
    reducescatter              is an InputError, because it would receive rows
    barrier                    is complete once all others have called it

`size` does not change. Each operation costs the others a second header exchange meanwhile (group.py).
"""

import math
from collections.abc import Callable
from types import TracebackType

from allred import world
from allred.comm import functions
from allred.comm.process_set import ProcessSet
from allred.errors import InputError


def add_observer(observer: Callable[[int], None]) -> None:
    """Call `observer` on this rank with the number of the rank that joined last, when all ranks have joined."""
    world.current().join_observers.append(observer)


def remove_observer(observer: Callable[[int], None]) -> None:
    """Remove an observer."""
    if (here := world.current_or_none()) is not None and observer in here.join_observers:
        here.join_observers.remove(observer)


def join(process_set: ProcessSet | None = None) -> int:
    """Take part in the operations of the other ranks, without data, until all ranks have joined.

    Returns the number of the rank that joined last (the lowest of several), the same on all ranks. There is no time
    limit while the other ranks live; a long wait for their next operation is shown. Errors of the other ranks, such as
    MismatchError, are not raised here.

    process_set: the ranks whose operations these are; default: all ranks.

    Example: after a loop over batches whose number differs between ranks, `last = allred.join()`.
    """
    communicator, first = functions.current(process_set), True
    while (last := communicator.join(first).wait(math.inf)) is None:
        first = False
    if process_set is None:
        for observer in list(world.current().join_observers):
            observer(last)
    return last


class Join:
    """A context manager that calls `join` at its end: `with allred.Join() as joined:`. After an exception it does not.

    process_set: as for `join`. `joined.last` is the result of `join`; inside the block it raises InputError.
    """

    def __init__(self, process_set: ProcessSet | None = None) -> None:
        self._set = process_set
        self._last: int | None = None

    def __enter__(self) -> "Join":
        functions.current(self._set)  # raises early what `join` would raise at the end
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
