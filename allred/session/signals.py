"""Signals that stop training: SIGTERM, SIGUSR1 (sent by batch systems before their time limit), and one Ctrl-C.

The handler records the signal, and the session ends the loop after the step. A second Ctrl-C raises KeyboardInterrupt.
"""

import contextlib
import os
import signal
import types
from collections.abc import Callable
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopSignals:
    """Handlers of the stop signals. `reason`: the name of the first signal, "" before."""

    def __init__(self) -> None:
        self.reason = ""
        self._on_signal: Callable[[], None] = lambda: None
        self._previous: dict[int, Any] = {}
        self._process = os.getpid()

    def install(self) -> None:
        """Install the handlers. Has no effect outside of the main thread, and for signals that the program ignores
        (nohup, background jobs) or handles in C."""
        with contextlib.suppress(ValueError):
            for number in SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._previous[number] = signal.signal(number, self._handle)

    def notify(self, on_signal: Callable[[], None]) -> None:
        """Call `on_signal` in the handler of each signal; at once if a signal was received before."""
        self._on_signal = on_signal
        if self.reason:
            on_signal()

    def restore(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)
        self._previous = {}

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked process, such as a data loader: the previous handler applies
            signal.signal(number, self._previous.get(number) or signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.reason = self.reason or signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(number, self._previous[number])
        self._on_signal()
