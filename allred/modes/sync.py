"""Synchronous SGD: every rank averages its gradients with all others, then updates its own copy of the parameters.

The parameters start equal (`broadcast`) and every rank applies the same mean with the same optimizer, so they stay
equal, bit for bit, without being sent again.
"""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from allred import arrays, checkpoint, nest, world
from allred.cluster import report
from allred.comm import functions
from allred.comm.ops import ReduceOp
from allred.compression import Compression
from allred.errors import AllredError, InputError
from allred.fusion.plan import Tensor
from allred.gpu.device_arrays import to_host
from allred.modes.clipping import Clipper
from allred.modes.detect.checks import Checks
from allred.modes.detect.outside import restored
from allred.modes.early import Early
from allred.modes.meter import Meter
from allred.optim.base import Optimizer
from allred.ps.account import Statistics
from allred.reducer import Reducer
from allred.timeline.recorder import span


class SyncMode:
    """Of one optimizer; see `allred.distributed` for the arguments."""

    dropped = 0
    in_step = True

    def __init__(
        self,
        optimizer: Any,
        op: ReduceOp,
        accumulate: int,
        bucket_bytes: int | str | None,
        nonfinite: str | None,
        name: str,
        compression: Compression,
        clipper: Clipper,
    ) -> None:
        self._optimizer, self._name, self._clipper = optimizer, name, clipper
        self._title = f"{name}.step()"
        self._reducer = Reducer(op, bucket_bytes, self._title, f"accumulate={accumulate}", compression)
        self._checks = Checks(self._title, nonfinite, optimizer, compression)
        self._early = Early(self._reducer, self._checks, self._title, lambda: clipper.settings)
        self._meter = Meter()
        self.torn = False
        self._updates = 0  # for an optimizer that does not count them; those before a restore included

    def step(
        self, params: Any, grads: Any, tensors: list[Tensor], leaves: list[Any], values: list[Any],
        samples: int | None, problem: str,
    ) -> None:  # fmt: skip
        """Average the gradients over all ranks, then let the optimizer update the parameters."""
        communicator = functions.current()
        if not self._early.begun:
            self._meter.begin(communicator)
        self._checks.begin(params)
        mean = self._early.finish(tensors, values, samples, problem)
        if not self._meter.steps:
            report.inform(_first_step(self._optimizer, self._reducer, tensors))
        if mean is not None:
            mean = self._clipper.reduced(mean) if self._clipper.active else mean
            self.torn = True
            with span("apply", self._name):
                own = len(mean) == len(values) and all(map(operator.is_, mean, values))
                self._optimizer.step(params, grads if own else nest.rebuild(grads, mean))
            self.torn = False
            self._updates += 1
        if self._clipper.scaler is not None:
            self._clipper.scaler.update(mean is None, self._title)
        self._checks.end(updated=mean is not None)
        self._meter.end(communicator, self._reducer.samples)

    def reduce(self, name: str, grad: Any, samples: int | None) -> None:
        if not self._early.begun:
            self._meter.begin(functions.current())
        self._early.reduce(name, grad, samples)

    @property
    def skipped(self) -> int:
        return self._checks.skipped

    def broadcast(self, params: Any, tensors: list[Tensor], root: int, problem: str) -> None:
        communicator = functions.current()
        title, settings = f"{self._name}.broadcast()", f"optimizer has a state: {has_state(self._optimizer)}"
        communicator.check("parameters", title, [str(t) for t in tensors], settings, problem=problem).wait()
        for name, leaf in nest.leaves(params):
            communicator.broadcast_(leaf, root, name).wait()
        if has_state(self._optimizer):
            state = self._optimizer.state_dict() if communicator.number == root else None
            state = communicator.broadcast_object(state, root, f"state of {self._name}").wait()
            if communicator.number != root:
                self._optimizer.load_state_dict(state)
            restored(self._optimizer)
        self._early.forget()  # a rank that had joined does not know the order

    def pull(self, params: Any) -> None:
        pass

    def finish(self) -> None:
        pass

    def meet(self) -> None:
        pass

    def hear(self, failure: AllredError | None) -> AllredError | None:
        heard: AllredError | None = functions.broadcast_object(failure)
        return heard

    def statistics(self) -> Statistics:
        raise InputError(f"{self._name}.statistics() is of parameter servers, and this is mode sync; see summary()")

    def state_dict(self) -> Any:
        return self._optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._optimizer.load_state_dict(state)

    def save(self, params: Any, extra: Any, copy: bool) -> Callable[[str], str]:
        state, step = self._optimizer.state_dict(), self.global_step
        entries = [
            checkpoint.whole(name, np.array(to_host(leaf)) if copy else to_host(leaf))
            for name, leaf in nest.leaves(params)
        ]
        meta: dict[str, Any] = {"optimizer": None}
        if isinstance(self._optimizer, Optimizer):
            slots = state.pop("slots")
            entries += [
                checkpoint.whole(n, to_host(value), slot) for n, part in slots.items() for slot, value in part.items()
            ]
            meta = {"optimizer": state}
        else:
            entries.append(checkpoint.pickled_state(state))
        if extra is not None:
            entries.append(checkpoint.pickled_extra(extra))
        return lambda directory: str(checkpoint.write(directory, step, entries, meta))

    @property
    def global_step(self) -> int:
        if isinstance(self._optimizer, Optimizer):
            return self._optimizer.global_step
        return self._updates

    def latest_step(self) -> int:
        return self.global_step

    def count_from(self, step: int) -> None:
        self._updates = step

    @property
    def waited_s(self) -> float:
        return functions.current().queue.waited_s

    def ask_to_end(self) -> None:
        pass

    def end_with(self, save: Callable[[], str]) -> None:
        pass

    def summary(self) -> str:
        shape, config = world.current().topology, world.config()
        skipped = f"\nskipped: {self.skipped} steps with gradients that were not finite" if self.skipped else ""
        return (
            f"world: {shape.size} rank{'s' * (shape.size > 1)} on {shape.nodes} node{'s' * (shape.nodes > 1)}, "
            f"mode {config.mode}\n"
            f"backend: {functions.current().name} ({world.current().reason})\n"
            f"speed: {self._meter.text()}{skipped}{self._wire()}"
        )

    def _wire(self) -> str:
        """How much travels, in words; nothing if nothing does."""
        if not self._meter.sent_bytes:
            return ""
        compression = self._reducer.compression
        how = "" if compression is Compression.none else f", as {compression.name}"
        return f"\ngradients: {arrays.amount(self._meter.sent_bytes / self._meter.steps)} a step on the wire{how}"


def has_state(optimizer: Any) -> bool:
    """Whether an optimizer can give its state, and take it."""
    return hasattr(optimizer, "state_dict") and hasattr(optimizer, "load_state_dict")


def _first_step(optimizer: Any, reducer: Reducer, tensors: list[Tensor]) -> str:
    """What this job does at each step, in a line; said once."""
    plan, size, rate = reducer.plan(tensors), functions.current().size, getattr(optimizer, "lr", None)
    batch = f"; global batch {reducer.samples} over {size} rank{'s' * (size > 1)}" if reducer.samples else ""
    lr = f"; learning rate {rate:g}, not scaled by the number of ranks" if isinstance(rate, float) else ""
    return (
        f"{reducer.op.value} of {len(tensors)} gradients ({arrays.amount(plan.nbytes)}) "
        f"in {len(plan.buckets)} bucket{'s' * (len(plan.buckets) != 1)}{batch}{lr}"
    )
