"""Payload of a step in mode ps: gradients in the form that is pushed, the learning rate, and the targets of a pull.

Parameter servers take host arrays only. `HostStaging` has pinned host memory for arrays on a GPU: download gradients
(the host waits) -> push and pull -> upload parameters (the caller's stream waits).
"""

import math
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from allred.arrays import Array
from allred.comm import functions
from allred.comm.device_operation import adopt_on
from allred.errors import InputError
from allred.fusion import Plan, Tensor
from allred.gpu.device_arrays import Adopted, is_device
from allred.gpu.streams import Completion, Device
from allred.modes.detect import finite
from allred.optim.base import Optimizer, compute_dtype
from allred.validators import non_negative


class PushedGradients:
    """Converts the gradients of one optimizer to the form that is sent. Argument: its parameters. tensors, plan: the
    form."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [tensor.shape for tensor in tensors]
        self._dtypes = [compute_dtype(np.empty(0, tensor.dtype)) for tensor in tensors]
        self.tensors = tuple(Tensor(t.name, t.shape, dtype) for t, dtype in zip(tensors, self._dtypes, strict=True))
        self.plan = Plan(self.tensors, 2**20)
        self.any_not_finite = finite.nonfinite_scanner(self.plan)
        self.same_dtypes = [tensor.dtype for tensor in tensors] == self._dtypes
        self._zeros: dict[int, Array] = {}

    def to_wire(self, values: Sequence[Any]) -> list[Array]:
        """Return the gradients contiguous and in the dtype of the update; zeros for None."""
        return [self._to_wire(index, value) for index, value in enumerate(values)]

    def _to_wire(self, index: int, value: Any) -> Array:
        dtype, shape = self._dtypes[index], self._shapes[index]
        if type(value) is np.ndarray and value.dtype == dtype and value.flags.c_contiguous:
            return value
        if value is None:
            if index not in self._zeros:
                self._zeros[index] = np.zeros(shape, dtype)
            return self._zeros[index]
        return np.ascontiguousarray(value, dtype).reshape(shape)

    def describe(self, sources: Sequence[Array]) -> dict[str, str]:
        return finite.describe(self.plan, sources)


def targets(leaves: Sequence[Any]) -> list[Any]:
    """Return the arrays that a pull writes into: the parameters, or buffers for those that are not contiguous."""
    return [leaf if leaf.flags.c_contiguous else np.empty(leaf.shape, leaf.dtype) for leaf in leaves]


def put_back(leaves: Sequence[Any], targets: Sequence[Any]) -> None:
    for leaf, target in zip(leaves, targets, strict=True):
        if target is not leaf:
            leaf[...] = target


def difference(tensors: Sequence[Tensor], known: Sequence[Tensor]) -> str:
    """Describe how the parameters differ from those of the servers."""
    for tensor, one in zip(tensors, known, strict=False):
        if tensor != one:
            return f"{tensor} where they have {one}"
    return f"there are {len(tensors)}, not {len(known)}"


def shared_memory_problem(first: str, second: str) -> str:
    """Return the error text for parameters that share memory. second: equal to `first` if the parameter has several
    elements in the same memory."""
    what = f"parameters '{first}' and '{second}' share memory"
    if first == second:
        what = f"parameter '{first}' has several elements in the same memory"
    return (
        f"{what}. The servers would update them separately, and one gradient would be lost; pass this memory once, "
        "with the sum of its gradients"
    )


class PushedLearningRate:
    """The learning rate that the program assigns to its optimizer, which goes to the servers with a step. A schedule is
    not sent: the servers got it with their own optimizer. title: prefix of errors."""

    def __init__(self, optimizer: Any, title: str) -> None:
        self._optimizer, self._title = optimizer, title
        self._initial = self._last = getattr(optimizer, "lr", None)
        self._number = math.nan
        self._number = self._check(self._initial)

    def value(self) -> float:
        """Return the number to send; NaN for none. Raises InputError if it is no learning rate."""
        lr = getattr(self._optimizer, "lr", None)
        if lr is not self._last:
            self._number = self._check(lr)
            self._last = lr
        return self._number

    def _check(self, lr: Any) -> float:
        if not isinstance(self._optimizer, Optimizer):  # its lr may be anything, such as a scheduler
            is_assigned = lr is not self._initial
            return float(lr) if isinstance(lr, numbers.Real) and is_assigned else math.nan
        if not callable(lr):
            return non_negative(self._title, "lr", lr)
        if lr is not self._initial or not math.isnan(self._number):
            raise InputError(
                f"{self._title}: lr was changed to a schedule, which is not sent to the servers; give schedules when "
                "the optimizer is made, and assign numbers"
            )
        return math.nan


class HostStaging:
    """The staging memory of one optimizer. Arrays on the host are passed through."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, int], Array] = {}
        self._uploaded: Completion | None = None  # the event after which upload memory may be overwritten

    @property
    def _device(self) -> Device:
        devices = functions.current().devices
        assert devices is not None  # else there are no device arrays
        return devices.device

    def download(self, values: Sequence[Any]) -> list[Any]:
        """Return host arrays with the values of arrays on the GPU, valid until the next call."""
        there = self._on_gpu(values)
        hosts = [self._pinned("download", i, there[i]) if i in there else value for i, value in enumerate(values)]
        if there:
            lease = self._device.lease([one.stream for one in there.values()])
            with lease.enter():
                flats = {i: one.flat() for i, one in there.items() if one.nbytes}
                for i, flat in flats.items():
                    self._device.to_host(flat.view(np.uint8), hosts[i].reshape(-1).view(np.uint8))
            lease.end((there, flats)).synchronize()
        return hosts

    def host_targets(self, leaves: Sequence[Any]) -> list[Any]:
        """Return host arrays to write into, for `upload`. Arrays that share memory on the GPU share a target."""
        there = self._on_gpu(leaves)
        if self._uploaded is not None:
            self._uploaded.synchronize()
        found, first = list(leaves), dict[int, Array]()
        for i, one in there.items():
            found[i] = self._pinned("upload", i, one)
            if one.nbytes:
                found[i] = first.setdefault(one.array.data.ptr, found[i])
        return found

    def upload(self, leaves: Sequence[Any], targets: Sequence[Any]) -> None:
        """Copy the results of `host_targets` to the arrays on the GPU."""
        there = {i: one for i, one in self._on_gpu(leaves).items() if one.nbytes}
        if not there:
            return
        lease = self._device.lease([one.stream for one in there.values()])
        with lease.enter():
            for i, one in there.items():
                flat = one.flat()
                self._device.to_device(targets[i].reshape(-1).view(np.uint8), flat.view(np.uint8))
                if not one.array.flags.c_contiguous:
                    one.array[...] = flat.reshape(one.shape)
        self._uploaded = lease.end((there, targets))
        self._uploaded.order_callers()

    def _on_gpu(self, values: Sequence[Any]) -> dict[int, Adopted]:
        found = [i for i, value in enumerate(values) if is_device(value)]
        return {i: adopt_on(values[i], self._device.index) for i in found}

    def _pinned(self, use: str, index: int, like: Adopted) -> Array:
        key = use, index
        if key not in self._memory or self._memory[key].nbytes < like.nbytes:
            self._memory[key] = self._device.pinned(like.nbytes)
        return self._memory[key][: like.nbytes].view(like.dtype).reshape(like.shape)
