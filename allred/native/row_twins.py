"""numpy versions of the tables of rows and of the ids of a lookup (csrc/row_table.h, csrc/distinct_ids.h)."""

import functools
from typing import Any

import numpy as np

from allred.arrays import Array

_CONSTANT, _UNIFORM, _NORMAL = range(3)
_SLOTS = 3
_GOLDEN = 0x9E3779B97F4A7C15


def hashes(ids: Array) -> Array:
    """Return the hash of each id, uint64."""
    found = np.ascontiguousarray(ids).view(np.uint64)
    found = (found ^ found >> np.uint64(33)) * np.uint64(0xFF51AFD7ED558CCD)
    found = (found ^ found >> np.uint64(33)) * np.uint64(0xC4CEB9FE1A85EC53)
    result: Array = found ^ found >> np.uint64(33)
    return result


def _random_bits(state: Array) -> Array:
    state = (state ^ state >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ state >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    result: Array = state ^ state >> np.uint64(31)
    return result


def _normal_quantile(p: Array) -> Array:
    """The inverse of the normal distribution, by P. J. Acklam's approximation."""
    a = [-3.969683028665376e01, 2.209460984245205e02, -2.759285104469687e02]
    a += 1.383577518672690e02, -3.066479806614716e01, 2.506628277459239e00
    b = -5.447609879822406e01, 1.615858368580409e02, -1.556989798598866e02, 6.680131188771972e01, -1.328068155288572e01
    c = [-7.784894002430293e-03, -3.223964580411365e-01, -2.400758277161838e00]
    c += -2.549732539343734e00, 4.374664141464968e00, 2.938163982698783e00
    d = 7.784695709041462e-03, 3.224671290700398e-01, 2.445134137142996e00, 3.754408661907416e00
    q = p - 0.5
    r = q * q
    middle = np.polyval(a, r) * q / np.polyval((*b, 1.0), r)
    q = np.sqrt(-2 * np.log(np.where(p < 0.02425, p, 1 - p)))
    tail = np.polyval(c, q) / np.polyval((*d, 1.0), q)
    return np.where(np.abs(p - 0.5) <= 0.5 - 0.02425, middle, np.where(p < 0.02425, tail, -tail))


class RowTable:
    """A table of rows by id. The arguments are those of allred_row_form."""

    def __init__(
        self, dim: int, half: bool, slots: tuple[int, ...], slot_values: tuple[float, ...], init: int, a: float,
        b: float, seed: int, admit_after: int,
    ) -> None:  # fmt: skip
        self._dim, self._dtype = dim, np.dtype(np.float16 if half else np.float32)
        self._slots = [(size, np.float32(value)) for size, value in zip(slots, slot_values, strict=True)]
        self._init, self._a, self._b, self._seed = init, np.float32(a), np.float32(b), np.uint64(seed)
        self._admit_after = admit_after
        self.clear()

    def clear(self) -> None:
        self._rows: dict[int, dict[str, Any]] = {}
        self._candidates: dict[int, list[int]] = {}  # {id: [lookups, last step]}

    @property
    def rows(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        return self.rows * (24 + self._dim * self._dtype.itemsize + 4 * sum(size for size, _ in self._slots))

    def _first_vector(self, number: int) -> Array:
        if self._init == _CONSTANT:
            return np.full(self._dim, self._a, self._dtype)
        with np.errstate(over="ignore"):
            base = _random_bits(self._seed + hashes(np.array([number], np.uint64)))
            bits = _random_bits(base + np.arange(1, self._dim + 1, dtype=np.uint64) * np.uint64(_GOLDEN))
        if self._init == _UNIFORM:
            uniform = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
            return (self._a + (self._b - self._a) * uniform).astype(self._dtype)
        normal = _normal_quantile(((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2**-53)
        return (float(self._a) + float(self._b) * normal).astype(np.float32).astype(self._dtype)

    def _make(self, number: int) -> dict[str, Any]:
        slots = [np.full(size, value, np.float32) for size, value in self._slots]
        self._rows[number] = row = {"seen": 0, "step": 0, "vector": self._first_vector(number), "slots": slots}
        return row

    def _admits(self, number: int, step: int) -> bool:
        if self._admit_after <= 1:
            return True
        found = self._candidates.setdefault(number, [0, 0])
        found[:] = found[0] + 1, step
        return found[0] >= self._admit_after

    def lookup(self, ids: Array, vectors: Array, step: int) -> None:
        for number, vector in zip(_numbers(ids), vectors.reshape(-1, self._dim), strict=True):
            row = self._rows.get(number)
            if row is None and step and self._admits(number, step):
                row = self._make(number)
            if row is not None and step:
                row["seen"], row["step"] = row["seen"] + 1, step
            vector[...] = self._first_vector(number) if row is None else row["vector"]

    def update(self, ids: Array, gradients: Array, rule: str, numbers: tuple[float, ...], step: int) -> int:
        updated = 0
        for number, gradient in zip(_numbers(ids), gradients.reshape(-1, self._dim), strict=True):
            if (row := self._rows.get(number)) is not None:
                vector = row["vector"].astype(np.float32)
                with np.errstate(all="ignore"):
                    _RULES[rule](vector, gradient, row["slots"], *numbers)
                    row["vector"] = vector.astype(self._dtype)
                row["step"] = step
                updated += 1
        return updated

    def add(self, ids: Array, gradients: Array, weight: float) -> None:
        for number, gradient in zip(_numbers(ids), gradients.reshape(-1, self._dim), strict=True):
            row = self._rows.get(number) or self._make(number)
            row["vector"] += gradient * np.float32(weight)

    def update_mean(self, sums: "RowTable", divisor: float, rule: str, numbers: tuple[float, ...], step: int) -> int:
        ids = np.array(list(sums._rows), np.uint64)
        means = [row["vector"] / np.float32(divisor) for row in sums._rows.values()]
        return self.update(ids, np.array(means, np.float32), rule, numbers, step)

    def remove_older(self, step: int) -> int:
        before = self.rows
        self._rows = {number: row for number, row in self._rows.items() if row["step"] >= step}
        self._candidates = {number: found for number, found in self._candidates.items() if found[1] >= step}
        return before - self.rows

    def select(self, since: int, numbers: Array) -> int:
        found = [number for number, row in enumerate(self._rows.values()) if row["step"] >= since]
        numbers[: len(found)] = found
        return len(found)

    def read(self, numbers: Array, ids: Any, seen: Any, steps: Any, vectors: Any, slots: tuple[Any, ...]) -> None:
        items = list(self._rows.items())
        for at, number in enumerate(numbers.tolist()):
            key, row = items[number]
            for column, value in (
                (None if ids is None else ids.view(np.uint64), key),
                (seen, row["seen"]),
                (steps, row["step"]),
                (vectors, row["vector"]),
                *zip(slots, row["slots"], strict=False),
            ):
                if column is not None:
                    column.reshape(len(numbers), -1)[at] = value

    def write(self, ids: Array, seen: Any, steps: Any, vectors: Any, slots: tuple[Any, ...]) -> None:
        for at, number in enumerate(_numbers(ids)):
            row = self._rows.get(number) or self._make(number)
            for key, column in (("seen", seen), ("step", steps)):
                if column is not None:
                    row[key] = int(column[at])
            if vectors is not None:
                row["vector"] = vectors.reshape(-1, self._dim)[at].astype(self._dtype)
            for slot, column in zip(row["slots"], slots, strict=False):
                if column is not None:
                    slot[...] = column.reshape(len(ids), -1)[at]


def _numbers(ids: Array) -> list[int]:
    numbers: list[int] = np.ascontiguousarray(ids).view(np.uint64).tolist()
    return numbers


# The rules of csrc/update.h, of one row.


def _sgd(param: Array, grad: Array, slots: list[Array], lr: Any, momentum: Any, nesterov: Any, decay: Any) -> None:
    g = param * decay + grad if decay else grad
    if (buffer := slots[0]).size:
        buffer[...] = buffer * momentum + g
        g = g + buffer * momentum if nesterov else buffer
    param -= g * lr


def _adagrad(param: Array, grad: Array, slots: list[Array], lr: Any, eps: Any, decay: Any) -> None:
    g = param * decay + grad if decay else grad
    slots[0] += g * g
    param -= g / (np.sqrt(slots[0]) + eps) * lr


def sum_of_squares(g: Array) -> Array:
    """Return the sum of squares of each row, with the bits of the C kernel. g: shape (..., dim)."""
    squares = np.zeros((*g.shape[:-1], -(-g.shape[-1] // 8) * 8), g.dtype, like=g)
    np.multiply(g, g, out=squares[..., : g.shape[-1]])
    lanes = np.zeros((*g.shape[:-1], 8), g.dtype, like=g)
    for at in range(0, squares.shape[-1], 8):
        lanes += squares[..., at : at + 8]
    for width in (4, 2, 1):
        lanes = lanes[..., :width] + lanes[..., width : 2 * width]
    return lanes


def _row_wise_adagrad(param: Array, grad: Array, slots: list[Array], lr: Any, eps: Any, decay: Any) -> None:
    g = param * decay + grad if decay else grad
    slots[0] += sum_of_squares(g) / np.float32(g.size)
    param -= g / (np.sqrt(slots[0]) + eps) * lr


def _rmsprop(
    param: Array, grad: Array, slots: list[Array], lr: Any, keep: Any, eps: Any, momentum: Any, decay: Any
) -> None:
    square_avg, grad_avg, buffer = slots
    take = 1.0 - keep
    g = param * decay + grad if decay else grad
    square_avg[...] = square_avg * keep + g * g * take
    variance = square_avg
    if grad_avg.size:
        grad_avg[...] = grad_avg * keep + g * take
        variance = np.maximum(square_avg - grad_avg * grad_avg, np.float32(0))
    d = g / (np.sqrt(variance) + eps)
    if buffer.size:
        buffer[...] = d = buffer * momentum + d
    param -= d * lr


def _adam(
    param: Array, grad: Array, slots: list[Array], rate: Any, beta1: Any, beta2: Any, root: Any, eps: Any, decay: Any,
    apart: bool = False,
) -> None:  # fmt: skip
    mean, square = slots[:2]
    g = param * decay + grad if decay and not apart else grad
    mean[...] = mean * beta1 + g * (1.0 - beta1)
    square[...] = square * beta2 + g * g * (1.0 - beta2)
    change = mean / (np.sqrt(square) / root + eps) * rate
    if apart:
        change = change + param * decay
    param -= change


_RULES: dict[str, Any] = {
    "sgd": _sgd, "adagrad": _adagrad, "row_wise_adagrad": _row_wise_adagrad, "rmsprop": _rmsprop, "adam": _adam,
    "adamw": functools.partial(_adam, apart=True),
}  # fmt: skip


# The ids of a lookup.


def distinct_ids(ids: Array, distinct: Array, positions: Array, counts: Array) -> int:
    numbers: dict[int, int] = {}
    first = [numbers.setdefault(number, len(numbers)) for number in _numbers(ids)]
    found = np.array(list(numbers), np.uint64)
    owners = ((hashes(found) >> np.uint64(32)) * np.uint64(counts.size)) >> np.uint64(32)
    order = np.argsort(owners, kind="stable")
    place = np.empty(len(found), np.uint32)
    place[order] = np.arange(len(found), dtype=np.uint32)
    distinct.view(np.uint64)[: len(found)] = found[order]
    positions[...] = place[first] if first else []
    counts[...] = np.bincount(owners.astype(np.int64), minlength=counts.size)
    return len(found)


def spread_rows(
    out: Array, rows: Array, half: bool, positions: Array, dim: int, offsets: Any = None, mean: bool = False
) -> None:
    found = rows.reshape(-1, dim)[positions].astype(np.float32)
    out = out.reshape(-1, dim)
    if offsets is None:
        out[...] = found
        return
    for bag, (first, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        out[bag] = 0
        for at in range(first, end):
            out[bag] = found[at] if at == first else out[bag] + found[at]
        if mean and end - first > 1:
            out[bag] /= np.float32(end - first)


def sum_gradients(
    out: Array, gradients: Array, positions: Array, dim: int, offsets: Any = None, mean: bool = False
) -> None:
    gradients, out = gradients.reshape(-1, dim), out.reshape(-1, dim)
    if offsets is not None:
        sizes = np.diff(offsets).astype(np.int64)
        if mean:
            gradients = gradients / np.maximum(sizes, 1).astype(np.float32)[:, None]
        gradients = np.repeat(gradients, sizes, axis=0)
    out[...] = 0
    np.add.at(out, positions, gradients)
