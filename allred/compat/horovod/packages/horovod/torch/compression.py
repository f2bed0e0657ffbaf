"""The compression of horovod.torch, from allred.torch."""

from allred.torch import Compression

__all__ = ["Compression"]
