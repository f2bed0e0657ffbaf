"""allred: data-parallel training over MPI. Importing it starts neither MPI nor CUDA; allred.init() does.

Public names are imported when a program first uses them (PEP 562), which shortens the start of every rank. __init__.pyi
has the same names for type checkers.
"""

import importlib as _importlib
import threading as _threading

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
        "join patience poll recv recv_async reducescatter reducescatter_async send send_async synchronize"
    ),
    "allred.comm.gathered_functions": "SampleStatistics allreduce_with argmax argmin cumsum statistics",
    "allred.comm.ops": "Average Compression Max Min Product ReduceOp Sum",
    "allred.comm.process_set": "ProcessSet",
    "allred.comm.root_functions": "gather reduce scatter",
    "allred.comm.shared_counter": "SharedCounter",
    "allred.comm.work": "Work",
    "allred.embeddings.embedding": "Embedding",
    "allred.errors": (
        "AllredError CheckpointError CollectiveTimeout ConfigError DataError DriftError InputError MismatchError "
        "NonFiniteError NotInitializedError RanksChanged RemoteRankError ShutdownError"
    ),
    "allred.membership.recovery": "recover",
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
_PACKAGES = ("checkpoint", "client", "config", "data", "embeddings", "errors", "optim", "ps", "session")

__all__ = sorted([*_MODULES, "data", "optim"])

# Threads that import parts of a package at once may see modules that are not complete. The wait is limited because a
# thread that waits here may hold the lock of a module that the other one imports.
_importing, _IMPORT_S = _threading.RLock(), 10.0

_exit_protocol.before_init()


def __getattr__(name: str) -> object:
    if name not in _MODULES and name not in _PACKAGES:
        raise AttributeError(f"module 'allred' has no attribute {name!r}")
    has_lock = _importing.acquire(timeout=_IMPORT_S)
    try:
        module = _importlib.import_module(_MODULES.get(name, f"allred.{name}"))
    finally:
        if has_lock:
            _importing.release()
    value = getattr(module, name) if name in _MODULES else module
    globals()[name] = value  # the next use finds it there
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_PACKAGES})
