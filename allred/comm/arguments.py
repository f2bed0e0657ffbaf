"""Checks the arguments of an operation: returns the arrays it works on and its OpDescriptor, or raises InputError."""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from allred import arrays, native
from allred.arrays import Array
from allred.comm import header, ops
from allred.comm.header import OpDescriptor, quoted
from allred.comm.node_memory import is_shared
from allred.comm.ops import Compression, ReduceOp
from allred.errors import InputError

T = TypeVar("T")
_NO_OP = object()  # the operation does not reduce; None is a value that a user may pass by mistake


def source_and_target(value: Any, in_place: bool) -> tuple[Array, Array]:
    """Return what to reduce and where to store it: the caller's array twice, or a new contiguous array for the result.
    Raises InputError."""
    if in_place:
        target = target_of(value, in_place)
        return target, target
    source = arrays.as_host_array(value)
    return source, np.empty(source.shape, source.dtype)


def target_of(value: Any, in_place: bool, refuse_shared: bool = True) -> Array:
    if not in_place:
        return np.array(arrays.as_host_array(value), copy=True, order="C")
    arrays.as_host_array(value)  # raises for device arrays, torch tensors and masked arrays
    if not isinstance(value, np.ndarray):
        kind = type(value).__name__
        raise InputError(f"in place needs a numpy array, got {kind}; use the form without the underscore")
    if not value.flags.writeable:
        raise InputError("the array is read-only; use the form without the underscore, or pass a writable copy")
    if not value.flags.forc and arrays.has_internal_overlap(value):
        raise InputError("the array has several elements in the same memory; pass a copy of it")
    if refuse_shared and is_shared(value):
        raise InputError("the array is a parameter of opt.share(), one memory for all ranks of the node; pass a copy")
    return value


