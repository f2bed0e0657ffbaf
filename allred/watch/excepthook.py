"""The end of the program of a rank: report an uncaught exception, Ctrl-C and sys.exit(n) to the watcher.

An explicit `raise SystemExit(n)` is not seen here; libc's exit() sees it (csrc/python/exit.h). An uncaught exception is
reported once, in the first of these places that sees it:

    sys.excepthook       the interpreter calls it, or a hook of the program that calls the hook before it
    shutdown of threads  the first act of the interpreter after the program; for hooks that do not call the one before
    sys.exit             a program that runs another one, such as coverage, calls sys.excepthook, then sys.exit(1)
    end of the target    of a child of multiprocessing, which catches the exception

A failed rank reports to its watcher first and prints its traceback last, after the other ranks have unwound. These do
not print the traceback of the verdict, which would repeat it.
"""

import contextlib
import functools
import os
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from typing import Any

from allred import world
from allred.errors import AllredError
from allred.runtime import process_end
from allred.runtime.timings import PRINT_FIRST_S
from allred.watch import exit_callbacks
from allred.watch.exit_callbacks import delayed_handlers

_STATUS: dict[Any, int] = {KeyboardInterrupt: 130}  # by exception; 1 for any other

_Hook = Callable[[type[BaseException], BaseException, types.TracebackType | None], Any]

originals: list[Callable[[BaseException], BaseException]] = []  # return the exception that another one reports

_end_soon: Callable[[int], None] | None = None
_pid = 0
_hook: _Hook | None = None  # the one that was installed last
_handled: BaseException | None = None  # by a hook at present; a hook of the program may call an older one of ours
_passed: dict[int, tuple[str, str]] = {}  # exceptions that Python code has passed to the hook: {status: (words, text)}
_status: int | None = None  # once the program has ended


def watch(end_soon: Callable[[int], None]) -> None:
    """Install the hooks. They call `end_soon` with the exit status when the program is about to end.

    May be called again, after the program has replaced sys.excepthook."""
    global _end_soon, _pid, _hook
    if _pid != os.getpid():
        process_end.call_after_target(_end_of_child)
    first, _end_soon, _pid = _end_soon is None, end_soon, os.getpid()
    if sys.excepthook is not _hook:
        sys.excepthook = _hook = _make_hook(sys.excepthook)
    if not first:
        return

    @functools.wraps(sys.exit)
    def leave(status: Any = None, /) -> None:
        if isinstance(status, SystemExit):
            raise status
        raise (_Exit if threading.current_thread() is threading.main_thread() else SystemExit)(status)

    sys.exit = leave  # type: ignore[assignment]
    # Private, but in all versions. atexit is too late: before it the interpreter waits for threads.
    if (register := getattr(threading, "_register_atexit", None)) is not None:
        register(_at_threads_shutdown)


def _make_hook(original: _Hook) -> _Hook:
    def hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        global _handled
        if error is _handled:
            original(kind, error, trace)
            return
        _handled = error
        try:
            with delayed_handlers(run_after=_uncaught() is not error):
                _handle(original, kind, error, trace)
        finally:
            _handled = None

    return hook


