"""Inputs and expected results of every operation of a plan, computed by numpy, with tolerances.

Every rank generates the arrays of all ranks from the seed, so each rank checks its results itself.
"""

import dataclasses
import functools
import math
from typing import Any

import ml_dtypes
import numpy as np
from plan import FLOATS, Job, Operation

FUNCTIONS = {"Min": np.minimum, "Max": np.maximum, "Product": np.multiply, "Sum": np.add, "Average": np.add}
WIRES = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def inputs(job: Job, index: int, operation: Operation, rank: int) -> list[np.ndarray]:
    """Arrays that a rank passes to operation `index`, contiguous."""
    rng = np.random.default_rng([job.seed, index, rank])
    rows = (sum(operation.rows[rank]),) if operation.rows else ()
    pairs = zip(operation.dtypes, operation.shapes, strict=True)
    return [random_array(rng, dtype, (*rows, *shape), operation.specials) for dtype, shape in pairs]


def random_array(rng: np.random.Generator, name: str, shape: tuple[int, ...], specials: bool) -> np.ndarray:
    """Integers of the whole range, so that sums wrap around; normal floats; with `specials` also NaN and infinities."""
    dtype, count = dtype_of(name), math.prod(shape)
    if name == "bool":
        values = rng.integers(0, 2, count).astype(dtype)
    elif dtype.kind == "c":
        real_name = f"float{4 * dtype.itemsize}"
        values = np.ravel(random_array(rng, real_name, (*shape, 2), specials)).view(dtype)
    elif name not in FLOATS:
        info = np.iinfo(dtype)
        values = rng.integers(info.min, info.max, count, dtype, endpoint=True)
    else:
        values = rng.standard_normal(count, np.float32).astype(dtype)
        if specials and count:
            where = rng.integers(0, count, 3)
            values[where] = np.array([np.nan, np.inf, -np.inf]).astype(dtype)
    return values.reshape(shape)


@dataclasses.dataclass
class Expected:
    """Expected result: the array reduced in rank order, and the tolerance of each element for other orders."""

    array: np.ndarray
    tolerance: np.ndarray | None = None  # None: exact
    everywhere: bool = True  # equal on all ranks


def reduced(parts: list[np.ndarray], op: str) -> Expected:
    """Reduce in rank order: 16-bit floats in float32, rounded once; complex numbers as their parts."""
    dtype, size = parts[0].dtype, len(parts)
    if dtype.kind == "c":
        return _reduced_complex(parts, op)
    floating = dtype.name in FLOATS
    wide = np.dtype(np.float32) if floating and dtype.itemsize == 2 else dtype
    with np.errstate(all="ignore"):
        result = functools.reduce(FUNCTIONS[op], [part.astype(wide) for part in parts])
        result = result / wide.type(size) if op == "Average" else result
        array = np.asarray(result).astype(dtype)
        if not floating or op in ("Min", "Max"):
            return Expected(array)
        exact = [part.astype(np.float64) for part in parts]
        scale = np.abs(np.prod(exact, axis=0)) if op == "Product" else np.sum(np.abs(exact), axis=0)
        rounding = ml_dtypes.finfo(dtype).eps * np.abs(array.astype(np.float64)) if wide != dtype else 0
        smallest = float(ml_dtypes.finfo(dtype).smallest_subnormal)
        return Expected(array, 2 * size * float(np.finfo(wide).eps) * scale + rounding + smallest)


def _reduced_complex(parts: list[np.ndarray], op: str) -> Expected:
    """As `reduced`; the tolerance has one more dimension, (real, imaginary)."""
    if op != "Product":
        found = reduced([each[..., None].view(each.real.dtype) for each in parts], op)
        return dataclasses.replace(found, array=found.array.view(parts[0].dtype)[..., 0])
    product = functools.reduce(np.multiply, parts)
    scale = np.abs(np.prod([each.astype(np.complex128) for each in parts], axis=0))[..., None]
    eps = float(np.finfo(product.dtype).eps)
    return Expected(product, 4 * len(parts) * eps * np.repeat(scale, 2, axis=-1))


def real(array: np.ndarray) -> np.ndarray:
    """Return numbers as float64; complex numbers (...) as (..., 2)."""
    return (array[..., None].view(array.real.dtype) if array.dtype.kind == "c" else array).astype(np.float64)


