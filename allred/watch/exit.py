"""The exit of a rank: MPI_Finalize after success, MPI_Abort after a failure.

mpi4py would finalize MPI at exit, which waits for the other ranks; a failed rank would wait forever for ranks that wait
for it. So a rank that ends with a status other than 0 aborts the job. Before that it reports the failure to its
watcher, so that the other ranks unwind and leave first (job_state.py has the protocol).

With the C extension this is decided inside libc's exit(), which knows the status (csrc/python/exit.h). Without it, or
if MPI was imported before allred.init() and mpi4py finalizes it first, the status is the one that Python shows: an
uncaught exception, Ctrl-C, sys.exit(n). An explicit `raise SystemExit(n)` is not seen then.

A rank that is a forked child of multiprocessing leaves by os._exit, without libc's exit(): see process_end.py. After
success `_leave` calls what exit() would call. After a failure multiprocessing prints the traceback and ends it.

Two more cases use the status that Python shows. A rank that fails while its own threads or atexit functions still run,
or the deletion of its objects, is ended after LEAVE_S: by a thread of Python, and from `_leave` on by one of C. And
MPICH's mpirun ignores a failure before allred.init() while the other ranks wait in MPI_Init: the failed rank sends
mpirun an abort.
"""

import contextlib
import ctypes
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from allred import native, world
from allred.runtime import process_end
from allred.runtime.timings import DRAIN_S, FOLLOWER_LEAVE_S, LEAST_LEAVE_S, LEAVE_S, LINGER_READ_S
from allred.watch import excepthook, runner_link
from allred.watch.exit_callbacks import delayed_handlers

_TELL, _AWAIT, _RELEASED, _STAY, _LINGER = range(5)  # as in csrc/python/exit.h

_pid = 0  # of the rank's own process, not of its forks
_is_rank = False  # after `take_over` or `take_over_without_mpi`
_mpi: Any = None  # mpi4py.MPI, after `take_over`
_number = 0  # of this rank in MPI.COMM_WORLD, or without MPI
_arm: Callable[..., bool] | None = None  # the C extension's, where that decides
_stuck = False
_grace_end = float("inf")
_is_left_to_c = False  # the end of this process: no thread of Python runs while its objects are deleted
_lifeline = -1  # see `take_over`
_pmi: tuple[int, int] | None = None  # descriptor and inode of the socket to MPICH's mpirun, before MPI starts


def before_init() -> None:
    """Report failures before MPI starts, under MPICH's mpirun with several ranks, which ignores them."""
    global _pid, _pmi
    try:
        descriptor = int(os.environ.get("PMI_FD", ""))
        status = os.fstat(descriptor)
    except (ValueError, OSError):  # another launcher, or a child process, which has the variable without the socket
        return
    if stat.S_ISSOCK(status.st_mode) and os.environ.get("PMI_SIZE", "1") != "1" and "mpi4py.MPI" not in sys.modules:
        os.set_inheritable(descriptor, False)  # a program that this one starts is no rank
        _pid, _pmi = os.getpid(), (descriptor, status.st_ino)
        excepthook.watch(_end_soon)
        process_end.register(_leave, False)


def before_exec() -> None:
    """Let the program that os.exec starts in this process be the rank: undo `before_init`."""
    if _pmi is not None:
        os.set_inheritable(_pmi[0], True)


def take_over(MPI: Any, finalizes: bool, lifeline: int = -1) -> None:  # noqa: N803  (mpi4py's spelling)
    """Take over the exit of this process, once.

    finalizes: whether allred finalizes MPI. lifeline: the descriptor that reports the end of this process to the
    others, if no launcher started it; else -1 (csrc/python/exit.h).
    """
    global _mpi
    if _mpi is not None and _pid == os.getpid():
        return
    _mpi = MPI
    several = MPI.COMM_WORLD.Get_size() > 1 or bool(runner_link.address())
    calls = finalizes and (several or _arm is not None)  # it may be armed for a world without MPI
    number = MPI.COMM_WORLD.Get_rank()
    _take_over(number, max(lifeline, _lifeline), several, _functions(MPI) if calls else None)
    process_end.register(_leave, finalizes)


