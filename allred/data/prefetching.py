"""Prefetching of batches by a thread, alone or with processes that call `Loader.load`.

1. The thread iterates over the specifications in order and puts each with its batch into a queue of `depth` entries.
2. With processes it gives each specification to the next process in turn, and takes the batches back in order.
3. The iteration takes them out of the queue. An error passes through the queue too, after the batches before it.
4. When the iteration ends for any reason, it sets the stop event, empties the queue, so that a thread that waits for a
   free entry continues, ends the processes, and joins the thread. The thread puts at most one more entry.

Processes are not ranks and do not use MPI. Each is a new interpreter, because a fork of a process that uses MPI is not
safe, without the variables of the launcher, which would make it start as a rank. It exits as soon as its socket is
closed, also during a batch.
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
from collections.abc import Iterable, Iterator
from multiprocessing import spawn
from typing import Any

import numpy as np

from allred.data.loader import BatchSpec, Fetched, Load, Loader
from allred.errors import AllredError, DataError, InputError
from allred.launcher_variables import without_launcher
from allred.validators import integer

_NAME = "allred-prefetch"
_EXIT_S = 2.0  # time to exit before a process is killed


def check_not_in_prefetch_process(what: str) -> None:
    """Raise AllredError if the current process is one that prefetches. what: the call, for the error."""
    if multiprocessing.current_process().name == _NAME:
        raise AllredError(
            f"{what} was called in a process that prefetches. Such a process imports the script: put the main part of "
            'the script under if __name__ == "__main__":'
        )


class ProcessPool:
    """Processes that make batches with `load`. Raises the error of pickle if `load` cannot be pickled."""

    def __init__(self, load: Load, count: int) -> None:
        check_not_in_prefetch_process("prefetch()")
        self._processes: list[_Process] = []
        try:
            self._processes += [_Process(number, count) for number in range(count)]  # they start concurrently
            for process in self._processes:
                process.send(load)
        except BaseException:
            self.end()
            raise

    def fetch(self, specs: Iterable[BatchSpec]) -> Fetched:
        """Yield each specification with its batch, in order."""
        pending: deque[BatchSpec] = deque()
        count = len(self._processes)
        received = 0
        for sent, spec in enumerate(specs):
            if len(pending) == count:
                yield pending.popleft(), self._processes[received % count].receive()
                received += 1
            self._processes[sent % count].send(spec.input)
            pending.append(spec)
        while pending:
            yield pending.popleft(), self._processes[received % count].receive()
            received += 1

    def end(self) -> None:
        """End all processes. A thread that waits for one gets an error."""
        for process in self._processes:
            process.disconnect()
        deadline = time.monotonic() + _EXIT_S
        for process in self._processes:
            process.end(deadline)


class _Process:
    def __init__(self, number: int, count: int) -> None:
        self.title = f"process {number + 1} of {count} that prefetches"
        self._socket, theirs = socket.socketpair()
        with theirs:
            code = f"import sys; sys.path[:] = {sys.path!r}; from allred.data.prefetching import main; "
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"{code}main({theirs.fileno()})"],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C goes to the rank, which ends this process
                env=without_launcher(os.environ),
            )
        preparation = spawn.get_preparation_data(_NAME)
        preparation.pop("authkey", None)  # cannot be pickled, and is not needed
        self.send(preparation)

    def send(self, value: Any) -> None:
        try:
            _send(self._socket, value)
        except (BrokenPipeError, ConnectionResetError):
            raise self._exit_error() from None

    def receive(self) -> Any:
        try:
            ok, value, text = _unpickle(_receive(self._socket))
        except (EOFError, ConnectionResetError):
            raise self._exit_error() from None
        if ok:
            return value
        if value is None:
            raise DataError(f"{self.title} (pid {self._process.pid}) failed:\n{text}")
        raise value from _RemoteTraceback(text)

    def disconnect(self) -> None:
        with contextlib.suppress(OSError):  # the process has exited
            self._socket.shutdown(socket.SHUT_RDWR)

    def end(self, deadline: float) -> None:
        try:
            self._process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._socket.close()

    def _exit_error(self) -> DataError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        code = self._process.returncode
        if code is None:
            how = "closed its connection"
        elif code < 0:
            how = f"was killed by signal {-code} ({signal.Signals(-code).name})"
            if code == -signal.SIGKILL:
                how += "; if the host ran out of memory, use fewer workers or smaller batches"
        else:
            how = f'exited with code {code}; a script may use MPI and train only under if __name__ == "__main__":'
        return DataError(f"{self.title} (pid {self._process.pid}) {how}")


class _RemoteTraceback(Exception):  # noqa: N818  (shown as the cause of the error)
    """Traceback, as text, of an error that was raised in another process."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def main(descriptor: int) -> None:
    """Make batches until the other end of the socket is closed: the main program of a process of the pool."""
    connection = socket.socket(fileno=descriptor)
    messages: queue.SimpleQueue[_Message] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, messages), daemon=True).start()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # os._exit does not flush it
    import mpi4py  # does not start MPI

    mpi4py.rc.initialize = False  # a script that imports MPI would start a world of one, which leaves files
    load, reason = None, None
    try:
        spawn.prepare(_unpickle(messages.get()))  # imports the user's script, which may define pickled objects
        load = _unpickle(messages.get())
    except BaseException as error:
        reason = error
    while True:
        message = messages.get()
        try:
            if load is None:
                raise reason or AllredError("the process received no data")
            _send(connection, (True, load(_unpickle(message)), ""))
        except BaseException as error:
            with contextlib.suppress(OSError):  # the socket is closed: this process is about to exit
                _send(connection, (False, _picklable(error), traceback.format_exc()))


