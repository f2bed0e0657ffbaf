"""The batch normalization of horovod.torch, from allred.torch."""

from allred.torch import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