def take_over_without_mpi(rank: int, lifeline: int) -> None:
    """As `take_over`, for rank `rank` of several that run without MPI."""
    if not _is_rank or _pid != os.getpid():
        _take_over(rank, lifeline, True, (0, 0, 0, 0))
        process_end.register(_leave, False)


def _take_over(number: int, lifeline: int, several: bool, mpi: tuple[int, int, int, int] | None) -> None:
    """mpi: the functions of MPI that C calls; None: C does nothing."""
    global _pid, _is_rank, _arm, _pmi, _lifeline, _number
    _pid, _is_rank, _pmi, _lifeline, _number = os.getpid(), True, None, lifeline, number
    process_end.unregister(_leave)
    if several:
        excepthook.watch(_end_soon)
    if mpi is not None and native.arm_exit is not None:
        arm = native.arm_exit
        _arm = lambda text, code, fd, duty, grace_s, status: arm(  # noqa: E731
            mpi, _who(), text, code, _stuck, fd, duty, lifeline, grace_s, status
        )
        if not _arm("", 0, -1, _TELL, -1.0, 0):
            _arm = None


def stuck() -> None:
    """Note that an MPI operation of this process will never complete, so that its exit aborts the job."""
    global _stuck
    _stuck = _mpi is not None and _mpi.COMM_WORLD.Get_size() > 1


def end_blocked(words: str) -> None:
    """End this process with status 1, from a thread: the main thread is blocked in C for ever and raises no error.
    words: the error, as in the last line of a traceback."""
    watcher = world.watcher()
    if watcher is not None:
        if watcher.verdict is None:
            watcher.fail(1, words, "")
        else:
            watcher.is_exiting = True
            watcher.send("unwound")
        watcher.await_release()
    _end_job("is blocked in a call that never completes" + "; ending the job" * (_lifeline < 0), 1)
    os._exit(1)


def _functions(MPI: Any) -> tuple[int, int, int, int]:  # noqa: N803
    library = ctypes.CDLL(MPI.__file__)  # mpi4py's module is linked with the MPI that runs
    functions = (library.MPI_Finalized, library.MPI_Finalize, library.MPI_Abort)
    finalized, finalize, abort = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
    return finalized, finalize, abort, MPI._handleof(MPI.COMM_WORLD)


def _end_soon(status: int) -> None:
    """Ensure the end of this process, which is about to end with `status`, if it is not 0."""
    global _grace_end
    _grace_end = time.monotonic() + LEAVE_S
    if status and os.getpid() == _pid:
        with contextlib.suppress(RuntimeError):  # no thread can be started
            threading.Thread(target=_end_after_grace, args=(status,), name="allred-exit", daemon=True).start()


def _end_after_grace(status: int) -> None:
    _sleep(LEAVE_S)
    watcher = world.watcher()
    if watcher is not None and watcher.lingers:
        while not (_is_left_to_c or watcher.linger_is_over()):
            time.sleep(LINGER_READ_S)
        if not (_is_left_to_c or watcher.failed_elsewhere()):
            watcher.linger()
    if watcher is not None and watcher.failed_elsewhere():
        _sleep(FOLLOWER_LEAVE_S - LEAVE_S)  # the failed rank ends the job
    if _is_left_to_c:
        return
    what = f"failed with exit code {status} but has not left after {LEAVE_S:g} s: threads or atexit functions run"
    _end_job(what + "; ending the job" * (_lifeline < 0), status)


