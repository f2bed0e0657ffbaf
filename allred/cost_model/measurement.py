"""Measures the constants of this host for the cost model, in a few seconds and without MPI's launcher."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

from allred.arrays import Array

MEMORY_BYTES, PIECE_BYTES = 2**26, 2**20  # of an array: more than caches hold; of a window
SENT_BYTES = 2**18  # at once, as csrc/network_windows.c
PING = 64  # bytes of a message

_ECHO = """
import socket, sys
peer = socket.socket(fileno=int(sys.argv[1]))
while data := peer.recv(64):
    peer.send(data)
"""


def measure(ranks: int) -> dict[str, float]:
    """Return constants of `Machine` by name, while `ranks` threads (at most one for each core) copy and add."""
    threads = min(ranks, len(os.sched_getaffinity(0)))
    return {
        "message_s": _message_s(),
        "stream_bytes_per_s": _stream_bytes_per_s(),
        "copy_bytes_per_s": _memory_bytes_per_s(threads, np.copyto),
        "sum_bytes_per_s": _memory_bytes_per_s(threads, lambda window, piece: np.add(window, piece, out=window)),
        "python_s": _python_s(),
    }


def _quiet(times: list[float]) -> float:
    """Return the 10th percentile: other processes use the machine too, and the first calls are slow."""
    return float(np.percentile(times, 10))


def _memory_bytes_per_s(threads: int, work: Callable[[Array, Array], object]) -> float:
    """Return the bytes per second at which a thread works on pieces of a large array and a window, while all do."""
    times: list[float] = []

    def run() -> None:
        pieces = np.ones((MEMORY_BYTES // PIECE_BYTES, PIECE_BYTES // 4), np.float32)
        window = np.zeros_like(pieces[0])
        for _ in range(8):
            for piece in pieces:
                start = time.perf_counter()
                work(window, piece)
                times.append(time.perf_counter() - start)

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


def _message_s() -> float:
    """Return half of the time of a message to another process and back."""
    one, other = _connection()
    with one, other:
        words = [sys.executable, "-c", _ECHO, str(other.fileno())]
        child = subprocess.Popen(words, pass_fds=[other.fileno()])
        other.close()
        times, data = [], bytes(PING)
        for _ in range(2000):
            start = time.perf_counter()
            one.send(data)
            one.recv(PING)
            times.append(time.perf_counter() - start)
        one.close()
    child.wait()
    return _quiet(times) / 2


def _stream_bytes_per_s() -> float:
    """Return the bytes per second that one thread sends and receives, as a rank does."""
    one, other = _connection()
    buffer, times = bytearray(SENT_BYTES), []
    with one, other:
        one.setblocking(False)
        for _ in range(20):
            start, moved = time.perf_counter(), 0
            while moved < 2**24:
                try:
                    sent = one.send(buffer)
                except BlockingIOError:
                    sent = 0
                moved += sent
                while sent > 0:
                    sent -= other.recv_into(buffer)
            times.append((time.perf_counter() - start) / moved)
    return 1 / _quiet(times)


def _python_s() -> float:
    """Return the time of an optimizer step with one small gradient, alone: of the code in Python."""
    import allred

    allred.init(banner=False)
    parameters = [np.zeros(8, np.float32)]
    optimizer = allred.distributed(allred.optim.SGD(0.0))
    optimizer.broadcast(parameters)
    gradients, times = [np.ones(8, np.float32)], []
    for _ in range(2000):
        start = time.perf_counter()
        optimizer.step(parameters, gradients)
        times.append(time.perf_counter() - start)
    allred.shutdown()
    return _quiet(times)
