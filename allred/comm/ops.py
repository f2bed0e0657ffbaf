"""The reduction operators, and their meaning for each dtype.

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
    """A reduction operator. Also available as allred.Average, allred.Sum, allred.Min, allred.Max and allred.Product."""

    AVERAGE = "Average"
    SUM = "Sum"
    MIN = "Min"
    MAX = "Max"
    PRODUCT = "Product"

    def __repr__(self) -> str:
        return f"allred.{self.value}"


CODES = {op: code for code, op in enumerate(ReduceOp, start=1)}


def refusal(op: Any, dtype: np.dtype[Any]) -> str | None:
    """Return why `op` cannot reduce `dtype` and what to do instead; None if it can."""
    if not isinstance(op, ReduceOp):
        return f"op={op!r} is not a reduction; use allred.Average, Sum, Min, Max or Product"
    if arrays.name_of(dtype) == "bool" and op in (ReduceOp.SUM, ReduceOp.AVERAGE):
        return f"{op.value} of bool is not defined; use allred.Max for 'any', allred.Min for 'all', or cast to int32"
    if op is ReduceOp.AVERAGE and not arrays.is_float(dtype):
        return f"Average of {dtype.name} is not defined (it would round); use op=allred.Sum, or cast to float32"
    return None
