"""Unscaling and clipping of gradients before the optimizer gets them (`Clipper`), and the loss scale (`GradScaler`).

One pass over memory multiplies by both factors. The norm must be the same number on all ranks, or their parameters
drift apart; but a sum of squares depends on the order of summation, so on memory layout and CPU. So each rank sums up
its share of the elements, and an allreduce adds these sums: equal on all ranks, and faster.
"""

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from allred import arrays
from allred.comm.communicator import Communicator
from allred.comm.ops import ReduceOp
from allred.errors import InputError, NonFiniteError
from allred.fusion import Tensor
from allred.gpu.device_arrays import compute, shape_and_dtype, squares
from allred.validators import integer, positive

_LARGEST_SCALE = 2.0**127  # a power of two that float32 represents
_SMALLEST_SCALE = 2.0**-24


class GradScaler:
    """Scales losses, so that gradients in float16 neither vanish nor overflow, like torch.amp.GradScaler.

        scaler = allred.GradScaler()
        opt = allred.distributed(optimizer, scaler=scaler)
        loss, grads = model.loss_and_grads(x, y, scale=scaler.get_scale())      # or use scaler.scale(loss)
        opt.step(params, grads)             # reduces, then divides by the scale; or skips the step and lowers the scale

    If gradients are not finite on any rank, or overflow in the sum or on the wire, all ranks skip the step and multiply
    the scale by `backoff_factor`. After `growth_interval` steps without an overflow they multiply it by
    `growth_factor`. The step unscales, clips and updates the scale itself: there is no unscale_, step or update to
    call. 16-bit gradients are divided in float32 and reach the optimizer as float32. In mode ps each worker has its own
    scale.

    Arguments:
        init_scale: > 0.
        growth_factor: > 1.
        backoff_factor: between 0 and 1.
        growth_interval: steps, at least 1.

    Raises:
        InputError: an argument is out of its range.
        NonFiniteError: in a step, on all ranks, when the scale falls below 2**-24.

    >>> scaler = GradScaler(init_scale=1024.0)
    >>> scaler.scale(0.5)
    512.0

    P. Micikevicius et al.: Mixed precision training. ICLR 2018.
    """

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self._scale = _finite("init_scale", init_scale)
        self.growth_factor = _finite("growth_factor", growth_factor)
        self.backoff_factor = _finite("backoff_factor", backoff_factor)
        self.growth_interval = integer("GradScaler: growth_interval", growth_interval, 1, "it counts steps")
        if self.growth_factor <= 1 or self.backoff_factor >= 1:
            raise InputError(
                f"GradScaler: growth_factor={growth_factor!r} must be more than 1 and "
                f"backoff_factor={backoff_factor!r} less"
            )
        self._steps = 0  # without overflow since the last change of the scale
        self._owner: weakref.ref[Any] | None = None

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss or an array by the scale."""
        return outputs * self._scale

    def get_scale(self) -> float:
        """Return the scale, by which the next step divides."""
        return self._scale

    def state_dict(self) -> dict[str, Any]:
        """Return all numbers by the names of torch. Checkpoints of the optimizer contain them."""
        return {
            "scale": self._scale, "growth_factor": self.growth_factor, "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval, "_growth_tracker": self._steps,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of `state_dict`. Raises InputError for another value; nothing has changed then."""
        expected = self.state_dict()
        if not isinstance(state, Mapping) or not expected.keys() <= state.keys():
            raise InputError(f"GradScaler.load_state_dict: expected a dict with {', '.join(expected)}, got {state!r}")
        self._scale, self._steps = float(state["scale"]), int(state["_growth_tracker"])
        self.growth_factor, self.backoff_factor = float(state["growth_factor"]), float(state["backoff_factor"])
        self.growth_interval = int(state["growth_interval"])

    def set_owner(self, owner: Any, name: str) -> str:
        """Internal: set the wrapper whose steps change the scale. Return the error text if there is another one; "" if
        not."""
        if self._owner is not None and self._owner() not in (None, owner):
            return (
                f"{name}: this GradScaler belongs to another optimizer, whose steps change its scale; create one for "
                "each optimizer"
            )
        self._owner = weakref.ref(owner)
        return ""

    def update(self, overflow: bool, title: str) -> None:
        """Internal: adapt the scale after a step. Raises NonFiniteError if it cannot be lowered any more."""
        self._steps = 0 if overflow else self._steps + 1
        if overflow:
            if self._scale * self.backoff_factor < _SMALLEST_SCALE:
                raise NonFiniteError(
                    f"{title}: gradients are not finite even at a scale of {self._scale:g}, so a lower scale does "
                    "not help. Look at the loss, or lower the learning rate"
                )
            self._scale *= self.backoff_factor
        elif self._steps == self.growth_interval:
            self._steps = 0
            self._scale = min(self._scale * self.growth_factor, max(self._scale, _LARGEST_SCALE))


def _finite(name: str, value: Any) -> float:
    number = positive("GradScaler", name, value)
    if math.isinf(number):
        raise InputError(f"GradScaler: {name} must be finite, but is {value!r}; pass a number")
    return number


