"""The flight record of this rank: its last operations of torch process groups, in the format of torch.

`python -m torch.distributed.flight_recorder.fr_trace` reads the files of all ranks. The variables of torch switch the
recording on and name the files; without them no group has a `GroupRecord`, and nothing is recorded.

An operation is one record in a ring of fixed length. It is formatted only when the file is written.
"""

import os
import pickle
import sys
import threading
import time
import types
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from allred import world
from allred.comm.communicator import Communicator
from allred.comm.work import Work
from allred.errors import ConfigError, InputError
from allred.runtime import process_end
from allred.runtime.stderr import rank_warning
from allred.torch.torch_work import StartedOperation

_SIZE = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"  # the first that is set; torch has renamed them
_PREFIX = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
_DEFAULT_SIZE = 2000  # of torch
_VERSION = "2.10"  # of the format: torch/csrc/distributed/c10d/FlightRecorder.hpp
_BACKEND = "gloo"  # torch reads only the names of its own backends
_MOST_FRAMES = 64
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")

# For each method: torch's name of the operation, and the numbers of the arguments with inputs and outputs; -1: none.
_METHODS: dict[str, tuple[str, int, int]] = {
    "allreduce": ("all_reduce", 0, 0),
    "allreduce_coalesced": ("allreduce_coalesced", 0, 0),
    "reduce": ("reduce", 0, 0),
    "reduce_scatter": ("reduce_scatter", 1, 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor_coalesced", 1, 0),
    "_reduce_scatter_base": ("_reduce_scatter_base", 1, 0),
    "broadcast": ("broadcast", 0, 0),
    "allgather": ("all_gather", 1, 0),
    "allgather_coalesced": ("ALLGATHER_coalesced", 1, 0),
    "allgather_into_tensor_coalesced": ("all_gather_into_tensor_coalesced", 1, 0),
    "_allgather_base": ("_all_gather_base", 1, 0),
    "alltoall": ("all_to_all", 1, 0),
    "alltoall_base": ("all_to_all", 1, 0),
    "gather": ("gather", 1, 0),
    "scatter": ("scatter", 1, 0),
    "barrier": ("barrier", -1, -1),
}

_Tensors = list[tuple[Sequence[int], torch.dtype]]  # size and dtype of each


class RecordedOperation:
    """An operation. number: among all operations of this process, from 1. sequence: among the collectives of the group,
    or its messages with the same peers. peers: (source, destination, tag) of a message, by ranks of the world. frames:
    of the stack that called it, the innermost first."""

    __slots__ = (
        "__weakref__", "_is_followed", "_works", "completed_ns", "created_ns", "frames", "group", "inputs", "name",
        "number", "operation_id", "outputs", "peers", "sequence", "thread",
    )  # fmt: skip

    def __init__(
        self,
        group: "GroupRecord",
        name: str,
        sequence: int,
        peers: tuple[int, int, int] | None,
        inputs: _Tensors,
        outputs: _Tensors,
    ) -> None:
        self.group, self.name, self.sequence, self.peers = group, name, sequence, peers
        self.inputs, self.outputs = inputs, outputs
        self.number, self.operation_id = group.recorder.count, group.operations
        self.frames = _frames()
        self.created_ns, self.completed_ns = time.time_ns(), 0
        self.thread = threading.get_ident()
        self._is_followed = False
        self._works: list[weakref.ref[Work[Any]]] = []

    def follow(self, parts: Sequence[StartedOperation]) -> None:
        """Take the state from these operations, which are started now, without keeping them alive. One that starts in
        its wait ends by `end`."""
        self._is_followed = True
        self._works = [weakref.ref(work, self.end) for work, _ in parts if isinstance(work, Work)]
        if not parts:
            self.end()

    def end(self, _: object = None) -> None:
        """Note the time at which the operation is known to be complete."""
        self.completed_ns = time.time_ns()

    @property
    def state(self) -> str:
        """The state by torch's name. An operation that has failed, or whose Work is freed, counts as completed."""
        if any((work := each()) is not None and not work.finished for each in self._works):
            return "started"
        if self.completed_ns or self._works:
            return "completed"
        return "started" if self._is_followed else "scheduled"


class GroupRecord:
    """The record of one process group. number: of the process. ranks: of the world."""

    def __init__(self, recorder: "FlightRecorder", number: int, communicator: Communicator, timeout_s: float) -> None:
        self.recorder, self.number, self.timeout_s = recorder, number, timeout_s
        self.rank, self.ranks = communicator.rank, [*communicator.ranks]
        self.name = self.description = ""
        self.collectives = self.operations = 0  # that have begun
        self._messages: dict[tuple[int, int, int], int] = {}  # by source, destination and tag

    def begin(self, method: str, arguments: Sequence[Any], name: str, description: str) -> RecordedOperation | None:
        """Record the call of a method of the group, whose name torch may have changed. None for a receive from any
        rank: record it as a `recv` when the sender is known."""
        self.name, self.description = name, description or "undefined"
        peers = None
        if method in ("send", "recv"):
            ranks = (self.rank, arguments[1]) if method == "send" else (arguments[1], self.rank)
            if not 0 <= arguments[1] < len(self.ranks):
                return None
            peers = self.ranks[ranks[0]], self.ranks[ranks[1]], arguments[2]
            sequence = self._messages[peers] = self._messages.get(peers, 0) + 1
            title, inputs = method, _describe(arguments[0])
            outputs = inputs
        elif method in _METHODS:
            title, source, target = _METHODS[method]
            self.collectives += 1
            sequence = self.collectives
            is_list = method == "alltoall"  # of one tensor for each rank
            inputs = [] if source < 0 else _describe([arguments[source]] if is_list else arguments[source])
            outputs = inputs if target == source else _describe([arguments[target]] if is_list else arguments[target])
        else:
            return None
        self.operations += 1
        self.recorder.count += 1
        record = RecordedOperation(self, title, sequence, peers, inputs, outputs)
        self.recorder.records.append(record)
        return record


class FlightRecorder:
    """The last `size` operations of all groups of this process. rank: in the world."""

    def __init__(self, size: int, rank: int) -> None:
        self.rank, self.count = rank, 0
        self.records = deque[RecordedOperation](maxlen=size)
        self.groups = weakref.WeakSet[GroupRecord]()

    def snapshot(self) -> dict[str, Any]:
        """Return the record in the format of torch."""
        records = [*self.records]
        groups = {id(group): group for group in [*self.groups, *(record.group for record in records)]}.values()
        threads = {thread.ident: thread.name for thread in threading.enumerate()}
        config = {group.name: _config(group.name, group.description, group.ranks) for group in groups}
        status = {}
        for group in groups:
            ended = [
                each.sequence
                for each in records
                if each.group is group and not each.peers and each.state == "completed"
            ]
            status[str(group.number)] = {
                "last_enqueued_collective": group.collectives, "last_started_collective": group.collectives,
                "last_completed_collective": max(ended, default=-1),
            }  # fmt: skip
        for record in records:
            if record.peers is not None:
                name = _message_group(record)
                config[name] = _config(name, record.group.description, sorted({*record.peers[:2]}))
        entries = [_entry(record, threads) for record in records]
        return {"version": _VERSION, "pg_config": config, "pg_status": status, "entries": entries}


def _config(name: str, description: str, ranks: Sequence[int]) -> dict[str, str]:
    return {"name": name, "desc": description, "ranks": str([*ranks])}


def _message_group(record: RecordedOperation) -> str:
    """Return the name of the group of a message: its sender and its receiver. torch's analysis expects every rank of a
    group to take part in each operation."""
    assert record.peers is not None
    source, target, tag = record.peers
    return f"{record.group.name} from {source} to {target}, tag {tag}"


def _entry(record: RecordedOperation, threads: dict[int | None, str]) -> dict[str, Any]:
    group, title = record.group.name, f"{_BACKEND}:{record.name}"
    if record.peers is not None:
        group, both = _message_group(record), sorted({*record.peers[:2]})
        source, target = map(both.index, record.peers[:2])
        title += f" {source}->{target}" if record.name == "send" else f" {target}<-{source}"
    return {
        "record_id": record.number - 1, "pg_id": record.group.number,
        "process_group": (group, record.group.description),
        "collective_seq_id": record.sequence, "p2p_seq_id": record.sequence if record.peers else 0,
        "op_id": record.operation_id, "profiling_name": title, "is_p2p": record.peers is not None,
        "input_sizes": [[*size] for size, _ in record.inputs],
        "input_dtypes": [_name(dtype) for _, dtype in record.inputs],
        "output_sizes": [[*size] for size, _ in record.outputs],
        "output_dtypes": [_name(dtype) for _, dtype in record.outputs],
        "time_created_ns": record.created_ns, "time_discovered_started_ns": record.created_ns,
        "time_discovered_completed_ns": record.completed_ns or None,
        "state": record.state, "retired": record.state == "completed",
        "timeout_ms": int(1000 * record.group.timeout_s), "thread_id": str(record.thread),
        "thread_name": threads.get(record.thread, ""),
        "frames": [
            {"name": code.co_name, "filename": code.co_filename, "line": _line(code, at)}
            for code, at in record.frames if not code.co_filename.startswith(_PACKAGE)
        ],
    }  # fmt: skip


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(tensors: Any) -> _Tensors:
    """Return size and dtype of a tensor or of each tensor of a list. A list in a list, with one tensor for each rank,
    counts as one tensor: the stack of them, or a flat one. Nothing for anything else, which the method refuses."""
    if isinstance(tensors, torch.Tensor):
        return [(tensors.shape, tensors.dtype)]
    try:
        return [_stacked(each) if isinstance(each, (list, tuple)) else (each.shape, each.dtype) for each in tensors]
    except (AttributeError, TypeError):
        return []


def _stacked(tensors: Sequence[torch.Tensor]) -> tuple[Sequence[int], torch.dtype]:
    if not tensors:
        return (0,), torch.float32
    shape = tensors[0].shape
    if all(tensor.shape == shape for tensor in tensors):
        return (len(tensors), *shape), tensors[0].dtype
    return (sum(tensor.numel() for tensor in tensors),), tensors[0].dtype


def _frames() -> list[tuple[types.CodeType, int]]:
    """Return the code and the position of each frame, the innermost first."""
    found: list[tuple[types.CodeType, int]] = []
    frame: types.FrameType | None = sys._getframe(3)  # without the functions of this module
    while frame is not None and len(found) < _MOST_FRAMES:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return found


def _line(code: types.CodeType, position: int) -> int:
    lines = (line for start, end, line in code.co_lines() if start <= position < end and line is not None)
    return next(lines, code.co_firstlineno)


_recorder: FlightRecorder | None = None
_groups = 0


def group_record(communicator: Communicator, timeout_s: float | None) -> GroupRecord | None:
    """Return the record of a new group; None if the variables of torch do not switch recording on. timeout_s: of the
    group; None: ALLRED_TIMEOUT_S."""
    global _recorder, _groups
    if _recorder is None and (size := _size()):
        _recorder = FlightRecorder(size, world.current().topology.rank)
        process_end.register_for_failure(_write_after_failure)
    if _recorder is None:
        return None
    limit_s = world.config().timeout_s if timeout_s is None else timeout_s
    group = GroupRecord(_recorder, _groups, communicator, limit_s)
    _groups += 1
    _recorder.groups.add(group)
    return group


def _variable(names: Sequence[str]) -> tuple[str, str]:
    """Return the name and the value of the first variable that is set; "" if none is."""
    return next(((name, os.environ[name]) for name in names if os.environ.get(name)), ("", ""))


def _size() -> int:
    """Return how many operations to record; 0: none."""
    name, value = _variable(_SIZE)
    if not name:
        return _DEFAULT_SIZE if _variable(_PREFIX)[0] else 0
    if not value.isdecimal():
        raise ConfigError(f"{name}={value!r} is not a whole number of operations; set it to 2000, or to 0: no record")
    return int(value)


def _prefix() -> str:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return _variable(_PREFIX)[1] or os.path.join(cache, "torch", "comm_lib_trace_rank_")


def write_flight_record(prefix: str | None = None) -> str:
    """Write the flight record of this rank: its last operations of torch process groups. Return the path of the file.

    prefix: path of the file without the rank, which is added; default: TORCH_FR_DUMP_TEMP_FILE, or torch's default,
    `~/.cache/torch/comm_lib_trace_rank_`. A missing directory is created, an existing file replaced.

    Not collective. Each rank writes its file by itself when the job fails or an operation reaches its time limit. If
    all ranks have written theirs, `python -m torch.distributed.flight_recorder.fr_trace DIRECTORY` compares them.

    Raises InputError if nothing is recorded: set TORCH_FR_BUFFER_SIZE (for example 2000: the last 2000 operations) or
    TORCH_FR_DUMP_TEMP_FILE before `init_process_group`. Raises OSError if the file cannot be written.

    Example: `write_flight_record("traces/rank_")` writes traces/rank_0 on rank 0.
    """
    if _recorder is None:
        raise InputError(
            "write_flight_record: nothing is recorded; set TORCH_FR_BUFFER_SIZE=2000 before "
            "init_process_group('allred')"
        )
    path = f"{_prefix() if prefix is None else prefix}{_recorder.rank}"
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    data = pickle.dumps(_recorder.snapshot())
    with open(f"{path}.part", "wb") as file:
        file.write(data)
    os.replace(f"{path}.part", path)  # a rank that is killed leaves no half of a file
    return path


def _write_after_failure() -> None:
    assert _recorder is not None
    try:
        path = write_flight_record()
    except OSError as error:
        return rank_warning(f"cannot write the flight record of rank {_recorder.rank}: {error}")
    if _recorder.rank == 0:
        directory, name = os.path.split(os.path.abspath(path))
        rank_warning(
            f"each rank writes its flight record to {directory} on its host; to compare them: "
            f"python -m torch.distributed.flight_recorder.fr_trace {directory} --prefix {name[:-1]}"
        )
