"""Errors of operations: of allred, of Horovod, and of the class that TensorFlow has for them.

So `except hvd.HorovodInternalError`, `except allred.MismatchError` and `except tf.errors.FailedPreconditionError` work.
"""

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from allred.horovod.horovod_errors import HorovodInputError, HorovodMismatchError, as_horovod_error


class TensorFlowMismatchError(HorovodMismatchError, tf.errors.FailedPreconditionError):
    """Ranks called different operations, or one operation with different tensors."""

    def __init__(self, text: str) -> None:
        tf.errors.FailedPreconditionError.__init__(self, None, None, text)


class TensorFlowInputError(HorovodInputError, tf.errors.InvalidArgumentError):
    """An argument of an operation cannot be used on some rank."""

    def __init__(self, text: str) -> None:
        tf.errors.InvalidArgumentError.__init__(self, None, None, text)


@contextlib.contextmanager
def as_tensorflow_error() -> Iterator[None]:
    """Raise an error of allred inside this block as an error of Horovod, which is one of TensorFlow where possible."""
    try:
        with as_horovod_error():
            yield
    except HorovodMismatchError as error:
        raise TensorFlowMismatchError(str(error)) from error.__cause__
    except HorovodInputError as error:
        raise TensorFlowInputError(str(error)) from error.__cause__
