"""TFRecord files: a sequence of records, each with its length and checksums; and tf.train.Example messages in them.

    length  uint64, little-endian                       crc     uint32, masked CRC-32C of the length
    data    length bytes                                crc     uint32, masked CRC-32C of the data

https://www.tensorflow.org/tutorials/load_data/tfrecord. The package google-crc32c (extra `tfrecord`) computes CRC-32C
(Castagnoli); it warns if it is not compiled.

Examples are read and written with Google's package protobuf (extra `tfrecord`). The messages are those of example.proto
and feature.proto in tensorflow/core/example, in a separate descriptor pool, so that the process may also load
TensorFlow. A map is serialized as a list of entries; it is declared as a list here, which is faster to read.
"""

import functools
import importlib
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from allred import arrays, log
from allred.arrays import Array
from allred.errors import DataError, InputError

_ONES = 0xFFFFFFFF
_POLICIES = ("raise", "skip")
_HEAD = struct.Struct("<QI")
_FOOT = struct.Struct("<I")

Path = str | os.PathLike[str]


@functools.cache
def google_crc32c() -> Any:
    """Return the package. Raises ImportError."""
    try:
        return importlib.import_module("google_crc32c")
    except ImportError as error:
        raise ImportError(f"TFRecord files need google-crc32c: pip install google-crc32c protobuf ({error})") from error


def masked_crc32c(data: bytes) -> int:
    """Masked CRC-32C of TFRecord files: rotated, plus a constant. The mask allows records that contain records.

    >>> hex(masked_crc32c(b"123456789"))
    '0xc78ab0e5'
    """
    crc: int = google_crc32c().value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & _ONES


class TFRecord:
    """Iterable of records as bytes, returned by `tfrecord`; it can be iterated several times.

    skipped: number of corrupt records or file ends that the current or latest pass skipped; 0 with corrupt="raise".
    """

    def __init__(self, paths: list[str], corrupt: str) -> None:
        self.paths, self.corrupt, self.skipped = paths, corrupt, 0
        self._warned = False

    def __iter__(self) -> Iterator[bytes]:
        self.skipped = 0
        for path in self.paths:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise DataError(f"{path}: expected a regular file, got a pipe or a device")
                yield from self._records(path, file, status.st_size)

    def _records(self, path: str, file: BinaryIO, end: int) -> Iterator[bytes]:
        offset = 0
        while offset < end:
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                return self._rest(path, offset, f"expected {_HEAD.size} bytes of length and CRC, got {len(head)}", end)
            length, crc = _HEAD.unpack(head)
            if (expected := masked_crc32c(head[:8])) != crc:
                what = f"expected masked CRC {crc:#010x} of the length, got {expected:#010x} of {length}"
                hint = "; it looks compressed with gzip: unpack it first" if head.startswith(b"\x1f\x8b\x08") else ""
                return self._rest(path, offset, what + hint, end)
            left = min(end - offset - _HEAD.size, length + _FOOT.size)
            body = file.read(left)
            if len(body) < length + _FOOT.size:
                what = (
                    f"expected {length} bytes of data and {_FOOT.size} of CRC, got {len(body)}: the file is cut short"
                )
                return self._rest(path, offset, what, end)
            data, (crc,) = body[:length], _FOOT.unpack_from(body, length)
            if (expected := masked_crc32c(data)) == crc:
                yield data
            else:
                what = f"expected masked CRC {crc:#010x} of {length} bytes of data, got {expected:#010x}"
                self._corrupt(f"{path}: record at offset {offset}: {what}")
            offset += _HEAD.size + length + _FOOT.size
        return None

    def _rest(self, path: str, offset: int, what: str, end: int) -> None:
        """Report a corrupt length: the following records cannot be located."""
        text = f"{path}: record at offset {offset}: {what}"
        if self.corrupt == "raise":
            text += "; the following records cannot be located"
        else:
            text += f"; the rest of this file, {end - offset} bytes, is skipped"
        self._corrupt(text, always=True)

    def _corrupt(self, text: str, always: bool = False) -> None:
        if self.corrupt == "raise":
            raise DataError(f'{text}. tfrecord(..., corrupt="skip") skips and counts corrupt records')
        self.skipped += 1
        if always or not self._warned:
            more = "" if self._warned else ". Corrupt records are skipped and counted in .skipped"
            self._warned = True
            log.runtime_warning(text + more)


