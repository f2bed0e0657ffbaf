"""The IDX format, in which MNIST comes: two zeros, a byte for the dtype, one for the number of dimensions, each of
these as a big-endian 32-bit number, the elements in C order, big-endian. http://yann.lecun.com/exdb/mnist/ (at the end)
"""

import gzip
import math
import os
import struct
import zlib

import numpy as np

from allred.arrays import Array
from allred.errors import DataError

DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_GZIP = b"\x1f\x8b"


def idx(path: str | os.PathLike[str]) -> Array:
    """The array in an IDX file, gzip-compressed or not, whatever its name.

    uint8, int8, int16, int32, float32 or float64, of the shape in the file, read as a whole, native byte order.
    Raises OSError if the file cannot be read, DataError if it is no such file, is damaged, or too short or too long.

    >>> images, labels = idx("train-images-idx3-ubyte.gz"), idx("train-labels-idx1-ubyte.gz")    # doctest: +SKIP
    >>> images.shape, images.dtype, labels.shape    # doctest: +SKIP
    ((60000, 28, 28), dtype('uint8'), (60000,))
    """
    name = os.fspath(path)
    with open(name, "rb") as file:
        content = file.read()
    where = name
    if content.startswith(_GZIP):
        where = f"{name}, unpacked"
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{name}: damaged gzip file of {len(content)} bytes: {error}") from None
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in DTYPES:
        codes = ", ".join(f"{code:#04x}" for code in DTYPES)
        raise DataError(
            f"{where}: offset 0: expected IDX, which is two zeros and one of {codes}, "
            f"got {content[:4].hex(' ') or 'an empty file'}"
        )
    dtype, ndim = np.dtype(DTYPES[content[2]]), content[3]
    begin = 4 + 4 * ndim
    if len(content) < begin:
        raise DataError(f"{where}: offset 4: expected {ndim} dimensions, {4 * ndim} bytes, got {len(content) - 4}")
    shape = struct.unpack(f">{ndim}I", content[4:begin])
    expected = math.prod(shape) * dtype.itemsize
    if len(content) - begin != expected:
        raise DataError(
            f"{where}: offset {begin}: expected {expected} bytes of {dtype.newbyteorder('=').name} {shape}, got "
            f"{len(content) - begin}"
        )
    return np.frombuffer(content, dtype, offset=begin).reshape(shape).astype(dtype.newbyteorder("="))
