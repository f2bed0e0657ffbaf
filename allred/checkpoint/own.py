"""What is no tensor, pickled: the state of an optimizer that is not of allred.optim, and what a session adds.

Loading it runs what it says, as pickle does: like the program itself, it has to come from where one trusts.
"""

import pickle
from typing import Any

import numpy as np

from allred.arrays import Array
from allred.checkpoint.entry import Entry, whole

_NAME = ""  # no parameter's: a nest that is one array has this name, but only slots of arrays
_STATE, _EXTRA = "state", "extra"


def own_state(state: Any) -> tuple[Entry, Array]:
    """An optimizer's as an entry of a checkpoint."""
    return _pickled(state, _STATE)


def extra(value: Any) -> tuple[Entry, Array]:
    """What comes along with parameters and optimizer, as an entry."""
    return _pickled(value, _EXTRA)


def _pickled(value: Any, slot: str) -> tuple[Entry, Array]:
    return whole(_NAME, np.frombuffer(pickle.dumps(value, pickle.HIGHEST_PROTOCOL), np.uint8), slot)


def is_own_state(entry: Entry) -> bool:
    """Whether it is what `own_state` makes, or `extra`."""
    return entry.name == _NAME and entry.slot in (_STATE, _EXTRA) and entry.dtype == "uint8"


def find_own_state(slots: dict[str, dict[str, Array]]) -> Any:
    """The optimizer's state in the slots of a checkpoint; None if there is none."""
    return _loaded(slots, _STATE)


def take_extra(slots: dict[str, dict[str, Array]]) -> Any:
    """What came along, which is taken out of the slots of a checkpoint; None if nothing did."""
    value = _loaded(slots, _EXTRA)
    if slots.get(_NAME, {}).pop(_EXTRA, None) is not None and not slots[_NAME]:
        del slots[_NAME]
    return value


def _loaded(slots: dict[str, dict[str, Array]], slot: str) -> Any:
    data = slots.get(_NAME, {}).get(slot)
    return None if data is None else pickle.loads(data.tobytes())
