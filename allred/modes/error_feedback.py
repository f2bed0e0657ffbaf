"""`ErrorFeedback`: the residuals of compression between hosts. A residual is what rounding has removed from a number;
it is added to the same number in the next step.

Each rank has one array of float32 with an element for each element of a list of tensors (csrc/network_compressed.c). It
writes only the part that it encodes, and pages that are never written take no memory. Ranks of one host share the work,
so a host has 4 bytes for each element.

All ranks reset their residuals to zero when a checkpoint is written. So a checkpoint has none, and a run that is
continued from it on equal hosts has the same bits as the run that wrote it, unless gradients are sent during the
backward pass. They are reset, too, after a step that was skipped or has failed, when the scale of the loss changes,
when gradients are reduced in other groups, and when parameters are broadcast or the ranks change: then they belong to
other gradients.

F. Seide et al.: 1-bit stochastic gradient descent and its application to data-parallel distributed training of speech
DNNs. Interspeech 2014. S. P. Karimireddy et al.: Error feedback fixes SignSGD. ICML 2019.
"""

from typing import Any

import numpy as np

from allred.arrays import Array
from allred.fusion import Plan


class ErrorFeedback:
    """The residuals of one optimizer. saved: a checkpoint was written on this rank since the last step."""

    def __init__(self) -> None:
        self._key: Any = object()  # residuals of another one are dropped
        self.saved = False

    def residual(self, plan: Plan) -> Array:
        """Return the residuals of a list of tensors: float32, one-dimensional, in the order of the plan. They are kept
        as long as the plan, which is the same object in each step."""
        found = plan.kept.get(self._key)
        if found is None:
            plan.kept.clear()
            found = plan.kept[self._key] = np.zeros(sum(tensor.elements for tensor in plan.tensors), np.float32)
        return found

    def drop(self) -> None:
        """Reset all residuals to zero. On all ranks, between two steps."""
        self._key, self.saved = object(), False
