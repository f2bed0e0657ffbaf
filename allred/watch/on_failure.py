"""Functions that a rank calls when the job fails, or when one of its waits has reached the time limit, before it raises
the error. They run in the main thread or in the thread that waits, possibly inside a signal handler."""

from collections.abc import Callable

from allred.runtime.stderr import rank_warning

_functions: list[Callable[[], None]] = []


def register(function: Callable[[], None]) -> None:
    """Register a function. It stays registered until the process ends."""
    _functions.append(function)


def call() -> None:
    """Call the functions. An error of one is printed."""
    for function in _functions:
        try:
            function()
        except Exception as error:
            rank_warning(f"{error}")
