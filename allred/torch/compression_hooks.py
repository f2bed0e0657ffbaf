"""`int8_hook`, `int4_hook`: communication hooks of DistributedDataParallel that compress gradients between hosts.

    torch.distributed.init_process_group("allred")
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    ddp.register_comm_hook(None, allred.torch.int8_hook)

Between hosts that are connected by TCP, gradients travel in 8 or 4 bits, with error feedback (docs/slow-links.md);
elsewhere, and on GPUs, as without a hook. `state` is None, or the process group of the DistributedDataParallel.
Residuals are reset when a mean is not finite. A hook does not know of checkpoints, so a run that is continued from one
does not have the bits of the run that wrote it.
"""

import functools
import types
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from allred.comm.ops import Compression
from allred.errors import InputError
from allred.torch.process_group import ProcessGroupAllred


def int8_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook: gradients are sent between hosts as `allred.Compression.int8`. Returns a future of the flat
    buffer of the bucket, which then has the mean over the ranks. state: None, or the process group of the module.

    Gradients that are not in CPU memory are reduced uncompressed, with any backend. Raises InputError for others if the
    process group is not of backend "allred"."""
    return _reduce(Compression.int8, state, bucket)


def int4_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook: gradients are sent between hosts as `allred.Compression.int4`. Returns a future of the flat
    buffer of the bucket, which then has the mean over the ranks. state: None, or the process group of the module.

    Gradients that are not in CPU memory are reduced uncompressed, with any backend. Raises InputError for others if the
    process group is not of backend "allred"."""
    return _reduce(Compression.int4, state, bucket)


def _reduce(compression: Compression, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    group = dist.group.WORLD if state is None else state
    if bucket.buffer().device.type != "cpu":
        return default_hooks.allreduce_hook(group, bucket)
    if not isinstance(group, ProcessGroupAllred):
        raise InputError(
            f"allred.torch.{compression.name}_hook: the process group of this DistributedDataParallel has the backend "
            f"{dist.get_backend(group)!r}; use torch.distributed.init_process_group('allred')"
        )
    residual = group.residual(bucket.parameters())
    options = types.SimpleNamespace(
        reduceOp=dist.ReduceOp.AVG, timeout=None, compression=compression, residual=residual
    )
    future = group.allreduce_coalesced(bucket.gradients(), options).get_future()
    return future.then(functools.partial(_complete, group, bucket))


def _complete(group: ProcessGroupAllred, bucket: dist.GradBucket, future: Any) -> torch.Tensor:
    future.wait()  # raises its error
    buffer = bucket.buffer()
    if not torch.isfinite(buffer.sum()):  # on all ranks; a GradScaler skips this step
        group.drop_residuals()
    return buffer
