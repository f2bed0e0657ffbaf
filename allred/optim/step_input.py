"""Records of a step of an optimizer: its checked input, what the next step is compared with, and the kernel."""

from typing import Any, NamedTuple

import numpy as np

from allred.arrays import Array
from allred.nest import Structure

Slots = dict[str, Array]


class Kernel(NamedTuple):
    """A rule of csrc/update.h with its arguments: the names of the slots, None for a missing one, and the numbers."""

    rule: str
    slots: tuple[str | None, ...]
    numbers: tuple[float, ...]


class Kind(NamedTuple):
    """Properties of a parameter that its slots depend on."""

    array_type: type
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def kind_of(param: Array) -> Kind:
    return Kind(type(param), param.shape, param.dtype)


class CheckedInput(NamedTuple):
    """The input of a step after its checks, one list per column. The tensors without a gradient are left out."""

    names: list[str]
    params: list[Array]
    grads: list[Any]
    slots: list[Slots]


class Known(NamedTuple):
    """The last checked input, if each gradient was an array like its parameter: a step with input of this structure and
    these kinds needs no other check."""

    structure: Structure
    names: list[str]
    kinds: list[Kind]
    slots: list[Slots]


class PendingUpdates(NamedTuple):
    """The updates of one step, by tensor, which are still to be made. lr, step: as for `Optimizer.update`."""

    names: list[str]
    params: list[Array]
    grads: list[Any]
    slots: list[Slots]
    lr: float
    step: int
