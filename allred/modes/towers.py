"""`Towers`: a batch in several parts within one process, each the work of a tower: the model on one part of the batch,
with the parameters that all towers share. The gradients are averaged, and applied once.

It knows no ranks, and no optimizer: what it returns is one rank's gradients, for the `step` of any.
"""

import contextvars
import itertools
import operator
from collections.abc import Callable
from concurrent import futures
from typing import Any

import numpy as np

from allred import arrays, nest
from allred.arrays import Array
from allred.errors import InputError
from allred.modes.blas_threads import BlasLimit


class Towers:
    """Loss and gradients of a batch, computed by several towers at the same time.

        towers = allred.Towers(2, loss_and_grads)
        loss, grads = towers(params, x, y)
        opt.step(params, grads)

    Every tower calls `loss_and_grads(params, *part)` for its part of the batch, which returns `(loss, grads)`. With n_i
    samples in part i, of n in all,

        loss = sum_i n_i / n * loss_i,   grads = sum_i n_i / n * grads_i,

    which are those of the whole batch if the function's are means over samples that do not depend on each other (as
    they do in batch normalisation). A term of the loss that depends on the parameters alone, such as an L2 penalty, is
    in each tower's loss, and so comes once into the mean. The sum is formed in the order of the towers, whichever is
    first: the same bits at every call, in threads or not; 16-bit floats in float32.

    Several ranks may each have towers: the optimizer of `allred.distributed` averages over ranks, weighted by the
    samples of their shares of `allred.data.batches`.

    Arguments:
        count: how many towers. A batch of fewer samples leaves the last ones out.
        loss_and_grads: a function that only reads what towers share, so no writing to the parameters, and in torch
            `torch.autograd.grad` instead of `backward()`. It must not call collectives of allred: those are not for
            several threads. Its loss is a number, its gradients a nest of float arrays, torch tensors (CPU) or numbers.
        parallel: each tower in a thread, which is kept for the next call, and ends with this object; else one after
            the other. With the package threadpoolctl, a call limits the BLAS threads of the process to the cores of
            this rank divided by `count`, and restores their number at its end. Without it a warning says so if there
            are more threads than cores. torch has threads of its own: see torch.set_num_threads.

    >>> def loss_and_grads(params, x):
    ...     return (params["w"] * x).mean(), {"w": x.mean()}
    >>> Towers(2, loss_and_grads)({"w": np.array(2.0)}, np.array([1.0, 2.0, 6.0]))
    (6.0, {'w': array(3.)})
    """

    def __init__(self, count: int, loss_and_grads: Callable[..., Any], parallel: bool = True) -> None:
        try:
            self.count = operator.index(count)
        except TypeError:
            self.count = 0
        if self.count < 1:
            raise InputError(f"Towers(count={count!r}): expected a whole number of towers, at least 1")
        if not callable(loss_and_grads):
            raise InputError(f"Towers: loss_and_grads={loss_and_grads!r} is not a function")
        self._function = loss_and_grads
        self._threads = None
        if parallel and self.count > 1:  # they start with their first part, and end with this object
            self._blas = BlasLimit(self.count)
            self._threads = futures.ThreadPoolExecutor(self.count, "allred-tower", self._blas.start_thread)

    def __call__(self, params: Any, *batch: Any) -> tuple[float, Any]:
        """Split the batch, within one sample, and give its loss and gradients.

        Arguments:
            params: passed on to each tower, as they are.
            batch: arrays or torch tensors of equal first dimension, of which each tower gets a slice. One without
                samples goes to tower 0 (a rank may have none, and yet makes the step).

        Returns:
            The loss, a float, and the gradients: the nest that the towers return, of new numpy arrays of their dtypes,
            0-d for numbers. None counts as zeros, and stays None if all towers return it.

        Raises:
            InputError: for a batch that cannot be split, and for results that cannot be averaged.
            What a tower raised, the first of several, with a note that says which tower and which samples.
        """
        rows = _rows_of(batch)
        sizes = [size for size in arrays.split_sizes(rows, self.count) if size] or [0]
        starts = [0, *itertools.accumulate(sizes)]
        parts = [tuple(column[start:end] for column in batch) for start, end in itertools.pairwise(starts)]
        running = self._start(params, parts)
        mean = _Mean()
        for tower, part in enumerate(parts):
            try:
                result = running[tower].result() if running else self._function(params, *part)
            except BaseException as error:
                which = f"samples {starts[tower]} to {starts[tower + 1] - 1} of the batch" if rows else "no samples"
                error.add_note(f"in tower {tower} of {self.count}, with {which}")
                raise
            mean.add(tower, result, sizes[tower] / rows if rows else 1.0)
        return mean.loss, mean.grads()

    def _start(self, params: Any, parts: list[tuple[Any, ...]]) -> list[futures.Future[Any]]:
        """In threads, each in a copy of the caller's context (np.errstate is part of it), until all have ended; what is
        raised by a signal meanwhile (Ctrl-C, another rank's failure) does not wait for them."""
        if self._threads is None or len(parts) == 1:
            return []
        with self._blas():
            running = [
                self._threads.submit(contextvars.copy_context().run, self._function, params, *part) for part in parts
            ]
            futures.wait(running)
        return running


