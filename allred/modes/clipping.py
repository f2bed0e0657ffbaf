"""What is done with reduced gradients before the optimizer gets them: they are unscaled, measured, and clipped.

One pass multiplies by both factors. The norm has to be the same number on all ranks, or their parameters part; a sum of
squares depends on its order, which follows from the memory layout and the CPU. So each rank adds up a part of the
elements, and an allreduce adds up the parts, which is the same everywhere, and quicker.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from allred import arrays
from allred.comm import functions
from allred.comm.ops import ReduceOp
from allred.errors import InputError
from allred.fusion.plan import Tensor
from allred.gpu.arithmetic import compute, squares
from allred.gpu.device_arrays import shape_and_dtype
from allred.modes.scaler import GradScaler
from allred.validators import positive


class Clipper:
    """Of one optimizer. clip_norm: the largest norm that gradients may have; None: it is not even measured."""

    def __init__(self, clip_norm: float | None, scaler: GradScaler | None, name: str) -> None:
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise InputError(f"scaler={scaler!r} must be an allred.GradScaler")
        self.limit = None if clip_norm is None else positive("allred.distributed", "clip_norm", clip_norm)
        self.scaler = scaler
        self.norm: float | None = None  # at the last step, before clipping
        self._name = name

    @property
    def active(self) -> bool:
        """Whether it does anything."""
        return self.limit is not None or self.scaler is not None

    @property
    def settings(self) -> str:
        """What must be the same on all ranks, in words."""
        clip = "" if self.limit is None else f"clip_norm={self.limit:g}"
        scale = "" if self.scaler is None else f"scale={self.scaler.get_scale():g}"
        return " ".join(filter(None, (clip, scale)))

    def refusal(self, tensors: Sequence[Tensor]) -> str:
        """Why such gradients cannot be clipped or unscaled, in words; nothing if they can."""
        if self.scaler is not None:
            self.scaler.serve(self, self._name)
        odd = next((tensor for tensor in tensors if not arrays.is_float(tensor.dtype)), None) if self.active else None
        return f"the gradient of {odd} cannot be scaled: it would be rounded; cast it" if odd else ""

    def reduced(self, grads: list[Any]) -> list[Any]:
        """Gradients that all ranks have, which are overwritten; 16-bit ones give new arrays if they are unscaled."""
        return self._scaled(grads, _norm_of_all(grads) if self.limit is not None else 0.0, in_place=True)

    def own(self, grads: list[Any]) -> list[Any]:
        """Gradients of this rank alone, as they are to be used; they stay as they are."""
        return self._scaled(grads, _norm(grads) if self.limit is not None else 0.0, in_place=False)

    def _scaled(self, grads: list[Any], norm: float, in_place: bool) -> list[Any]:
        factor = 1.0 if self.scaler is None else 1.0 / self.scaler.get_scale()
        if self.limit is not None:
            self.norm = norm * factor
            if self.limit < self.norm < math.inf:
                factor *= self.limit / self.norm
        if factor == 1.0:
            return grads
        return [None if grad is None else self._times(grad, factor, in_place) for grad in grads]

    def _times(self, grad: Any, factor: float, in_place: bool) -> Any:
        _, dtype = shape_and_dtype(grad)
        wide = arrays.accumulator(dtype)
        in_place = in_place and (wide == dtype or self.scaler is None)
        return compute(np.multiply, grad, factor, wide=wide, out=grad if in_place else None)


def _norm(grads: Sequence[Any]) -> float:
    here = [grad for grad in grads if grad is not None]
    return math.sqrt(squares([(grad, 0, _count(grad)) for grad in here]))


def _norm_of_all(grads: Sequence[Any]) -> float:
    """The norm of gradients that all ranks have alike; the same bits on all of them. Collective."""
    here = [(grad, _count(grad)) for grad in grads if grad is not None]
    active = functions.current().active  # of the reduction that was just made
    shares = arrays.split_sizes(sum(count for _, count in here), active.size)
    start, at = sum(shares[: active.rank]), 0
    stop = start + shares[active.rank]
    mine = []  # of this rank's share
    for grad, count in here:
        low, high = max(start - at, 0), min(stop - at, count)
        if low < high:
            mine.append((grad, low, high))
        at += count
    return math.sqrt(functions.allreduce(np.array(squares(mine)), ReduceOp.SUM, "norm of the gradients"))


def _count(grad: Any) -> int:
    return arrays.size_of(shape_and_dtype(grad)[0])
