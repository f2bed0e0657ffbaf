"""Handles of started collectives: the integers that functions named ..._async return."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from allred.comm.communicator import Communicator
from allred.comm.work import Work
from allred.errors import InputError
from allred.torch.horovod.horovod_errors import as_horovod_error

_JOINED = "after hvd.join() of some ranks only allreduce and barrier are possible, as in Horovod"


class BlockingCall:
    """An operation that starts when the program waits for it, which is faster. ranks: as in Work."""

    def __init__(self, communicator: Communicator, call: Callable[[], Any]) -> None:
        self._communicator, self._call, self.ranks = communicator, call, 0

    def wait(self) -> Any:
        result = self._call()
        self.ranks = self._communicator.active.size
        return result

    def done(self) -> bool:
        return False


@dataclasses.dataclass
class Started:
    """One or several operations that were started by one call.

    title: the kind and the name of the call. size: the number of ranks of its communicator. finish: returns the
    result of the call from those of the operations and the number of ranks that took part. may_join: whether a rank
    that has joined may be missing.
    """

    title: str
    works: Sequence[Work[Any] | BlockingCall]
    size: int
    finish: Callable[[list[Any], int], Any]
    may_join: bool = False
    key: tuple[int, str] | None = None  # of a named operation, see `_names`

    def wait(self) -> Any:
        """Wait, and return the result."""
        with as_horovod_error():
            results = [work.wait() for work in self.works]
            active = self.works[-1].ranks if self.works else self.size
            if active < self.size and not self.may_join:
                raise InputError(f"{self.title}: {_JOINED}")
            return self.finish(results, active)


_numbers = itertools.count()
_started: dict[int, Started] = {}  # by handle
_names: set[tuple[int, str]] = set()  # (process set id, title) of the named operations that are not complete


def add(started: Started) -> int:
    """Return a new handle."""
    handle = next(_numbers)
    _started[handle] = started
    if started.key is not None:
        _names.add(started.key)
    return handle


def check_name(key: tuple[int, str]) -> None:
    """Raise ValueError if an operation of this title is not complete."""
    if key in _names:
        raise InputError(
            f"{key[1]}: an operation of this name was started before; call hvd.synchronize() with its handle, or give "
            "this one another name"
        )


def forget_all() -> None:
    """Forget all operations: those of a world that has ended."""
    _started.clear()
    _names.clear()


def poll(handle: int) -> bool:
    """Return whether an operation is complete: then `synchronize` does not wait.

    Raises ValueError if there is no such operation, or after `synchronize`.

    Example: `hvd.poll(hvd.allreduce_async(torch.ones(2)))`.
    """
    started = _started.get(handle)
    if started is None:
        raise InputError(f"poll({handle!r}): there is no such handle, or hvd.synchronize() was called with it")
    complete = all(work.done() for work in started.works)
    if complete and started.key is not None:
        _names.discard(started.key)
    return complete


def synchronize(handle: int) -> Any:
    """Wait for an operation, and return its result; None if `synchronize` was called with this handle before.

    Raises HorovodInternalError if the operation failed.

    Example: `mean = hvd.synchronize(hvd.allreduce_async(torch.ones(2)))`.
    """
    started = _started.pop(handle, None)
    if started is None:
        return None
    if started.key is not None:
        _names.discard(started.key)
    return started.wait()
