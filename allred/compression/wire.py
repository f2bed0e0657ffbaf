"""Wire types: float32 and float64 numbers that travel as 16-bit floats.

Every number is rounded to the nearest, ties to even, before it is sent; a float64 is made a float32 first. All ranks,
and each for its own numbers too, add up the rounded ones in float32: so they get the same bits. In shared memory C does
all of it while it copies (csrc/transfers.c); this is for everybody else. 16-bit numbers are uint16 arrays here, so that
bfloat16 needs no package.
"""

import enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allred import arrays, native
from allred.arrays import Array

_SUM = 2  # its code (comm/ops.py); of one source it is that source
_WIDE = frozenset({"float32", "float64"})


class Compression(enum.Enum):
    """What float32 and float64 numbers travel as between ranks: as they are, as float16 or as bfloat16.

    `none`    as they are
    `fp16`    float16: 11 bits of precision; above 65504 it is infinity, below 6e-8 zero (see `GradScaler`)
    `bf16`    bfloat16: 8 bits of precision, float32's range

    Integers, bools and 16-bit floats travel as they are in any case.
    """

    none = 0  # the values are codes of arrays.DTYPES
    fp16 = arrays.DTYPES.index("float16")
    bf16 = arrays.DTYPES.index("bfloat16")

    def __repr__(self) -> str:
        return f"allred.Compression.{self.name}"


def narrows(dtype: np.dtype[Any], wire: int) -> bool:
    """Whether numbers of this dtype travel as narrower ones; wire: a Compression's value."""
    return bool(wire) and arrays.name_of(dtype) in _WIDE


def narrow(numbers: Array, out: NDArray[np.uint16], wire: int) -> None:
    """Contiguous numbers as they travel."""
    native.narrow(numbers, out, arrays.dtype_code(numbers.dtype), wire)


def widen(halves: NDArray[np.uint16], out: Array, wire: int) -> None:
    """The reverse, which is exact."""
    native.reduce([halves], out, wire, _SUM, 1, "", arrays.dtype_code(out.dtype))
