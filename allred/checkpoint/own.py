"""The state of an optimizer that is not of allred.optim: whatever its state_dict gives, pickled.

Loading it runs what it says, as pickle does: like the program itself, it has to come from where one trusts.
"""

import pickle
from typing import Any

import numpy as np

from allred.arrays import Array
from allred.checkpoint.entry import Entry, whole

_NAME, _SLOT = "", "state"  # no parameter's: a nest that is one array has this name, but only slots of arrays


def own_state(state: Any) -> tuple[Entry, Array]:
    """It as an entry of a checkpoint."""
    return whole(_NAME, np.frombuffer(pickle.dumps(state, pickle.HIGHEST_PROTOCOL), np.uint8), _SLOT)


def is_own_state(entry: Entry) -> bool:
    """Whether it is what `own_state` makes."""
    return (entry.name, entry.slot, entry.dtype) == (_NAME, _SLOT, "uint8")


def find_own_state(slots: dict[str, dict[str, Array]]) -> Any:
    """The state in the slots of a checkpoint; None if there is none."""
    data = slots.get(_NAME, {}).get(_SLOT)
    return None if data is None else pickle.loads(data.tobytes())
