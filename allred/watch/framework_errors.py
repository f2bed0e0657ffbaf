"""Errors of allred that a framework has reported as errors of its own."""

import contextlib
from collections.abc import Iterator

from allred.watch import excepthook


@contextlib.contextmanager
def raise_allred_errors() -> Iterator[None]:
    """Inside this block functions that TensorFlow or JAX has compiled raise errors of allred, such as
    `allred.MismatchError`. Without it they raise errors of the framework with the same text. Ctrl-C in a wait is
    KeyboardInterrupt.

        with allred.keras.raise_allred_errors():
            model.fit(x, y)

    Outside of compiled functions it is not needed. A script that ends with such an error prints allred's.
    """
    try:
        yield
    except Exception as error:
        if (own := original(error)) is error:
            raise
        raise own from None


def original(error: BaseException) -> BaseException:
    """Return the exception that a framework has reported with `error`, or `error` itself."""
    for original_of in excepthook.originals:
        error = original_of(error)
    return error