def tfrecord(paths: Path | Sequence[Path], corrupt: str = "raise") -> TFRecord:
    """Read the records of TFRecord files in the order of the files, and check both checksums of each record.

    A record takes about 2 us plus 1 ns per byte. Needs google-crc32c (extra `tfrecord`).

    Arguments:
        paths: one file or several, not compressed.
        corrupt: what to do with a record that has a wrong checksum or is cut off by the end of the file. "raise" raises
            DataError with the file, the offset, and the expected and actual values. "skip" skips the record and counts
            it in `.skipped`; the first one in a pass prints a warning. After a corrupt length the following records
            cannot be located: the rest of that file is skipped, with a warning each time.

    Returns a `TFRecord` object, which yields each record as bytes.

    Raises:
        InputError: no path, or another value of `corrupt`.
        OSError: during iteration, if a file cannot be opened.
        ImportError: google-crc32c is not installed.

    >>> list(tfrecord("numbers.tfrecord"))    # doctest: +SKIP
    [b'one', b'two']
    """
    google_crc32c()
    found = [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    if corrupt not in _POLICIES:
        raise InputError(f"tfrecord: corrupt={corrupt!r} must be one of {', '.join(map(repr, _POLICIES))}")
    if not found:
        raise InputError("tfrecord() needs at least one file")
    return TFRecord(found, corrupt)


def write_tfrecord(path: Path, records: Iterable[bytes]) -> int:
    """Write records to a TFRecord file, replacing an existing file, and return their number.

    Raises OSError if the file cannot be written, ImportError without google-crc32c (extra `tfrecord`).

    >>> write_tfrecord("numbers.tfrecord", [b"one", b"two"])    # doctest: +SKIP
    2
    """
    count = 0
    with open(path, "wb") as file:
        for record in records:
            length = struct.pack("<Q", len(record))
            file.write(length + _FOOT.pack(masked_crc32c(length)) + record + _FOOT.pack(masked_crc32c(record)))
            count += 1
    return count


_OBJECT, _FLOAT = np.dtype(object), np.dtype(np.float32)
_DTYPES = {"bytes_list": _OBJECT, "float_list": _FLOAT, "int64_list": np.dtype(np.int64)}
_SHORT = 32  # elements; up to this length conversion through a list of Python objects is the fastest


def example(record: bytes) -> dict[str, Array]:
    """Parse a serialized tf.train.Example.

    Returns features by name. Each is a new array (n,) of int64, float32, or object (bytes). A feature without a list is
    left out. An Example has no shapes: reshape the arrays.

    Raises:
        DataError: `record` is not a serialized Example.
        ImportError: protobuf is not installed (extra `tfrecord`).

    >>> example(make_example({"label": 3, "image": b"abc", "size": [2.5, 1.0]}))
    {'label': array([3]), 'image': array([b'abc'], dtype=object), 'size': array([2.5, 1. ], dtype=float32)}
    """
    message_class, decode_error = _protobuf()
    try:
        message = message_class.FromString(record)
    except decode_error as error:
        raise DataError(
            f"tf.train.Example: expected a serialized message, got {len(record)} bytes that begin with "
            f"{bytes(record[:16])!r}: {error}"
        ) from None
    found: dict[str, Array] = {}
    for entry in message.features.feature[:]:
        feature = entry.value
        kind = feature.WhichOneof("kind")
        if kind is None:
            continue
        listed = getattr(feature, kind)
        values = listed.value
        count, dtype = len(values), _DTYPES[kind]
        if count <= _SHORT or dtype is _OBJECT:
            found[entry.key] = np.array(values[:], dtype)
        elif dtype is _FLOAT:  # the serialized list ends with the floats
            serialized = bytearray(listed.SerializeToString())
            found[entry.key] = np.frombuffer(serialized, dtype, count, len(serialized) - 4 * count)
        else:
            found[entry.key] = np.array(values, dtype)
    return found


def make_example(features: Mapping[str, Any]) -> bytes:
    """Serialize features as a tf.train.Example.

    Arguments:
        features: by name, bytes, a string (saved as UTF-8), a number, or a list or an array of these, flattened in C
            order. Integers and bools are saved as int64, floats as float32.

    Raises:
        InputError: another value, or an integer outside int64.
        ImportError: protobuf is not installed (extra `tfrecord`).

    >>> example(make_example({"label": 3, "name": "seven"}))
    {'label': array([3]), 'name': array([b'seven'], dtype=object)}
    """
    message = _protobuf()[0]()
    for name, value in features.items():
        kind, values = _list(name, value)
        entry = message.features.feature.add(key=name)
        found = getattr(entry.value, kind)
        found.SetInParent()  # so that an empty list has a kind
        found.value.extend(values)
    serialized: bytes = message.SerializeToString()
    return serialized


def _list(name: str, value: Any) -> tuple[str, list[Any]]:
    """Kind of list for a value, and its elements."""
    try:
        array = np.asarray(value, object if isinstance(value, (str, bytes)) else None)
    except ValueError:  # lists of different lengths
        array = np.empty(1, object)
    if array.size and array.dtype.kind in "OSU":
        items = value if isinstance(value, (list, tuple)) else array.flat  # numpy removes trailing zero bytes
        texts = [item.encode() if isinstance(item, str) else item for item in items]
        if all(isinstance(text, bytes) for text in texts):
            return "bytes_list", texts
    if arrays.is_inexact(array.dtype) and not arrays.is_complex(array.dtype):
        return "float_list", array.astype(np.float32).ravel().tolist()
    if array.dtype.kind in "iub" and (array.dtype != np.uint64 or not array.size or array.max() < 2**63):
        return "int64_list", array.astype(np.int64).ravel().tolist()
    raise InputError(
        f"make_example: {name!r} is {type(value).__name__} of dtype {array.dtype}; expected bytes, a string, integers "
        "in int64, floats, or a list or an array of these"
    )


@functools.cache
def _protobuf() -> tuple[Any, type[Exception]]:
    """Message class of tf.train.Example, and the error class that it raises if parsing fails."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory
    except ImportError as error:
        raise ImportError(
            f"example() and make_example() need Google's protobuf: pip install google-crc32c protobuf ({error})"
        ) from error
    types = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="allred_example.proto", package="allred", syntax="proto3")

    def declare(name: str, label: int, **fields: int | str) -> Any:
        declared = file.message_type.add(name=name)
        for number, (field, kind) in enumerate(fields.items(), start=1):
            added = declared.field.add(name=field, number=number, label=label)
            if isinstance(kind, int):
                added.type = kind
            else:
                added.type, added.type_name = types.TYPE_MESSAGE, f".allred.{kind}"
        return declared

    one, many = types.LABEL_OPTIONAL, types.LABEL_REPEATED
    declare("BytesList", many, value=types.TYPE_BYTES)
    declare("FloatList", many, value=types.TYPE_FLOAT)
    declare("Int64List", many, value=types.TYPE_INT64)
    feature = declare("Feature", one, bytes_list="BytesList", float_list="FloatList", int64_list="Int64List")
    feature.oneof_decl.add(name="kind")
    for field in feature.field:
        field.oneof_index = 0
    declare("Entry", one, key=types.TYPE_STRING, value="Feature")
    declare("Features", many, feature="Entry")
    declare("Example", one, features="Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("allred.Example")), message.DecodeError
