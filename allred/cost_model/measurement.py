"""Measures the constants of this host for the cost model, in a few seconds and without MPI's launcher."""

import itertools
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

from allred.arrays import Array

MEMORY_BYTES, PIECE_BYTES = 2**26, 2**20  # an array larger than the caches; a window
SENT_BYTES, STREAM_BYTES = 2**18, 2**22  # of a call of send, as in csrc/network_windows.c; of a sample
MESSAGE = bytes(64)
_ECHO = "import socket as s, sys\np = s.socket(fileno=int(sys.argv[1]))\nwhile data := p.recv(64): p.send(data)"


def measure(ranks: int) -> dict[str, float]:
    """Return fields of `Machine`, measured on this host: copies and sums by `ranks` threads, at most one for each core;
    the others by one."""
    threads = min(ranks, len(os.sched_getaffinity(0)))
    return {
        "overhead_s": _overhead_s(),
        "stream_bytes_per_s": _stream_bytes_per_s(),
        "copy_bytes_per_s": _memory_bytes_per_s(threads, np.copyto),
        "sum_bytes_per_s": _memory_bytes_per_s(threads, lambda window, piece: np.add(window, piece, out=window)),
        "python_s": _python_s(),
    }


def _times(count: int, call: Callable[[], object]) -> list[float]:
    """Return the seconds of each of `count` calls."""
    ends = [time.perf_counter()]
    for _ in range(count):
        call()
        ends.append(time.perf_counter())
    return [end - begin for begin, end in itertools.pairwise(ends)]


def _quiet(times: list[float]) -> float:
    """Return the 10th percentile: other processes use the machine too, and the first calls are slow."""
    return float(np.percentile(times, 10))


def _memory_bytes_per_s(threads: int, work: Callable[[Array, Array], object]) -> float:
    """Return the bytes per second at which a thread works on pieces of a large array and a window, while all do."""
    times: list[float] = []

    def run() -> None:
        pieces = np.ones((MEMORY_BYTES // PIECE_BYTES, PIECE_BYTES // 4), np.float32)
        window, order = np.zeros_like(pieces[0]), itertools.cycle(pieces)
        times.extend(_times(8 * len(pieces), lambda: work(window, next(order))))

    running = [threading.Thread(target=run) for _ in range(threads)]
    for each in running:
        each.start()
    for each in running:
        each.join()
    return PIECE_BYTES / _quiet(times)


def _connection() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a TCP connection over the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    for each in (one, other):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one, other


def _overhead_s() -> float:
    """Return half of the time of a message to another process and back."""
    one, other = _connection()
    with one, other:
        words = [sys.executable, "-c", _ECHO, str(other.fileno())]
        child = subprocess.Popen(words, pass_fds=[other.fileno()])
        other.close()
        times = _times(2000, lambda: (one.send(MESSAGE), one.recv(len(MESSAGE))))
    child.wait()
    return _quiet(times) / 2


def _stream_bytes_per_s() -> float:
    """Return the bytes per second that one thread sends and receives, as a rank does."""
    one, other = _connection()
    buffer = bytearray(SENT_BYTES)

    def pass_bytes() -> None:
        moved = 0
        while moved < STREAM_BYTES:
            select.select([], [one], [])
            moved += (left := one.send(buffer))
            while left:
                left -= other.recv_into(buffer, left)

    with one, other:
        one.setblocking(False)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * SENT_BYTES)
        return STREAM_BYTES / _quiet(_times(100, pass_bytes))


def _python_s() -> float:
    """Return the time of an optimizer step with one small gradient, alone: of the code in Python."""
    import allred

    allred.init(banner=False)
    parameters = [np.zeros(8, np.float32)]
    optimizer = allred.distributed(allred.optim.SGD(0.0))
    optimizer.broadcast(parameters)
    gradients = [np.ones(8, np.float32)]
    times = _times(2000, lambda: optimizer.step(parameters, gradients))
    allred.shutdown()
    return _quiet(times)
