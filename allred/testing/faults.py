"""Fault injection for tests: an action on one rank at one step.

A fault is called once per step, by the program or by an optimizer (`into`). Faults can be nested:

    opt = fail_at(2, 5).into(slow(1, 0.1).into(allred.distributed(allred.optim.SGD())))   # before the reduction
    opt = allred.distributed(fail_at(2, 5).into(allred.optim.SGD()))                      # after it, before the update

Ranks are those of allred.rank(). Steps count from 1.
"""

import functools
import os
import signal as signals
import sys
import time
from collections.abc import Callable
from typing import Any

from allred.cluster import topology
from allred.errors import InputError
from allred.wording import count


class Fault:
    """Action on one rank at one step. Call the object once per step on every rank.

    Arguments:
        title: name of the fault in messages.
        rank: rank that runs the action, >= 0.
        step: step that runs it, >= 1; None means every step.
        happen: the action.

    Raises InputError: rank or step is out of range; when called, if the job has no such rank.

    >>> Fault("nothing", rank=1, step=5, happen=lambda: None)
    nothing on rank 1 at step 5
    """

    def __init__(self, title: str, rank: int, step: int | None, happen: Callable[[], object]) -> None:
        if rank < 0 or (step is not None and step < 1):
            raise InputError(f"{title}: rank={rank} and step={step} are invalid; ranks count from 0, steps from 1")
        self.title = title
        self.rank = rank
        self.step = step
        self.steps = 0  # steps begun
        self._happen = happen

    def __call__(self) -> None:
        """Begin a step, and run the action if this is its rank and step."""
        if self.rank >= topology.size():
            raise InputError(f"{self}: the job has only {count(topology.size(), 'rank')}; choose one of them")
        self.steps += 1
        if topology.rank() == self.rank and self.step in (None, self.steps):
            self._happen()

    def into(self, optimizer: Any) -> Any:
        """Call this fault before each `step(...)` of an optimizer, distributed or not. Returns the optimizer."""
        step = optimizer.step

        @functools.wraps(step)
        def faulty(*args: Any, **kwargs: Any) -> Any:
            self()
            return step(*args, **kwargs)

        optimizer.step = faulty
        return optimizer

    def __repr__(self) -> str:
        return f"{self.title} on rank {self.rank} at {'every step' if self.step is None else f'step {self.step}'}"


def fail_at(rank: int, step: int, error: BaseException | None = None) -> Fault:
    """Raise `error` on the rank, by default a RuntimeError that names this call."""
    default = RuntimeError(f"allred.testing.fail_at(rank={rank}, step={step})")

    def fail() -> None:
        raise default if error is None else error

    return Fault("fail_at", rank, step, fail)


def exit_at(rank: int, step: int, code: int = 1) -> Fault:
    """Exit the rank by sys.exit(code)."""
    return Fault("exit_at", rank, step, lambda: sys.exit(code))


def kill_at(rank: int, step: int, signal: int = signals.SIGKILL) -> Fault:
    """Send the rank a signal, by default SIGKILL, which the kernel uses when memory runs out."""
    return Fault("kill_at", rank, step, lambda: os.kill(os.getpid(), signal))


def stop_at(rank: int, step: int) -> Fault:
    """Stop all threads of the rank by SIGSTOP, until it receives SIGCONT."""
    return Fault("stop_at", rank, step, lambda: os.kill(os.getpid(), signals.SIGSTOP))


def slow(rank: int, seconds: float) -> Fault:
    """Delay every step of the rank by `seconds`."""
    return Fault("slow", rank, None, lambda: time.sleep(seconds))
