"""Functions that this process calls before its program ends: an open session writes its last checkpoint there.

Each is called once, with the exception that ends the program, or None. The first of these calls it:

    uncaught.py       an uncaught exception or sys.exit(), on several ranks: before the watcher hears of it
    allred.shutdown   with the exception that is being handled, if there is one
    atexit            every other end; the exception is known if Python has shown it
"""

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable

from allred.cluster import report
from allred.errors import AllredError
from allred.watch import line

End = Callable[[BaseException | None], None]

_ends: list[tuple[int, End]] = []  # with the process that registered it: a fork does not call it


def register(end: End) -> None:
    """Have `end` called. Only from the main thread: another thread's loop may still run when the program ends."""
    if threading.current_thread() is threading.main_thread():
        _ends.append((os.getpid(), end))
        atexit.unregister(_at_exit)  # called in reverse order: it has to come before those that init() registers
        atexit.register(_at_exit)


def unregister(end: End) -> None:
    """`end` is not called any more."""
    _ends[:] = [each for each in _ends if each[1] != end]


def call(error: BaseException | None) -> None:
    """Call the functions, the last one first. Raises what they raise."""
    while _ends:
        process, end = _ends.pop()
        if process == os.getpid():
            end(error)


def call_and_tell(error: BaseException | None) -> None:
    """Call the functions, and print what they raise: the program is at its end, so nobody can catch it."""
    while _ends:
        try:
            call(error)
        except AllredError as problem:
            if line.current is None or line.current.verdict is None:  # else the watcher tells it
                report.say_here(str(problem))
        except BaseException as problem:  # a hook of the user raised it, or Ctrl-C
            report.say_here("".join(traceback.format_exception(problem)).rstrip())


def _at_exit() -> None:
    shown = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)  # at a prompt it ended nothing
    call_and_tell(shown)
