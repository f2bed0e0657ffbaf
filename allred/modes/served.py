"""The tensors of a worker in mode ps: gradients in the form that is sent, and the arrays that a pull writes into."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from allred.arrays import Array
from allred.fusion import Plan, Tensor
from allred.modes.detect import finite
from allred.optim.tensors import compute_dtype


class Gradients:
    """Converts the gradients of one optimizer, whose parameters are `tensors`, to the form that is sent."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [tensor.shape for tensor in tensors]
        self._dtypes = [compute_dtype(np.empty(0, tensor.dtype)) for tensor in tensors]
        self._plan = Plan(
            tuple(Tensor(t.name, t.shape, dtype) for t, dtype in zip(tensors, self._dtypes, strict=True)), 2**20
        )
        self.any_not_finite = finite.nonfinite_scanner(self._plan)
        self.same_dtypes = [tensor.dtype for tensor in tensors] == self._dtypes
        self._zeros: dict[int, Array] = {}

    def travelling(self, values: Sequence[Any]) -> list[Array]:
        """Return the gradients contiguous and in the dtype of the update; zeros for None."""
        return [self._travelling(index, value) for index, value in enumerate(values)]

    def _travelling(self, index: int, value: Any) -> Array:
        dtype, shape = self._dtypes[index], self._shapes[index]
        if type(value) is np.ndarray and value.dtype == dtype and value.flags.c_contiguous:
            return value
        if value is None:
            if index not in self._zeros:
                self._zeros[index] = np.zeros(shape, dtype)
            return self._zeros[index]
        return np.ascontiguousarray(value, dtype).reshape(shape)

    def describe(self, sources: Sequence[Array]) -> dict[str, str]:
        """Return {name: problem} of the gradients that have a NaN or infinity."""
        return finite.describe(self._plan, sources)


def targets(leaves: Sequence[Any]) -> list[Any]:
    """Return the arrays that a pull writes into: the parameters, or buffers for those that are not contiguous."""
    return [leaf if leaf.flags.c_contiguous else np.empty(leaf.shape, leaf.dtype) for leaf in leaves]


def put_back(leaves: Sequence[Any], targets: Sequence[Any]) -> None:
    """Copy the buffers of `targets` to their parameters."""
    for leaf, target in zip(leaves, targets, strict=True):
        if target is not leaf:
            leaf[...] = target


def difference(tensors: Sequence[Tensor], known: Sequence[Tensor]) -> str:
    """Describe how the parameters differ from those of the servers."""
    for tensor, one in zip(tensors, known, strict=False):
        if tensor != one:
            return f"{tensor} where they have {one}"
    return f"there are {len(tensors)}, not {len(known)}"


def sharing(tensors: Sequence[Tensor], leaves: Sequence[Array]) -> str:
    """Which parameters share memory, in words."""
    pairs = itertools.combinations(zip(tensors, leaves, strict=True), 2)
    one, other = next(((a.name, b.name) for (a, x), (b, y) in pairs if np.may_share_memory(x, y)), ("?", "?"))
    return (
        f"parameters '{one}' and '{other}' share memory. The servers would train them apart, and one's gradient would "
        "be lost; give such a parameter once, with the sum of its gradients"
    )