def _listen(connection: socket.socket, messages: "queue.SimpleQueue[_Message]") -> None:
    try:
        while True:
            messages.put(_receive(connection))
    except (EOFError, OSError):
        os._exit(0)


def _picklable(error: BaseException) -> BaseException | None:
    """The error if it can be pickled, else None; None also for SystemExit, which would end the rank silently."""
    if not isinstance(error, Exception):
        return None
    try:
        again = pickle.loads(pickle.dumps(error))
        return error if type(again) is type(error) else None
    except Exception:
        return None


# A message: number of parts, their sizes in bytes, a pickle, and the memory of each array in it.

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


def _unpickle(message: _Message) -> Any:
    return pickle.loads(message[0], buffers=message[1:])


_JOIN_S = 10.0  # for a batch that the thread is making when the iteration ends


class Prefetch:
    """Iterable of prefetched batches, returned by `prefetch`. Batches, length and state are those of the loader."""

    def __init__(self, loader: Loader, depth: int, workers: int) -> None:
        self._loader, self._depth, self._workers = loader, depth, workers

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # raises TypeError for a Stream

    @property
    def batch_size(self) -> int:
        """Samples of a batch over all ranks."""
        return self._loader.batch_size

    @property
    def epochs(self) -> int:
        """Passes over the data."""
        return self._loader.epochs

    @property
    def loader(self) -> Loader:
        """The loader whose batches are prefetched."""
        return self._loader

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch. Raises AttributeError for a stream."""
        return int(self._loader.steps_per_epoch)  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Any]:
        return self._loader.iterate(self._fetch)

    def state_dict(self) -> dict[str, Any]:
        """Position after the latest batch of the iteration, without the batches that were fetched ahead."""
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the next iteration at the position in `state`, as `Batches.load_state_dict`."""
        self._loader.load_state_dict(state)

    def _fetch(self, specs: Iterable[BatchSpec], load: Load) -> Fetched:
        pool = ProcessPool(load, self._workers) if self._workers else None
        fetched = pool.fetch(specs) if pool else ((spec, load(spec.input)) for spec in specs)
        filled: queue.Queue[_Entry] = queue.Queue(self._depth)
        stop = threading.Event()
        thread = threading.Thread(target=_fill, args=(filled, fetched, stop), name="allred-prefetch", daemon=True)
        try:
            thread.start()
            while True:
                item = filled.get()
                if item is None:
                    return
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            item = None  # the traceback of an error refers to this frame
            stop.set()
            while not filled.empty():
                filled.get()
            if pool:
                pool.end()
            if thread.is_alive():  # not if it could not be started
                thread.join(_JOIN_S)


_Entry = tuple[BatchSpec, Any] | BaseException | None  # None: there are no more batches


def _fill(filled: "queue.Queue[_Entry]", fetched: Iterable[tuple[BatchSpec, Any]], stop: threading.Event) -> None:
    end: BaseException | None = None
    try:
        for item in fetched:
            if stop.is_set():
                return
            filled.put(item)
    except BaseException as error:
        end = error
    if not stop.is_set():
        filled.put(end)


def prefetch(batches: Loader, depth: int = 2, workers: int = 0) -> Prefetch:
    """Fetch batches ahead while the program computes.

    A batch made by a process is copied through a socket, at a few hundred MB/s. Thread and processes end with the
    iteration, also after a `break`, an exception or Ctrl-C. Processes also end if this process is killed.

    Arguments:
        batches: result of `allred.data.batches` or `allred.data.stream`; both objects share one position.
        depth: batches that wait at most, >= 1. One more is being made, or `workers` more.
        workers: 0 uses a thread, which is enough for files and for code that releases the GIL. A number > 0 uses that
            many processes, for datasets and decoders in Python. They start with each iteration, in about half a second,
            and receive the data once: mapped files by name, arrays in memory as a copy for each process. What they call
            must be importable. They import the script, so its main part must be under `if __name__ == "__main__":`.

    Returns a `Prefetch` object, which yields the same batches. `state_dict` and the samples of a step refer to the
    latest batch that it yielded. An error in fetching is raised after the batches before it; a killed process raises
    DataError with its number and signal.
    Raises InputError: `batches` is another iterable, or depth or workers is out of range.

    >>> import allred
    >>> batches = allred.data.batches([1, 2, 3], batch_size=2, seed=None, rank=0, size=1)
    >>> [x.tolist() for x in allred.data.prefetch(batches)]
    [[1, 2], [3]]
    """
    if not isinstance(batches, Loader):
        raise InputError(
            f"prefetch() takes the result of allred.data.batches or allred.data.stream, got {type(batches).__name__}; "
            "put processing of samples into the dataset or into decode="
        )
    return Prefetch(batches, integer("prefetch: depth", depth, 1), integer("prefetch: workers", workers, 0))
