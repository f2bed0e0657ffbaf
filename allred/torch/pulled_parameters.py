"""Finds changes that the program makes to parameters between two steps of mode ps: the next pull would overwrite them.

In-place operations of torch (`add_`, `copy_`) count in `_version`, and `parameter.data = x` moves the memory. In-place
operations on `parameter.data` do neither, so 64 to 127 elements of each tensor on the host are compared, others after
each step. The pulls write through numpy, which torch does not count.
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
    """The parameters of one optimizer, as the last exchange with the servers has left them."""

    def __init__(self) -> None:
        self._known: dict[str, _Pulled] = {}
        self._offset = 0

    def record(self, named: list[tuple[str, torch.Tensor]], views: dict[str, Any]) -> None:
        """Note all parameters. views: arrays over their memory, the same objects while it is the same."""
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
