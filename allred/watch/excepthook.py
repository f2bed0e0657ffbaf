"""sys.excepthook and sys.exit of a rank: report an uncaught exception, Ctrl-C and sys.exit(n) to the watcher.

An explicit `raise SystemExit(n)` is not seen here; libc's exit() sees it (csrc/exit.h).

A failed rank reports to its watcher first and prints its traceback last, after the other ranks have unwound. These do
not print the traceback of the verdict, which would repeat it.
"""

import contextlib
import functools
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any

from allred import world
from allred.watch import exit_callbacks

_STATUS: dict[Any, int] = {KeyboardInterrupt: 130}  # by exception; 1 for any other

_end_soon: Callable[[int], None] | None = None
_status = 0


def watch(end_soon: Callable[[int], None]) -> None:
    """Install the hooks. They call `end_soon` with the exit status when the program is about to end."""
    global _end_soon
    first, _end_soon = _end_soon is None, end_soon
    if not first:
        return
    original_hook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        if (watcher := world.watcher()) is not None:
            watcher.is_exiting = True
        ends = _called_by_the_interpreter() and not hasattr(sys, "ps1")  # a prompt continues
        shown = not ends
        if ends:
            exit_callbacks.call_and_print(error)
        try:
            shown = shown or _report(kind, error, trace)
        finally:
            try:
                if shown:
                    original_hook(kind, error, trace)
            finally:
                if watcher is not None:
                    watcher.is_exiting = ends
                if ends:
                    _end_with(_STATUS.get(kind, 1))

    @functools.wraps(sys.exit)
    def leave(status: Any = None, /) -> None:
        if isinstance(status, SystemExit):
            raise status
        raise (_Exit if threading.current_thread() is threading.main_thread() else SystemExit)(status)

    sys.excepthook = hook
    sys.exit = leave  # type: ignore[assignment]


def status_at_exit() -> int:
    """Return the exit status that Python shows."""
    error = getattr(sys, "last_type", None)  # set if an exception ended the main program, with any hooks
    return _status or (_STATUS.get(error, 1) if error is not None and _end_soon is not None else 0)


def interrupted() -> bool:
    """Whether Ctrl-C ends the program."""
    return getattr(sys, "last_type", None) is KeyboardInterrupt


def _last_line(kind: type[BaseException], error: BaseException) -> str:
    """Return the last line of a traceback, without the notes after it."""
    notes = getattr(error, "__notes__", None)
    lines = sum(str(note).count("\n") + 1 for note in notes) if isinstance(notes, list) else 0
    return traceback.format_exception_only(kind, error)[-1 - lines].strip()


def _report(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> bool:
    """Report to the watcher, and linger. Return whether to print the traceback."""
    watcher = world.watcher()
    if watcher is None:
        return True
    text = "".join(traceback.format_exception(kind, error, trace))
    if watcher.verdict is None:
        words = _last_line(kind, error)
        with contextlib.suppress(OSError, AttributeError, ValueError):  # a stream that is closed or gone
            sys.stdout.flush()  # lingering may take long
        watcher.fail(_STATUS.get(kind, 1), words, text)
    elif watcher.verdict.rank == watcher.rank:
        watcher.linger()
    verdict = watcher.verdict
    if verdict is None or verdict.rank == watcher.rank:
        return True
    same = bool(verdict.traceback) and text.endswith(verdict.traceback)  # the watcher has only the end of a long one
    return str(error) != str(verdict.error()) and not same


class _Exit(SystemExit):
    """The exception of sys.exit. It notes its status when it ends the process, not when it is caught."""

    def __init__(self, status: Any) -> None:
        super().__init__(status)
        self._code = status

    @property
    def code(self) -> Any:
        if _called_by_the_interpreter():
            status = 0 if self._code is None else self._code & 0xFF if isinstance(self._code, int) else 1
            exit_callbacks.call_and_print(self if status else None)
            if status and (watcher := world.watcher()) is not None:
                watcher.report_failure(status, f"sys.exit({self._code!r})")
            _end_with(status)
        return self._code

    @code.setter
    def code(self, status: Any) -> None:
        self._code = status


def _called_by_the_interpreter() -> bool:
    """Whether no Python code called the calling function: the interpreter is exiting."""
    try:
        sys._getframe(2)
    except ValueError:
        return True
    return False


def _end_with(status: int) -> None:
    global _status
    _status = status
    if _end_soon is not None:
        _end_soon(status)
