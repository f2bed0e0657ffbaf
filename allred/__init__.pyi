"""The public names of allred, for type checkers: __init__.py imports them when they are first used."""

from allred import checkpoint as checkpoint
from allred import client as client
from allred import config as config
from allred import data as data
from allred import embeddings as embeddings
from allred import errors as errors
from allred import optim as optim
from allred import ps as ps
from allred import session as session
from allred.arena import empty, empty_like
from allred.client.client_session import connect
from allred.cluster.device import device
from allred.cluster.spec import ClusterSpec
from allred.cluster.topology import (
    cross_rank,
    cross_size,
    is_chief,
    job_name,
    local_rank,
    local_size,
    rank,
    size,
    task_index,
    world_rank,
    world_size,
)
from allred.comm.functions import (
    Join,
    allgather,
    allgather_async,
    allgather_object,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    barrier_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    broadcast_object,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    join,
    patience,
    poll,
    recv,
    recv_async,
    reducescatter,
    reducescatter_async,
    send,
    send_async,
    synchronize,
)
from allred.comm.gathered_functions import SampleStatistics, allreduce_with, argmax, argmin, cumsum, statistics
from allred.comm.ops import Average, Compression, Max, Min, Product, ReduceOp, Sum
from allred.comm.process_set import ProcessSet
from allred.comm.root_functions import gather, reduce, scatter
from allred.comm.shared_counter import SharedCounter
from allred.comm.work import Work
from allred.embeddings.embedding import Embedding
from allred.errors import (
    AllredError,
    CheckpointError,
    CollectiveTimeout,
    ConfigError,
    DataError,
    DriftError,
    InputError,
    MismatchError,
    NonFiniteError,
    NotInitializedError,
    RanksChanged,
    RemoteRankError,
    ShutdownError,
)
from allred.membership.recovery import recover
from allred.modes.clipping import GradScaler
from allred.modes.decorator import distributed
from allred.modes.optimizer import DistributedOptimizer
from allred.modes.towers import Towers
from allred.nest import digest
from allred.ps.variable import replica_device_setter, variable
from allred.server import Server
from allred.session.session import Session
from allred.startup import init, shutdown
from allred.world import is_initialized

__version__: str

__all__ = [
    "AllredError", "Average", "CheckpointError", "ClusterSpec", "CollectiveTimeout", "Compression", "ConfigError",
    "DataError", "DistributedOptimizer", "DriftError", "Embedding", "GradScaler", "InputError", "Join", "Max", "Min",
    "MismatchError", "NonFiniteError", "NotInitializedError", "ProcessSet", "Product", "RanksChanged", "ReduceOp",
    "RemoteRankError",
    "SampleStatistics", "Server", "Session", "SharedCounter", "ShutdownError", "Sum", "Towers", "Work", "allgather",
    "allgather_async", "allgather_object", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_",
    "allreduce_with", "alltoall", "alltoall_async", "argmax", "argmin", "barrier", "barrier_async", "broadcast",
    "broadcast_", "broadcast_async", "broadcast_async_", "broadcast_object", "connect", "cross_rank", "cross_size",
    "cumsum", "data", "device", "digest", "distributed", "empty", "empty_like", "gather", "grouped_allreduce",
    "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_", "init", "is_chief", "is_initialized",
    "job_name", "join", "local_rank", "local_size", "optim", "patience", "poll", "rank", "recover", "recv",
    "recv_async", "reduce", "reducescatter", "reducescatter_async", "replica_device_setter", "scatter", "send",
    "send_async", "shutdown", "size", "statistics", "synchronize", "task_index", "variable", "world_rank", "world_size",
]  # fmt: skip
