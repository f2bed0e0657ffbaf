"""How a rank leaves. mpi4py would finalize MPI at exit, which waits for the other ranks; a rank that failed would wait
for ever for peers that wait for it. So allred owns the exit: a rank that ends with a status other than 0 aborts the
job, any other finalizes.

With the C extension that decision is made inside libc's exit(), which knows the status (csrc/exit.h). Where the
extension is missing, or where MPI was imported before allred.init() and so mpi4py finalizes it first, it is made from
what Python can see: an uncaught exception, Ctrl-C, sys.exit(n). Unseen there is only `raise SystemExit(n)` by hand.
"""

import atexit
import os
import socket
import sys
import time
import types
from typing import Any

from allred import native

_DRAIN_S = 0.2  # as in csrc/exit.c
_status = 0
_pid = 0


def own(MPI: Any, finalizes: bool) -> None:  # noqa: N803  (mpi4py's spelling)
    """Take over the exit of this process, once. `finalizes`: whether MPI is ours to finalize."""
    global _pid
    if _pid == os.getpid():
        return
    _pid = os.getpid()
    rank = MPI.COMM_WORLD.Get_rank()
    if MPI.COMM_WORLD.Get_size() == 1:  # nobody waits for anybody
        if finalizes:
            atexit.register(_leave, MPI, rank, finalizes)
        return
    if finalizes and native.arm_exit is not None and _arm_in_c(MPI, rank):
        return
    _watch_python()
    atexit.register(_leave, MPI, rank, finalizes)


def _arm_in_c(MPI: Any, rank: int) -> bool:  # noqa: N803
    import ctypes

    library = ctypes.CDLL(MPI.__file__)  # mpi4py's module is linked with the MPI that runs
    finalize, abort = (ctypes.cast(f, ctypes.c_void_p).value or 0 for f in (library.MPI_Finalize, library.MPI_Abort))
    assert native.arm_exit is not None
    return native.arm_exit(finalize, abort, MPI._handleof(MPI.COMM_WORLD), rank, socket.gethostname())


def _watch_python() -> None:
    original_hook, original_exit = sys.excepthook, sys.exit

    def note(status: int) -> None:
        global _status
        _status = status

    def hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        original_hook(kind, error, trace)
        if not hasattr(sys, "ps1"):  # at a prompt an exception ends nothing
            note(130 if issubclass(kind, KeyboardInterrupt) else 1)

    def leave(status: Any = None) -> None:
        note(status & 0xFF if isinstance(status, int) else 0 if status is None else 1)
        original_exit(status)

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
