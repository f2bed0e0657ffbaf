"""The process group of torch.distributed over an allred communicator.

The default group uses the communicator of all ranks. Every other group creates its own communicator, so that its
operations are independent of all other groups, even with the same ranks.

torch 2.13 renamed some collectives and kept the old names; both are defined. Calls with GPU tensors are forwarded to a
device group, torch's own group with ProcessGroupNCCL.
"""

import collections
import contextlib
import datetime
import functools
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from allred import world
from allred.arrays import Array, amount, flat
from allred.comm import process_set
from allred.comm.communicator import Communicator
from allred.comm.work import call_site
from allred.errors import AllredError, InputError, RanksChanged
from allred.torch import arena_allocator, elastic_group, flight_recorder, group_operations, rendezvous, tool_events
from allred.torch.group_operations import device_of, with_options
from allred.torch.optimizer_hooks import uncompiled
from allred.torch.tensors import as_raw_array
from allred.torch.torch_work import StartedOperation, TorchWork, UnstartedError, as_torch_error, start_each

Tensors = Sequence[torch.Tensor]


class DeviceError(InputError, RuntimeError):
    """There is no group for tensors on a device."""


# torch's C++ code may wait for a Work whose Python object is gone, such as DistributedDataParallel's in `join`, and
# such a wait never ends. So a group keeps the objects: of each Work until it is complete, and of this number of
# complete ones for which nothing has waited; torch before 2.7 also needs those for which the program has waited.
_KEPT = 500
_KEEPS_ALL = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7)


def create(options: Any) -> "ProcessGroupAllred":
    """Create the group that torch asks for. options: torch's DistributedBackendOptions."""
    rank, size, ranks = options.group_rank, options.group_size, tuple(options.global_ranks_in_group)
    if not ranks:
        rendezvous.init_from_store(options.store, rank, size)
        communicator = world.current().communicator
    elif world.current().recovery is not None:
        raise InputError("dist.new_group(): groups beside the default group cannot be used with `allred run --elastic`")
    else:
        try:
            communicator = process_set.dedicated(ranks, f"torch's process group {options.group_id}")
        except AllredError as error:
            as_torch_error(error)
            raise
    arena_allocator.install()
    timeout = options.timeout if options.timeout != dist.constants.default_pg_timeout else None
    group = ProcessGroupAllred(communicator, options.store, timeout)
    if group.recovery is not None:
        group.recovery.follow(group)
    return group


def operation(kind: str = "", takes_lists: bool = True) -> Callable[[Callable[..., TorchWork]], Callable[..., Any]]:
    """Decorate a method that starts operations: forward tensors on other devices to the device group, and raise an
    InputError of one rank on all ranks.

    kind: one of header.KINDS; "" for send and recv, whose error is local. takes_lists: whether the arguments are lists
    of tensors.
    """

    def decorate(method: Callable[..., TorchWork]) -> Callable[..., Any]:
        @uncompiled
        @functools.wraps(method)
        def call(self: "ProcessGroupAllred", *arguments: Any, **named: Any) -> Any:
            arguments += tuple(named.values())  # in the order of the parameters
            if (device := device_of(arguments)) != "cpu":
                return getattr(self.device_group(device), method.__name__)(*arguments)
            if self.recovery is not None:
                elastic_group.note_constructor()
            if self.recovery is not None and self.recovery.joins_alone:
                elastic_group.answer_to_joiner(method.__name__, arguments)
                return TorchWork([], [], None)
            if kind and not (arguments and hasattr(arguments[-1], "timeout")):
                arguments = with_options(arguments, takes_lists)
            event = tool_events.ToolEvent(self, method.__name__, arguments) if tool_events.watched() else None
            record = None if self.flight_record is None else self._record(method.__name__, arguments)
            if self.recovery is not None:
                self._on_loss = elastic_group.loss_handler(self.recovery, method.__name__, arguments)
            try:
                try:
                    work = method(self, *arguments)
                except RanksChanged as error:
                    if self._on_loss is None:
                        raise
                    self._on_loss(error)
                    outputs = arguments[0]  # of the operations of DDP
                    work = TorchWork([], outputs if isinstance(outputs, list) else [], None)
                except InputError as error:
                    if kind:
                        self._raise_everywhere(kind, f"{method.__name__}()", error)
                    raise
                finally:
                    self._on_loss = None
            except Exception as error:
                if event is not None:
                    event.end()
                as_torch_error(error)
                raise
            if event is not None:
                event.end_on_completion(work)
            if record is not None:
                record.follow(work.parts)
            if getattr(arguments[-1], "asyncOp", True) is False:
                work.wait()
                if record is not None:
                    record.end()
            return work

        return call

    return decorate


