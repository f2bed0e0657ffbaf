"""Detects updates that an optimizer makes without its wrapper, so without averaged gradients.

They are found in the optimizer's own counter `global_step`, if it has one, as all of allred.optim have. Other
optimizers are only found when the parameters are compared (drift.py).
"""

import atexit
import weakref
from typing import Any

from allred import log, world
from allred.comm import functions


class Updates:
    """Counts the updates of one optimizer that its wrappers know. Created by `updates_of`."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer  # a reference keeps its id unique
        self.wrappers: dict[int, str] = {}  # titles of the wrappers that have made a step, by id
        self.known: int | None = None  # the counter after the last step of a wrapper

    def outside(self) -> int:
        """Return the number of updates since the last step of a wrapper; negative if the counter was set back."""
        count = _count(self.optimizer)
        return 0 if count is None or self.known is None else count - self.known

    def stepped(self, wrapper: object, title: str) -> None:
        """Note that a wrapper has made an update."""
        self.known = _count(self.optimizer)
        if id(wrapper) not in self.wrappers:
            _unused.pop(id(self.optimizer), None)
            if self.wrappers:
                first = next(iter(self.wrappers.values()))
                log.warning(
                    f"{title}: the same {type(self.optimizer).__name__} object is wrapped twice and steps in {first} "
                    "too; its state is shared by both. Wrap it once, or make an optimizer for each"
                )
            self.wrappers[id(wrapper)] = title
            weakref.finalize(wrapper, self.wrappers.pop, id(wrapper), None).atexit = False


def _count(optimizer: Any) -> int | None:
    count = getattr(optimizer, "global_step", None)
    return count if isinstance(count, int) else None


_known: weakref.WeakValueDictionary[int, Updates] = weakref.WeakValueDictionary()
_unused: dict[int, tuple[weakref.ref[Any], int]] = {}  # optimizers not stepped by a wrapper yet, and their counters


def updates_of(optimizer: Any) -> Updates:
    """Return the record of an optimizer, shared by all its wrappers."""
    record = _known.get(id(optimizer))
    if record is None:
        record = _known[id(optimizer)] = Updates(optimizer)
        count = _count(optimizer)
        if count is not None and hasattr(type(optimizer), "__weakref__"):
            _unused[id(optimizer)] = weakref.ref(optimizer), count
    return record


def used(optimizer: Any) -> None:
    """Note that the wrapper of an optimizer has made a step, so it is not unused."""
    _unused.pop(id(optimizer), None)


def restored(optimizer: Any) -> None:
    """Note that the wrapper has restored an optimizer: updates are counted from its restored counter."""
    count = _count(optimizer)
    if count is not None and id(optimizer) in _unused:
        _unused[id(optimizer)] = weakref.ref(optimizer), count


def warn_unused() -> None:
    """Warn of optimizers that were wrapped, but stepped only without the wrapper: each rank trained alone."""
    for optimizer, before in [(reference(), count) for reference, count in _unused.values()]:
        made = (_count(optimizer) or 0) - before
        if made > 0 and world.is_initialized() and functions.current().size > 1:
            log.warning(
                f"a distributed {type(optimizer).__name__} made no step, but the optimizer it wraps made {made} by "
                "itself: each rank trained alone. Call step of what allred.distributed returned"
            )
    _unused.clear()


atexit.register(warn_unused)
