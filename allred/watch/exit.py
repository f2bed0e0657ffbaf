"""How a rank leaves. mpi4py would finalize MPI at exit, which waits for the other ranks; a rank that failed would wait
for ever for peers that wait for it. So allred owns the exit: a rank that ends with a status other than 0 aborts the
job, any other finalizes.

With the C extension that decision is made inside libc's exit(), which knows the status (csrc/exit.h). Where the
extension is missing, or where MPI was imported before allred.init() and so mpi4py finalizes it first, it is made from
what Python can see: an uncaught exception, Ctrl-C, sys.exit(n). Only a `raise SystemExit(n)` by hand goes unseen then.

Two more cases rest on what Python sees. A rank that fails while threads of its own still run is ended after GRACE_S.
And one that fails before allred.init(), under MPICH's mpirun, which takes such an end for a good one while the other
ranks wait in MPI's start: that rank tells mpirun itself.
"""

import atexit
import contextlib
import ctypes
import functools
import os
import socket
import stat
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

from allred import native

GRACE_S = 3.0  # from failing to leaving
_DRAIN_S = 0.2  # as in csrc/exit.c
_UNCAUGHT: dict[Any, int] = {KeyboardInterrupt: 130}  # status by exception; 1 for any other

_pid = 0  # of the process whose exit is watched or owned: not that of its forks
_mpi: Any = None  # mpi4py.MPI, once the exit is owned
_arm: Callable[[bool], bool] | None = None  # tells the C extension whether MPI is stuck, where that decides
_watching = False
_stuck = False
_status = 0  # what Python knows of the exit
_pmi: tuple[int, int] | None = None  # descriptor and inode of the socket to MPICH's mpirun, before MPI starts


def before_init() -> None:
    """Watch for a failure before MPI starts, where the launcher does not: under MPICH's mpirun, with several ranks."""
    global _pid, _pmi
    try:
        descriptor = int(os.environ.get("PMI_FD", ""))
        status = os.fstat(descriptor)
    except (ValueError, OSError):  # another launcher; or a child process, which has the variable but not the socket
        return
    if stat.S_ISSOCK(status.st_mode) and os.environ.get("PMI_SIZE", "1") != "1" and "mpi4py.MPI" not in sys.modules:
        os.set_inheritable(descriptor, False)  # a program that this one starts is no rank
        _pid, _pmi = os.getpid(), (descriptor, status.st_ino)
        _watch_python()
        atexit.register(_leave, False)


def own(MPI: Any, finalizes: bool) -> None:  # noqa: N803  (mpi4py's spelling)
    """Take over the exit of this process, once. `finalizes`: whether MPI is ours to finalize."""
    global _pid, _mpi, _arm, _pmi
    if _mpi is not None and _pid == os.getpid():
        return
    _pid, _mpi, _pmi = os.getpid(), MPI, None
    atexit.unregister(_leave)
    if MPI.COMM_WORLD.Get_size() > 1:
        _watch_python()
        if finalizes and native.arm_exit is not None:
            _arm = functools.partial(native.arm_exit, *_functions(MPI), MPI.COMM_WORLD.Get_rank(), socket.gethostname())
            if _arm(False):
                return
            _arm = None
    atexit.register(_leave, finalizes)


def stuck() -> None:
    """An MPI operation of this process will never complete: it can only end by ending the job."""
    global _stuck
    _stuck = _watching
    if _arm is not None:
        _arm(True)


def _functions(MPI: Any) -> tuple[int, int, int, int]:  # noqa: N803
    library = ctypes.CDLL(MPI.__file__)  # mpi4py's module is linked with the MPI that runs
    functions = (library.MPI_Finalized, library.MPI_Finalize, library.MPI_Abort)
    finalized, finalize, abort = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
    return finalized, finalize, abort, MPI._handleof(MPI.COMM_WORLD)


def _watch_python() -> None:
    global _watching
    if _watching:
        return
    _watching = True
    original_hook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        try:
            original_hook(kind, error, trace)
        finally:
            if _called_by_the_interpreter() and not hasattr(sys, "ps1"):  # at a prompt an exception ends nothing
                _note(_UNCAUGHT.get(kind, 1))

    def leave(status: Any = None, /) -> None:
        if isinstance(status, SystemExit):
            raise status
        raise (_Exit if threading.current_thread() is threading.main_thread() else SystemExit)(status)

    sys.excepthook = hook
    sys.exit = leave  # type: ignore[assignment]


class _Exit(SystemExit):
    """What sys.exit raises here: one that notes its status when it ends the process, not when somebody catches it."""

    def __init__(self, status: Any) -> None:
        super().__init__(status)
        self._code = status

    @property
    def code(self) -> Any:
        if _called_by_the_interpreter():
            _note(0 if self._code is None else self._code & 0xFF if isinstance(self._code, int) else 1)
        return self._code

    @code.setter
    def code(self, status: Any) -> None:
        self._code = status


def _called_by_the_interpreter() -> bool:
    """Whether the function that asks was called by no Python code: the interpreter is leaving."""
    try:
        sys._getframe(2)
    except ValueError:
        return True
    return False


def _note(status: int) -> None:
    """This process is about to end with `status`."""
    global _status
    _status = status
    if status and os.getpid() == _pid:
        threading.Thread(target=_end_after_grace, name="allred-exit", daemon=True).start()


def _end_after_grace() -> None:
    time.sleep(GRACE_S)
    _end_job(f"failed with exit code {_status} but has not left after {GRACE_S:g} s: threads or atexit functions run")


def _leave(finalizes: bool) -> None:
    """At exit, where C does not decide."""
    global _status
    if os.getpid() != _pid or _arm is not None or (_mpi is not None and _mpi.Is_finalized()):
        return
    error = getattr(sys, "last_type", None)  # set where an exception ended the main program, whatever the hooks did
    if _watching and error is not None:
        _status = _status or _UNCAUGHT.get(error, 1)
    if _status or _stuck:
        _end_job(f"left with exit code {_status}{' and an operation that never completed' * _stuck}")
    elif finalizes:
        _mpi.Finalize()


def _end_job(what: str) -> None:
    if _mpi is None and not _still_before_mpi():
        return
    rank = os.environ.get("PMI_RANK", "?") if _mpi is None else _mpi.COMM_WORLD.Get_rank()
    with contextlib.suppress(OSError, AttributeError, ValueError):  # a stream that is closed or gone
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        os.write(2, f"allred: rank {rank} on {socket.gethostname()} {what}; ending the job\n".encode())
    time.sleep(_DRAIN_S)
    if _mpi is not None:
        _mpi.COMM_WORLD.Abort(_status or 1)
    elif _pmi is not None:
        os.write(_pmi[0], b"cmd=abort exitcode=%d\n" % _status)  # PMI-1, which mpirun speaks on this socket


def _still_before_mpi() -> bool:
    try:
        return _pmi is not None and "mpi4py.MPI" not in sys.modules and os.fstat(_pmi[0]).st_ino == _pmi[1]
    except OSError:
        return False
