"""The process group of torch.distributed over an allred communicator.

The default group uses the communicator of all ranks. Every other group has one of its own: its operations are
independent of those of other groups, also of groups with the same ranks.

torch calls some collectives by several names: 2.13 has renamed some, and keeps the older names. A tensor on a GPU
selects the collective of an inner group, NCCL.
"""

import collections
import contextlib
import datetime
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from allred import world
from allred.arrays import Array, flat
from allred.comm import header, process_set
from allred.comm.communicator import Communicator
from allred.errors import AllredError, InputError
from allred.torch import join_ranks, reductions
from allred.torch.tensors import as_movable
from allred.torch.torch_work import Part, TorchWork

Tensors = Sequence[torch.Tensor]

# torch before 2.7 does not keep the Python objects of the Work that its C++ code waits for; without them a wait never
# ends. A group keeps those that are not complete, and this number of those that are.
_KEPT = 500 if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7) else 0


def create(options: Any) -> "AllredGroup":
    """Create the group that torch asks for. options: torch's DistributedBackendOptions."""
    rank, size, ranks = options.group_rank, options.group_size, tuple(options.global_ranks_in_group)
    if not ranks:
        join_ranks.from_store(options.store, rank, size)
        communicator = world.current().communicator
    else:
        communicator = process_set.dedicated(ranks, f"torch's process group {options.group_id}")
    timeout = options.timeout if options.timeout != dist.constants.default_pg_timeout else None
    return AllredGroup(communicator, options.store, timeout)


def collective(kind: str = "") -> Callable[[Callable[..., TorchWork]], Callable[..., Any]]:
    """Decorate a method that starts operations: forward tensors on other devices to the inner group, and raise the
    InputError of a rank on all ranks. kind: of header.KINDS; "" for a message, which is raised here."""

    def decorate(method: Callable[..., TorchWork]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: "AllredGroup", *arguments: Any, **named: Any) -> Any:
            arguments += tuple(named.values())  # torch names only the last argument, the options
            if (device := _device_of(arguments)) != "cpu":
                return getattr(self.inner(device), method.__name__)(*arguments)
            try:
                work = method(self, *arguments)
            except InputError as error:
                if kind:
                    self.communicator.check(kind, f"{method.__name__}()", problem=str(error)).wait()
                raise
            if getattr(arguments[-1] if arguments else None, "asyncOp", True) is False:
                work.wait()
            return work

        return torch._disable_dynamo(call)  # type: ignore[no-any-return]

    return decorate


def _device_of(arguments: Sequence[Any]) -> str:
    """Return the type of the device of the tensors in nested lists; "cpu" if there are none."""
    for each in arguments:
        if isinstance(each, torch.Tensor):
            return str(each.device.type)
        if isinstance(each, (list, tuple)) and (found := _device_of(each)) != "cpu":
            return found
    return "cpu"


