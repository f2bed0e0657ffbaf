"""The compression of horovod.torch, from allred.torch."""

from allred.torch.horovod.compression import Compression, Compressor, FP16Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