def _sleep(seconds: float) -> None:
    """Sleep; starts again while the end of the job is delayed. C then receives the messages of the watcher."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, LINGER_READ_S))
        if _is_left_to_c:
            return
        if (watcher := world.watcher()) is not None and watcher.end_is_delayed():
            until = time.monotonic() + seconds


@delayed_handlers(run_after=False)
def _leave(finalizes: bool) -> None:
    """Leave at the end of Python. With the C extension, pass it the remaining actions."""
    global _is_left_to_c
    if os.getpid() != _pid:
        return
    forked = process_end.is_forked_child()
    _is_left_to_c = _arm is not None and not excepthook.interrupted()  # after Ctrl-C a signal ends Python, not exit()
    status, watcher = excepthook.status_at_exit(), world.watcher()
    duty, code, words = _TELL, 0, ""
    if watcher is not None:
        watcher.ending()
        if watcher.released:
            duty = _RELEASED
        elif watcher.failed and not watcher.failed_elsewhere():
            duty = _LINGER if watcher.lingers and watcher.verdict is None else _AWAIT
        elif watcher.verdict is not None:
            duty, code, words = _AWAIT, watcher.verdict.code, _printable(watcher.verdict.brief)
            watcher.send("unwound")
        elif watcher.gone:
            rank, how = next(iter(watcher.gone.items()))
            duty, code, words = _STAY, watcher.gone_code, _printable(f"rank {rank} {how}")
        if status and forked and duty != _RELEASED:  # multiprocessing then prints the traceback, and calls
            watcher.await_release()  # os._exit
            duty = _RELEASED
    if _arm is not None and _is_left_to_c:
        _cancel_abort_of_mpi4py()
        grace_s = min(LEAVE_S, max(LEAST_LEAVE_S, _grace_end - time.monotonic())) if status else -1.0
        _arm(words, code, -1 if watcher is None else watcher.duplicate(), duty, grace_s, status)
        if forked and not status:
            process_end.finish_forked_child()
            _flush()
            native.run_exit_handler(0)
    if forked and status:
        _print(f"ends: {words}" if code else f"left with exit code {status}")
    elif not (_arm is not None and _is_left_to_c):
        _leave_without_c(finalizes or forked, status, duty, code, words)


def _cancel_abort_of_mpi4py() -> None:
    """Cancel the abort that `python -m mpi4py` has requested: mpi4py performs it before libc's exit(), when the other
    ranks have not unwound, and the failed rank has not printed its traceback."""
    if (set_status := getattr(_mpi, "_set_abort_status", None)) is not None:
        set_status(0)


def _leave_without_c(finalizes: bool, status: int, duty: int, code: int, words: str) -> None:
    """Do what csrc/python/exit.c does, with the status that Python shows."""
    watcher = world.watcher()
    bad = bool(status or _stuck)
    if duty == _STAY and bad:
        duty, code = _TELL, 0
    if watcher is not None and duty in (_TELL, _STAY):
        watcher.send("failed" if bad else "left", code=status or 1, words="", traceback="")
        watcher.lingers = watcher.lingers or duty == _STAY
    if _mpi is not None and _mpi.Is_finalized():
        return
    if not (bad or code) and duty == _TELL:
        if finalizes and _mpi is not None:
            _mpi.Finalize()
        return
    if watcher is not None and duty != _RELEASED:
        watcher.await_release()
    if code:
        return _end_job(f"ends the job: {words}", code)
    never, ending = " and an operation that never completed" * _stuck, "; ending the job" * (_lifeline < 0)
    _end_job(f"left with exit code {status}{never}{ending}", status)


def _printable(words: str) -> str:
    return words.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")


def _who() -> str:
    """Name this rank by its number in the world, and in MPI if that is another one."""
    number = _number if _is_rank else os.environ.get("PMI_RANK", "?")
    here = world.current_or_none()
    rank = here.topology.world_rank if here is not None and _is_rank else number
    more = "" if rank == number else f" (rank {number} of MPI.COMM_WORLD)"
    return f"rank {rank}{more} on {socket.gethostname()}"


def _end_job(what: str, status: int) -> None:
    if not _is_rank and not _waits_before_mpi():
        return
    _print(what)
    if _lifeline >= 0:
        os._exit(status or 1)
    time.sleep(DRAIN_S)
    if _mpi is not None:
        _mpi.COMM_WORLD.Abort(status or 1)
    elif _pmi is not None:
        os.write(_pmi[0], b"cmd=abort exitcode=%d\n" % status)  # PMI-1, which mpirun speaks on this socket


def _print(what: str) -> None:
    """Print a line about the end of this rank."""
    _flush()
    with contextlib.suppress(OSError):
        os.write(2, f"allred: {_who()} {what}\n".encode())


def _flush() -> None:
    with contextlib.suppress(OSError, AttributeError, ValueError):  # a stream that is closed or gone
        sys.stdout.flush()


def _waits_before_mpi() -> bool:
    """Whether MPI has not started, and the socket to MPICH's mpirun is still open."""
    try:
        return _pmi is not None and "mpi4py.MPI" not in sys.modules and os.fstat(_pmi[0]).st_ino == _pmi[1]
    except OSError:
        return False
