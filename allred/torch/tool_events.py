"""Shows the operations of a process group to tools that watch torch's operators: its profiler, and dispatch modes such
as CommDebugMode.

torch's own groups call operators such as `c10d::allreduce_`, which these tools see; a group written in Python does not.
While a tool watches, each operation also calls the operator, on a group that does nothing and with an empty tensor in
place of each tensor, and appears in the profile as an event such as `allred:all_reduce`, from its start to its end.
"""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

_EVENT_NAMES = {
    "allreduce": "all_reduce", "allreduce_coalesced": "all_reduce_coalesced",
    "allgather": "all_gather", "allgather_coalesced": "all_gather_coalesced", "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced", "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced", "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single", "recv_anysource": "recv",
}  # fmt: skip  # of operations, by methods of a group; the others have the same name
_EMPTY = torch.empty(0)


def watched() -> bool:
    """Return whether a tool watches torch's operators in this thread."""
    return bool(torch._C._len_torch_dispatch_stack() or torch.autograd._profiler_enabled())


class ToolEvent:
    """An operation that starts, shown to the tools. group: of torch; method: its method."""

    def __init__(self, group: Any, method: str, arguments: Sequence[Any]) -> None:
        with contextlib.suppress(Exception):  # arguments that cannot be used: the operation raises a better error
            operators = _fake_group(group.rank(), group.size())  # not with torch 2.5
            getattr(operators, method)(*map(_with_empty_tensors, arguments[:-1]), arguments[-1])
        self._event: Any = torch.autograd.profiler.record_function(f"allred:{_EVENT_NAMES.get(method, method)}")
        self._event.__enter__()

    def end_on_completion(self, work: Any) -> None:
        """End the event when a Work is complete."""
        self._event._call_end_callbacks_on_future(work.get_future())

    def end(self) -> None:
        """End the event of an operation that could not be started."""
        self._event.__exit__(None, None, None)


@functools.cache
def _fake_group(rank: int, size: int) -> Any:
    group = dist.ProcessGroup(dist.HashStore(), rank, size)
    backend = _distributed_c10d.FakeProcessGroup._create_internal(rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
    return group


def _with_empty_tensors(argument: Any) -> Any:
    """Return an argument with an empty tensor in place of each tensor, and without sizes of parts."""
    if isinstance(argument, torch.Tensor):
        return _EMPTY
    if isinstance(argument, (list, tuple)):
        return [_with_empty_tensors(each) for each in argument if not isinstance(each, int)]
    return argument
