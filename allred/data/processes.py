"""Processes that make batches. They are no ranks: MPI knows nothing of them, and they know nothing of MPI.

Each is a fresh interpreter, never a fork: a forked copy of a process that uses MPI is no good. It finds no variable of
the launcher, by which a program would take itself for a rank. A socket leads to it, and it leaves as soon as that is
closed, also in the midst of a batch: when the iteration ends or the rank dies, by whatever cause.
"""

import contextlib
import io
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterable
from multiprocessing import spawn
from typing import Any

import numpy as np

from allred.data.loader import Fetched, Job, Load
from allred.errors import AllredError, DataError

_LAUNCHERS = ("PMI", "PRTE_", "HYDI_", "HYDRA_", "MPI_", "MPIR_", "OMPI_")  # variables of theirs begin so
_NAME = "allred-prefetch"
_LEAVE_S = 2.0  # then it is killed


def refuse(what: str) -> None:
    """Raise AllredError if this is such a process."""
    if multiprocessing.current_process().name == _NAME:
        raise AllredError(
            f"{what} in a process that prefetches, which imports the script: put the script's main part under "
            'if __name__ == "__main__":'
        )


class Pool:
    """So many processes, each with what makes a batch. Raises what pickle does if that cannot be pickled."""

    def __init__(self, load: Load, workers: int) -> None:
        refuse("prefetch()")
        self._workers: list[_Worker] = []
        try:
            self._workers += [_Worker(number, workers) for number in range(workers)]  # they start side by side
            for worker in self._workers:
                worker.send(load)
        except BaseException:
            self.end()
            raise

    def fetch(self, jobs: Iterable[Job]) -> Fetched:
        """Every job with its batch, in order."""
        under_way: deque[Job] = deque()
        count = len(self._workers)
        done = 0
        for begun, job in enumerate(jobs):
            if len(under_way) == count:
                yield under_way.popleft(), self._workers[done % count].receive()
                done += 1
            self._workers[begun % count].send(job.task)
            under_way.append(job)
        while under_way:
            yield under_way.popleft(), self._workers[done % count].receive()
            done += 1

    def end(self) -> None:
        """End all processes; whoever waits for one gets an error."""
        for worker in self._workers:
            worker.hang_up()
        deadline = time.monotonic() + _LEAVE_S
        for worker in self._workers:
            worker.end(deadline)


class _Worker:
    def __init__(self, number: int, of: int) -> None:
        self.title = f"process {number + 1} of {of} that prefetches"
        self._socket, theirs = socket.socketpair()
        with theirs:
            code = f"import sys; sys.path[:] = {sys.path!r}; from allred.data.processes import main; "
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"{code}main({theirs.fileno()})"],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the rank, which ends it
                env={name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)},
            )
        about = spawn.get_preparation_data(_NAME)
        about.pop("authkey", None)  # cannot be pickled, and is not needed
        self.send(about)

    def send(self, value: Any) -> None:
        try:
            _send(self._socket, value)
        except (BrokenPipeError, ConnectionResetError):
            raise self._died() from None

    def receive(self) -> Any:
        try:
            good, value, text = _open(_receive(self._socket))
        except (EOFError, ConnectionResetError):
            raise self._died() from None
        if good:
            return value
        if value is None:
            raise DataError(f"{self.title} (pid {self._process.pid}) failed:\n{text}")
        raise value from _ThereError(text)

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):  # it has gone
            self._socket.shutdown(socket.SHUT_RDWR)

    def end(self, deadline: float) -> None:
        try:
            self._process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._socket.close()

    def _died(self) -> DataError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LEAVE_S)
        code = self._process.returncode
        if code is None:
            how = "closed its connection"
        elif code < 0:
            how = f"was killed by signal {-code} ({signal.Signals(-code).name})"
            if code == -signal.SIGKILL:
                how += "; if the kernel did it for want of memory, take fewer workers or smaller batches"
        else:
            how = f"left with exit code {code}; a script may use MPI, and train, only under its main guard"
        return DataError(f"{self.title} (pid {self._process.pid}) {how}")


class _ThereError(Exception):
    """The traceback of an error, as text, from the process where it was raised; shown as its cause."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


# ---- in the process


def main(descriptor: int) -> None:
    """Make batches until the other end of the socket is closed."""
    connection = socket.socket(fileno=descriptor)
    messages: queue.SimpleQueue[_Message] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, messages), daemon=True).start()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # it will not be flushed at the end
    import mpi4py  # its settings, not MPI

    mpi4py.rc.initialize = False  # a script that imports MPI would start a world of one, which leaves files behind
    load, reason = None, None
    try:
        spawn.prepare(_open(messages.get()))  # imports the user's script, from which pickled things may be
        load = _open(messages.get())
    except BaseException as error:
        reason = error
    while True:
        message = messages.get()
        try:
            if load is None:
                raise reason or AllredError("no data came")
            _send(connection, (True, load(_open(message)), ""))
        except BaseException as error:
            with contextlib.suppress(OSError):  # nobody waits any more: it leaves in a moment
                _send(connection, (False, _as_it_can_be_sent(error), traceback.format_exc()))


def _listen(connection: socket.socket, messages: "queue.SimpleQueue[_Message]") -> None:
    try:
        while True:
            messages.put(_receive(connection))
    except (EOFError, OSError):
        os._exit(0)


def _as_it_can_be_sent(error: BaseException) -> BaseException | None:
    """None also for sys.exit and the like, which would end the rank without a word."""
    if not isinstance(error, Exception):
        return None
    try:
        again = pickle.loads(pickle.dumps(error))
        return error if type(again) is type(error) else None
    except Exception:
        return None


# ---- messages: the number of parts, their sizes in bytes, a pickle, and the memory of the arrays in it

_Message = list[Any]


def _send(to: socket.socket, value: Any) -> None:
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, 5, buffer_callback=buffers.append)
    parts = [memoryview(head), *(buffer.raw() for buffer in buffers)]
    to.sendall(struct.pack(f"<{1 + len(parts)}Q", len(parts), *(part.nbytes for part in parts)))
    for part in parts:
        to.sendall(part)


def _receive(connection: socket.socket) -> _Message:
    (count,) = struct.unpack("<Q", _read(connection, 8))
    sizes = struct.unpack(f"<{count}Q", _read(connection, 8 * count))
    return [_read(connection, size) for size in sizes]


def _read(connection: socket.socket, nbytes: int) -> Any:
    memory = np.empty(nbytes, np.uint8)
    view = memory.data
    while view.nbytes:
        got = connection.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return memory


def _open(message: _Message) -> Any:
    return pickle.loads(message[0], buffers=message[1:])
