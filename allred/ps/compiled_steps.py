"""Serves steps in C (csrc/step_server.h), if C has a kernel for the update of the optimizer.

With policy async, or bounded if all workers are on this node, and with locking, a push and pull is served without
Python, from the record of its request to the reply. Python gets every other request, such as the step of a worker that
must wait for others afterwards. The cells of a push that Python got are applied in C if they are applied at once.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from allred import native
from allred.optim.optimizers import SGD, Adagrad, Adam, AdamW, RMSProp
from allred.ps import protocol
from allred.ps.consistency import Async, Bounded, Coordinator
from allred.ps.shard import Shard, Update
from allred.timeline import recorder

_LARGEST = float(np.finfo(np.float32).max)  # of a number that a kernel of float32 takes
_STEP = protocol.PUSH | protocol.PULL


class CompiledSteps:
    """The steps of one shard. See `of`."""

    def __init__(self, shard: Shard, optimizer: Any, policy: Any) -> None:
        kernel = optimizer.kernel(0.1, 1)
        cells = [
            (param, *(None if name is None else slots[name] for name in kernel.slots)) for param, slots in shard.cells
        ]
        self._server = native.StepServer(kernel.rule, cells)
        self._shard, self._optimizer = shard, optimizer
        self._serves = isinstance(policy, Async | Bounded)
        self._bound = policy.staleness if isinstance(policy, Bounded) else None
        self._workers: list[int] = []

    @classmethod
    def of(cls, shard: Shard, optimizer: Any, policy: Any, locking: bool) -> "CompiledSteps | None":
        """Return the steps, or None if they are served in Python."""
        plain = all(group.dtype.char in "fd" for group in shard.layout.groups)
        known = type(optimizer) in (SGD, Adagrad, RMSProp, Adam, AdamW)  # a row-wise Adagrad is not in place
        if native.StepServer is None or not (plain and known and locking and shard.in_place and shard.layout.groups):
            return None
        return cls(shard, optimizer, policy)

    def set_boxes(self, boxes: list[Any], workers: list[int]) -> None:
        """Set the mailboxes of the workers of this node."""
        self._server.set_boxes(boxes, native.Mailbox)
        self._workers = workers

    def _numbers(self, lr: float, step: int) -> tuple[float, ...] | None:
        """Return the numbers of an update; None if C cannot use them."""
        numbers: tuple[float, ...] = self._optimizer.kernel(lr, step).numbers
        return numbers if all(type(number) is float and abs(number) <= _LARGEST for number in numbers) else None

    def serve(self, limit_us: int, first: int, chief: int, coordinator: Coordinator) -> "Served | None":
        """Serve requests until one is of another kind, or for `limit_us`. Return None if steps are served in Python
        now. first: the box to begin with. chief: the box of the worker whose learning rate counts; -1: none.
        coordinator: all its workers compute."""
        optimizer, lr, bound = self._optimizer, self._optimizer.lr, self._bound
        if not self._serves or not self._workers or recorder.current is not None:
            return None
        if bound is not None and coordinator.live != set(self._workers):
            return None
        if type(lr) is not float or not 0.0 <= lr < math.inf:
            return None
        numbers = self._numbers(lr, optimizer.global_step + 1)
        if numbers is None:
            return None
        adam = (*optimizer.betas, optimizer.eps, optimizer.weight_decay) if isinstance(optimizer, Adam) else None
        shard, before = self._shard, self._shard.version
        shard.version, optimizer.global_step, box, record = self._server.serve(
            _STEP if bound is None else _STEP | protocol.DONE, before, optimizer.global_step, lr, numbers, adam,
            limit_us, first, chief, None if bound is None else [coordinator.accepted[w] for w in self._workers],
            bound or 0,
        )  # fmt: skip
        by_box, staleness = self._server.take_counts() if shard.version != before else ([], [])
        by_worker = [(self._workers[at], number) for at, number in by_box]
        if bound is not None:
            for worker, number in by_worker:
                coordinator.count_served(worker, number)
        return Served(box, record, by_worker, staleness)

    def apply(self, update: Update, box: int, first: int, gives: bool) -> int | None:
        """Apply the cells of the request of a box from number `first` on, as long as they arrive, and give each to the
        worker if `gives`. Return the number of the next cell; None if Python must apply them."""
        numbers = self._numbers(update.lr, update.step)
        if numbers is None or update.absent:
            return None
        reached: int = self._server.apply(box, first, gives, numbers)
        return reached


class Served(NamedTuple):
    """Requests that were served. box, record: of the first request that was not served; box is -1 if there is none.
    by_worker: [(worker, number of requests)]. staleness: [(updates, number of requests)]."""

    box: int
    record: bytes | None
    by_worker: list[tuple[int, int]]
    staleness: list[tuple[int, int]]
