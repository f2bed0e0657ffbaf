"""Base class of operations on device arrays: start, header exchange, launch order, completion.

The host backend exchanges the headers of all operations, so they have one order, and a rank that passes a host array
where another passes a device array gets the usual error. After that, the operation waits for its turn to be launched
(gpu/launch_order.py), and is enqueued on the streams of the communicator. `wait` orders the caller's stream after it
and does not block the host.
"""

import contextlib
import dataclasses
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from allred import arrays
from allred.comm.arguments import refuse_shared_memory
from allred.comm.backends.backend import DeviceBackend
from allred.comm.group import Group
from allred.comm.header import OpDescriptor, quoted
from allred.comm.ops import ReduceOp
from allred.comm.work import Polled, Steps, Work
from allred.errors import InputError
from allred.gpu.device_arrays import Adopted, adopt, is_device, memory_order
from allred.gpu.streams import StreamLease

T = TypeVar("T")

_ON_GPU = 128  # added to the code of the dtype in the hash of the header


class DeviceOperations:
    """Operations on device arrays, for a communicator with a device backend."""

    def __init__(self, communicator: Group) -> None:
        assert communicator.devices is not None
        self.communicator = communicator
        self.devices = communicator.devices

    def _begin(self, kind: str, name: str, make: Callable[[], Steps[T]], agreed: bool = False) -> Work[T]:
        """Start an operation, after the work already enqueued on the caller's streams. If `make` finds arguments that
        cannot be used, the header says so to the other ranks. agreed: skip the header exchange: that of the previous
        operation has compared this one. Then an error is this rank's alone, and the communicator cannot be used."""
        steps: Steps[T]
        queue = self.communicator.queue
        try:
            steps = self._keeping(make())
        except Exception as error:
            if agreed:
                queue.poison(f"{kind}{quoted(name)} failed on this rank: {error}")
                raise
            steps = _refused(error)
        turn = self.devices.device.launches.take(lambda: queue.poisoned)
        try:
            if agreed:
                return queue.start(f"{kind}{quoted(name)}", steps, turn)
            return self.communicator.start(kind, name, steps, turn)
        except BaseException:
            turn.end()
            raise

    def _keeping(self, steps: Steps[T]) -> Steps[T]:
        """Run the steps. After an error keep what the kernels use that are launched already: the local variables of the
        functions that the error has ended, until the GPU has finished."""
        try:
            return (yield from steps)
        except BaseException as error:
            frames = [dict(frame.f_locals) for frame, _ in traceback.walk_tb(error.__traceback__)][1:]
            with contextlib.suppress(Exception):  # of CUDA, which allocates no memory any more then
                self.devices.device.keep_until_idle(frames)
            raise

    def _agree(self, descriptor: OpDescriptor) -> Steps[tuple[Group, DeviceBackend, list[bytes]]]:
        """Exchange headers, and wait until the operation may be launched. Return the group that runs it, the device
        backend of the group, and the headers."""
        group, headers = yield from self.communicator.agree(descriptor)
        return group, (yield from self._wait_for_turn(group)), headers

    def _wait_for_turn(self, group: Group) -> Steps[DeviceBackend]:
        """Wait until the current operation may be launched by `group`. Return its device backend."""
        work = self.communicator.queue.advancing
        assert work is not None
        assert work.turn is not None
        assert group.devices is not None
        if not work.turn.is_first():
            yield Polled(work.turn.is_first, waits_for_peers=True)
        yield from group.devices.ready()
        return group.devices

    def _end(self, devices: DeviceBackend, lease: StreamLease, *kept: Any, stream: Any = None) -> None:
        """The current operation is enqueued: `wait` orders the caller's streams after it. kept: memory that it uses.
        stream: the one on which it ends, by default the communication stream."""
        work = self.communicator.queue.advancing
        assert work is not None
        work.end = devices.watch(lease.end(kept, stream), work.title)


def adopt_on(value: Any, index: int) -> Adopted:
    """Return `value` as an array on this rank's GPU, whose index is `index`. Raises InputError if it is elsewhere."""
    if not is_device(value):
        kind = f"{type(value).__module__}.{type(value).__name__}"
        raise InputError(f"the group has arrays on the GPU and on the host ({kind}); reduce them in two calls")
    found = adopt(value)
    if (there := found.array.data.device_id) != index:
        raise InputError(
            f"the array is on GPU {there}, but allred.init() has bound this rank to GPU {index} (numbers "
            "of the GPUs that this process sees); create the array there, or move it"
        )
    return found


def check_writable(given: list[Adopted]) -> None:
    """Raise InputError if an array cannot be reduced in place: it is read-only, or shares memory with another."""
    if not all(one.writable for one in given):
        raise InputError(
            "the array is read-only (all arrays of some frameworks are); call the function without the trailing "
            "underscore, which returns a new array"
        )
    group = [one.array for one in given]
    for array in group:
        if array.size and any(step == 0 and n > 1 for step, n in zip(array.strides, array.shape, strict=True)):
            raise InputError(
                "the array has several elements in the same memory (a broadcast or expanded view); copy it"
            )
    ranges = [  # an array with gaps counts as its first byte: interleaved arrays are allowed
        (array.data.ptr, array.data.ptr + (min(array.nbytes, 1) if memory_order(array) is None else array.nbytes))
        for array in group
    ]
    refuse_shared_memory(arrays.overlapping_ranges(ranges))


def refuse_product(op: ReduceOp, dtype: np.dtype[Any]) -> None:
    """Raise InputError for the one reduction that hosts have and GPUs lack."""
    if op is ReduceOp.PRODUCT and arrays.is_complex(dtype):
        raise InputError(f"Product of {dtype} is not available on GPUs; copy the array to the host")


def on_gpu(descriptor: OpDescriptor) -> OpDescriptor:
    """Mark the operation as one on device arrays: the header of a rank with a host array differs."""
    marked = None
    if descriptor.arrays is not None:
        marked = tuple((code | _ON_GPU, shape) for code, shape in descriptor.arrays)
    return dataclasses.replace(descriptor, title=f"{descriptor.title} on the GPU", arrays=marked)


def _refused(error: Exception) -> Steps[Any]:
    """Raise `error` as the first step of an operation, so that the other ranks receive it in the header."""
    yield from ()
    raise error
