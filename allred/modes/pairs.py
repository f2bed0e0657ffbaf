"""Parameters and their gradients, matched: the first thing at every step.

Most steps bring what the step before brought: a dict or a list of contiguous arrays, the same names, shapes and dtypes.
That is looked at in a tenth of a microsecond a tensor, on a GPU in half of one; anything else goes the long way,
which knows all the words.
"""

from typing import Any

import numpy as np

from allred import arrays, native, nest
from allred.cluster import report
from allred.errors import InputError
from allred.fusion.plan import Tensor
from allred.gpu import device_arrays as gpu
from allred.reducer import takes_gpu, tensor_of

Matched = tuple[list[Tensor], list[Any], list[Any], str]


class Pairs:
    """Matches the parameters and gradients of one optimizer. `title`: prefix of its warnings."""

    def __init__(self, title: str = "opt.step()") -> None:
        self._title = title
        self._warned_float64 = False
        self._tensors: list[Tensor] = []  # of the last step, if it brought plain arrays
        self._keys: Any = None  # of its dict, in order; or None, of a list
        self._there: list[Any] | None = None  # what they were on a GPU, if they were there

    def match(self, params: Any, grads: Any) -> Matched:
        """What a plan knows of each gradient, the parameters, the gradients, all in the nest's order; and the words for
        what is wrong with them, if anything. The same list of tensors as before means that all is as it was, and on the
        host."""
        again = self._match_again(params, grads)
        if again is not None:
            return again
        matched = _match(params, grads)
        tensors, leaves, values, problem = matched
        if not self._warned_float64 and not problem:
            self._warn_float64(tensors, leaves, values)
        self._tensors = []
        if not problem and _plain(params):
            here = native.match(tensors, leaves, values)
            self._there = None if here else _on_gpu(leaves, values)
            if here or self._there:
                self._tensors = tensors
                self._keys = sorted(params, key=str) if type(params) is dict else None
        return matched

    def _warn_float64(self, tensors: list[Tensor], leaves: list[Any], values: list[Any]) -> None:
        """Print one warning if gradients are float64 and their parameters float32."""
        wide = [
            tensor.name
            for tensor, leaf, value in zip(tensors, leaves, values, strict=True)
            if tensor.dtype == np.float64 and value is not None and tensor_of(tensor.name, leaf).dtype == np.float32
        ]
        if wide:
            self._warned_float64 = True
            others = f" and {len(wide) - 1} more" if len(wide) > 1 else ""
            report.say(
                f"{self._title}: the gradients of float32 parameters are float64 ('{wide[0]}'{others}). float64 "
                "doubles the bytes that are sent, and the parameters stay float32. Compute the gradients in float32 "
                "(float64 data or constants make them float64), or pass grad.astype(numpy.float32)"
            )

    def _match_again(self, params: Any, grads: Any) -> Matched | None:
        """The same, where all is as it was."""
        if not self._tensors or type(params) is not type(grads) or not len(params) == len(grads) == len(self._tensors):
            return None
        if type(params) is dict and self._keys is not None:
            try:
                leaves, values = [params[key] for key in self._keys], [grads[key] for key in self._keys]
            except KeyError:
                return None
        elif type(params) is list and self._keys is None:
            leaves, values = params, grads
        else:
            return None
        if self._there is None:
            return (self._tensors, leaves, values, "") if native.match(self._tensors, leaves, values) else None
        if takes_gpu() and self._there == _on_gpu(leaves, values):
            return list(self._tensors), leaves, values, ""
        return None


def _on_gpu(leaves: list[Any], values: list[Any]) -> list[Any] | None:
    """What parameters and gradients on a GPU are, wherever they lie there; None if that takes longer to find out."""
    known, others = gpu.layouts(leaves), gpu.layouts(values)
    return None if known is None or others is None else [layout[1:] for layout in known + others]


def _plain(params: Any) -> bool:
    """Whether it is a dict or a list of nothing but leaves."""
    if type(params) is not dict and type(params) is not list:
        return False
    return not any(isinstance(v, (dict, list, tuple)) for v in (params.values() if type(params) is dict else params))


def _match(params: Any, grads: Any) -> Matched:
    try:
        named, given = nest.leaves(params), nest.leaves(grads)
    except InputError as error:
        return [], [], [], str(error)
    names, given_names = [name for name, _ in named], [name for name, _ in given]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        return [], [], [], f"two parameters are named '{twice}': dict keys must differ as text"
    if names != given_names:
        odd = sorted(set(names) ^ set(given_names))[:5]
        return [], [], [], f"params and grads differ in structure, in {', '.join(map(repr, odd)) or 'their order'}"
    tensors = []
    try:
        for (name, param), (_, grad) in zip(named, given, strict=True):
            expected = parameter(name, param)
            got = expected if grad is None else tensor_of(name, grad)
            if got.shape != expected.shape:
                return [], [], [], f"the gradient of {expected} has shape {got.shape}"
            tensors.append(expected if isinstance(grad, (int, float)) else got)  # Python's numbers have no dtype
    except InputError as error:
        return [], [], [], str(error)
    return tensors, [leaf for _, leaf in named], [grad for _, grad in given], ""


def parameter(name: str, leaf: Any) -> Tensor:
    """What a plan knows of a parameter. Raises InputError if it cannot be updated in place."""
    if type(leaf) is np.ndarray and leaf.flags.writeable:
        return tensor_of(name, leaf)
    if gpu.is_device(leaf):
        if not takes_gpu():
            arrays.as_host_array(leaf)  # raises
        if not gpu.adopt(leaf).writable:
            raise InputError(f"parameter '{name}' is on a GPU and cannot be written to; it is updated in place")
        return tensor_of(name, leaf)
    arrays.as_host_array(leaf)  # raises its own words about devices, torch and masks
    if not isinstance(leaf, np.ndarray) or not leaf.flags.writeable:
        what = "a read-only array" if isinstance(leaf, np.ndarray) else type(leaf).__name__
        raise InputError(f"parameter '{name}' is {what}; it is updated in place, so it must be a writable array")
    return tensor_of(name, leaf)