class Clipper:
    """Unscales and clips the gradients of one optimizer. limit: the largest norm; None: the norm is not computed."""

    def __init__(self, limit: float | None, scaler: GradScaler | None, name: str) -> None:
        self.limit, self.scaler, self._name = limit, scaler, name
        self.norm: float | None = None  # of the last step, before clipping

    @property
    def active(self) -> bool:
        """Whether gradients are unscaled, measured or clipped."""
        return self.limit is not None or self.scaler is not None

    @property
    def settings(self) -> str:
        """Text that must be the same on all ranks."""
        clip = "" if self.limit is None else f"clip_norm={self.limit:g}"
        scale = "" if self.scaler is None else f"scale={self.scaler.get_scale():g}"
        return " ".join(filter(None, (clip, scale)))

    def check(self, tensors: Sequence[Tensor]) -> str:
        """Return why gradients of these dtypes cannot be clipped or unscaled; "" if they can."""
        if self.scaler is not None and (problem := self.scaler.set_owner(self, self._name)):
            return problem
        odd = next((tensor for tensor in tensors if not arrays.is_inexact(tensor.dtype)), None) if self.active else None
        return f"the gradient of {odd} cannot be scaled: it would be rounded; cast it" if odd else ""

    def clip_reduced(self, communicator: Communicator, grads: list[Any]) -> list[Any]:
        """Scale reduced gradients, equal on all ranks, in place; 16-bit gradients that are unscaled give new arrays."""
        return self._scaled(grads, _norm_of_all(communicator, grads) if self.limit is not None else 0.0, in_place=True)

    def clip_local(self, grads: list[Any]) -> list[Any]:
        here = [(grad, 0, _count(grad)) for grad in grads if grad is not None and self.limit is not None]
        return self._scaled(grads, math.sqrt(squares(here)), in_place=False)

    def _scaled(self, grads: list[Any], norm: float, in_place: bool) -> list[Any]:
        factor = self._unscale_factor()
        if self.limit is not None:
            self.norm = norm * factor
            factor *= self._clip_factor()
        return self._multiplied(grads, factor, in_place)

    def _unscale_factor(self) -> float:
        return 1.0 if self.scaler is None else 1.0 / self.scaler.get_scale()

    def _clip_factor(self) -> float:
        """Return the factor that reduces gradients of the norm `norm` to the limit; 1 if their norm is not finite."""
        assert self.limit is not None
        assert self.norm is not None
        return self.limit / self.norm if self.limit < self.norm < math.inf else 1.0

    def _multiplied(self, grads: list[Any], factor: float, in_place: bool) -> list[Any]:
        if factor == 1.0:
            return grads
        return [None if grad is None else self._times(grad, factor, in_place) for grad in grads]

    def _times(self, grad: Any, factor: float, in_place: bool) -> Any:
        _, dtype = shape_and_dtype(grad)
        wide = arrays.accumulator(dtype)
        in_place = in_place and (wide == dtype or self.scaler is None)
        return compute(np.multiply, grad, factor, wide=wide, out=grad if in_place else None)


class UpdateClipper(Clipper):
    """The clipper of a hooked torch optimizer: it unscales gradients after each reduction, and clips them before the
    update, because in between other backward passes may add to them and torch's GradScaler may unscale them."""

    def clip_reduced(self, communicator: Communicator, grads: list[Any]) -> list[Any]:
        """Unscale reduced gradients."""
        return self._multiplied(grads, self._unscale_factor(), in_place=True)

    def clip_for_update(self, communicator: Communicator, grads: list[Any], divisor: float) -> None:
        """Clip gradients, equal on all ranks, in place. Collective. divisor: the update divides the gradients by it;
        the limit is that of the quotients."""
        self.norm = _norm_of_all(communicator, grads) / divisor
        if (factor := self._clip_factor()) != 1.0:
            for grad in grads:
                wide = arrays.accumulator(shape_and_dtype(grad)[1])
                compute(np.multiply, grad, factor, wide=wide, out=grad)


def _norm_of_all(communicator: Communicator, grads: Sequence[Any]) -> float:
    """Return the norm of gradients that are equal on all ranks; the result has the same bits on all. Collective."""
    here = [(grad, _count(grad)) for grad in grads if grad is not None]
    active = communicator.active  # the ranks of the last reduction
    shares = arrays.split_sizes(sum(count for _, count in here), active.size)
    start, at = sum(shares[: active.rank]), 0
    stop = start + shares[active.rank]
    mine = []  # parts of gradients: this rank's share
    for grad, count in here:
        low, high = max(start - at, 0), min(stop - at, count)
        if low < high:
            mine.append((grad, low, high))
        at += count
    total = communicator.allreduce_blocking(np.array(squares(mine)), False, ReduceOp.SUM, "norm of the gradients")
    return math.sqrt(total)


def _count(grad: Any) -> int:
    return arrays.size_of(shape_and_dtype(grad)[0])
