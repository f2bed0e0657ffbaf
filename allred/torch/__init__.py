"""allred for PyTorch: the interface of horovod.torch, and the backend "allred" of torch.distributed.

    import allred.torch as hvd                  # the names of horovod.torch 0.28; docs/from-horovod.md

    import torch.distributed as dist
    dist.init_process_group("allred")           # under mpirun or torchrun; docs/torch.md

Importing it registers the backend and does not start MPI. With torch >= 2.5 `import torch` alone registers it, too.
"""

import sys

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        f"allred.torch needs PyTorch, and {sys.executable} has none: pip install torch ml_dtypes "
        "(the CPU build: docs/install.md)",
        name="torch",
    ) from None

import _allred_torch
from allred.horovod.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
)
from allred.horovod.handles import poll, synchronize
from allred.horovod.horovod_errors import HorovodInternalError
from allred.horovod.operators import Adasum, Average, Max, Min, Product, Sum
from allred.horovod.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from allred.horovod.rank_timeline import start_timeline, stop_timeline
from allred.torch import elastic
from allred.torch.compression_hooks import int4_hook as int4_hook  # not in __all__, which has Horovod's names
from allred.torch.compression_hooks import int8_hook as int8_hook
from allred.torch.embedding_modules import Embedding as Embedding
from allred.torch.embedding_modules import EmbeddingBag as EmbeddingBag
from allred.torch.horovod.allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from allred.torch.horovod.collectives import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)
from allred.torch.horovod.horovod_optimizer import DistributedOptimizer
from allred.torch.horovod.operations import Compression
from allred.torch.horovod.state_broadcast import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from allred.torch.horovod.sync_batch_norm import SyncBatchNorm

_allred_torch.register()

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
