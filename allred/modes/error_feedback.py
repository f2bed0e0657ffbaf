"""`ErrorFeedback`: the errors of compression between hosts, which are added to the gradients of the next step.

Each rank keeps the errors of what it encodes (csrc/network_compressed.c), as one float32 number for each element of a
list of tensors; it uses only its own part of them, and the rest takes no memory. Ranks of one host share the work, so a
host has 4 bytes for each element.

Errors are dropped, on all ranks, when a checkpoint is written. So a checkpoint needs no errors, and a run that is
continued from it on equal hosts has the same bits as the run that wrote it, unless gradients are sent during the
backward pass. They are dropped, too, after a step that was skipped or has failed, when the scale of the loss changes,
when gradients are reduced in another grouping, and when parameters are broadcast or the ranks change: then they belong
to other gradients.

F. Seide et al.: 1-bit stochastic gradient descent and its application to data-parallel distributed training of speech
DNNs. Interspeech 2014. S. P. Karimireddy et al.: Error feedback fixes SignSGD. ICML 2019.
"""

from typing import Any

import numpy as np

from allred.arrays import Array
from allred.fusion import Plan


class ErrorFeedback:
    """The errors of one optimizer. saved: a checkpoint was written on this rank since the last step."""

    def __init__(self) -> None:
        self._epoch: Any = object()  # errors of another one are dropped
        self.saved = False

    def residual(self, plan: Plan) -> Array:
        """Return the errors of a list of tensors. They are kept as long as the plan, the same object in each step."""
        found = plan.kept.get(self._epoch)
        if found is None:
            plan.kept.clear()
            found = plan.kept[self._epoch] = np.zeros(sum(tensor.elements for tensor in plan.tensors), np.float32)
        return found

    def drop(self) -> None:
        """Forget all errors. On all ranks, between two steps."""
        self._epoch, self.saved = object(), False
