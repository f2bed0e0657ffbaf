"""What numbers travel as: the narrower dtypes (wire), and the arithmetic of getting there and back."""

from allred.compression.wire import Compression, narrow, narrows, widen

__all__ = ["Compression", "narrow", "narrows", "widen"]
