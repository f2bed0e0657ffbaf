"""The names of horovod.torch, from allred.torch."""

from allred.torch import *  # noqa: F403
from horovod.torch import compression, functions, mpi_ops, optimizer, sync_batch_norm  # noqa: F401
