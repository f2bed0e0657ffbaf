"""Calls of operations of the plan, with random variants on each rank.

In place or not, the memory layout, a number instead of an array: ranks may differ in these without an effect on other
ranks, so every rank draws them separately. A call that raises an error must not change its arguments.
"""

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
from arithmetic import real
from plan import Operation

import allred

OPS = {op.value: op for op in allred.ReduceOp}
UNUSABLE = np.array([None])


def laid_out(array: np.ndarray, rng: random.Random) -> Any:
    """Copy the values to a random memory layout; a 0-d array sometimes becomes a number."""
    if array.ndim == 0 and rng.random() < 0.3:
        return array[()]
    layout = rng.choice(("plain", "plain", "strided", "reversed", "fortran", "offset", "read-only"))
    if layout == "fortran":
        return np.asfortranarray(array).reshape(array.shape)
    if layout == "reversed" and array.ndim:
        back = (slice(None, None, -1),) * array.ndim
        return array[back].copy()[back]
    if layout == "strided" and array.ndim:
        wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
        wide[..., ::2] = array
        return wide[..., ::2]
    if layout == "offset":  # not aligned to elements
        memory = np.empty(array.nbytes + 1, np.uint8)[1:].view(np.uint8)
        other = np.frombuffer(memory, np.uint8, array.nbytes).view(array.dtype).reshape(array.shape)
        other[...] = array
        return other
    copy = array.copy()
    copy.flags.writeable = layout != "read-only"
    return copy


def _writable(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.flags.writeable


class Call:
    """One call of an operation: `run()` returns the results as a list."""

    def __init__(
        self, operation: Operation, arrays: list[np.ndarray], rank: int, ranks: int, rng: random.Random
    ) -> None:
        self.operation, self.rank, self.ranks = operation, rank, ranks
        self.in_place = rng.random() < 0.5
        self.given = [laid_out(array, rng) for array in arrays]
        if self.in_place or operation.kind == "step":
            self.given = [array if _writable(array) else np.array(array) for array in self.given]
        self._before = [array.copy() for array in self.given]
        self._passes_splits = rng.random() < 0.7

    def run(self) -> list[Any]:
        """Run the blocking call. Raises the errors of allred."""
        return getattr(self, self.operation.kind)(*self._arguments())

    def start(self) -> Callable[[], list[Any]] | None:
        """Start the operation and return a function that waits for the results; None if it has no *_async function."""
        kind = self.operation.kind
        if kind == "barrier":
            work = allred.barrier_async()
        elif hasattr(allred, f"{kind}_async"):
            array = [*self._arguments()] if kind == "grouped_allreduce" else self._arguments()[0]
            options = {"splits": self.operation.rows[self.rank]} if kind == "alltoall" else {}
            work = self._function(f"{kind}_async")(array, **options)
        else:
            return None
        return lambda: self._listed(allred.synchronize(work))

    def _listed(self, result: Any) -> list[Any]:
        if self.operation.kind in ("grouped_allreduce", "alltoall"):
            return list(result)
        return [] if self.operation.kind == "barrier" else [result]

    def untouched(self) -> bool:
        """Whether the arguments are unchanged."""
        pairs = zip(self.given, self._before, strict=True)
        return all(a.tobytes() == b.tobytes() for a, b in pairs)

    def right_memory(self, results: list[Any]) -> bool:
        """Whether the results are the arguments of an in-place call, or the arguments of another call are unchanged."""
        if self.operation.kind in ("allreduce", "grouped_allreduce", "broadcast") and self.in_place:
            return all(got is given for got, given in zip(results, self.given, strict=True))
        return self.operation.kind == "step" or self.untouched()

    def _arguments(self) -> list[Any]:
        return [*self.given[:-1], UNUSABLE] if self.operation.unusable and self.operation.kind != "step" else self.given

    def _function(self, name: str) -> Callable[..., Any]:
        options: dict[str, Any] = {"name": self.operation.name}
        if self.operation.op:
            options["op"] = OPS[self.operation.op]
        if name.startswith("broadcast"):
            options["root"] = self.ranks if self.operation.unusable else self.operation.root
        if self.operation.compression != "none":
            options["compression"] = allred.Compression[self.operation.compression]
        in_place = self.in_place and hasattr(allred, f"{name}_") and not self.operation.unusable
        return functools.partial(getattr(allred, f"{name}_" if in_place else name), **options)

    def allreduce(self, array: np.ndarray) -> list[Any]:
        return [self._function("allreduce")(array)]

    def grouped_allreduce(self, *group: np.ndarray) -> list[Any]:
        return list(self._function("grouped_allreduce")([*group]))

    def broadcast(self, array: np.ndarray) -> list[Any]:
        return [self._function("broadcast")(array)]

    def allgather(self, array: np.ndarray) -> list[Any]:
        return [self._function("allgather")(array)]

    def reducescatter(self, array: np.ndarray) -> list[Any]:
        return [self._function("reducescatter")(array)]

    def alltoall(self, array: np.ndarray) -> list[Any]:
        rows = self.operation.rows[self.rank]
        even = len(set(rows)) == 1 and not self._passes_splits
        return list(self._function("alltoall")(array, splits=None if even else rows))

    def barrier(self) -> list[Any]:
        allred.barrier()
        return []

    def allgather_object(self, array: np.ndarray) -> list[Any]:
        value = (lambda: None) if self.operation.unusable else {"rank": self.rank, "array": array}
        objects = self._function("allgather_object")(value)
        assert [each["rank"] for each in objects] == list(range(self.ranks))
        return [each["array"] for each in objects]

    def broadcast_object(self, array: np.ndarray) -> list[Any]:
        return [self._function("broadcast_object")([array, "text"])[0]]

    def step(self, *grads: np.ndarray) -> list[Any]:
        """Step a distributed optimizer with parameters 0 and learning rate 1; the gradients are the results."""
        params, operation = [np.zeros(grad.shape, grad.dtype) for grad in grads], self.operation
        options = {"op": OPS[operation.op], "bucket_bytes": operation.bucket_bytes, "name": f"opt{operation.name}"}
        options["nonfinite"] = "ignore"  # sums may overflow
        options["compression"] = allred.Compression[operation.compression]
        given = [*grads[:-1], np.zeros((5, 4, 3, 2), np.float32)] if operation.unusable else [*grads]
        allred.distributed(allred.optim.SGD(lr=1.0), **options).step(params, given)
        with np.errstate(all="ignore"):
            for param, grad in zip(params, grads, strict=True):
                assert np.array_equal(real(param), -real(grad), equal_nan=True)
        return [*grads]
