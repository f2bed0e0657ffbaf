"""Callbacks that run before the program ends. An open session registers one, which writes its last checkpoint.

Each callback runs once. Its argument is the exception that ends the program, or None. The first of these runs it:

    excepthook.py     an uncaught exception or sys.exit(), with several ranks: before the report to the watcher
    allred.shutdown   the argument is the exception that is being handled, if there is one
    process_end.py    every other end; the argument is the exception that Python has printed, if there is one

`delayed_handlers()`: the program's signal handlers run after a clean-up, not inside of it. A handler may raise an
exception, such as torch's for DataLoader workers that have died; the rest of the clean-up would be skipped. Ctrl-C with
Python's own handler is not delayed, so a clean-up that waits can be interrupted. Handlers of allred are not either:
they only note that the signal came.
"""

import contextlib
import os
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

from allred import log, world
from allred.errors import AllredError
from allred.runtime import process_end

Callback = Callable[[BaseException | None], None]

_callbacks: list[tuple[int, Callback]] = []  # with the process that registered it: a forked process does not run it


def register(callback: Callback, any_thread: bool = False) -> None:
    """Register a callback. No effect outside the main thread without `any_thread`: the loop of another thread may run
    on at the end."""
    if any_thread or threading.current_thread() is threading.main_thread():
        _callbacks.append((os.getpid(), callback))
        process_end.unregister(_at_exit)  # in reverse order, so these run before the functions of init()
        process_end.register(_at_exit)


def unregister(callback: Callback) -> None:
    _callbacks[:] = [each for each in _callbacks if each[1] != callback]


def call(error: BaseException | None) -> None:
    """Run the callbacks in reverse order. Raises what they raise."""
    while _callbacks:
        process, callback = _callbacks.pop()
        if process == os.getpid():
            callback(error)


def call_and_print(error: BaseException | None) -> None:
    """Run the callbacks, and print their errors: at the end of the program no caller can catch them."""
    while _callbacks:
        try:
            call(error)
        except AllredError as problem:
            if (watcher := world.watcher()) is None or watcher.verdict is None:  # else the watcher reports it
                log.rank_warning(str(problem))
        except BaseException as problem:  # a hook of the user raised it, or Ctrl-C
            log.rank_warning("".join(traceback.format_exception(problem)).rstrip())


def _at_exit() -> None:
    at_prompt = hasattr(sys, "ps1")  # there an exception does not end the program
    call_and_print(process_end.target_error() or (None if at_prompt else getattr(sys, "last_value", None)))


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