class AllredGroup(dist.ProcessGroup):
    """A group of ranks. timeout: of all waits; None for the setting of allred."""

    def __init__(self, communicator: Communicator, store: Any, timeout: datetime.timedelta | None) -> None:
        super().__init__(communicator.rank, communicator.size)
        self.communicator = communicator
        self._store = store
        self._limit_s = None if timeout is None else timeout.total_seconds()
        self._inner: dict[str, Any] = {}
        self._unfinished: list[TorchWork] = []
        self._finished = collections.deque[TorchWork](maxlen=_KEPT)
        self._coalesced: list[TorchWork] | None = None
        self._name = self._description = ""

    # Reductions.

    @collective("allreduce")
    def allreduce(self, tensors: Tensors, opts: Any = None) -> TorchWork:
        return self._allreduce(tensors, opts)

    @collective("allreduce")
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> TorchWork:
        return self._allreduce(tensors, opts)

    def _allreduce(self, tensors: Tensors, opts: Any) -> TorchWork:
        """As `allreduce`. If the caller waits at once (asyncOp is false), without a time limit, take the faster way."""
        blocking = getattr(opts, "asyncOp", True) is False and self._coalesced is None and self._limit_of(opts) is None
        parts = reductions.allreduce(self.communicator, tensors, _op(opts), blocking)
        return TorchWork(parts, tensors, None) if blocking else self._start(parts, tensors, opts)

    @collective("allreduce")
    def reduce(self, tensors: Tensors, opts: Any) -> TorchWork:
        name, is_root = self._name_with_root("reduce", opts), opts.rootRank == self.communicator.rank
        parts = [reductions.reduce(self.communicator, tensor, _op(opts), is_root, name) for tensor in tensors]
        return self._start(parts, tensors, opts)

    @collective("reducescatter")
    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> TorchWork:
        pairs = zip(outputs, inputs, strict=True)
        parts = [reductions.reducescatter(self.communicator, one, several, _op(opts)) for one, several in pairs]
        return self._start(parts, outputs, opts)

    @collective("reducescatter")
    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> TorchWork:
        pairs = zip(outputs, inputs, strict=True)
        parts = [reductions.reducescatter(self.communicator, one, [whole], _op(opts)) for one, whole in pairs]
        return self._start(parts, outputs, opts)

    @collective("reducescatter")
    def _reduce_scatter_base(self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None) -> TorchWork:
        part = reductions.reducescatter(self.communicator, output, [whole], _op(opts))
        return self._start([part], [output], opts)

    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    # Collectives that move tensors.

    @collective("broadcast")
    def broadcast(self, tensors: Tensors, opts: Any) -> TorchWork:
        root = self._number(opts.rootRank)
        arrays = [as_movable(tensor) for tensor in tensors]
        return self._start(
            [(self.communicator.broadcast(array, root, in_place=True), None) for array in arrays], tensors, opts
        )

    @collective("allgather")
    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> TorchWork:
        parts = [self._gather(into, tensor) for into, tensor in zip(outputs, inputs, strict=True)]
        return self._start(parts, [tensor for into in outputs for tensor in into], opts)

    @collective("allgather")
    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> TorchWork:
        parts = [self._gather([each[i] for each in outputs], tensor) for i, tensor in enumerate(inputs)]
        return self._start(parts, [tensor for into in outputs for tensor in into], opts)

    @collective("allgather")
    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> TorchWork:
        parts = [self._gather([into], tensor) for into, tensor in zip(outputs, inputs, strict=True)]
        return self._start(parts, outputs, opts)

    @collective("allgather")
    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> TorchWork:
        return self._start([self._gather([output], tensor)], [output], opts)

    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def _gather(self, outputs: Tensors, tensor: torch.Tensor) -> Part:
        """Start an allgather. outputs: a tensor for each rank, or one for all."""
        targets, source = [as_movable(each) for each in outputs], flat(as_movable(tensor))
        if len(targets) != 1:
            self._check_sizes([source] * self.communicator.size, targets)
        elif targets[0].size != source.size * self.communicator.size:
            raise InputError(
                f"the output tensor has {targets[0].size} elements; expected {source.size} for each of "
                f"{self.communicator.size} ranks"
            )
        elif targets[0].flags.c_contiguous:
            return self.communicator.allgather(source, out=targets[0].reshape(-1)), None
        return self.communicator.allgather(source), functools.partial(_split, targets)

    @collective("alltoall")
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> TorchWork:
        targets, sources = [as_movable(tensor) for tensor in outputs], [flat(as_movable(tensor)) for tensor in inputs]
        self._check_sizes(sources, targets)
        return self._start([self._exchange(sources, targets)], outputs, opts)

    @collective("alltoall")
    def alltoall_base(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int], opts: Any = None
    ) -> TorchWork:
        target, source, size = as_movable(output), as_movable(tensor), self.communicator.size
        expected = list(received) or [len(target) // size] * size
        if len(expected) != size or sum(expected) != len(target):
            raise InputError(f"the output tensor has {len(target)} rows; expected the sum of {size} splits, {expected}")
        if math.prod(source.shape[1:]) != math.prod(target.shape[1:]):
            raise InputError(f"the rows of input {source.shape} and output {target.shape} have different sizes")

        def finish(result: tuple[Array, Array]) -> None:
            rows, counts = result
            if counts.tolist() != expected:
                raise InputError(f"alltoall: {counts.tolist()} rows were received, but {expected} were expected")
            target[...] = rows.reshape(target.shape)

        work = self.communicator.alltoall(source, list(sent) or None)
        return self._start([(work, finish)], [output], opts)

    all_to_all_single = alltoall_base

    @collective("alltoall")
    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> TorchWork:
        name, source = self._name_with_root("gather", opts), flat(as_movable(*inputs))
        sources = [np.empty(0, source.dtype)] * self.communicator.size
        sources[opts.rootRank] = source
        into = outputs[0] if opts.rootRank == self.communicator.rank else []
        targets = [as_movable(each) for each in into]
        if opts.rootRank == self.communicator.rank:
            self._check_sizes([source] * self.communicator.size, targets)
        return self._start([self._exchange(sources, targets, name)], into, opts)

    @collective("alltoall")
    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> TorchWork:
        name, target = self._name_with_root("scatter", opts), as_movable(*outputs)
        sources = [np.empty(0, target.dtype)] * self.communicator.size
        if opts.rootRank == self.communicator.rank:
            sources = [flat(as_movable(tensor)) for tensor in inputs[0]]
            self._check_sizes(sources, [target] * self.communicator.size)
        return self._start([self._exchange(sources, [target], name)], outputs, opts)

    def _exchange(self, sources: list[Array], targets: list[Array], name: str = "") -> Part:
        """Start an alltoall of sources[r] to rank r. targets: for the arrays that arrive, in rank order."""
        work = self.communicator.alltoall(np.concatenate(sources), [source.size for source in sources], name)
        return work, lambda result: _split(targets, result[0])

    def _check_sizes(self, sources: list[Array], targets: list[Array]) -> None:
        """Raise InputError unless there is one of each for every rank, and those of this rank have the same size."""
        size, rank = self.communicator.size, self.communicator.rank
        if not len(sources) == len(targets) == size:
            raise InputError(
                f"expected a tensor for each of {size} ranks, got {len(sources)} inputs and {len(targets)} outputs"
            )
        if sources[rank].size != targets[rank].size:
            raise InputError(
                f"this rank sends itself {sources[rank].size} elements, but the output tensor for them has "
                f"{targets[rank].size}"
            )

    def _name_with_root(self, method: str, opts: Any) -> str:
        """Return the name of an operation of another kind than its method, so that other methods and roots differ."""
        return f"{method}(root={self._number(opts.rootRank)})"

    @collective("barrier")
    def barrier(self, opts: Any = None) -> TorchWork:
        return self._start([(self.communicator.barrier(), None)], [], opts)

    # Messages.

    @collective()
    def send(self, tensors: Tensors, dest: int, tag: int) -> TorchWork:
        (tensor,) = tensors
        return self._start([(self.communicator.send(flat(as_movable(tensor)), self._number(dest), tag), None)], tensors)

    @collective()
    def recv(self, tensors: Tensors, source: int, tag: int) -> TorchWork:
        return self._receive(tensors, self._number(source), tag)

    @collective()
    def recv_anysource(self, tensors: Tensors, tag: int) -> TorchWork:
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Tensors, source: int | None, tag: int) -> TorchWork:
        target = as_movable(*tensors)
        buffer = target.reshape(-1)  # a copy if the tensor is not contiguous

        def finish(sender: int) -> None:
            work.source = self.communicator.ranks.index(sender)
            if not np.shares_memory(buffer, target):
                target[...] = buffer.reshape(target.shape)

        work = self._start([(self.communicator.recv(buffer, source, tag), finish)], tensors)
        return work

    # The rest of torch's interface.

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type != "cpu":
            self.inner(device.type)._start_coalescing()
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Any:
        works, self._coalesced = self._coalesced or [], None
        if device.type != "cpu":
            return self.inner(device.type)._end_coalescing()
        return self._start([part for work in works for part in work.take()], [])

    def _start(self, parts: list[Part], outputs: Tensors, opts: Any = None) -> TorchWork:
        """Return the Work of operations that have been started."""
        place = header.call_site()
        for work, _ in parts:
            work.place = place
        made = TorchWork(parts, outputs, self._limit_of(opts))
        unfinished, self._unfinished = self._unfinished, [made]
        for each in unfinished:
            if not each.is_released():
                self._unfinished.insert(-1, each)
            elif _KEPT:
                each.release_outputs()
                self._finished.append(each)
        if self._coalesced is not None:
            self._coalesced.append(made)
        return made

    def _limit_of(self, opts: Any) -> float | None:
        """Return the time limit of an operation in seconds; None for the setting of allred."""
        timeout = getattr(opts, "timeout", None)
        given_s = 0.0 if timeout is None else timeout.total_seconds()
        return given_s if given_s > 0 else self._limit_s

    def _number(self, rank: int) -> int:
        """Return the number of a rank of this group among all ranks."""
        if not 0 <= rank < self.communicator.size:
            raise InputError(f"rank {rank} is not in the group, whose ranks are 0 to {self.communicator.size - 1}")
        return self.communicator.ranks[rank]

    def inner(self, device: str) -> Any:
        """Return the group that reduces and moves tensors on devices of this type; create it at the first use."""
        if device not in self._inner:
            store = dist.PrefixStore(f"allred/{device}/", self._store)
            self._inner[device] = _create_inner(device, store, self.communicator, self._limit_s)
        return self._inner[device]

    def shutdown(self) -> None:
        """Release the group's resources. allred stays initialized: the default group's communicator is that of all."""
        for group in self._inner.values():
            group.shutdown()
        here = world.current_or_none()
        if here is not None and self.communicator is not here.communicator:
            with contextlib.suppress(AllredError):
                process_set.close(self.communicator)

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
        return [torch.device("cpu"), *map(torch.device, self._inner)]

    def _get_backend(self, device: torch.device) -> Any:
        kind = torch.device(device).type
        if kind == "cuda" and not torch.cuda.is_available():  # torch 2.5 asks in each new_group, and expects this error
            raise RuntimeError("group allred: there is no GPU")
        return self if kind == "cpu" else self.inner(kind)

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def __repr__(self) -> str:
        return f"AllredGroup(rank {self.communicator.rank} of {self.communicator.size})"


def _op(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp


def _split(targets: list[Array], result: Array) -> None:
    """Copy consecutive parts of a flat array into arrays."""
    if sum(target.size for target in targets) != result.size:
        sizes = [target.size for target in targets]
        raise InputError(f"{result.size} elements were received, but the output tensors have {sizes}")
    start = 0
    for target in targets:
        target[...] = result[start : start + target.size].reshape(target.shape)
        start += target.size


def _create_inner(device: str, store: Any, communicator: Communicator, limit_s: float | None) -> Any:
    """Create the group for tensors on `device`."""
    if device != "cuda":
        raise InputError(f"tensors on {device} are not supported; use tensors on the CPU or on a CUDA GPU")
    options = dist.ProcessGroupNCCL.Options()
    if limit_s is not None:
        options._timeout = datetime.timedelta(seconds=limit_s)
    group = dist.ProcessGroupNCCL(store, communicator.rank, communicator.size, options)
    group._set_sequence_number_for_group()
    return group
