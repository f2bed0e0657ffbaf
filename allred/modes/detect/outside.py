"""Steps around the wrapper: updates that an optimizer makes without its gradients having been averaged.

They show in the optimizer's own count of updates, `global_step`, where it has one (all of allred.optim do). Others
show when the parameters are compared.
"""

import atexit
import weakref
from typing import Any

from allred import world
from allred.cluster import report
from allred.comm import functions


class Updates:
    """Of one optimizer: how many updates it has made, as far as its wrappers know. Made by `updates_of`."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer  # kept, so that its id stays its own
        self.wrappers: dict[int, str] = {}  # those that have made a step, by id, with their titles
        self.known: int | None = None  # after the last one of a wrapper

    def outside(self) -> int:
        """Updates since then, by whoever; less than 0 if it was set back."""
        count = _count(self.optimizer)
        return 0 if count is None or self.known is None else count - self.known

    def stepped(self, wrapper: object, title: str) -> None:
        """A wrapper has made an update."""
        self.known = _count(self.optimizer)
        if id(wrapper) not in self.wrappers:
            _unused.pop(id(self.optimizer), None)
            if self.wrappers:
                first = next(iter(self.wrappers.values()))
                report.say(
                    f"{title}: the same {type(self.optimizer).__name__} object is wrapped twice and steps in {first} "
                    "too; its state is shared by both. Wrap it once, or make an optimizer for each"
                )
            self.wrappers[id(wrapper)] = title
            weakref.finalize(wrapper, self.wrappers.pop, id(wrapper), None).atexit = False


def _count(optimizer: Any) -> int | None:
    count = getattr(optimizer, "global_step", None)
    return count if isinstance(count, int) else None


_known: weakref.WeakValueDictionary[int, Updates] = weakref.WeakValueDictionary()
_unused: dict[int, tuple[weakref.ref[Any], int]] = {}  # wrapped, and not yet stepped by a wrapper: its count then


def updates_of(optimizer: Any) -> Updates:
    """The record of an optimizer, one for all of its wrappers."""
    record = _known.get(id(optimizer))
    if record is None:
        record = _known[id(optimizer)] = Updates(optimizer)
        count = _count(optimizer)
        if count is not None and hasattr(type(optimizer), "__weakref__"):
            _unused[id(optimizer)] = weakref.ref(optimizer), count
    return record


def used(optimizer: Any) -> None:
    """Its wrapper has made a step: its count is no sign of steps around the wrapper."""
    _unused.pop(id(optimizer), None)


def restored(optimizer: Any) -> None:
    """Its wrapper has given it a state, and with it a count: what is added later counts."""
    count = _count(optimizer)
    if count is not None and id(optimizer) in _unused:
        _unused[id(optimizer)] = weakref.ref(optimizer), count


def say_unused() -> None:
    """Name the optimizers that were wrapped, and then stepped without the wrapper only: each rank trained alone."""
    for optimizer, before in [(reference(), count) for reference, count in _unused.values()]:
        made = (_count(optimizer) or 0) - before
        if made > 0 and world.is_initialized() and functions.current().size > 1:
            report.say(
                f"a distributed {type(optimizer).__name__} made no step, but the optimizer it wraps made {made} by "
                "itself: each rank trained alone. Call step of what allred.distributed returned"
            )
    _unused.clear()


atexit.register(say_unused)
