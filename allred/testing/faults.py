"""Faults for tests: what goes wrong, on which rank, at which step.

A fault is called once a step, by hand or by an optimizer that it was put into. They compose, and go off in turn:

    opt = fail_at(2, 5).into(slow(1, 0.1).into(allred.distributed(allred.optim.SGD())))   # before the gradients travel
    opt = allred.distributed(fail_at(2, 5).into(allred.optim.SGD()))                      # after, before the update

Ranks are those of allred.rank(), asked for at each call; steps count from 1.
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


class Fault:
    """Something that happens on one rank, at one step, or at every step if `step` is None. `title` is for messages.

    Call it once a step on every rank. Raises InputError if there is no such rank, for then it could never happen.

    >>> Fault("nothing", rank=1, step=5, happen=lambda: None)
    nothing on rank 1 at step 5
    """

    def __init__(self, title: str, rank: int, step: int | None, happen: Callable[[], object]) -> None:
        if rank < 0 or (step is not None and step < 1):
            raise InputError(f"{title}: rank={rank} and step={step} cannot be; ranks count from 0, steps from 1")
        self.title = title
        self.rank = rank
        self.step = step
        self.steps = 0  # so many were begun
        self._happen = happen

    def __call__(self) -> None:
        """A step begins."""
        if self.rank >= topology.size():
            raise InputError(f"{self}: there are {topology.size()} ranks, so it would never happen; use one of them")
        self.steps += 1
        if topology.rank() == self.rank and self.step in (None, self.steps):
            self._happen()

    def into(self, optimizer: Any) -> Any:
        """The same optimizer, with this fault before its `step(...)`; of any kind, distributed or not."""
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
    """The rank raises `error`, by default a RuntimeError that says where it came from."""
    default = RuntimeError(f"allred.testing.fail_at(rank={rank}, step={step})")

    def fail() -> None:
        raise default if error is None else error

    return Fault("fail_at", rank, step, fail)


def exit_at(rank: int, step: int, code: int = 1) -> Fault:
    """The rank leaves by sys.exit(code)."""
    return Fault("exit_at", rank, step, lambda: sys.exit(code))


def kill_at(rank: int, step: int, signal: int = signals.SIGKILL) -> Fault:
    """The rank sends itself a signal: by default the one that the kernel kills with when memory runs out."""
    return Fault("kill_at", rank, step, lambda: os.kill(os.getpid(), signal))


def stop_at(rank: int, step: int) -> Fault:
    """The rank stops, all threads of it, until somebody sends it SIGCONT."""
    return Fault("stop_at", rank, step, lambda: os.kill(os.getpid(), signals.SIGSTOP))


def slow(rank: int, seconds: float) -> Fault:
    """The rank sleeps so many seconds before every step."""
    return Fault("slow", rank, None, lambda: time.sleep(seconds))
