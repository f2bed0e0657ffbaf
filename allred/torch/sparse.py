"""Sparse gradients of a hooked torch optimizer, such as those of `torch.nn.Embedding(sparse=True)`.

In the reduction of the dense gradients, a sparse gradient is represented by its largest magnitude, so that the checks
for NaN and for missing gradients include it. Then all ranks gather the indices and values of all ranks.
"""

from typing import Any

import numpy as np
import torch

from allred.comm.communicator import Communicator
from allred.torch.tensors import as_array, as_tensor


class SparseGradients:
    """The parameters of one optimizer whose gradients are sparse. names: agreed on between the ranks."""

    def __init__(self) -> None:
        self.names: frozenset[str] = frozenset()

    def agree_on_names(self, communicator: Communicator, parameters: dict[str, torch.Tensor], title: str) -> None:
        """Agree on the names of parameters with sparse gradients on any rank. Collective. A rank without a gradient
        keeps the previous result for this parameter."""
        here = [name for name, parameter in parameters.items() if self._was_sparse(name, parameter)]
        everyone = communicator.allgather_object(here, f"{title}.step(): which gradients are sparse").wait()
        self.names = frozenset().union(*everyone)

    def _was_sparse(self, name: str, parameter: torch.Tensor) -> bool:
        return name in self.names if parameter.grad is None else parameter.grad.is_sparse

    def refusal(self, parameters: dict[str, torch.Tensor]) -> str:
        """Return why the gradients of this rank cannot be reduced, or ""."""
        found = {name for name, parameter in parameters.items() if getattr(parameter.grad, "is_sparse", False)}
        agreed = "when the ranks agreed on sparse gradients"
        for name in sorted(found - self.names):
            return f"the gradient of '{name}' is sparse, but was dense or missing on all ranks {agreed}"
        for name in sorted(self.names - found):
            if name in parameters and parameters[name].grad is not None:
                return f"the gradient of '{name}' is dense, but was sparse on some rank {agreed}"
        return ""

    def largest_magnitude(self, parameter: torch.Tensor) -> Any:
        """Return the largest magnitude of a gradient as an array of shape (1,) and the dtype of the parameter; None
        without gradient. The gradient becomes coalesced."""
        if parameter.grad is None:
            return None
        values = coalesce_gradient(parameter).values()
        made = values.abs().max().reshape(1) if values.numel() else values.new_zeros(1)
        return as_array(made)

    def reduce(
        self, communicator: Communicator, name: str, parameter: torch.Tensor, weight: float | None, average: bool
    ) -> Any:
        """Replace a gradient that some rank has by its sum or mean over the ranks. Collective. Returns the array of its
        values. weight: factor of this rank's gradient, or None."""
        grad = parameter.grad if parameter.grad is not None else self.zeros(parameter)
        size, indices, values = communicator.active.size, grad.indices(), grad.values()
        if weight is not None:
            values = values * weight if weight else torch.zeros_like(values)  # weight 0: zeros, because 0 * NaN is NaN
        rows = communicator.allgather(np.ascontiguousarray(as_array(indices).T), f"indices of {name}").wait()
        parts = communicator.allgather(np.ascontiguousarray(as_array(values)), f"values of {name}").wait()
        total = torch.sparse_coo_tensor(
            as_tensor(rows).T.contiguous(), as_tensor(parts), parameter.shape, check_invariants=False
        ).coalesce()
        if total.values().shape[0] < 2:  # not copied: torch cannot add to memory of numpy in place, which resizes it
            total = total.clone()
        if average:
            total.values().div_(size)
        parameter.grad = total
        return as_array(total.values())

    def assign(self, parameter: torch.Tensor, value: Any) -> None:
        """Set the values of a reduced gradient, if they are not those of `.grad` already."""
        assert parameter.grad is not None
        own = as_array(parameter.grad.values())
        if not np.shares_memory(own, value):
            own[...] = value

    @staticmethod
    def zeros(parameter: torch.Tensor) -> torch.Tensor:
        """Return a sparse gradient of a parameter without values."""
        indices = torch.zeros((1, 0), dtype=torch.int64)
        values = torch.zeros((0, *parameter.shape[1:]), dtype=parameter.dtype)
        return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False).coalesce()


def coalesce_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Coalesce the sparse gradient of a parameter in place and return it. In-place operations such as `mul_` clear the
    coalesced flag."""
    grad = parameter.grad
    assert grad is not None
    if not grad.is_coalesced():
        made = grad.coalesce()
        vars(made).update(vars(grad))  # the mark of optimizer_hooks.py
        parameter.grad = made
        return made
    return grad