class ProcessGroupAllred(dist.ProcessGroup):
    """A torch process group. timeout: limit of each wait; None: ALLRED_TIMEOUT_S."""

    def __init__(self, communicator: Communicator, store: Any, timeout: datetime.timedelta | None) -> None:
        super().__init__(communicator.rank, communicator.size)
        self.communicator = communicator
        here = world.current_or_none()
        self.recovery = None if here is None else here.recovery  # in an elastic job; else None
        self._on_loss: Callable[[Exception], None] | None = None  # of the operation that is being started
        self._is_shut_down = False
        self._store = store
        self._timeout_s = None if timeout is None else timeout.total_seconds()
        # None: nothing is recorded.
        self.flight_record = None if here is None else flight_recorder.group_record(communicator, self._timeout_s)
        self._device_groups: dict[str, Any] = {}
        self._numbers = itertools.count()
        self._unfinished: dict[int, TorchWork] = {}  # by number, until complete: the program need not keep them
        self._finished = collections.deque[TorchWork](maxlen=_KEPT)
        self._first_coalesced: int | None = None  # while operations are coalesced, the number before their first one
        self._name = self._description = ""
        self._residuals = WeakIdKeyDictionary()  # by the first parameter of a bucket: its parameters, and the errors

    def residual(self, parameters: Tensors) -> Array:
        """Return the errors of compression of a bucket of DistributedDataParallel with these parameters."""
        bucket = tuple(map(id, parameters))
        found: tuple[tuple[int, ...], Array] | None = self._residuals.get(parameters[0])
        if found is None or found[0] != bucket:
            found = bucket, np.zeros(sum(each.numel() for each in parameters), np.float32)
            self._residuals[parameters[0]] = found
        return found[1]

    def drop_residuals(self) -> None:
        """Drop the errors of compression."""
        self._residuals.clear()

    # Reductions.

    @operation("allreduce")
    def allreduce(self, tensors: Tensors, opts: Any) -> TorchWork:
        """As in gloo, all tensors become the reduction of all tensors of all ranks."""
        if len(tensors) < 2:
            return self._allreduce(tensors, opts, ())
        return self._allreduce([group_operations.reduce_locally(tensors, opts.reduceOp)], opts, tensors)

    @operation("allreduce")
    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> TorchWork:
        if hasattr(opts, "compression"):  # of a hook in compression_hooks.py
            part = group_operations.compressed_mean(self.communicator, tensors, opts.compression, opts.residual)
            return self._start([part], tensors, opts)
        return self._allreduce(group_operations.without_repeated(tensors), opts, ())

    def _allreduce(self, tensors: Tensors, opts: Any, copies: Tensors) -> TorchWork:
        """Reduce each tensor over the ranks. If the caller waits at once (asyncOp is false), without a time limit, take
        the faster way. copies: tensors that become copies of the first."""
        blocking = getattr(opts, "asyncOp", True) is False and self._limit_of(opts) is None
        parts = group_operations.allreduce(self.communicator, tensors, opts.reduceOp, blocking)
        if copies:
            parts = group_operations.with_copies(parts, [(each, tensors[0]) for each in copies])
        if blocking:
            return TorchWork(parts, copies or tensors, None, on_loss=self._on_loss)
        return self._start(parts, copies or tensors, opts)

    @operation("allreduce")
    def reduce(self, tensors: Tensors, opts: Any) -> TorchWork:
        name, is_root = self._name_with_root("reduce", opts), self._is_root(opts)
        parts = [group_operations.reduce(self.communicator, tensor, opts.reduceOp, is_root, name) for tensor in tensors]
        return self._start(parts, tensors, opts)

    @operation("reducescatter")
    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> TorchWork:
        return self._reduce_scatter(outputs, inputs, opts)

    @operation("reducescatter")
    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> TorchWork:
        return self._reduce_scatter(outputs, [[tensor] for tensor in inputs], opts)

    @operation("reducescatter", takes_lists=False)
    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> TorchWork:
        return self._reduce_scatter([output], [[tensor]], opts)

    def _reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> TorchWork:
        """inputs: for each output a tensor for each rank, or one for all."""
        _check_lengths(outputs, inputs)
        start = functools.partial(group_operations.reducescatter, self.communicator, op=opts.reduceOp)
        pairs = zip(outputs, inputs, strict=True)
        return self._start(start_each([functools.partial(start, *pair) for pair in pairs]), outputs, opts)

    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    # Collectives that move tensors.

    @operation("broadcast")
    def broadcast(self, tensors: Tensors, opts: Any) -> TorchWork:
        """As in gloo, all tensors become the tensor `opts.rootTensor` of the root."""
        root, index = self._global_rank(opts.rootRank), getattr(opts, "rootTensor", 0)
        if not 0 <= index < len(tensors):
            raise InputError(f"rootTensor is {index}; expected the index of one of {len(tensors)} tensors")
        array = group_operations.flat_view(as_raw_array(tensors[index]))
        parts: list[StartedOperation] = [(self.communicator.broadcast(array, root, in_place=True), None)]
        if len(tensors) > 1:
            parts = group_operations.with_copies(parts, [(each, tensors[index]) for each in tensors])
        return self._start(parts, tensors, opts)

    @operation("allgather")
    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> TorchWork:
        """As in gloo, each list of outputs becomes all inputs of all ranks."""
        _check_lengths(outputs, inputs)
        count = len(inputs)
        if count < 2:
            return self._allgather(outputs, inputs, opts)
        for into in outputs:
            if len(into) != count * self.communicator.size:
                problem = (
                    f"expected {count} * {self.communicator.size} tensors in each list of outputs, got {len(into)}"
                )
                raise UnstartedError(problem, count)
        copies = [pair for into in outputs[1:] for pair in zip(into, outputs[0], strict=True)]
        return self._allgather([outputs[0][i::count] for i in range(count)], inputs, opts, copies)

    @operation("allgather")
    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> TorchWork:
        for into in outputs:
            _check_lengths(into, inputs)
        return self._allgather([[into[i] for into in outputs] for i in range(len(inputs))], inputs, opts)

    @operation("allgather")
    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> TorchWork:
        return self._allgather([[output] for output in outputs], inputs, opts)

    @operation("allgather", takes_lists=False)
    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> TorchWork:
        return self._allgather([[output]], [tensor], opts)

    def _allgather(
        self,
        outputs: Sequence[Tensors],
        inputs: Tensors,
        opts: Any,
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    ) -> TorchWork:
        """outputs: for each input a tensor for each rank, or one for all. copies: pairs of a tensor and the output
        that is copied into it."""
        _check_lengths(outputs, inputs)
        start = functools.partial(group_operations.allgather, self.communicator)
        parts = start_each([functools.partial(start, *pair) for pair in zip(outputs, inputs, strict=True)])
        if copies:
            parts = group_operations.with_copies(parts, copies)
        return self._start(parts, [tensor for into in outputs for tensor in into], opts)

    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced

    @operation("alltoall")
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any) -> TorchWork:
        return self._start([group_operations.alltoall(self.communicator, outputs, inputs)], outputs, opts)

    @operation("alltoall", takes_lists=False)
    def alltoall_base(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int], opts: Any
    ) -> TorchWork:
        part = group_operations.alltoall_single(self.communicator, output, tensor, received, sent)
        return self._start([part], [output], opts)

    all_to_all_single = alltoall_base

    @operation("alltoall")
    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> TorchWork:
        name, (tensor,) = self._name_with_root("gather", opts), inputs
        into = outputs[0] if self._is_root(opts) else []
        part = group_operations.gather(self.communicator, into, tensor, opts.rootRank, name)
        return self._start([part], into, opts)

    @operation("alltoall")
    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> TorchWork:
        name, (output,) = self._name_with_root("scatter", opts), outputs
        tensors = inputs[0] if self._is_root(opts) else []
        part = group_operations.scatter(self.communicator, output, tensors, opts.rootRank, name)
        return self._start([part], outputs, opts)

    def _is_root(self, opts: Any) -> bool:
        return bool(opts.rootRank == self.communicator.rank)

    def _name_with_root(self, method: str, opts: Any) -> str:
        """Return the name of an operation of another kind than its method, so that other methods and roots differ."""
        return f"{method}(root={self._global_rank(opts.rootRank)})"

    @operation("barrier")
    def barrier(self, opts: Any) -> TorchWork:
        return self._start([(self.communicator.barrier(), None)], [], opts)

    # Point-to-point communication.

    @operation()
    def send(self, tensors: Tensors, dest: int, tag: int) -> TorchWork:
        (tensor,) = tensors
        return self._start(
            [(self.communicator.send(flat(as_raw_array(tensor)), self._global_rank(dest), tag), None)], tensors
        )

    @operation()
    def recv(self, tensors: Tensors, source: int, tag: int) -> TorchWork:
        return self._receive(tensors, self._global_rank(source), tag)

    @operation()
    def recv_anysource(self, tensors: Tensors, tag: int) -> TorchWork:
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Tensors, source: int | None, tag: int) -> TorchWork:
        target = as_raw_array(*tensors)
        buffer = target.reshape(-1)  # a copy if the tensor is not contiguous

        def finish(sender: int) -> None:
            work.source = self.communicator.ranks.index(sender)
            if source is None and (record := self._record("recv", (tensors, work.source, tag))) is not None:
                record.end()
            if not np.shares_memory(buffer, target):
                target[...] = buffer.reshape(target.shape)

        work = self._start([(self.communicator.recv(buffer, source, tag), finish)], tensors)
        return work

    # The rest of torch's interface.

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type != "cpu":
            self.device_group(device.type)._start_coalescing(device)
        self._first_coalesced = next(self._numbers)

    def _end_coalescing(self, device: torch.device) -> Any:
        if device.type != "cpu":
            return self.device_group(device.type)._end_coalescing(device)
        first, self._first_coalesced = self._first_coalesced, None
        works = [work for number, work in sorted(self._unfinished.items()) if first is not None and number > first]
        return self._start([part for work in works for part in work.take_operations()], [])

    def _raise_everywhere(self, kind: str, title: str, error: InputError) -> None:
        """Raise an error of this rank on all ranks, in place of each operation that this rank cannot start."""
        count = error.count if isinstance(error, UnstartedError) else 1
        checks = [self.communicator.check(kind, title, problem=str(error)) for _ in range(count)]
        for check in checks[1:]:
            check.silence()
        with contextlib.suppress(AllredError):
            checks[-1].wait()  # after the others
        checks[0].wait()

    def _record(self, method: str, arguments: Sequence[Any]) -> flight_recorder.RecordedOperation | None:
        group = self.flight_record
        return None if group is None else group.begin(method, arguments, self._name, self._description)

    def _start(self, parts: list[StartedOperation], outputs: Tensors, opts: Any = None) -> TorchWork:
        """Return the Work of operations that have been started."""
        place = call_site()
        for started, _ in parts:
            started.place = started.place or place  # operations that were coalesced have one
        # Look at two earlier operations, whose number does not change the cost; not while operations are coalesced,
        # because one that fails would be missing in their Work.
        looked_at = 0 if self._first_coalesced is not None else 2
        for number, work in [*itertools.islice(self._unfinished.items(), looked_at)]:
            if work.complete_if_done():
                self._end(number)
            elif self._unfinished.pop(number, None) is not None:
                self._unfinished[number] = work  # behind the others
        number = next(self._numbers)
        end = functools.partial(self._end, number)
        made = self._unfinished[number] = TorchWork(parts, outputs, self._limit_of(opts), end, self._on_loss)
        return made

    def _end(self, number: int) -> None:
        """Do not keep a Work any more, unless torch may still wait for it."""
        work = self._unfinished.pop(number, None)
        if work is not None and not work.parts and (_KEEPS_ALL or not work.was_waited_for):
            work.release_outputs()
            self._finished.append(work)

    def _limit_of(self, opts: Any) -> float | None:
        """Return the time limit of an operation in seconds; None for the setting of allred."""
        timeout = getattr(opts, "timeout", None)
        given_s = 0.0 if timeout is None else timeout.total_seconds()
        return given_s if given_s > 0 else self._timeout_s

    def _global_rank(self, group_rank: int) -> int:
        """Return the global rank of a rank of this group."""
        if not 0 <= group_rank < self.communicator.size:
            raise InputError(
                f"rank {group_rank} is not in the group, whose ranks are 0 to {self.communicator.size - 1}"
            )
        return self.communicator.ranks[group_rank]

    def device_group(self, device: str) -> Any:
        """Return the group that reduces and moves tensors on devices of this type; create it at the first use."""
        if self.recovery is not None:
            raise DeviceError(f"tensors on {device} cannot be used with `allred run --elastic`")
        if device not in self._device_groups:
            store = dist.PrefixStore(f"allred/{device}/", self._store)
            self._device_groups[device] = _create_device_group(device, store, self.communicator, self._timeout_s)
        return self._device_groups[device]

    def shutdown(self) -> None:
        """Wait for the operations that are not complete, and release the group's resources. Does not wait while an
        exception is handled, because other ranks may not take part in the operations any more.

        allred stays initialized: the default group's communicator is that of all ranks.
        """
        try:
            if sys.exc_info()[0] is None and not self.communicator.queue.poisoned:
                for work in [*self._unfinished.values()]:
                    work.wait()
        finally:
            self._is_shut_down = True
            self._unfinished.clear()
            self._release()

    def _release(self) -> None:
        for group in self._device_groups.values():
            group.shutdown()
        here = world.current_or_none()
        if here is not None and self.communicator is not here.communicator:
            with contextlib.suppress(AllredError):
                process_set.close(self.communicator)

    def begin_world(self) -> None:
        """Internal: take the ranks of the new world of an elastic job."""
        if self._is_shut_down:
            return
        self.communicator = world.current().communicator
        self.flight_record = flight_recorder.group_record(self.communicator, self._timeout_s)
        self._unfinished.clear()
        self._finished.clear()
        self.drop_residuals()
        if self.recovery is not None:
            rendezvous.set_env_variables(os.environ)
        elastic_group.begin_world(self)

    def getRank(self) -> int:  # noqa: N802
        return self.communicator.rank

    def getSize(self) -> int:  # noqa: N802
        return self.communicator.size

    def get_group_store(self) -> Any:
        return self._store

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return "allred"

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    _set_group_name, group_name = setGroupName, property(getGroupName)
    _set_group_desc, group_desc = setGroupDesc, property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        if self not in dist.distributed_c10d._world.pg_map:  # torch makes this group: 2.15 attaches its flight recorder
            return []  # to a group with devices, and fails, because this group has no backend in C++
        return [torch.device("cpu"), *map(torch.device, self._device_groups)]

    def _get_backend(self, device: torch.device) -> Any:
        """Return torch's backend of the device group: this group until there is one. Raises DeviceError."""
        device = torch.device(device)
        name = device.type
        if name in self._device_groups:
            return self._device_groups[name]._get_backend(device)
        if name != "cpu":
            _check_device(name)
        return self

    def summary(self) -> str:
        """Return how many bytes this rank has contributed to allreduces, and what passed without a copy
        (docs/torch-optimizer.md#gradients-in-place)."""
        comm = self.communicator
        read = getattr(comm.backend.engine, "read_in_place", 0)
        share = 100 * comm.in_place_bytes / (comm.sent_bytes or 1)
        return (
            f"allreduce: {amount(comm.sent_bytes)}, {share:.0f} % reduced in place\n"
            f"other collectives: {amount(read)} read in place"
        )

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def __repr__(self) -> str:
        return f"ProcessGroupAllred(rank {self.communicator.rank} of {self.communicator.size})"


