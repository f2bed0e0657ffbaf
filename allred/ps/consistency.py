"""Consistency policies: which gradients a parameter server applies, and how far apart the workers may be.

    Async()                       each gradient is applied when it arrives; no worker waits
    Bounded(staleness=4)          as Async, but no worker runs more than 4 clocks ahead of the slowest
    Sync()                        a step is the mean of one gradient of every live worker
    Sync(replicas_to_aggregate=3) a step is the mean of the first 3 fresh gradients: with 4 workers there is one backup
                                  worker, and the last gradient of each step is dropped

A policy is a record. Its coordinator on server 0 decides (coordinator.py).
"""

import dataclasses
import operator
from typing import Any

from allred.errors import InputError
from allred.ps.coordinator import AsyncCoordinator, BoundedCoordinator, Coordinator, SyncCoordinator


@dataclasses.dataclass(frozen=True)
class Async:
    """Asynchronous updates: each gradient is applied when it arrives, with any staleness; no worker waits.

    >>> Async().describe()
    'async: each gradient is applied when it arrives'
    """

    def describe(self) -> str:
        """Return a description for the banner."""
        return "async: each gradient is applied when it arrives"

    def coordinator(self, workers: int) -> Coordinator:
        """Return the coordinator. Raises InputError for less than 1 worker."""
        return AsyncCoordinator(_workers(workers))


@dataclasses.dataclass(frozen=True)
class Bounded:
    """Bounded staleness: no worker starts a step while it is more than `staleness` clocks ahead of the slowest.

    staleness: an integer >= 0, in clocks; the clock of a worker is the number of its gradients that were applied. 0 is
    bulk synchronous: all workers start a step together, from the same parameters. Raises InputError.

    >>> Bounded(staleness=4).describe()
    'bounded staleness: no worker runs more than 4 clocks ahead of the slowest'
    """

    staleness: int = 4

    def __post_init__(self) -> None:
        remedy = "0 keeps all workers together, and Async() has no bound"
        _keep(self, "staleness", _whole("Bounded: staleness", self.staleness, 0, remedy))

    def describe(self) -> str:
        """Return a description for the banner."""
        clocks = "1 clock" if self.staleness == 1 else f"{self.staleness} clocks"
        return f"bounded staleness: no worker runs more than {clocks} ahead of the slowest"

    def coordinator(self, workers: int) -> Coordinator:
        """Return the coordinator. Raises InputError for less than 1 worker."""
        return BoundedCoordinator(_workers(workers), self.staleness)


@dataclasses.dataclass(frozen=True)
class Sync:
    """Synchronous steps: a step is the mean of several fresh gradients; late ones are dropped and counted.

    replicas_to_aggregate: number of gradients in a step, an integer >= 1. Fewer than the workers: the others are backup
    workers. More: workers give several. None: one gradient of every worker that has not left.
    total_num_replicas: number of workers, as in TensorFlow; None: any.
    Raises InputError.

    >>> Sync(replicas_to_aggregate=3, total_num_replicas=4).describe()
    'sync: a step is the mean of the first 3 fresh gradients, later ones are dropped; 4 workers, 1 of them backup'
    """

    replicas_to_aggregate: int | None = None
    total_num_replicas: int | None = None

    def __post_init__(self) -> None:
        for field, meaning in (
            ("replicas_to_aggregate", "one gradient of every worker"),
            ("total_num_replicas", "any"),
        ):
            value = getattr(self, field)
            if value is not None:
                _keep(self, field, _whole(f"Sync: {field}", value, 1, f"None means {meaning}"))

    def describe(self) -> str:
        """Return a description for the banner."""
        needed, total = self.replicas_to_aggregate, self.total_num_replicas
        text = "sync: a step is the mean of "
        text += (
            "one gradient of every live worker"
            if needed is None
            else f"the first {needed} fresh gradient{'s' * (needed > 1)}, later ones are dropped"
        )
        if total is not None:
            text += f"; {total} worker{'s' * (total > 1)}"
            if needed is not None and needed < total:
                text += f", {total - needed} of them backup"
            elif needed is not None and needed > total:
                text += ", several gradients of each"
        return text

    def coordinator(self, workers: int) -> Coordinator:
        """Return the coordinator. Raises InputError for less than 1 worker, or if not `total_num_replicas`."""
        if self.total_num_replicas not in (None, _workers(workers)):
            raise InputError(
                f"Sync: total_num_replicas is {self.total_num_replicas}, but the number of workers is {workers}; "
                f"leave it out, or start {self.total_num_replicas} workers"
            )
        return SyncCoordinator(workers, self.replicas_to_aggregate)


Policy = Async | Bounded | Sync


def _workers(count: int) -> int:
    if count < 1:
        raise InputError(f"a parameter server needs at least 1 worker, but has {count}; start more ranks")
    return count


def _whole(name: str, value: Any, least: int, remedy: str) -> int:
    """Return `value` as an int. Raises InputError unless it is an integer >= `least`."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise InputError(f"{name} must be an integer >= {least}, but is {value!r}; {remedy}")
    return number


def _keep(policy: Any, field: str, number: int) -> None:
    """Replace a field by a plain int; the user may have passed a numpy integer."""
    object.__setattr__(policy, field, number)
