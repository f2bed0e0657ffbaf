"""Horovod's exceptions.

Each error is an instance of HorovodInternalError and of allred's class, such as MismatchError. So `except
hvd.HorovodInternalError`, `except ValueError` and `except allred.MismatchError` of programs work.
"""

import contextlib
from collections.abc import Iterator

from allred.errors import AllredError, InputError, MismatchError


class HorovodInternalError(AllredError, RuntimeError):
    """A collective operation failed. The text is that of allred's error, which is the cause of this one."""


class HorovodMismatchError(HorovodInternalError, MismatchError):
    """Ranks called different operations, or one operation with different tensors."""


class HorovodInputError(HorovodInternalError, InputError):
    """An argument of an operation cannot be used on some rank."""


class HorovodNotInitializedError(AllredError, ValueError):
    """A call needs the ranks, but `hvd.init()` was not called. Horovod raises a ValueError, not a RuntimeError."""


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818  (Horovod's name)
    """The hosts of an elastic job have changed. skip_sync: True if state.sync() is not needed before the
    next call."""

    def __init__(self, skip_sync: bool) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


@contextlib.contextmanager
def as_horovod_error() -> Iterator[None]:
    """Raise an error of allred inside this block as a HorovodInternalError."""
    try:
        yield
    except (HorovodInternalError, HorovodNotInitializedError):
        raise
    except MismatchError as error:
        raise HorovodMismatchError(str(error)) from error
    except InputError as error:
        raise HorovodInputError(str(error)) from error
    except AllredError as error:
        raise HorovodInternalError(str(error)) from error
