"""Detects changes that the program makes to parameters in mode ps, which the next pull would overwrite.

In-place operations of torch (`add_`, `copy_`) increment `_version`, and `parameter.data = x` changes the address.
In-place operations on `parameter.data` do neither: for these, 64 to 127 elements of each host tensor are compared,
other elements in each step. Pulls write through numpy and do not increment `_version`.
"""

import dataclasses
from typing import Any

import numpy as np
import torch

_SAMPLES = 64  # elements of a tensor


@dataclasses.dataclass(slots=True)
class _Pulled:
    """A parameter after a pull. memory: keeps the memory of `view` alive. vector: all elements, over this memory; empty
    on a GPU. stride: of the sampled elements in it. sample: their bytes."""

    parameter: torch.Tensor
    view: Any
    memory: torch.Tensor
    vector: Any
    stride: int
    version: int = 0
    sample: bytes = b""


class PulledParameters:
    """Versions and samples of the parameters of one optimizer after the last pull."""

    def __init__(self) -> None:
        self._known: dict[str, _Pulled] = {}
        self._offset = 0

    def record(self, named: list[tuple[str, torch.Tensor]], views: dict[str, Any]) -> None:
        """Store version and sample of all parameters. views: arrays over their memory, the same objects while it is
        the same."""
        self._offset = offset = self._offset + 1
        for name, parameter in named:
            known = self._known.get(name)
            if known is None or known.view is not views[name]:
                vector = _vector(views[name])
                stride = max(vector.size // _SAMPLES, 1)
                known = self._known[name] = _Pulled(parameter, views[name], parameter.detach(), vector, stride)
            known.version = parameter._version
            known.sample = known.vector[offset % known.stride :: known.stride].tobytes()

    def changed(self, named: list[tuple[str, torch.Tensor]], views: dict[str, Any]) -> str | None:
        """Return the name of a parameter that has changed since `record`; None if none is known to have."""
        offset = self._offset
        for name, parameter in named:
            known = self._known.get(name)
            if known is None or known.parameter is not parameter:
                continue
            moved = views[name] is not known.view
            differs = not _equal(views[name], known.view) if moved else parameter._version != known.version
            if differs or known.vector[offset % known.stride :: known.stride].tobytes() != known.sample:
                return name
        return None


def _vector(view: Any) -> Any:
    """Return a view of the elements of an array, in the order of the memory; empty if there is none."""
    if isinstance(view, np.ndarray) and np.may_share_memory(vector := view.ravel(order="K"), view):
        return vector
    return np.empty(0)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return type(one) is type(other) and torch.equal(one, other)
