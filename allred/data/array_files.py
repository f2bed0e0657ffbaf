"""Array files: numpy's .npy, mapped into memory, and IDX, the format of MNIST."""

import gzip
import math
import os
import struct
import zlib

import numpy as np

from allred.arrays import Array
from allred.errors import DataError

# IDX: two zero bytes, a byte for the dtype, a byte for the number of dimensions, each dimension as a big-endian uint32,
# then the elements in C order, big-endian. http://yann.lecun.com/exdb/mnist/ (at the end)
IDX_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_GZIP = b"\x1f\x8b"


def npy(path: str | os.PathLike[str]) -> Array:
    """Map the array of a .npy file into memory, read-only. Only the parts that are used are read, when they are used.

    Ranks of a node share the memory. If the file is truncated while it is mapped, the process ends with SIGBUS.

    Returns:
        An array of any shape and any dtype except object.

    Raises:
        OSError: the file cannot be opened.
        DataError: it is not a .npy file, holds objects, or is too short.

    >>> images = npy("images.npy")    # doctest: +SKIP

    https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
    """
    name = os.fspath(path)
    try:
        array = np.lib.format.open_memmap(name, mode="r")
    except OSError:
        raise
    except Exception as error:  # usually ValueError; numpy evaluates a damaged header, which may raise any error
        nbytes = os.path.getsize(name)
        raise DataError(f"{name}: expected an array in numpy's .npy format, got {nbytes} bytes: {error}") from None
    return array


def idx(path: str | os.PathLike[str]) -> Array:
    """Read the array of an IDX file, compressed with gzip or not, whatever its name is.

    Returns:
        An array of the shape in the file, in native byte order: uint8, int8, int16, int32, float32 or float64.

    Raises:
        OSError: the file cannot be read.
        DataError: it is not an IDX file, is damaged, or has the wrong size.

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
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in IDX_DTYPES:
        codes = ", ".join(f"{code:#04x}" for code in IDX_DTYPES)
        raise DataError(
            f"{where}: offset 0: expected IDX (two zero bytes and one of {codes}), "
            f"got {content[:4].hex(' ') or 'an empty file'}"
        )
    dtype, ndim = np.dtype(IDX_DTYPES[content[2]]), content[3]
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
