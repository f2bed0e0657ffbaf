"""The learning rate that a program changes by hand on its optimizer: in mode ps it goes to the servers with a step."""

import math
import numbers
from typing import Any

from allred.errors import InputError
from allred.optim.base import Optimizer
from allred.validators import non_negative


class LearningRate:
    """Of one optimizer. A schedule is not sent: the servers have it, for it was given when theirs were made."""

    def __init__(self, optimizer: Any, title: str) -> None:
        self._optimizer, self._title = optimizer, title
        self._given = self._seen = getattr(optimizer, "lr", None)
        self._number = math.nan
        self._number = self._look(self._given)

    def now(self) -> float:
        """The number to send; NaN where there is none. Raises InputError for what cannot be a learning rate."""
        value = getattr(self._optimizer, "lr", None)
        if value is not self._seen:
            self._number = self._look(value)
            self._seen = value
        return self._number

    def _look(self, value: Any) -> float:
        if not isinstance(self._optimizer, Optimizer):  # its lr may be anything, for example a scheduler's own
            untouched = value is self._given
            return float(value) if isinstance(value, numbers.Real) and not untouched else math.nan
        if not callable(value):
            return non_negative(self._title, "lr", value)
        if value is not self._given or not math.isnan(self._number):
            raise InputError(
                f"{self._title}: lr was changed to a schedule, and the servers do not hear of it; give schedules when "
                "the optimizer is made, and assign numbers"
            )
        return math.nan
