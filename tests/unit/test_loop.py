"""The event loop of background processes: files, timers, and wake-ups."""

import contextlib
import os
import signal
import socket
import threading
import time

import pytest

from allred.runtime.loop import Loop


@pytest.fixture
def loop():
    with contextlib.closing(Loop()) as opened:
        yield opened


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_files_are_read_until_they_are_removed(loop, pair):
    found = []
    loop.on_input(pair[0], lambda: found.append(pair[0].recv(1)))
    pair[1].send(b"ab")
    loop.turn()
    loop.turn()
    assert found == [b"a", b"b"]
    loop.remove(pair[0])
    loop.remove(pair[0])
    pair[1].send(b"c")
    loop.turn(0.01)
    assert found == [b"a", b"b"]


def test_output_is_called_while_there_is_room_and_until_it_is_removed(loop, pair):
    found, ours = [], pair[0]
    ours.setblocking(False)
    loop.on_input(ours, lambda: found.append(ours.recv(1)))
    loop.on_output(ours, lambda: found.append("room"))
    pair[1].send(b"a")
    loop.turn()
    assert found == [b"a", "room"]
    with contextlib.suppress(BlockingIOError):
        while True:
            ours.send(bytes(10000))
    loop.turn(0.01)
    assert found == [b"a", "room"]
    pair[1].recv(1_000_000)
    loop.turn()
    assert found == [b"a", "room", "room"]
    loop.on_output(ours, None)
    loop.turn(0.01)
    loop.remove(ours)
    loop.on_output(ours, lambda: found.append("room after the end"))
    loop.turn(0.01)
    assert found == [b"a", "room", "room"]


def test_a_file_that_an_earlier_call_removed_is_not_read(loop, pair):
    found = []

    def read(mine, other):
        loop.remove(other)
        other.close()
        found.append(mine.recv(1))

    others = socket.socketpair()
    loop.on_input(pair[0], lambda: read(pair[0], others[0]))
    loop.on_input(others[0], lambda: read(others[0], pair[0]))
    pair[1].send(b"x")
    others[1].send(b"x")
    loop.turn()
    assert found == [b"x"]
    others[1].close()


def test_timers_are_called_once_in_the_order_of_their_times(loop):
    found = []
    for seconds, name in ((0.02, "c"), (0.01, "a"), (0.01, "b"), (0.015, "cancelled")):
        timer = loop.after(seconds, lambda name=name: found.append(name))
        if name == "cancelled":
            timer.cancel()
    while len(found) < 3:
        loop.turn()
    loop.turn(0.03)
    assert found == ["a", "b", "c"]


def test_a_timer_may_start_and_cancel_others(loop):
    found = []
    later = loop.after(0.01, lambda: found.append("later"))

    def first():
        found.append("first")
        later.cancel()
        loop.after(0.0, lambda: found.append("second"))

    loop.after(0.0, first)
    while len(found) < 2:
        loop.turn()
    loop.turn(0.02)
    assert found == ["first", "second"]


def test_what_happened_before_a_timer_is_handled_before_it(loop, pair):
    """Even if the process got no core in between, and both are late."""
    found = []
    loop.on_input(pair[0], lambda: found.append(pair[0].recv(1)))
    loop.after(0.01, lambda: found.append("timer"))
    pair[1].send(b"x")
    time.sleep(0.03)
    loop.turn()
    assert found == [b"x", "timer"]


def test_the_time_of_a_turn_is_before_its_wait(loop):
    before = time.monotonic()
    assert before <= loop.turn(0.05) < before + 0.05


def test_another_thread_wakes_the_loop(loop):
    thread = threading.Thread(target=lambda: [loop.wake() for _ in range(100_000)])  # more than the pipe holds
    thread.start()
    loop.turn()
    thread.join()
    loop.turn()


def test_a_signal_wakes_the_loop(loop):
    came = []
    before = signal.signal(signal.SIGUSR2, lambda *_: came.append("signal"))
    try:
        loop.wake_on_signals()
        timer = threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGUSR2))
        timer.start()
        while not came:
            loop.turn()
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGUSR2, before)
        timer.join()
