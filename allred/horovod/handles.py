"""Handles of started collectives: the integers that functions named ..._async return."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from allred.comm.communicator import Communicator
from allred.comm.work import Work
from allred.errors import InputError
from allred.horovod.horovod_errors import as_horovod_error

JOINED = "a rank has called hvd.join(); until all have, only allreduce and barrier are available"


class DeferredCall:
    """A deferred blocking call: it runs in wait(), without a Work, which is faster. ranks: as in Work."""

    def __init__(self, communicator: Communicator, call: Callable[[], Any]) -> None:
        self._communicator, self._call, self.ranks, self._has_run = communicator, call, 0, False

    def wait(self) -> Any:
        self._has_run = True
        result = self._call()
        self.ranks = self._communicator.active.size
        return result

    def done(self) -> bool:
        return self._has_run


@dataclasses.dataclass
class AsyncCall:
    """The operations that were started by one call.

    title: the kind and the name of the call. size: the number of ranks of its communicator. finish: returns the
    result of the call from those of the operations and the number of ranks that took part. allows_joined: whether it
    is available while some ranks have joined.
    """

    title: str
    works: Sequence[Work[Any] | DeferredCall]
    size: int
    finish: Callable[[list[Any], int], Any]
    allows_joined: bool = False

    def wait(self) -> Any:
        """Wait, and return the result."""
        with as_horovod_error():
            results = [work.wait() for work in self.works]
            active = self.works[-1].ranks if self.works else self.size
            if active < self.size and not self.allows_joined:
                raise InputError(f"{self.title}: {JOINED}")
            return self.finish(results, active)

    def done(self) -> bool:
        """Return whether all operations are complete; does not wait."""
        return all(work.done() for work in self.works)


_numbers = itertools.count()
_calls: dict[int, AsyncCall] = {}  # by handle
_named: dict[tuple[int, str], AsyncCall] = {}  # the last call of each process set id and title


def add(call: AsyncCall, key: tuple[int, str] | None) -> int:
    """Return a new handle. key: the process set id and the title of a named operation."""
    handle = next(_numbers)
    _calls[handle] = call
    if key is not None:
        _named[key] = call
    return handle


def check_name(key: tuple[int, str]) -> None:
    """Raise ValueError if the last operation of this name is not complete."""
    if (call := _named.pop(key, None)) is not None and not call.done():
        _named[key] = call
        raise InputError(
            f"{key[1]}: an operation of this name is still in progress; call hvd.synchronize() with its handle, or "
            "give this one another name"
        )


def forget_all() -> None:
    """Forget all operations, such as those of a world that has ended."""
    _calls.clear()
    _named.clear()


def poll(handle: int) -> bool:
    """Return whether an operation is complete: then `synchronize` does not wait.

    Raises ValueError if there is no such operation, or after `synchronize`.

    Example: `hvd.poll(hvd.allreduce_async(torch.ones(2)))`.
    """
    call = _calls.get(handle)
    if call is None:
        raise InputError(f"poll({handle!r}): there is no such handle, or hvd.synchronize() was called with it")
    return call.done()


def synchronize(handle: int) -> Any:
    """Wait for an operation, and return its result; None if `synchronize` was called with this handle before.

    Raises HorovodInternalError if the operation failed.

    Example: `mean = hvd.synchronize(hvd.allreduce_async(torch.ones(2)))`.
    """
    call = _calls.pop(handle, None)
    try:
        return None if call is None else call.wait()
    except BaseException:
        _named.clear()  # the program may repeat operations whose first attempt it does not wait for
        raise


def synchronize_all(started: Iterable[int]) -> list[Any]:
    """Wait for all operations, and return their results. Then raise the first error, if any failed."""
    results, errors = [], []
    for handle in started:
        try:
            results.append(synchronize(handle))
        except RuntimeError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return results
