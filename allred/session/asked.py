"""Signals that ask a training to end: SIGTERM, SIGUSR1 (a batch system's warning before its limit), and one Ctrl-C.

They are noted, and the session ends the loop after a step. A second Ctrl-C interrupts as ever.
"""

import contextlib
import os
import signal
import types
from collections.abc import Callable
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Asked:
    """`reason`: the signal's name, once one has come to this process."""

    def __init__(self) -> None:
        self.reason = ""
        self.noted: Callable[[], None] = lambda: None  # called when one comes, in the handler
        self._before: dict[int, Any] = {}
        self._process = os.getpid()

    def listen(self) -> None:
        """From now on. In another thread than the main one there are no handlers: then nothing is heard. Nor is what
        the program ignores (nohup, a job in the background), or handles in C."""
        with contextlib.suppress(ValueError):
            for number in SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._hear)

    def notify(self, noted: Callable[[], None]) -> None:
        """Have this called when one comes, or now if one has come."""
        self.noted = noted
        if self.reason:
            noted()

    def stop(self) -> None:
        """Put back what was there before."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._hear:
                signal.signal(number, handler)
        self._before = {}

    def _hear(self, number: int, frame: types.FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked process, to load data for example, ends as it would without
            signal.signal(number, self._before.get(number) or signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.reason = self.reason or signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(number, self._before[number])
        self.noted()
