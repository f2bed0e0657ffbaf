"""Functions that run at the end of this process, or at a failure of the job.

atexit runs them, except in a child of multiprocessing that was forked, by start method fork or forkserver: such a child
leaves by os._exit. There multiprocessing calls them as finalizers, when the target of the child has returned or raised.
"""

import atexit
import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

from allred.runtime.stderr import rank_warning

# After the finalizers of the program and of multiprocessing, such as one that sends the last objects of a queue.
_PRIORITY = -1000
_FORKING = ("multiprocessing.popen_fork", "multiprocessing.forkserver")

_for_failure: list[Callable[[], None]] = []
_finalizers: dict[Callable[..., object], Any] = {}  # by function


def top_frame(ident: int) -> Any:
    """Return the current frame of a thread of Python; None if there is none. ident: `threading.Thread.ident`.

    The garbage collector is disabled meanwhile. Before Python 3.11.9, sys._current_frames() holds a lock of the
    interpreter while it allocates. A collection there may let other threads run; one that ends needs the same lock, and
    the process hangs (https://github.com/python/cpython/issues/106883).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(ident)
    finally:
        if collects:
            gc.enable()


def is_forked_child() -> bool:
    """Return whether this process is a forked child of multiprocessing, which leaves by os._exit: its stack begins in
    these modules."""
    frame = top_frame(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_globals.get("__name__") in _FORKING:
            return True
        frame = frame.f_back
    return False


def register(function: Callable[..., object], *arguments: Any) -> None:
    """Call function(*arguments) at the end of this process, the last registered function first."""
    if is_forked_child():
        from multiprocessing.util import Finalize

        _finalizers[function] = Finalize(None, function, arguments, exitpriority=_PRIORITY)
    else:
        atexit.register(function, *arguments)


def register_for_failure(function: Callable[[], None]) -> None:
    """Call the function when the job fails, or when a wait of this rank has reached the time limit, before the rank
    raises the error: in the main thread or the thread that waits, possibly inside of a signal handler."""
    _for_failure.append(function)


def call_for_failure() -> None:
    """Call the functions of `register_for_failure`. An error of one is printed."""
    for function in _for_failure:
        try:
            function()
        except Exception as error:
            rank_warning(f"{error}")


def unregister(function: Callable[..., object]) -> None:
    """Undo `register`."""
    if (finalizer := _finalizers.pop(function, None)) is not None:
        finalizer.cancel()
    atexit.unregister(function)


def finish_forked_child() -> None:
    """Run the finalizers of multiprocessing that functions of `register` have made: they send what these functions have
    put into queues."""
    from multiprocessing import util

    if (run := getattr(util, "_run_finalizers", None)) is not None:
        run()


def call_after_target(function: Callable[[BaseException | None], object]) -> None:
    """In a child of multiprocessing, call function(error) after its target and before the functions of `register`.
    error: as `target_error` returns it. No effect in other processes."""
    if (multiprocessing := sys.modules.get("multiprocessing")) is not None and multiprocessing.parent_process():
        from multiprocessing.util import Finalize

        Finalize(None, lambda: function(target_error()), exitpriority=_PRIORITY + 1)


def target_error() -> BaseException | None:
    """Return the exception that the target of a child of multiprocessing has raised; None if it has returned, or
    outside of a finalizer."""
    error = sys.exc_info()[1]
    if error is None or error.__traceback__ is None:
        return None
    frame = error.__traceback__.tb_frame  # that catches it; another exception is handled where the child was forked
    caught_in = frame.f_globals.get("__name__"), frame.f_code.co_name
    return error if caught_in == ("multiprocessing.process", "_bootstrap") else None


def exit_code(error: BaseException | None) -> int:
    """Return the exit code, 0 to 255, of a child of multiprocessing whose target has raised `error`."""
    if not isinstance(error, SystemExit):
        return int(error is not None)
    return 0 if error.code is None else error.code & 0xFF if isinstance(error.code, int) else 1
