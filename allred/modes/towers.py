"""`Towers`: computes the gradients of a batch in several threads of one process, one part of the batch in each.

All towers share the parameters, and their gradients are averaged. Towers know no ranks and no optimizer: the result is
the gradients of one rank, for the `step` of any optimizer. threadpoolctl limits BLAS threads while towers run
(`BlasLimit`): towers x BLAS threads <= cores of this rank.
"""

import contextlib
import contextvars
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import numpy as np

from allred import arrays, nest
from allred.arrays import Array
from allred.cluster import processors
from allred.errors import InputError
from allred.gpu.device_arrays import compute
from allred.validators import integer


class Towers:
    """Computes loss and gradients of a batch in several towers at the same time.

        towers = allred.Towers(2, loss_and_grads)
        loss, grads = towers(params, x, y)
        opt.step(params, grads)

    Every tower calls `loss_and_grads(params, *part)` for its part of the batch, which returns `(loss, grads)`. With n_i
    samples in part i, and n in total, the result is

        loss = sum_i n_i / n * loss_i,   grads = sum_i n_i / n * grads_i

    These are the values of the whole batch if the function returns means over independent samples (in batch
    normalisation, samples are not independent). A term of the loss that depends on the parameters only, such as an L2
    penalty, is in the loss of each tower, and so counts once in the mean. The sum is formed in the order of the towers:
    the same bits in every call, with or without threads; 16-bit floats in float32.

    Several ranks may each have towers: the optimizer of `allred.distributed` averages over ranks, weighted by the
    samples of their shares of `allred.data.batches`.

    Arguments:
        count: the number of towers. If a batch has fewer samples, the last towers are not used.
        loss_and_grads: a function that only reads what towers share: it does not write to the parameters, and in torch
            it uses `torch.autograd.grad` instead of `backward()`. It must not call collectives of allred, which allow
            one thread only. Its loss is a number, its gradients a nest of float arrays, torch tensors (CPU) or numbers.
        parallel: run each tower in a thread, which is kept until this object is freed; else run one after the other.
            A call limits the BLAS threads of the process to the cores of this rank divided by `count`, and restores
            their number at its end. torch has its own threads: see torch.set_num_threads.

    >>> def loss_and_grads(params, x):
    ...     return (params["w"] * x).mean(), {"w": x.mean()}
    >>> Towers(2, loss_and_grads)({"w": np.array(2.0)}, np.array([1.0, 2.0, 6.0]))
    (6.0, {'w': array(3.)})
    """

    def __init__(self, count: int, loss_and_grads: Callable[..., Any], parallel: bool = True) -> None:
        self.count = integer("Towers: count", count, 1, "it is the number of towers")
        if not callable(loss_and_grads):
            raise InputError(f"Towers: loss_and_grads={loss_and_grads!r} is not a function")
        self._function = loss_and_grads
        self._threads = None
        if parallel and self.count > 1:  # a thread starts with its first part
            self._blas = BlasLimit(self.count)
            self._threads = futures.ThreadPoolExecutor(self.count, "allred-tower", self._blas.start_thread)

    def __call__(self, params: Any, *batch: Any) -> tuple[float, Any]:
        """Split the batch into parts whose sizes differ by at most one sample; return the loss and the gradients.

        Arguments:
            params: passed to each tower unchanged.
            batch: arrays or torch tensors with equal first dimensions; each tower gets a slice of each. A batch without
                samples goes to tower 0, because a rank without samples makes the step too.

        Returns:
            The loss, a float, and the gradients: the nest that the towers return, with new numpy arrays of the same
            dtypes, 0-d for numbers. None counts as zeros, and stays None if all towers return it.

        Raises:
            InputError: the batch cannot be split, or the results cannot be averaged.
            The exception of the first tower that failed, with a note that names the tower and its samples.
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
        """Run the towers in threads and wait for all. Each gets a copy of the context of the caller (np.errstate). An
        exception from a signal handler (Ctrl-C, the failure of another rank) does not wait for them."""
        if self._threads is None or len(parts) == 1:
            return []
        with self._blas():
            running = [
                self._threads.submit(contextvars.copy_context().run, self._function, params, *part) for part in parts
            ]
            futures.wait(running)
        return running


def _rows_of(batch: tuple[Any, ...]) -> int:
    if not batch:
        raise InputError("Towers: call it with a batch: towers(params, x, ...)")
    if odd := [value for value in batch if not getattr(value, "shape", ())]:
        raise InputError(
            f"Towers: a batch consists of arrays or tensors with a first dimension to split, but here is "
            f"{_describe(odd[0])}; pass values that all towers need unsplit in params, or use them in the function"
        )
    rows = [len(value) for value in batch]
    if len(set(rows)) > 1:
        raise InputError(f"Towers: the arrays of a batch must have equal first dimensions, got {rows}")
    return rows[0]


class _Mean:
    """The weighted mean of the results of the towers, summed in the order of `add`."""

    def __init__(self) -> None:
        self.loss = 0.0
        self._tree: Any = None  # the gradients of tower 0
        self._names: list[str] = []
        self._sums: list[Array | None] = []
        self._dtypes: list[np.dtype[Any] | None] = []

    def add(self, tower: int, result: Any, weight: float) -> None:
        """Add the result of a tower. The weights of all towers add up to 1."""
        if not isinstance(result, tuple) or len(result) != 2:
            raise InputError(f"Towers: tower {tower} returned {_describe(result)}; expected a tuple (loss, grads)")
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
                self._add(index, _host(value, f"the gradient of {nest.quoted(name)} of tower {tower}"), tower, weight)

    def _add(self, index: int, grad: Array, tower: int, weight: float) -> None:
        name, before, dtype = self._names[index], self._sums[index], self._dtypes[index]
        if grad.dtype.kind in "iub" and not grad.ndim:
            grad = np.asarray(float(grad))  # a number
        if not arrays.is_inexact(grad.dtype):
            raise InputError(
                f"Towers: the gradient of {nest.quoted(name)} of tower {tower} is {grad.dtype.name}; only floats "
                "have a mean"
            )
        wide = arrays.accumulator(grad.dtype)
        added = compute(np.multiply, grad, weight, wide=wide)
        if before is None:
            self._sums[index], self._dtypes[index] = added, grad.dtype
        elif grad.shape != before.shape or grad.dtype != dtype:
            assert dtype is not None
            raise InputError(
                f"Towers: the gradient of {nest.quoted(name)} is {arrays.describe(grad.shape, grad.dtype)} in tower "
                f"{tower}, but {arrays.describe(before.shape, dtype)} in those before; it has to be like its parameter "
                "in all"
            )
        else:
            np.add(before, added, out=before)

    def grads(self) -> Any:
        means = [
            None if total is None else total.astype(dtype, copy=False)
            for total, dtype in zip(self._sums, self._dtypes, strict=True)
        ]
        return nest.rebuild(self._tree, means)


def _host(value: Any, what: str) -> Array:
    """Return a value as a numpy array without a copy. Raises InputError; what: description of the value."""
    try:
        if hasattr(value, "detach"):  # a torch tensor
            array: Array = value.detach().numpy()
            return array
        return arrays.as_host_array(value)
    except (InputError, TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"Towers: {what}: {error}") from None


def _describe(value: Any) -> str:
    kind = type(value).__name__
    return f"a {kind} of {len(value)}" if isinstance(value, (tuple, list)) else f"a {kind}"


_limiting = threading.Lock()


class BlasLimit:
    """The BLAS limit of one `Towers` object. The first use searches for the BLAS libraries."""

    def __init__(self, towers: int) -> None:
        self._towers = towers

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Lower the number of BLAS threads to the share of one tower, and restore it at the end of the block.

        The limit holds for the whole process. A block inside another one, or in another thread meanwhile, changes
        nothing: the first block restores the number.
        """
        if not _limiting.acquire(blocking=False):
            yield
        else:
            try:
                with self._lower("blas"):
                    yield
            finally:
                _limiting.release()

    def start_thread(self) -> None:
        """Limit OpenMP in this thread of a tower: OpenMP has a number of threads for each thread that calls it."""
        self._lower("openmp")

    @functools.cached_property
    def _controller(self) -> Any:
        import threadpoolctl

        return threadpoolctl.ThreadpoolController()

    @functools.cached_property
    def _share(self) -> int:
        return max(1, processors.cores_per_rank() // self._towers)

    def _lower(self, kind: str) -> Any:
        libraries = self._controller.select(user_api=kind)
        limits = [{**each, "num_threads": min(each["num_threads"], self._share)} for each in libraries.info()]
        return libraries.limit(limits=limits)