def _check_lengths(outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
    if len(outputs) != len(inputs):
        raise UnstartedError(f"{len(outputs)} outputs for {len(inputs)} inputs", max(len(inputs), 1))


def _check_device(device: str) -> None:
    """Raise DeviceError unless a group for tensors on `device` can be created."""
    if device != "cuda":
        raise DeviceError(f"tensors on {device} are not supported; use tensors on the CPU or on a CUDA GPU")
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise DeviceError("tensors on cuda need a GPU and a torch with NCCL; use tensors on the CPU")


def _create_device_group(device: str, store: Any, communicator: Communicator, timeout_s: float | None) -> Any:
    """Create the group for tensors on `device`: torch's own process group, with NCCL as its backend."""
    _check_device(device)
    options = dist.ProcessGroupNCCL.Options()
    if timeout_s is not None:
        options._timeout = datetime.timedelta(seconds=timeout_s)
    nccl = dist.ProcessGroupNCCL(store, communicator.rank, communicator.size, options)
    return _group_of_backend(device, dist.ProcessGroup.BackendType.NCCL, nccl, store)


def _group_of_backend(device: str, kind: Any, backend: Any, store: Any) -> Any:
    """Return a group that calls one backend of torch. A backend alone has not all methods of a group."""
    if hasattr(dist.ProcessGroup, "Options"):  # torch 2.5
        options = dist.ProcessGroup.Options(backend=backend.name())
        group = dist.ProcessGroup(store, backend.rank(), backend.size(), options)
    else:
        group = dist.ProcessGroup(store, backend.rank(), backend.size())
        group._set_default_backend(kind)
    group._register_backend(torch.device(device), kind, backend)
    group._set_sequence_number_for_group()
    return group
