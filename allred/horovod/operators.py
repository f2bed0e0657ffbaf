"""Horovod's reduction operators, and the arguments `op` and `average` of its functions."""

import warnings
from typing import Any

from allred.comm.ops import ReduceOp
from allred.errors import InputError

Average, Sum, Min, Max, Product = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT
Adasum = "Adasum"


def operator(op: Any, average: bool | None = None) -> ReduceOp:
    """Return the reduction of the arguments `op` and `average`. Raises InputError if both are given or `op` is not a
    reduction; NotImplementedError for Adasum."""
    if average is not None:
        if op is not None:
            raise InputError("op and average exclude each other; pass op=hvd.Average or op=hvd.Sum only")
        warnings.warn("average= is deprecated; pass op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=4)
    if op is None:
        return Sum if average is False else Average
    if op == Adasum:
        raise NotImplementedError("Adasum is not available; use op=hvd.Average")
    if not isinstance(op, ReduceOp):
        raise InputError(f"op={op!r} is not a reduction; use hvd.Average, hvd.Sum, hvd.Min, hvd.Max or hvd.Product")
    return op