def _rows_of(batch: tuple[Any, ...]) -> int:
    """The length of what a batch consists of. Raises InputError if there is none."""
    if not batch:
        raise InputError("Towers: call it with a batch: towers(params, x, ...)")
    if odd := [value for value in batch if not getattr(value, "shape", ())]:
        raise InputError(
            f"Towers: a batch consists of arrays or tensors with a first dimension to split, but here is "
            f"{_words(odd[0])}; what all towers need as it is belongs into params, or into the function"
        )
    rows = [len(value) for value in batch]
    if len(set(rows)) > 1:
        raise InputError(f"Towers: the arrays of a batch must have equal first dimensions, got {rows}")
    return rows[0]


class _Mean:
    """The weighted mean of what towers return, summed in the order of `add`."""

    def __init__(self) -> None:
        self.loss = 0.0
        self._tree: Any = None  # of tower 0
        self._names: list[str] = []
        self._sums: list[Array | None] = []
        self._dtypes: list[np.dtype[Any] | None] = []

    def add(self, tower: int, result: Any, weight: float) -> None:
        """Take the result of a tower. The weights of all add up to 1."""
        if not isinstance(result, tuple) or len(result) != 2:
            raise InputError(f"Towers: tower {tower} returned {_words(result)}; expected a tuple (loss, grads)")
        loss = _host(result[0], f"the loss of tower {tower}")
        if loss.size != 1 or loss.dtype.kind not in "fiubV":  # V: ml_dtypes
            raise InputError(f"Towers: the loss of tower {tower} is {loss.dtype} {loss.shape}; expected a number")
        self.loss += float(loss.item()) * weight
        named = nest.leaves(result[1])
        names = [name for name, _ in named]
        if tower == 0:
            self._tree, self._names = result[1], names
            self._sums, self._dtypes = [None] * len(names), [None] * len(names)
        elif names != self._names:
            odd = sorted(set(names) ^ set(self._names))[0]
            whose = "tower 0" if odd in self._names else f"tower {tower}"
            raise InputError(f"Towers: only {whose} returned a gradient '{odd}'; all have to return the same nest")
        for index, (name, value) in enumerate(named):
            if value is not None:
                self._add(index, _host(value, f"the gradient '{name}' of tower {tower}"), tower, weight)

    def _add(self, index: int, grad: Array, tower: int, weight: float) -> None:
        name, before, dtype = self._names[index], self._sums[index], self._dtypes[index]
        if grad.dtype.kind in "iub" and not grad.ndim:
            grad = np.asarray(float(grad))  # a number
        if not arrays.is_float(grad.dtype):
            raise InputError(
                f"Towers: the gradient '{name}' of tower {tower} is {grad.dtype.name}; only floats have a mean"
            )
        wide = arrays.accumulator(grad.dtype)
        added = np.asarray(np.multiply(grad, weight, dtype=wide))
        if before is None:
            self._sums[index], self._dtypes[index] = added, grad.dtype
        elif grad.shape != before.shape or grad.dtype != dtype:
            assert dtype is not None
            raise InputError(
                f"Towers: the gradient '{name}' is {arrays.describe(grad.shape, grad.dtype)} in tower {tower}, but "
                f"{arrays.describe(before.shape, dtype)} in those before; it has to be like its parameter in all"
            )
        else:
            np.add(before, added, out=before)

    def grads(self) -> Any:
        """The means."""
        means = [
            None if total is None else total.astype(dtype, copy=False)
            for total, dtype in zip(self._sums, self._dtypes, strict=True)
        ]
        return nest.rebuild(self._tree, means)


def _host(value: Any, what: str) -> Array:
    """As a numpy array, without a copy. Raises InputError, with `what` it is, if it cannot be one."""
    try:
        if hasattr(value, "detach"):  # a torch tensor
            array: Array = value.detach().numpy()
            return array
        return arrays.as_host_array(value)
    except (InputError, TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"Towers: {what}: {error}") from None


def _words(value: Any) -> str:
    kind = type(value).__name__
    return f"a {kind} of {len(value)}" if isinstance(value, (tuple, list)) else f"a {kind}"
