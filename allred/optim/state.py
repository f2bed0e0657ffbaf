"""The state of an optimizer as it is saved and restored: plain nested dicts of numbers and arrays.

    {"global_step": int, "slots": {parameter name: {slot name: array}}}

Any checkpoint format that keeps dicts, numbers and arrays can hold it. Arrays may come back as another kind (numpy
where cupy was saved) or dtype; they are brought to the parameter's at the first step after loading.
"""

import operator
from typing import Any

import numpy as np

from allred.arrays import Array
from allred.errors import InputError
from allred.optim.tensors import describe

Slots = dict[str, Array]


def copy_slots(slots: dict[str, Slots]) -> dict[str, Slots]:
    """A copy that shares no memory with `slots`."""
    return {name: {slot: array.copy() for slot, array in held.items()} for name, held in slots.items()}


def check_state(who: str, state: Any) -> tuple[int, dict[str, Slots]]:
    """Global step and slots in `state`. Raises InputError unless it has exactly the format above."""
    if not isinstance(state, dict) or set(state) != {"global_step", "slots"}:
        got = f"a dict with {sorted(map(str, state))}" if isinstance(state, dict) else describe(state)
        raise InputError(
            f"{who}: expected a dict with 'global_step' and 'slots', but got {got}; pass what state_dict() returned"
        )
    slots = state["slots"]
    if not isinstance(slots, dict) or not all(isinstance(held, dict) for held in slots.values()):
        raise InputError(
            f"{who}: 'slots' must hold one dict for each parameter name, but is {slots!r:.80}; "
            "pass what state_dict() returned"
        )
    for name, held in slots.items():
        for slot, array in held.items():
            if not (hasattr(array, "shape") and hasattr(array, "dtype") and hasattr(array, "copy")):
                raise InputError(
                    f"{who}: slot {slot!r} of {name!r} must be an array, but is {describe(array)}; "
                    "pass what state_dict() returned"
                )
    return _check_step(who, state["global_step"]), slots


def _check_step(who: str, value: Any) -> int:
    try:
        step = operator.index(value)
    except TypeError:
        step = -1
    if step < 0:
        raise InputError(f"{who}: 'global_step' must be an integer >= 0, but is {value!r}; it counts the updates done")
    return step


def fit_slots(who: str, name: str, loaded: Slots, fresh: Slots) -> Slots:
    """`loaded` in the dtypes and on the devices of `fresh`, the slots that a new optimizer would make.

    Raises:
        InputError: other slot names or shapes: the state is of another optimizer, of other hyper-parameters or of
            another model.
    """
    expected = {slot: tuple(array.shape) for slot, array in fresh.items()}
    got = {slot: tuple(array.shape) for slot, array in loaded.items()}
    if got != expected:
        raise InputError(
            f"{who}: parameter {name!r} needs the slots {expected}, but the state holds {got}; "
            "restore the state of the same optimizer, hyper-parameters and model, or make a new optimizer"
        )
    return {slot: np.array(loaded[slot], dtype=array.dtype, like=array) for slot, array in fresh.items()}
