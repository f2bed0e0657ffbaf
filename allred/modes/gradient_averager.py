"""`GradientAverager`: averages gradients as mode sync does, for frameworks whose programs make the update themselves.

It calls mode sync on the memory of the gradients, with an optimizer that makes no update. So gradients of JAX and
TensorFlow have the same checks, weights, compression and timeline as those of numpy and torch.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from allred import world
from allred.arrays import Array
from allred.comm.ops import ReduceOp
from allred.errors import InputError
from allred.modes.match import UnknownSamples
from allred.modes.optimizer import DistributedOptimizer
from allred.modes.sync import SyncMode


class GradientReceiver:
    """An optimizer that leaves the parameters as they are. mean: the averaged gradients of the last step; {} if it was
    skipped."""

    mean: dict[str, Array]

    def step(self, params: dict[str, Array], mean: dict[str, Array]) -> None:
        self.mean = mean


class GradientAverager(DistributedOptimizer):
    """A distributed optimizer that averages gradients, and leaves the update to a framework.

    framework: its name, for messages. update: an optimizer that keeps the averaged gradients. weights: whether ranks
    are weighted by the latest batch of allred.data in steps without `samples`.
    """

    def __init__(self, framework: str, update: GradientReceiver, weights: bool = True, **options: Any) -> None:
        super().__init__(update, **options)
        self.framework, self._update, self._weights = framework, update, weights
        self._zeros: dict[str, Array] = {}  # in place of parameters that are not known

    @property
    def op(self) -> ReduceOp:
        return self._options.op

    @property
    def micro_steps(self) -> int:
        return self._options.accumulate

    @property
    def skips(self) -> bool:
        """Whether a step may leave the parameters as they are: gradients are not finite, or are accumulated."""
        return self._options.accumulate > 1 or (self._options.nonfinite or world.config().nonfinite) == "skip"

    def average(
        self, title: str, grads: dict[str, Array], params: dict[str, Array] | None, samples: int | None
    ) -> bool:
        """Replace gradients by their mean over the ranks. Return False if the step is skipped. Collective. title: must
        be the same on all ranks."""
        self._sync_mode().title_of_call = title if params is None else f"{title}, with parameters"
        if params is None:
            known = {name: (zeros.shape, zeros.dtype) for name, zeros in self._zeros.items()}
            if known != {name: (grad.shape, grad.dtype) for name, grad in grads.items()}:
                self._zeros = {name: np.zeros(grad.shape, grad.dtype) for name, grad in grads.items()}
            params = self._zeros
        else:
            self._zeros = {}
        self._update.mean = {}
        if not self._weights:
            self._samples = UnknownSamples()
        try:
            self.step(params, grads, samples)
        finally:
            self._sync_mode().forget_arrays()
        mean, self._update.mean = self._update.mean, {}
        for name, value in mean.items():
            if value is not grads[name]:
                grads[name][...] = value
        return bool(mean)

    def _sync_mode(self) -> SyncMode:
        mode = self._get_mode()
        assert isinstance(mode, SyncMode)
        return mode

    def refusal(self) -> str:
        return ", ".join([self.framework, *filter(None, [super().refusal()])])

    def replicated(self, trained: dict[str, Any]) -> Any:
        raise InputError(f"the parameters are arrays of {self.framework}, which cannot be changed in place")


def unique(names: Sequence[str]) -> list[str]:
    """Return names for gradients; repeated ones get a number.

    >>> unique(["kernel", "bias", "kernel"])
    ['kernel', 'bias', 'kernel 2']
    """
    counts: dict[str, int] = {}
    found = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        found.append(name if counts[name] == 1 else f"{name} {counts[name]}")
    return found
