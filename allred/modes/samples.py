"""How many samples the gradients of a step stand for: as its first reduce() says, or step()."""

import operator
from typing import Any

from allred.data.iterations import claim_samples
from allred.errors import InputError


class Samples:
    """Of one optimizer. Without a number from the program it is the share of the batch at hand (data/iterations.py)."""

    def __init__(self) -> None:
        self._claimed: tuple[int | None, str] | None = None  # by reduce(), for the next step; or why they are not known

    def of_reduce(self, samples: Any) -> int | None:
        """In the first call for a step they count; what is wrong with them `of_step` says."""
        if self._claimed is None:
            try:
                self._claimed = _claim(samples), ""
            except InputError as error:
                self._claimed = None, str(error)
        return self._claimed[0]

    def of_step(self, samples: Any) -> int | None:
        """Those of the step that ends. Raises InputError."""
        claimed, self._claimed = self._claimed, None
        if claimed is None:
            return _claim(samples)
        if claimed[1]:
            raise InputError(claimed[1])
        if samples is not None and _whole(samples) != claimed[0]:
            raise InputError(f"samples={samples!r} in step(), but {claimed[0]!r} in the first reduce(); give it there")
        return claimed[0]


def _claim(samples: Any) -> int | None:
    return claim_samples(None if samples is None else _whole(samples))


def _whole(samples: Any) -> int:
    try:
        number = operator.index(samples)
    except TypeError:
        number = -1
    if number < 0:
        raise InputError(f"samples={samples!r} must be a whole number of at least 0")
    return number
