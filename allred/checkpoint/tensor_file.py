"""Files of tensors in the safetensors format, written and read in one pass that also computes their checksum.

    8 bytes   length of the header, little-endian
    header    JSON: {key: {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}, padded with spaces
    data      the tensors without gaps, in C order and little-endian; those with the largest elements first

The library safetensors reads and writes the same files, but then a checksum needs a second pass.
"""

import json
import os
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import numpy as np

from allred import arrays, native
from allred.arrays import Array

_CHUNK_BYTES = 1 << 18  # a chunk stays in the cache of the CPU until its checksum is computed
_LARGEST_HEADER = 100_000_000  # as safetensors has it
_ALIGNMENT = 8  # the data begins at a multiple of it
_DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
}  # fmt: skip
_PARTS = {"complex64": "float32", "complex128": "float64"}
_NAMES = {stored: name for name, stored in _DTYPES.items()}


def write(file: BinaryIO, tensors: Mapping[str, Array]) -> int:
    """Write contiguous arrays in native byte order into an unbuffered file. Return the checksum (CRC-32) of all bytes
    in it. Raises OSError."""
    header, position, checksum = {}, 0, 0
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    for key, array in ordered:
        stop = position + array.nbytes
        name, shape = _stored(arrays.name_of(array.dtype), array.shape)
        header[key] = {"dtype": _DTYPES[name], "shape": list(shape), "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    parts = [memoryview(len(text).to_bytes(8, "little") + text), *(_bytes_of(array) for _, array in ordered)]
    for left in parts:
        while len(left):
            count = file.write(left[:_CHUNK_BYTES])
            checksum = native.crc32(left[:count], checksum)
            left = left[count:]
    return checksum


def _stored(name: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape in a file. Complex numbers are floats (..., 2) there, because safetensors lacks them."""
    return _PARTS.get(name, name), (*shape, 2) if name in _PARTS else shape


def described(name: str, shape: tuple[int, ...]) -> str:
    """Describe a tensor for `Reader.read`."""
    name, shape = _stored(name, shape)
    return f"{name} {shape}"


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


class Reader:
    """Reads an unbuffered file of tensors from its beginning. checksum: of all bytes read so far."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._nbytes = file, os.fstat(file.fileno()).st_size
        self.checksum = 0

    def read(self, expected: Mapping[str, str], destination: Callable[[str], Array]) -> str:
        """Read all tensors. Return how the file differs from what is expected; "" if it does not.

        expected: `described` of each tensor by its key, such as "float32 (2, 3)". destination: returns the array to
        fill for a key: contiguous and writable.
        """
        length = np.zeros(1, "<u8")
        if not self._fill(length) or int(length[0]) > min(self._nbytes, _LARGEST_HEADER):
            return f"its header has {length[0]} bytes"
        text = np.empty(int(length[0]), np.uint8)
        if not self._fill(text):
            return "its header is too short"
        try:
            header = json.loads(text.tobytes())
            header.pop("__metadata__", None)
            stored = sorted((*_range(info), key, _described(info)) for key, info in header.items())
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            return f"its header cannot be read: {type(error).__name__}: {error}"
        for key in sorted(expected.keys() - header.keys()):
            return f"the file does not have tensor {key}"
        for key in sorted(header.keys() - expected.keys()):
            return f"tensor {key} of the file is not expected"
        position = 0
        for start, stop, key, found in stored:
            if found != expected[key]:
                return f"tensor {key} of the file is {found}, expected {expected[key]}"
            array = destination(key)
            if (start, stop) != (position, position + array.nbytes) or not self._fill(array):
                return f"tensor {key} is at bytes {start} to {stop}, expected {position} to {position + array.nbytes}"
            position = stop
        return ""

    def read_rest(self) -> None:
        """Read to the end of the file, for the checksum."""
        buffer = np.empty(_CHUNK_BYTES, np.uint8)
        while self._fill(buffer):
            pass

    def _fill(self, array: Array) -> bool:
        """Read into an array. Return whether the file had enough bytes."""
        left = _bytes_of(array)
        while len(left):
            count = self._file.readinto(left[:_CHUNK_BYTES])  # type: ignore[attr-defined]
            if not count:
                return False
            self.checksum = native.crc32(left[:count], self.checksum)
            left = left[count:]
        return True


def _range(info: Mapping[str, Any]) -> tuple[int, int]:
    start, stop = info["data_offsets"]
    return int(start), int(stop)


def _described(info: Mapping[str, Any]) -> str:
    return f"{_NAMES.get(info['dtype'], info['dtype'])} {tuple(info['shape'])}"
