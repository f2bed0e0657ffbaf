"""Progress of the program's own MPI operations while a rank waits in allred.

MPI makes progress with large (rendezvous) messages, one-sided operations and nonblocking collectives only during MPI
calls of the ranks that take part. A rank that waits for shared memory or a socket makes no such call, so the loop of
each longer wait of allred calls `advance`.
"""

import contextlib
import os
import sys

# The launcher or its daemon. Once it has died, Open MPI ends this process in the next MPI call, and nobody says why.
_PARENT = os.getppid()
_TAG = 0x7A11  # that no message has: a probe that finds a message returns without progress


def advance() -> None:
    """Let MPI make progress, if it is initialized and this thread may call it. Takes about a microsecond."""
    MPI = sys.modules.get("mpi4py.MPI")  # noqa: N806  (mpi4py's spelling)
    if MPI is None or not MPI.Is_initialized() or MPI.Is_finalized() or os.getppid() != _PARENT:
        return
    level = MPI.Query_thread()
    if level == MPI.THREAD_MULTIPLE or (level < MPI.THREAD_SERIALIZED and MPI.Is_thread_main()):
        with contextlib.suppress(MPI.Exception):  # of a process that has failed; the watcher reports it
            MPI.COMM_WORLD.Iprobe(MPI.ANY_SOURCE, _TAG)
