"""tf.train.Example messages, read and written with Google's package protobuf (extra `tfrecord`).

    Example  { 1: Features }          Feature { one of 1: BytesList, 2: FloatList, 3: Int64List }
    Features { 1: entry, ... }        entry   { 1: name, 2: Feature }          lists { 1: value, ... }

The messages are those of example.proto and feature.proto in tensorflow/core/example. They are declared here in a
separate descriptor pool, so that the process may also load TensorFlow. A map is serialized as a list of entries; it is
declared as a list here, which is faster to read.
"""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from allred import arrays
from allred.arrays import Array
from allred.errors import DataError, InputError

_OBJECT, _FLOAT = np.dtype(object), np.dtype(np.float32)
_DTYPES = {"bytes_list": _OBJECT, "float_list": _FLOAT, "int64_list": np.dtype(np.int64)}
_SHORT = 32  # elements; up to this length conversion through a list of Python objects is the fastest


def example(record: bytes) -> dict[str, Array]:
    """Parse a serialized tf.train.Example.

    Returns:
        Features by name. Each is a new array (n,) of int64, float32, or object (bytes). A feature without a list is
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
    if arrays.is_float(array.dtype):
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
            f"example() and make_example() need Google's protobuf: pip install 'allred[tfrecord]' ({error})"
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
