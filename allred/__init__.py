"""allred: data-parallel training over MPI. Importing it starts neither MPI nor CUDA; allred.init() does.

Public names are imported when a program first uses them (PEP 562), which shortens the start of every rank. __init__.pyi
has the same names for type checkers.
"""

import importlib as _importlib

from allred.watch import exit as _exit_protocol

__version__ = "0.1.0"

_NAMES_BY_MODULE = {
    "allred.arena": "empty empty_like",
    "allred.client.client_session": "connect",
    "allred.cluster.device": "device",
    "allred.cluster.spec": "ClusterSpec",
    "allred.cluster.topology": (
        "cross_rank cross_size is_chief job_name local_rank local_size rank size task_index world_rank world_size"
    ),
    "allred.comm.functions": (
        "Join allgather allgather_async allgather_object allreduce allreduce_ allreduce_async allreduce_async_ "
        "alltoall alltoall_async barrier barrier_async broadcast broadcast_ broadcast_async broadcast_async_ "
        "broadcast_object grouped_allreduce grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ "
        "join patience poll reducescatter reducescatter_async synchronize"
    ),
    "allred.comm.ops": "Average Compression Max Min Product ReduceOp Sum",
    "allred.comm.process_set": "ProcessSet",
    "allred.comm.work": "Work",
    "allred.errors": (
        "AllredError CheckpointError CollectiveTimeout ConfigError DataError DriftError InputError MismatchError "
        "NonFiniteError NotInitializedError RemoteRankError ShutdownError"
    ),
    "allred.modes.clipping": "GradScaler",
    "allred.modes.decorator": "distributed",
    "allred.modes.optimizer": "DistributedOptimizer",
    "allred.modes.towers": "Towers",
    "allred.nest": "digest",
    "allred.ps.variable": "replica_device_setter variable",
    "allred.server": "Server",
    "allred.session.session": "Session",
    "allred.startup": "init shutdown",
    "allred.world": "is_initialized",
}
_MODULES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}
_PACKAGES = ("checkpoint", "client", "data", "errors", "optim", "ps", "session")

__all__ = sorted([*_MODULES, "data", "optim"])

_exit_protocol.before_init()


def __getattr__(name: str) -> object:
    if name in _MODULES:
        value = getattr(_importlib.import_module(_MODULES[name]), name)
    elif name in _PACKAGES:
        value = _importlib.import_module(f"allred.{name}")
    else:
        raise AttributeError(f"module 'allred' has no attribute {name!r}")
    globals()[name] = value  # the next use finds it there
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_PACKAGES})
