"""The reduction operators, and what they mean for each dtype.

Average   the sum divided by the number of ranks; floating point only
Sum       integers wrap around; the 16-bit floats are summed in float32 and rounded once
Min, Max  a NaN on any rank makes the element NaN, as numpy.minimum does (plain MPI leaves it open)
Product   integers wrap around; the 16-bit floats are multiplied in float32 and rounded once

For bool, Min and Product are "all", Max is "any"; Sum and Average are errors.
"""

import enum
from typing import Any

import numpy as np

from allred import arrays


class ReduceOp(enum.Enum):
    """How the ranks' elements become one. Also available as allred.Average, allred.Sum and so on."""

    AVERAGE = "Average"
    SUM = "Sum"
    MIN = "Min"
    MAX = "Max"
    PRODUCT = "Product"

    def __repr__(self) -> str:
        return f"allred.{self.value}"


CODES = {op: code for code, op in enumerate(ReduceOp, start=1)}


def refusal(op: Any, dtype: np.dtype[Any]) -> str | None:
    """Why `op` cannot reduce `dtype`, as a sentence that says what to do; None if it can."""
    if not isinstance(op, ReduceOp):
        return f"op={op!r} is not a reduction; use allred.Average, Sum, Min, Max or Product"
    if arrays.name_of(dtype) == "bool" and op in (ReduceOp.SUM, ReduceOp.AVERAGE):
        return f"{op.value} of bool is not defined; use allred.Max for 'any', allred.Min for 'all', or cast to int32"
    if op is ReduceOp.AVERAGE and not arrays.is_float(dtype):
        return f"Average of {dtype.name} is not defined (it would round); use op=allred.Sum, or cast to float32"
    return None
