"""The optimizer of horovod.torch, from allred.torch."""

from allred.torch import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
