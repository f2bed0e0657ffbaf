"""The event loop of background processes: files that are ready, timers, and a wake-up from signals and threads.

One turn handles all files that are ready, then the timers that were due before it looked at the files. So everything
that happened before the time of a timer is handled before the timer, even if this process got no core for a while.
"""

import contextlib
import heapq
import itertools
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable

File = int | socket.socket
Call = Callable[[], object]


class Timer:
    """A call at a later time, in seconds of time.monotonic()."""

    def __init__(self, at: float, call: Call) -> None:
        self.at, self.call, self.is_cancelled = at, call, False

    def cancel(self) -> None:
        self.is_cancelled = True


class Loop:
    """An event loop. Its methods are called by one thread, except `wake`. now: the time at which the current or last
    turn began; what had happened before is handled before its timers."""

    def __init__(self) -> None:
        self._selector, self.now = selectors.DefaultSelector(), time.monotonic()
        self._timers: list[tuple[float, int, Timer]] = []  # a heap
        self._numbers = itertools.count()  # timers of the same time are called in the order of `after`
        self._pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.on_input(self._pipe[0], lambda: os.read(self._pipe[0], 4096))

    def on_input(self, file: File, call: Call) -> None:
        """Call `call` whenever there is something to read, until `remove`."""
        self._selector.register(file, selectors.EVENT_READ, (call, None))

    def on_output(self, file: File, call: Call | None) -> None:
        """Call `call` whenever the file can be written; None: no longer. No effect if `on_input` does not watch it."""
        with contextlib.suppress(KeyError, ValueError):
            read, _ = self._selector.get_key(file).data
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if call else 0)
            self._selector.modify(file, events, (read, call))

    def remove(self, file: File) -> None:
        """Watch a file no longer. No effect if it is not watched, or closed."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(file)

    def after(self, seconds: float, call: Call) -> Timer:
        """Call `call` once, after this time."""
        timer = Timer(time.monotonic() + seconds, call)
        heapq.heappush(self._timers, (timer.at, next(self._numbers), timer))
        return timer

    def turn(self, limit_s: float = float("inf")) -> float:
        """Wait for a file or a timer, at most `limit_s` seconds, and make the calls. Return `now`."""
        self.now = now = time.monotonic()
        wait_s = min(limit_s, self._timers[0][0] - now if self._timers else float("inf"))
        for key, events in self._selector.select(max(wait_s, 0.0) if wait_s < float("inf") else None):
            for event, call in zip((selectors.EVENT_READ, selectors.EVENT_WRITE), key.data, strict=True):
                watched = self._selector.get_map().get(key.fd)
                if events & event and watched is not None and watched.data[0] is key.data[0]:
                    call()  # an earlier call may close the file, and reuse its number
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if not timer.is_cancelled:
                timer.call()
        return now

    def wake(self) -> None:
        """End the current wait of `turn`, or the next one."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full: the loop will wake
            os.write(self._pipe[1], b"\0")

    def wake_on_signals(self) -> None:
        """End the wait at each signal that has a Python handler. In the main thread only."""
        signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)

    def close(self) -> None:
        """Close the loop, not the files that it watches."""
        self._selector.close()
        for end in self._pipe:
            os.close(end)