def result_of(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return the array for a result: `out`, or a new one if it is None. Raises InputError if `out` does not fit."""
    if out is None:
        return np.empty(shape, dtype)
    target = target_of(out, in_place=True)
    if target.shape != shape or target.dtype != dtype or not target.flags.c_contiguous:
        found = arrays.describe(target.shape, target.dtype)
        raise InputError(f"out is {found}; expected a contiguous array, {arrays.describe(shape, dtype)}")
    return target


def check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise InputError(f"name={name!r} must be a string, which is shown in messages; the result is a new array")


def memory_conflicts(group: list[Any]) -> Iterable[tuple[int, int]]:
    """As `arrays.pairs_sharing_memory`; takes a few nanoseconds for each array in the usual case, without any pair."""
    return () if native.disjoint(group) else arrays.pairs_sharing_memory(group)


def refuse_shared_memory(pairs: Iterable[tuple[int, int]]) -> None:
    """Raise InputError if `pairs`, a result of `memory_conflicts` for arrays that are written, is not empty."""
    for first, second in pairs:
        raise InputError(f"arrays {first} and {second} of the group share memory; pass a copy of one of them")


def as_list(group: Any) -> Sequence[Any]:
    if not isinstance(group, (str, bytes, Mapping)):
        with contextlib.suppress(TypeError):
            return list(group)
    raise InputError(f"expected a list of arrays, got {type(group).__name__}")


def each_of(group: Sequence[Any], function: Callable[[Any], T]) -> list[T]:
    """Apply a function to each array of a group. Its InputError gets the position of the array."""
    results = []
    for position, value in enumerate(group):
        try:
            results.append(function(value))
        except InputError as error:
            raise InputError(f"array {position} of the group: {error}") from None
    return results


def root_index(root: Any, ranks: Sequence[int]) -> int:
    try:
        return ranks.index(operator.index(root))
    except (TypeError, ValueError):
        which = f"0 to {len(ranks) - 1}" if isinstance(ranks, range) else f"one of {', '.join(map(str, ranks))}"
        raise InputError(f"root={root!r} is not a rank; expected {which}") from None


def splits_of(rows: int, splits: Sequence[int] | None, size: int) -> Array:
    """Return the number of rows for each rank, int64 of shape (size,). Raises InputError."""
    if splits is None:
        if rows % size:
            raise InputError(f"{rows} rows do not divide over {size} ranks; give splits, the rows for each rank")
        return np.full(size, rows // size, np.int64)
    try:
        sent = np.asarray(splits)
    except ValueError:  # lists of different lengths
        sent = np.empty(0)
    if sent.shape != (size,) or sent.dtype.kind not in "iu" or (sent < 0).any() or sum(sent.tolist()) != rows:
        raise InputError(f"splits={splits!r} must be {size} whole numbers, one per rank, that add up to {rows} rows")
    return sent.astype(np.int64)


def array_descriptor(
    kind: str,
    array: Array,
    name: str,
    op: Any = _NO_OP,
    root: int = -1,
    shape: tuple[Any, ...] | None = None,
    rows: int = 0,
    compression: Compression = Compression.none,
    how: str = "",
) -> OpDescriptor:
    """Return the descriptor of an operation on one array. how: what else must agree, for the title. Raises InputError
    if its arguments cannot be used."""
    (arrays.copied_code if op is _NO_OP else arrays.dtype_code)(array.dtype)  # raises
    if op is not _NO_OP and (problem := ops.refusal(op, array.dtype)):
        raise InputError(problem)
    _check_compression(compression, None if op is _NO_OP else op)
    reduction = op if op is not _NO_OP else None
    shape = array.shape if shape is None else shape
    return _descriptor(kind, shape, array.dtype, name, reduction, root, rows, compression, array.nbytes, how)


@functools.lru_cache(maxsize=4096)  # training calls the same operations over and over
def _descriptor(
    kind: str,
    shape: tuple[Any, ...],
    dtype: np.dtype[Any],
    name: str,
    op: ReduceOp | None,
    root: int,
    rows: int,
    compression: Compression,
    nbytes: int,
    how: str,
) -> OpDescriptor:
    words = _how(op, compression) if op is not None else "", f"root={root}" if root >= 0 else "", how
    how = ", ".join(filter(None, words))
    tensor = arrays.describe(shape, dtype)
    title = f"{kind}({how}){quoted(name)} {tensor}"
    op_code = ops.CODES[op] | compression.value << header.WIRE_SHIFT if op is not None else 0
    code = arrays.copied_code(dtype)
    hashed = ((code, shape),) if kind == "allreduce" else None
    return OpDescriptor(kind, name, title, arrays=hashed, op=op_code, dtype=code, root=root, rows=rows, nbytes=nbytes)


def group_descriptor(
    group: list[Array],
    name: str,
    op: Any,
    compression: Compression = Compression.none,
    weight: float | None = None,
) -> OpDescriptor:
    """Return the descriptor of a grouped allreduce. Raises InputError if its arguments cannot be used."""
    if problem := ops.refusal(op, np.dtype(np.float32)):
        raise InputError(problem)
    _check_compression(compression, op)
    each_of(group, lambda array: array_descriptor("grouped_allreduce", array, name, op))  # raises
    lines = tuple(arrays.describe(array.shape, array.dtype) for array in group)
    title = f"grouped_allreduce({_how(op, compression)}){quoted(name)} of {len(group)} tensors"
    hashed = tuple((arrays.dtype_code(array.dtype), array.shape) for array in group)
    how = ops.CODES[op] | compression.value << header.WIRE_SHIFT
    note = 0
    if weight is not None:
        how |= header.WEIGHTED
        note = header.weight_note(weight)
    nbytes = sum(array.nbytes for array in group)
    return OpDescriptor("grouped_allreduce", name, title, lines, arrays=hashed, op=how, nbytes=nbytes, note=note)


def empty_like(value: Array) -> Array | None:
    """Return a new array for the result; None if there is no memory, which the general path tells the other ranks."""
    try:
        return np.empty(value.shape, value.dtype)
    except MemoryError:
        return None


def wire_code(compression: Any) -> int:
    """Return the code of the wire dtype; -1, which sends C to the general path, for anything but a Compression."""
    return compression.value if type(compression) is Compression else -1


def _check_compression(compression: Any, op: Any) -> None:
    if not isinstance(compression, Compression):
        raise InputError(f"compression={compression!r}: expected allred.Compression{ops.COMPRESSIONS}")
    if compression.is_quantized and op not in (None, ReduceOp.AVERAGE, ReduceOp.SUM):
        raise InputError(f"op={op!r} with compression={compression!r}: use allred.Average or Sum, or no compression")


def _how(op: ReduceOp, compression: Compression) -> str:
    return str(op.value) if compression is Compression.none else f"{op.value}, compression={compression.name}"
