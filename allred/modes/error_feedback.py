"""`ErrorFeedback`: the errors of compression between hosts, which are added to the gradients of the next step.

Each rank keeps the errors of what it encodes (csrc/network_compressed.c), as one float32 number for each element of a
list of tensors; it uses only its own part of them, and the rest takes no memory. Ranks of one host share the work, so a
host has 4 bytes for each element.

Errors are dropped, on all ranks, when a checkpoint is written. So a checkpoint needs no errors, and a run that is
continued from it on equal hosts has the same bits as the run that wrote it, unless gradients are sent during the
backward pass. They are dropped, too, after a step that was skipped, when the scale of the loss changes, and when
parameters are broadcast or the ranks change: then they belong to other gradients.

F. Seide et al.: 1-bit stochastic gradient descent and its application to data-parallel distributed training of speech
DNNs. Interspeech 2014. S. P. Karimireddy et al.: Error feedback fixes SignSGD. ICML 2019.
"""

import numpy as np

from allred.arrays import Array
from allred.fusion import Plan

_LARGEST_NUMBER = 256  # of lists of tensors


class ErrorFeedback:
    """The errors of one optimizer. saved: a checkpoint was written on this rank since the last step."""

    def __init__(self) -> None:
        self._residuals: dict[int, tuple[Plan, Array]] = {}
        self.saved = False

    def residual(self, plan: Plan) -> Array:
        """Return the errors of a list of tensors, which is the same object in each step."""
        found = self._residuals.get(id(plan))
        if found is None:
            if len(self._residuals) >= _LARGEST_NUMBER:  # if shapes change at every step
                self._residuals.clear()
            found = plan, np.zeros(sum(tensor.elements for tensor in plan.tensors), np.float32)
            self._residuals[id(plan)] = found
        return found[1]

    def drop(self) -> None:
        """Forget all errors. On all ranks, between two steps."""
        self._residuals.clear()
        self.saved = False
