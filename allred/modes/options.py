"""What `allred.distributed` was given for mode ps, and what serves by it."""

import dataclasses
import pickle
from typing import Any

from allred.errors import InputError
from allred.optim.base import Optimizer
from allred.ps.consistency import Async, Bounded, Policy, Sync
from allred.ps.placement import How
from allred.ps.shard import locks

_POLICIES = ("async", "bounded", "sync")  # as settings call them


@dataclasses.dataclass(frozen=True)
class Options:
    """See `allred.distributed`; None: as in the settings."""

    name: str
    nonfinite: str | None = None
    consistency: Policy | str | None = None
    placement: How | None = None
    use_locking: bool | None = None

    def __post_init__(self) -> None:
        given = self.consistency
        if not (given is None or isinstance(given, Policy) or given in _POLICIES):
            raise InputError(
                f"consistency={given!r} must be allred.ps.Async(), allred.ps.Bounded(staleness=...), "
                f"allred.ps.Sync(...), or one of the words {', '.join(_POLICIES)}"
            )

    def policy(self, settings: Any) -> Policy:
        """The consistency policy in force."""
        given = settings.consistency if self.consistency is None else self.consistency
        if isinstance(given, Policy):
            return given
        if given == "bounded":
            return Bounded(settings.staleness)
        return Async() if given == "async" else Sync(settings.replicas_to_aggregate or None)

    def asks_to_lock(self, settings: Any) -> bool:
        """What the user wants: that requests are served one by one."""
        return bool(settings.use_locking if self.use_locking is None else self.use_locking)

    def locks(self, optimizer: Any, settings: Any) -> bool:
        """Whether requests are served one by one."""
        return locks(self.asks_to_lock(settings), self.policy(settings), optimizer)

    def agreement(self, optimizer: Any, settings: Any) -> str:
        """What has to be the same on all ranks, in words. The learning rate need not: worker 0's holds."""
        return f"{_words(optimizer)}, {self.policy(settings)}, use_locking={self.locks(optimizer, settings)}"

    def describe(self, optimizer: Any) -> bytes | str:
        """For a server that has no optimizer of its own: these options and the optimizer; or why that cannot be."""
        try:
            return pickle.dumps((dataclasses.replace(self, placement=None), optimizer))
        except Exception as error:  # whatever a class of the user's raises
            return f"{type(optimizer).__name__} cannot be pickled ({type(error).__name__}: {error})"


def _words(optimizer: Any) -> str:
    """An optimizer's class; of one of allred.optim the numbers that it was made with, too."""
    numbers = {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, (bool, int, float)) and name not in ("lr", "global_step") and name[0] != "_"
    } if isinstance(optimizer, Optimizer) else {}  # fmt: skip
    return f"{type(optimizer).__name__}({', '.join(f'{name}={value}' for name, value in numbers.items())})"
