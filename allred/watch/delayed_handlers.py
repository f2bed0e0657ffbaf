"""`delayed_handlers()`: the program's signal handlers run after a clean-up, not inside of it. A handler may raise an
exception, such as torch's for DataLoader workers that have died; the rest of the clean-up would be skipped.

Ctrl-C with Python's own handler is not delayed, so a clean-up that waits can be interrupted. Handlers of allred are not
either: they only note that the signal came.
"""

import contextlib
import signal
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def delayed_handlers(run_after: bool = True) -> Iterator[None]:
    """Delay Python signal handlers of the program. No effect outside of the main thread, where no handler runs.

    run_after: whether to run the handlers of the signals that came, once each, after the body. Raises what they raise.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: dict[int, None] = {}  # in order

    def note(number: int, frame: types.FrameType | None) -> None:
        came[number] = None

    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in signal.valid_signals()}
    delayed = {number: handler for number, handler in handlers.items() if _delays(handler)}
    for number in delayed:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in delayed.items():
            if signal.getsignal(number) is note:
                signal.signal(number, handler)
        if run_after:
            _run([(number, delayed[number]) for number in came])


def _delays(handler: Any) -> bool:
    module = str(getattr(handler, "__module__", ""))
    return callable(handler) and handler is not signal.default_int_handler and not module.startswith("allred.")


def _run(handlers: list[tuple[int, Callable[..., Any]]]) -> None:
    """Run all handlers. Raises the exception of the first that raises one."""
    for index, (number, handler) in enumerate(handlers, 1):
        try:
            handler(number, None)
        except BaseException:
            _run(handlers[index:])
            raise
