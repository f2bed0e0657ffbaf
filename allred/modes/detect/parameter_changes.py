"""`ParameterChanges`: mode ps; finds changes that the program makes to parameters, which the next pull would overwrite.

After each pull 1024 elements of the parameters are hashed, other elements after each step; the next step hashes them
again.
"""

import weakref
from typing import Any

from allred.fusion import Plan
from allred.modes.detect.drift_window import describe_window, window_hash


class ParameterChanges:
    """The hashes of one optimizer. A program may give several sets of arrays, such as one of each thread: the hash of
    each set is known by the set's first array. A set that is new is compared with the last pull."""

    def __init__(self) -> None:
        self._last: tuple[int, int] | None = None  # step and hash
        self._of_set: dict[int, tuple[weakref.ref[Any], tuple[int, int]]] = {}  # by id of the first array

    def record(self, step: int, plan: Plan, leaves: list[Any]) -> None:
        """Hash the parameters after a pull. step: a number that increases, which selects the elements."""
        self._last = step, window_hash(step, plan, leaves, leaves, True)
        key, known = id(leaves[0]), self._of_set
        first = weakref.ref(leaves[0], lambda _: known.pop(key, None)) if key not in known else known[key][0]
        known[key] = first, self._last

    def find(self, plan: Plan, leaves: list[Any]) -> str:
        """Return a description of the parameters that have changed since the last pull; "" if none is known to have."""
        known = self._of_set.get(id(leaves[0]))
        pulled = self._last if known is None else known[1]
        if pulled is None or window_hash(pulled[0], plan, leaves, leaves, True) == pulled[1]:
            return ""
        return describe_window(pulled[0], plan)


def remedy(optimizer: str) -> str:
    """Return the second part of the error text for such a change."""
    return (
        "In mode ps the servers own the parameters, and the next pull would overwrite the change. To keep it, change "
        f"the parameter on worker 0 and call {optimizer}.broadcast() on all workers, or change it in the step() method "
        f"of the optimizer's class, which the servers run, or use mode sync. To discard it, call {optimizer}.pull()"
    )
