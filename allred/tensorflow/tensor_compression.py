"""Compression of tensors before a collective. Programs may pass a class of their own with the two static methods."""

from typing import Any

import tensorflow as tf

from allred.comm import ops
from allred.errors import InputError


class TensorCompressor:
    """The interface: `compress` returns the tensor to send and a context, `decompress` gets both back."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        raise NotImplementedError


class NoTensorCompressor(TensorCompressor):
    """No compression."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class HalfTensorCompressor(TensorCompressor):
    """Floating-point tensors are sent as float16."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return (tf.cast(tensor, tf.float16) if tensor.dtype.is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tf.cast(tensor, ctx)


class Int8TensorCompressor(NoTensorCompressor):
    """Between hosts that are connected by TCP, allreduces send `allred.Compression.int8`. Not in Horovod."""

    encoding = ops.Compression.int8


class Int4TensorCompressor(NoTensorCompressor):
    """Between hosts that are connected by TCP, allreduces send `allred.Compression.int4`. Not in Horovod."""

    encoding = ops.Compression.int4


class TensorCompression:
    """The compressors for the argument `compression`. `int8` and `int4` are not in Horovod; they compress allreduces
    between hosts only (docs/slow-links.md).

    Example: `hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.fp16)`.
    """

    none = NoTensorCompressor
    fp16 = HalfTensorCompressor
    int8 = Int8TensorCompressor
    int4 = Int4TensorCompressor


def check_compression(compression: Any) -> None:
    """Raise InputError unless it is a compressor."""
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise InputError(
            f"compression={compression!r}: expected hvd.Compression.none, .fp16, .int8 or .int4, or a class with "
            "static methods compress and decompress"
        )
