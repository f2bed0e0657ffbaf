"""Uneven data: ranks that have no batches left while others have.

    with allred.Join() as joined:
        for x, y in loader:                        # of another length on every rank
            opt.step(params, gradients(params, x, y))
    opt.broadcast(params, root=joined.last)        # whoever was out has older parameters

A rank that has joined takes part in every operation of the others, without bringing anything, until all have joined:

    allreduce, also grouped    reduces what the others bring; Average divides by how many these are
    allgather, also objects    nothing comes from it
    broadcast                  it gets nothing; as the root it is an InputError on the others
    alltoall                   no rows come from it; rows that are for it are an InputError
    reducescatter              is an InputError, for it would get rows
    barrier                    is complete once all others are there

`size` stays what it was. Each operation costs the others a second exchange of headers meanwhile (base.py).
"""

import math
from collections.abc import Callable
from types import TracebackType

from allred.comm import functions
from allred.comm.process_set import ProcessSet
from allred.errors import InputError

_observers: list[Callable[[int], None]] = []


def observe(observer: Callable[[int], None]) -> None:
    """Have this called when all ranks have joined, with the rank that joined last. On all ranks."""
    _observers.append(observer)


def forget(observer: Callable[[int], None]) -> None:
    """It is not called any more."""
    _observers[:] = [each for each in _observers if each != observer]


def join(process_set: ProcessSet | None = None) -> int:
    """Take part in what the other ranks do, without bringing anything, until all ranks have joined.

    Returns the number of the rank that joined last, of several the lowest; the same on all ranks. There is no time
    limit, as long as the others live; a long wait for their next operation is told. Errors that they raise, such as for
    calls that differ, are not raised here.

    process_set: whose operations, those of all ranks without.
    """
    communicator, first = functions.current(process_set), True
    while (last := communicator.join(first).wait(math.inf)) is None:
        first = False
    if process_set is None:
        for observer in list(_observers):
            observer(last)
    return last


class Join:
    """A block at whose end this rank joins: `with allred.Join() as joined:`. An error ends the block without that.

    process_set: as of `join`. Afterwards `joined.last` is what that returns; before, it is an InputError.
    """

    def __init__(self, process_set: ProcessSet | None = None) -> None:
        self._set = process_set
        self._last: int | None = None

    def __enter__(self) -> "Join":
        functions.current(self._set)  # raises before the first batch what join would raise behind the last
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self._last = join(self._set)

    @property
    def last(self) -> int:
        """The rank that joined last."""
        if self._last is None:
            raise InputError("Join.last is known behind the block, once all ranks have joined")
        return self._last
