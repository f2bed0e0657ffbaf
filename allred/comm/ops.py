"""The reduction operators, and compression.

16-bit wire dtypes: each float32 or float64 number is rounded to nearest, ties to even, before it is sent; float64 is
first converted to float32. All ranks, also for their own numbers, add the rounded numbers in float32, so all get the
same bits. In shared memory C does this while it copies (csrc/allreduce.c); other backends use `narrow` and `widen`.
16-bit numbers are uint16 arrays here, so bfloat16 needs no package.

Between hosts that are connected by TCP, C encodes the float32 sums of each host (csrc/encode.h, network_compressed.c).
`int8` and `int4` exist only there.
"""

import enum
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allred import arrays, native
from allred.arrays import Array


class ReduceOp(enum.Enum):
    """A reduction operator. Also available as allred.Average, allred.Sum, allred.Min, allred.Max and allred.Product."""

    AVERAGE = "Average"
    SUM = "Sum"
    MIN = "Min"
    MAX = "Max"
    PRODUCT = "Product"

    def __repr__(self) -> str:
        return f"allred.{self.value}"


Average = ReduceOp.AVERAGE
"""The sum divided by the number of ranks; of floats and complex numbers only."""

Sum = ReduceOp.SUM
"""Integers wrap around; the 16-bit floats are summed in float32 and rounded once."""

Min = ReduceOp.MIN
"""The smallest; of bool: all. A NaN on any rank makes the element NaN. Not of complex numbers."""

Max = ReduceOp.MAX
"""The largest; of bool: any. A NaN on any rank makes the element NaN. Not of complex numbers."""

Product = ReduceOp.PRODUCT
"""Of bool: all. Integers wrap around; the 16-bit floats are multiplied in float32 and rounded once."""

CODES = {op: code for code, op in enumerate(ReduceOp, start=1)}


def of(op: Any) -> Any:
    """Return the operator that one of mpi4py corresponds to, or `op` itself."""
    MPI = sys.modules.get("mpi4py.MPI")  # noqa: N806  (mpi4py's spelling)
    if type(op) is ReduceOp or MPI is None or not isinstance(op, MPI.Op):
        return op
    pairs = (MPI.SUM, Sum), (MPI.MIN, Min), (MPI.MAX, Max), (MPI.PROD, Product)
    return next((own for other, own in pairs if op == other), op)


def refusal(op: Any, dtype: np.dtype[Any]) -> str | None:
    """Return why `op` cannot reduce `dtype` and what to do instead; None if it can."""
    if not isinstance(op, ReduceOp):
        if isinstance(op, np.ndarray):
            return (
                "the second argument is op, and not an array for the result: y = allred.allreduce(x) returns a new one"
            )
        if callable(op):
            return (
                f"op={op!r} is not a reduction; use allred.Average, Sum, Min, Max or Product, for MPI.MAXLOC and "
                "MINLOC allred.argmax and argmin, for a function allred.allreduce_with"
            )
        return f"op={op!r} is not a reduction; use allred.Average, Sum, Min, Max or Product"
    if arrays.name_of(dtype) == "bool" and op in (ReduceOp.SUM, ReduceOp.AVERAGE):
        return f"{op.value} of bool is not defined; use allred.Max for 'any', allred.Min for 'all', or cast to int32"
    if op in (ReduceOp.MIN, ReduceOp.MAX) and arrays.is_complex(dtype):
        return f"{op.value} of {dtype.name} is not defined: complex numbers have no order; reduce abs(x) or x.real"
    if op is ReduceOp.AVERAGE and not arrays.is_inexact(dtype):
        return f"Average of {dtype.name} is not defined (it would round); use op=allred.Sum, or cast to float32"
    return None


_WIDE = frozenset({"float32", "float64"})


class Compression(enum.Enum):
    """How floats travel in an allreduce.

        none    no compression
        fp16    float16: 11 bits of precision, range 6e-8 to 65504 (see GradScaler)
        bf16    bfloat16: 8 bits of precision, range of float32
        int8    8 bits and 1/64 more: -127 to 127 times a scale that each block of 256 numbers has
        int4    4 bits and 1/32 more: -7 to 7 times such a scale; for training with error feedback

    `fp16` and `bf16` compress float32 and float64. `int8` and `int4` compress also 16-bit floats, with Average and Sum,
    but only between hosts that are connected by TCP, and not arrays with fewer than two dimensions and at most 65536
    elements, such as biases; where they do not compress, arrays travel as they are. Integers, bools and complex numbers
    are never compressed. docs/slow-links.md compares them.

    >>> Compression.fp16
    allred.Compression.fp16
    """

    none = 0  # the values are codes of arrays.DTYPES
    fp16 = arrays.DTYPES.index("float16")
    bf16 = arrays.DTYPES.index("bfloat16")
    int8 = arrays.DTYPES.index("int8")
    int4 = arrays.DTYPES.index("uint8")  # two numbers in a byte

    @property
    def is_quantized(self) -> bool:
        """Whether it is `int8` or `int4`."""
        return self in (Compression.int8, Compression.int4)

    def __repr__(self) -> str:
        return f"allred.Compression.{self.name}"


COMPRESSIONS = ", ".join(f".{each.name}" for each in Compression)  # for errors

_NARROW = Compression.fp16.value, Compression.bf16.value
_EXEMPT_ELEMENTS = 65536  # as ALLRED_EXEMPT_ELEMENTS of csrc/encode.h


def narrows(dtype: np.dtype[Any], wire: int) -> bool:
    """Whether numbers of this dtype travel as 16-bit floats. wire: the value of a Compression."""
    return wire in _NARROW and arrays.name_of(dtype) in _WIDE


def wire_of(array: Array, compression: Compression, between_hosts: bool) -> int:
    """Return the type in which an array travels: the value of a Compression, or 0. `allred_wire_of` of
    csrc/python/segment_object.h is the same in C. between_hosts: whether the backend encodes there."""
    if not compression.is_quantized:
        return compression.value if narrows(array.dtype, compression.value) else 0
    small = array.ndim < 2 and array.size <= _EXEMPT_ELEMENTS
    floats = arrays.is_inexact(array.dtype) and not arrays.is_complex(array.dtype)
    return compression.value if between_hosts and floats and not small else 0


def narrow(numbers: Array, out: NDArray[np.uint16], wire: int) -> None:
    """Compress contiguous numbers into `out`, of the same number of elements."""
    native.narrow(numbers, out, arrays.dtype_code(numbers.dtype), wire)


def widen(halves: NDArray[np.uint16], out: Array, wire: int) -> None:
    """Decompress into `out`, as the sum of one array. The conversion is exact."""
    native.reduce([halves], out, wire, CODES[ReduceOp.SUM], 1, "", arrays.dtype_code(out.dtype))
