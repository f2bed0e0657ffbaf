"""How a rank leaves. mpi4py would finalize MPI at exit, which waits for the other ranks; a rank that failed would wait
for ever for peers that wait for it. So allred owns the exit: a rank that ends with a status other than 0 aborts the
job, any other finalizes.

With the C extension that decision is made inside libc's exit(), which knows the status (csrc/exit.h). Where the
extension is missing, or where MPI was imported before allred.init() and so mpi4py finalizes it first, it is made from
what Python can see: an uncaught exception, Ctrl-C, sys.exit(n). Only a `raise SystemExit(n)` by hand goes unseen then.
"""

import atexit
import ctypes
import functools
import os
import socket
import sys
import time
import types
from collections.abc import Callable
from typing import Any

from allred import native

_DRAIN_S = 0.2  # as in csrc/exit.c

_pid = 0  # of the process whose exit is owned: not that of its forks
_arm: Callable[[bool], bool] | None = None  # tells the C extension whether MPI is stuck, where that decides
_watching = False  # whether Python does
_status = 0  # what Python knows of the exit


def own(MPI: Any, finalizes: bool) -> None:  # noqa: N803  (mpi4py's spelling)
    """Take over the exit of this process, once. `finalizes`: whether MPI is ours to finalize."""
    global _pid, _arm
    if _pid == os.getpid():
        return
    _pid = os.getpid()
    rank = MPI.COMM_WORLD.Get_rank()
    if MPI.COMM_WORLD.Get_size() > 1:
        if finalizes and native.arm_exit is not None:
            _arm = functools.partial(native.arm_exit, *_mpi_functions(MPI), rank, socket.gethostname())
            if _arm(False):
                return
        _arm = None
        _watch_python()
    atexit.register(_leave, MPI, rank, finalizes)


def stuck() -> None:
    """An MPI operation of this process will never complete: it can only end by ending the job."""
    if _arm is not None:
        _arm(True)
    elif _watching:
        _note(1)


def _mpi_functions(MPI: Any) -> tuple[int, int, int, int]:  # noqa: N803
    library = ctypes.CDLL(MPI.__file__)  # mpi4py's module is linked with the MPI that runs
    functions = (library.MPI_Finalized, library.MPI_Finalize, library.MPI_Abort)
    finalized, finalize, abort = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
    return finalized, finalize, abort, MPI._handleof(MPI.COMM_WORLD)


def _note(status: int) -> None:
    global _status
    _status = status


class _Exit(SystemExit):
    """What sys.exit raises here: one that notes its status when it ends the process, not when somebody catches it."""

    @property
    def code(self) -> Any:  # type: ignore[override]
        value = self.args[0] if self.args else None
        try:
            sys._getframe(1)  # read by Python code
        except ValueError:  # read by the interpreter itself, which is leaving
            _note(0 if value is None else value & 0xFF if isinstance(value, int) else 1)
        return value


def _watch_python() -> None:
    global _watching
    _watching = True
    original_hook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        original_hook(kind, error, trace)
        if not hasattr(sys, "ps1"):  # at a prompt an exception ends nothing
            _note(130 if issubclass(kind, KeyboardInterrupt) else 1)

    def leave(status: Any = None, /) -> None:
        raise _Exit(status)

    sys.excepthook = hook
    sys.exit = leave  # type: ignore[assignment]


def _leave(MPI: Any, rank: int, finalizes: bool) -> None:  # noqa: N803
    if os.getpid() != _pid or MPI.Is_finalized():
        return
    if _status:
        sys.stdout.flush()
        where = f"rank {rank} on {socket.gethostname()}"
        print(f"allred: {where} left with exit code {_status}; ending the job", file=sys.stderr, flush=True)
        time.sleep(_DRAIN_S)
        MPI.COMM_WORLD.Abort(_status)
    elif finalizes:
        MPI.Finalize()
