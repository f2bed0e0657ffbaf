"""tf.train.Example, by a reader and a writer of protobuf's wire format for just this message.

    Example  { 1: Features }          Feature { one of 1: BytesList, 2: FloatList, 3: Int64List }
    Features { 1: entry, ... }        entry   { 1: name, 2: Feature }          lists { 1: value, ... }

https://protobuf.dev/programming-guides/encoding; example.proto and feature.proto in tensorflow/core/example.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from allred import arrays
from allred.arrays import Array
from allred.errors import DataError, InputError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3

_View = memoryview
_Field = tuple[int, int, int, Any]  # number, wire type, offset in the record, an int or a view


def example(record: bytes) -> dict[str, Array]:
    """The features of a serialized tf.train.Example, by name.

    Each is a 1-d array: int64, float32, or, of bytes, one of dtype object. A feature without a list is left out. An
    Example knows no shapes: reshape what comes.
    Raises DataError, with the offset in the record, for what is no such message.

    >>> example(make_example({"label": 3, "image": b"abc", "size": [2.5, 1.0]}))
    {'label': array([3]), 'image': array([b'abc'], dtype=object), 'size': array([2.5, 1. ], dtype=float32)}
    """
    found: dict[str, Array] = {}
    for at, features in _parts(_View(record), 0, 1):
        for begin, entry in _parts(features, at, 1):
            name = b"".join(bytes(value) for _, value in list(_parts(entry, begin, 1))[-1:])
            feature = None
            for start, value in _parts(entry, begin, 2):
                feature = _feature(value, start)
            if feature is not None:
                found[_text(name, begin)] = feature
    return found


def make_example(features: Mapping[str, Any]) -> bytes:
    """A serialized tf.train.Example.

    features: by name, bytes, a string (as UTF-8), a number, or a list or an array of these, flattened in C order.
    Integers and bools are saved as int64, floats as float32.
    Raises InputError for anything else, and for integers that are no int64.
    """
    entries = b"".join(
        _sized(1, _sized(1, name.encode()) + _sized(2, _list(name, value))) for name, value in features.items()
    )
    return _sized(1, entries)


# ---- reading


def _feature(feature: _View, at: int) -> Array | None:
    kind: int | None = None
    values: list[Any] = []
    for number, wire, begin, value in _fields(feature, at):
        if wire == _BYTES and number in (_BYTES_LIST, _FLOAT_LIST, _INT64_LIST):
            values = values if number == kind else []  # of several kinds the last one counts
            kind = number
            values += _values(value, begin, number)
    if kind is None:
        return None
    if kind == _BYTES_LIST:
        listed = np.empty(len(values), object)
        listed[:] = values
        return listed
    none = np.empty(0, np.float32 if kind == _FLOAT_LIST else np.int64)
    return np.concatenate([none, *values])


def _values(view: _View, at: int, kind: int) -> list[Any]:
    """Of a list: bytes, or arrays; numbers are packed, or stand one by one."""
    found: list[Any] = []
    for number, wire, begin, value in _fields(view, at):
        if number != 1:
            continue
        if kind == _BYTES_LIST and wire == _BYTES:
            found.append(bytes(value))
        elif kind == _FLOAT_LIST and wire in (_BYTES, _FIXED32):
            if len(value) % 4:
                raise DataError(f"tf.train.Example: offset {begin}: expected floats of 4 bytes, got {len(value)} bytes")
            found.append(np.frombuffer(value, "<f4"))
        elif kind == _INT64_LIST and wire == _BYTES:
            found.append(_varints(value, begin))
        elif kind == _INT64_LIST and wire == _VARINT:
            found.append(np.array([value], np.uint64).view(np.int64))
        else:
            raise DataError(f"tf.train.Example: offset {begin}: a value of wire type {wire} in a list of kind {kind}")
    return found


def _parts(view: _View, at: int, number: int) -> Iterator[tuple[int, _View]]:
    """Offset and content of every field of that number that is a message or text."""
    for field, wire, begin, value in _fields(view, at):
        if field == number and wire == _BYTES:
            yield begin, value


def _fields(view: _View, at: int) -> Iterator[_Field]:
    """All fields of a message that begins at offset `at` of the record."""
    place = 0
    while place < len(view):
        begin = at + place
        key, place = _varint(view, place, at)
        wire = key & 7
        if wire == _VARINT:
            value, place = _varint(view, place, at)
            yield key >> 3, wire, begin, value
            continue
        if wire == _BYTES:
            length, place = _varint(view, place, at)
        elif wire in (_FIXED64, _FIXED32):
            length = 8 if wire == _FIXED64 else 4
        else:
            raise DataError(f"tf.train.Example: offset {begin}: expected a field, got wire type {wire}")
        if length > len(view) - place:
            raise DataError(
                f"tf.train.Example: offset {begin}: expected a field of {length} bytes, got {len(view) - place}"
            )
        yield key >> 3, wire, at + place, view[place : place + length]
        place += length


def _varint(view: _View, place: int, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place == len(view):
            break
        byte = view[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, place
    raise DataError(f"tf.train.Example: offset {at + place}: expected a number, got none that ends")


def _varints(view: _View, at: int) -> Array:
    """Packed: int64 (n,)."""
    coded = np.frombuffer(view, np.uint8)
    ends = np.flatnonzero(coded < 0x80)
    starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    lengths = ends - starts + 1
    if len(coded) and (not len(ends) or ends[-1] != len(coded) - 1 or lengths.max() > 10):
        raise DataError(f"tf.train.Example: offset {at}: expected {len(coded)} bytes of numbers, got one without end")
    values = np.zeros(len(ends), np.uint64)
    for digit in range(int(lengths.max(initial=0))):
        have = lengths > digit
        values[have] |= (coded[starts[have] + digit] & 0x7F).astype(np.uint64) << np.uint64(7 * digit)
    return values.view(np.int64)


def _text(name: bytes, at: int) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"tf.train.Example: offset {at}: expected a name in UTF-8, got {name!r}: {error}") from None


# ---- writing


def _list(name: str, value: Any) -> bytes:
    try:
        array = np.asarray(value, object if isinstance(value, (str, bytes)) else None)
    except ValueError:  # lists of different lengths
        array = np.empty(1, object)
    if array.size and array.dtype.kind in "OSU":
        items = value if isinstance(value, (list, tuple)) else array.flat  # numpy would cut off zeros at the end
        texts = [item.encode() if isinstance(item, str) else item for item in items]
        if all(isinstance(text, bytes) for text in texts):
            return _sized(_BYTES_LIST, b"".join(_sized(1, text) for text in texts))
    if arrays.is_float(array.dtype):
        return _sized(_FLOAT_LIST, _sized(1, np.ascontiguousarray(array, "<f4").tobytes()))
    if array.dtype.kind in "iub" and (array.dtype != np.uint64 or not array.size or array.max() < 2**63):
        return _sized(_INT64_LIST, _sized(1, b"".join(_coded(int(number)) for number in array.flat)))
    raise InputError(
        f"make_example: {name!r} is {type(value).__name__} of dtype {array.dtype}; expected bytes, a string, integers "
        "that are int64, floats, or a list or an array of these"
    )


def _sized(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | _BYTES]) + _coded(len(content)) + content


def _coded(number: int) -> bytes:
    number &= 0xFFFFFFFFFFFFFFFF
    coded = bytearray()
    while number >= 0x80:
        coded.append(number & 0x7F | 0x80)
        number >>= 7
    coded.append(number)
    return bytes(coded)