def reduced_narrow(parts: list[np.ndarray], op: str, wire: np.dtype[Any]) -> Expected:
    """Reduce compressed numbers: round them to the wire dtype, then reduce in float32 in rank order.

    The tolerance covers backends with MPI, which round the results of nodes, and the final result once more.
    """
    dtype, size = parts[0].dtype, len(parts)
    with np.errstate(all="ignore"):
        narrow = [part.astype(np.float32).astype(wire).astype(np.float32) for part in parts]
        result = functools.reduce(FUNCTIONS[op], narrow)
        array = np.asarray(result / np.float32(size) if op == "Average" else result).astype(dtype)
        eps, smallest = (float(getattr(ml_dtypes.finfo(wire), name)) for name in ("eps", "smallest_subnormal"))
        exact = np.abs([part.astype(np.float64) for part in parts])
        lost = eps * exact + smallest  # rounding error of each number
        if op in ("Min", "Max"):
            return Expected(array, lost.sum(axis=0))
        if op == "Product":
            most = np.prod(exact + lost, axis=0)
            return Expected(array, most - np.prod(exact, axis=0) + 3 * eps * most + size * smallest)
        return Expected(array, 2 * lost.sum(axis=0) + 2 * eps * exact.sum(axis=0) + smallest)


def expected(job: Job, index: int, operation: Operation, rank: int) -> list[Expected]:
    """Expected results of the operation on a rank."""
    everyone = [inputs(job, index, operation, r) for r in range(job.ranks)]
    kind = operation.kind
    if kind in ("allreduce", "grouped_allreduce", "step"):
        wire = WIRES.get(operation.compression)
        return [
            reduced_narrow([*parts], operation.op, wire)
            if wire and parts[0].dtype in (np.float32, np.float64)
            else reduced([*parts], operation.op)
            for parts in zip(*everyone, strict=True)
        ]
    if kind == "reducescatter":
        return [_part(reduced([arrays[0] for arrays in everyone], operation.op), rank, job.ranks)]
    if kind in ("broadcast", "broadcast_object"):
        return [Expected(everyone[operation.root][0])]
    if kind == "allgather":
        return [Expected(np.concatenate([arrays[0] for arrays in everyone]))]
    if kind == "allgather_object":
        return [Expected(arrays[0]) for arrays in everyone]
    if kind == "alltoall":
        return _dealt(operation, everyone, rank)
    return []  # a barrier


def _part(whole: Expected, rank: int, size: int) -> Expected:
    tolerance = None if whole.tolerance is None else np.array_split(whole.tolerance, size)[rank]
    return Expected(np.array_split(whole.array, size)[rank], tolerance, everywhere=False)


def _dealt(operation: Operation, everyone: list[list[np.ndarray]], rank: int) -> list[Expected]:
    starts = [sum(rows[:rank]) for rows in operation.rows]
    come = [rows[rank] for rows in operation.rows]
    pairs = zip(everyone, starts, come, strict=True)
    parts = [arrays[0][start : start + count] for arrays, start, count in pairs]
    return [Expected(np.concatenate(parts), everywhere=False), Expected(np.array(come), everywhere=False)]


def difference(got: Any, wanted: Expected, exactly: bool) -> str:
    """Description of the difference between a result and the expected one; "" if there is none."""
    array = np.asarray(got)
    if (array.dtype, array.shape) != (wanted.array.dtype, wanted.array.shape):
        return f"is {array.dtype} {array.shape}, not {wanted.array.dtype} {wanted.array.shape}"
    good = array == wanted.array
    if array.dtype.name in FLOATS or array.dtype.kind == "c":
        a, b = real(array), real(wanted.array)
        good = a == b
        good |= np.isnan(a) & np.isnan(b)
        if wanted.tolerance is not None and not exactly:
            with np.errstate(invalid="ignore"):
                good |= np.abs(a - b) <= wanted.tolerance
        good = good.all(axis=-1) if array.dtype.kind == "c" else good
    if np.all(good):
        return ""
    where = tuple(int(axis[0]) for axis in np.nonzero(np.atleast_1d(~good)))
    got_there, wanted_there = np.atleast_1d(array)[where], np.atleast_1d(wanted.array)[where]
    return f"differs in {np.sum(~good)} of {array.size} elements; at {where} {got_there!r}, not {wanted_there!r}"


def without_nan_payload(array: Any) -> bytes:
    """Bytes of an array with one code for all NaN: only the codes of NaN may differ between ranks."""
    array = np.array(array)
    if array.dtype.kind == "c":
        array = array[..., None].view(array.real.dtype)
    if array.dtype.name in FLOATS:
        array[np.isnan(array.astype(np.float32))] = np.nan
    return array.tobytes()