def _handle(
    original: _Hook, kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    if (watcher := world.watcher()) is not None:
        watcher.is_exiting = True
    ends = _uncaught() is error
    for original_of in originals:
        error = original_of(error)
    kind = type(error)
    shown = True
    if ends:
        exit_callbacks.call_and_print(error)
    try:
        shown = _report(kind, error, trace) if ends else _note_passed(kind, error, trace)
        if ends and isinstance(error, AllredError) and error.raised_by_all is not None:
            shown = False
            _print_message(kind, error, error.raised_by_all)
    finally:
        try:
            if shown:
                original(kind, error, trace)
        finally:
            if watcher is not None:
                watcher.is_exiting = ends
            if ends:
                _end_with(_STATUS.get(kind, 1))


def _print_message(kind: type[BaseException], error: BaseException, rank: int) -> None:
    """Print an error that all ranks raise, once and without a traceback."""
    if rank:
        time.sleep(PRINT_FIRST_S)  # a launcher ends all ranks with the first
    else:
        print(f"allred: {kind.__name__}: {error}", file=sys.stderr, flush=True)


@delayed_handlers(run_after=False)
def _at_threads_shutdown() -> None:
    error = _uncaught()
    if error is not None and _status is None and os.getpid() == _pid:
        exit_callbacks.call_and_print(error)
        _report(type(error), error, error.__traceback__)
        _end_with(_STATUS.get(type(error), 1))


def _uncaught() -> BaseException | None:
    """Return the exception that has ended the main program; None if there is none, or at a prompt, which continues.

    The interpreter stores it in sys.last_value, as consoles and debuggers do with theirs. Its traceback begins at the
    bottom of the stack, because no Python code has caught it."""
    error = getattr(sys, "last_value", None)
    if error is None or hasattr(sys, "ps1") or threading.current_thread() is not threading.main_thread():
        return None
    trace = error.__traceback__
    return error if trace is None or trace.tb_frame.f_back is None else None


def status_at_exit() -> int:
    """Return the exit status that Python shows."""
    if _status is not None:
        return _status
    error = _uncaught()
    return 0 if error is None or _end_soon is None else _STATUS.get(type(error), 1)


def interrupted() -> bool:
    """Whether Ctrl-C ends the program."""
    return isinstance(_uncaught(), KeyboardInterrupt)


def _last_line(kind: type[BaseException], error: BaseException) -> str:
    """Return the last line of a traceback, without the notes after it."""
    notes = getattr(error, "__notes__", None)
    lines = sum(str(note).count("\n") + 1 for note in notes) if isinstance(notes, list) else 0
    return traceback.format_exception_only(kind, error)[-1 - lines].strip()


def _report(
    kind: type[BaseException], error: BaseException, trace: types.TracebackType | None, status: int | None = None
) -> bool:
    """Report to the watcher, and linger. Return whether to print the traceback. status: the exit code, if it is not the
    one that Python gives the exception."""
    watcher, here = world.watcher(), world.current_or_none()
    if here is not None and here.recovery is not None:
        here.recovery.report_failure(status or _STATUS.get(kind, 1), _last_line(kind, error))
        return True
    if watcher is None:
        return True
    text = "".join(traceback.format_exception(kind, error, trace))
    if watcher.verdict is None:
        with contextlib.suppress(OSError, AttributeError, ValueError):  # a stream that is closed or gone
            sys.stdout.flush()  # lingering may take long
        watcher.fail(status or _STATUS.get(kind, 1), _last_line(kind, error), text)
    elif watcher.verdict.rank == watcher.rank:
        watcher.linger()
    return not _repeats_verdict(error, text)


def _note_passed(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> bool:
    """Keep the words of an exception that Python code has passed to the hook. Return whether to print the traceback."""
    if hasattr(sys, "ps1") or threading.current_thread() is not threading.main_thread():
        return True
    text = "".join(traceback.format_exception(kind, error, trace))
    _passed[_STATUS.get(kind, 1)] = _last_line(kind, error), text
    return not _repeats_verdict(error, text)


def _repeats_verdict(error: BaseException, text: str) -> bool:
    """Whether another rank prints this exception. text: its traceback."""
    watcher = world.watcher()
    if watcher is None or not watcher.failed_elsewhere():
        return False
    assert watcher.verdict is not None
    end = watcher.verdict.traceback  # the end of a long one
    return (bool(end) and text.endswith(end)) or str(error) == str(watcher.verdict.error())


def _end_of_child(error: BaseException | None) -> None:
    """Report the end of a child of multiprocessing, whose target has raised `error`. multiprocessing catches it."""
    status = process_end.exit_code(error)
    if os.getpid() != _pid or _status is not None:
        return
    if status == 0 and process_end.is_forked_child() and (wait := getattr(threading, "_shutdown", None)) is not None:
        wait()  # for threads, which may use allred; multiprocessing would call it after this function
    if status and error is not None:
        exit_callbacks.call_and_print(error)
        shown = _handled_at_exit(error)
        _report(type(shown), shown, shown.__traceback__, status)
    if status or process_end.is_forked_child():
        _end_with(status)


def _handled_at_exit(error: BaseException) -> BaseException:
    """Return the exception that the target of a child was handling when it raised SystemExit, as the wrapper of
    torch.multiprocessing.spawn does; else `error` itself."""
    context = error.__context__ if isinstance(error, SystemExit) else None
    if context is None or context.__traceback__ is None:
        return error
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return context if context.__traceback__.tb_frame in frames else error  # else handled where the child was forked


class _Exit(SystemExit):
    """The exception of sys.exit. It notes its status when it ends the process, not when it is caught."""

    def __init__(self, status: Any) -> None:
        super().__init__(status)
        self._code = status

    @property
    def code(self) -> Any:
        if _called_by_the_interpreter():
            if _status is not None:  # of a child of multiprocessing that was spawned
                return self._code
            status = process_end.exit_code(SystemExit(self._code))
            exit_callbacks.call_and_print(self if status else None)
            here = world.current_or_none()
            if status and here is not None and here.recovery is not None:
                here.recovery.report_failure(status, _passed.get(status, (f"sys.exit({self._code!r})",))[0])
            elif status and (watcher := world.watcher()) is not None:
                watcher.report_failure(status, *_passed.get(status, (f"sys.exit({self._code!r})",)))
            _end_with(status)
        return self._code

    @code.setter
    def code(self, status: Any) -> None:
        self._code = status


_Exit.__module__, _Exit.__qualname__ = "builtins", "SystemExit"  # as tracebacks show it, such as of atexit functions


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
