"""The arguments of a table of embeddings: checked on every rank, and equal on all."""

import contextlib
import dataclasses
import functools
import pickle
from typing import Any

import numpy as np

from allred.errors import InputError
from allred.optim.base import Optimizer
from allred.validators import integer

_LARGEST_DIM = 2**17  # a float32 vector fits into a cell of the parameter servers
_RULES = "SGD, Adagrad, RMSProp, Adam and AdamW"


@dataclasses.dataclass(frozen=True)
class Uniform:
    """First values of the vectors of a table: uniform from `low` to `high`.

    >>> Uniform(-0.05, 0.05)
    Uniform(low=-0.05, high=0.05)
    """

    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Normal:
    """First values of the vectors of a table: normal, with this mean and standard deviation.

    >>> Normal(std=0.01)
    Normal(mean=0.0, std=0.01)
    """

    mean: float = 0.0
    std: float = 1.0


@dataclasses.dataclass(frozen=True)
class TableForm:
    """The arguments of `allred.Embedding`, checked. Raises InputError."""

    name: str
    dim: int
    rows: int | None
    init: float | Uniform | Normal
    optimizer: Optimizer
    dtype: np.dtype[Any]
    seed: int
    admit_after: int
    expire_after: int | None
    full_every: int

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name):
            raise InputError(f"allred.Embedding: name={self.name!r} must be a string that is not empty")
        self._replace("dim", integer(self._of("dim"), self.dim, 1, "it counts the numbers of a vector"))
        if self.dim > _LARGEST_DIM:
            raise InputError(f"{self._of('dim')} must be at most {_LARGEST_DIM}, but is {self.dim}")
        if self.rows is not None:
            self._replace("rows", integer(self._of("rows"), self.rows, 1, "None makes rows for all ids"))
        with contextlib.suppress(TypeError):
            self._replace("dtype", np.dtype(self.dtype))
        if self.dtype not in (np.dtype(np.float32), np.dtype(np.float16)):
            raise InputError(f"{self._of('dtype')} must be float32 or float16, but is {self.dtype!r:.80}")
        self._replace("init", self._checked_init())
        self._replace("seed", integer(self._of("seed"), self.seed, 0) % 2**64)
        self._replace("admit_after", integer(self._of("admit_after"), self.admit_after, 1, "it counts lookups"))
        if self.admit_after >= 2**32:
            raise InputError(f"{self._of('admit_after')} must be less than 2**32, but is {self.admit_after}")
        if self.expire_after is not None:
            self._replace("expire_after", integer(self._of("expire_after"), self.expire_after, 1, "it counts steps"))
        self._replace("full_every", integer(self._of("full_every"), self.full_every, 1, "it counts checkpoints"))
        given = self.optimizer
        if not isinstance(given, Optimizer) or given.kernel(0.1, 1) is None:
            raise InputError(
                f"{self._of('optimizer')} must be one of {_RULES} of allred.optim, but is {given!r:.80}; others have "
                "no update of single rows"
            )

    def check_pickled(self) -> "TableForm":
        """Return the form. Raises InputError if it cannot be sent to parameter servers."""
        try:
            pickle.dumps(self)
        except Exception as error:  # any error of an object of the user
            raise InputError(
                f"{self._of('optimizer')} cannot be sent to the servers ({type(error).__name__}: {error}); use a "
                "schedule of allred.optim, or a function of a module"
            ) from error
        return self

    def _of(self, argument: str) -> str:
        return f"allred.Embedding {self.name!r}: {argument}"

    def _replace(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _checked_init(self) -> float | Uniform | Normal:
        given = self.init
        numbers = dataclasses.astuple(given) if isinstance(given, Uniform | Normal) else (given,)
        try:
            with np.errstate(over="ignore"):
                values = [self.dtype.type(number) for number in numbers if not isinstance(number, bool)]
        except (TypeError, ValueError):
            values = []
        if len(values) != len(numbers) or not np.isfinite(values).all():
            raise InputError(
                f"{self._of('init')} must be a number, allred.embeddings.Uniform(low, high) or "
                f"allred.embeddings.Normal(mean, std), of numbers that are finite in {self.dtype}, but is {given!r}"
            )
        if isinstance(given, Uniform) and not given.low <= given.high:
            raise InputError(f"{self._of('init')}: low must not be above high, but is {given}")
        if isinstance(given, Uniform) and not given.high - given.low <= np.finfo(np.float32).max:
            raise InputError(f"{self._of('init')}: high - low must be finite in float32, but is {given}")
        if isinstance(given, Normal) and given.std < 0:
            raise InputError(f"{self._of('init')}: std must be >= 0, but is {given}")
        return given

    @functools.cached_property
    def text(self) -> str:
        """A description of all that must be equal on all ranks."""
        rows = "any id" if self.rows is None else f"ids below {self.rows}"
        hyper = {key: value for key, value in self.optimizer.hyperparameters().items() if key != "lr"}
        return (
            f"table {self.name!r}: dim={self.dim}, {rows}, {self.dtype}, init={self.init!r}, seed={self.seed}, "
            f"admit_after={self.admit_after}, expire_after={self.expire_after}, {self.optimizer.kind}{hyper!r}"
        )
