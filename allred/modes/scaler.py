"""Gradient scaling: small gradients of 16-bit arithmetic, or of a 16-bit wire, times a factor that keeps them from 0.

The factor goes down when a gradient overflows, and the step is skipped; it goes up after a while without. That is seen
by the look for gradients that are not finite (detect/), whose verdict is the same on all ranks, and so is the factor.
"""

import math
import weakref
from typing import Any

from allred.errors import InputError, NonFiniteError
from allred.validators import integer, positive

_LARGEST = 2.0**127  # float32's
_SMALLEST = 2.0**-24


class GradScaler:
    """Scale losses, so that gradients in float16 neither vanish nor overflow; as torch.amp.GradScaler does.

        scaler = allred.GradScaler()
        opt = allred.distributed(optimizer, scaler=scaler)
        loss, grads = model.loss_and_grads(x, y, scale=scaler.get_scale())      # or of scaler.scale(loss)
        opt.step(params, grads)             # reduced, then divided by the scale; or skipped, and the scale is lowered

    A step whose gradients are not finite on any rank, or overflow in the sum or on the wire, is skipped on all, and the
    scale times `backoff_factor` on all; after `growth_interval` steps without, it is times `growth_factor`. The step
    divides, clips and updates the scale itself: there is no unscale_, step or update to call. 16-bit gradients are
    divided in float32 and reach the optimizer as float32. In mode ps each worker has a scale of its own.

    Arguments:
        init_scale: > 0.
        growth_factor: > 1.
        backoff_factor: between 0 and 1.
        growth_interval: steps, at least 1.

    Raises:
        InputError: an argument out of its range.
        NonFiniteError: by a step, on all ranks, when the scale falls below 2**-24: no scale helps.

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
        self._steps = 0  # without an overflow, since the scale was changed
        self._owner: weakref.ref[Any] | None = None

    def scale(self, outputs: Any) -> Any:
        """A loss, or an array, times the scale."""
        return outputs * self._scale

    def get_scale(self) -> float:
        """The scale that the next step divides by."""
        return self._scale

    def state_dict(self) -> dict[str, Any]:
        """All numbers, by torch's names. Checkpoints of the optimizer have them."""
        return {
            "scale": self._scale, "growth_factor": self.growth_factor, "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval, "_growth_tracker": self._steps,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what state_dict gave."""
        self._scale, self._steps = float(state["scale"]), int(state["_growth_tracker"])
        self.growth_factor, self.backoff_factor = float(state["growth_factor"]), float(state["backoff_factor"])
        self.growth_interval = int(state["growth_interval"])

    def serve(self, owner: Any, name: str) -> None:
        """For the wrapper: that this is the only one whose steps change the scale."""
        if self._owner is not None and self._owner() not in (None, owner):
            raise InputError(
                f"{name}: this GradScaler is another optimizer's, whose steps change the scale; give each its own"
            )
        self._owner = weakref.ref(owner)

    def update(self, overflow: bool, title: str) -> None:
        """For the wrapper: a step is over. Raises NonFiniteError if the scale cannot be lowered any more."""
        self._steps = 0 if overflow else self._steps + 1
        if overflow:
            if self._scale * self.backoff_factor < _SMALLEST:
                raise NonFiniteError(
                    f"{title}: gradients are not finite at a scale of {self._scale:g} either; this is no overflow that "
                    "scaling helps with. Look at the loss, or lower the learning rate"
                )
            self._scale *= self.backoff_factor
        elif self._steps == self.growth_interval:
            self._steps = 0
            self._scale = min(self._scale * self.growth_factor, max(self._scale, _LARGEST))


def _finite(name: str, value: Any) -> float:
    number = positive("GradScaler", name, value)
    if math.isinf(number):
        raise InputError(f"GradScaler: {name} must be finite, but is {value!r}; pass a number")
    return number
