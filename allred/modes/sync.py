"""Synchronous SGD: every rank averages its gradients with all others, then updates its own copy of the parameters.

The parameters start equal (`broadcast`) and every rank applies the same mean with the same optimizer, so they stay
equal, bit for bit, without being sent again.
"""

import operator
from typing import Any

import numpy as np

from allred import arrays, nest
from allred.cluster import report, topology
from allred.comm import collectives
from allred.comm.ops import ReduceOp
from allred.data.share import claim
from allred.errors import InputError
from allred.fusion.plan import Tensor
from allred.modes.accumulate import Accumulator
from allred.modes.detect.checks import Checks
from allred.modes.meter import Meter
from allred.reducer import Reducer, tensor_of


class DistributedOptimizer:
    """What `allred.distributed` makes of an optimizer: the same `step`, with the mean gradient of all ranks.

    `optimizer` is the wrapped one. See `allred.distributed` for the arguments.
    """

    def __init__(
        self,
        optimizer: Any,
        op: ReduceOp = ReduceOp.AVERAGE,
        accumulate: int = 1,
        bucket_bytes: int | str | None = None,
        nonfinite: str | None = None,
        name: str = "opt",
    ) -> None:
        self.optimizer = optimizer
        self.name = name
        self._accumulator = Accumulator(accumulate)
        self._reducer = Reducer(op, bucket_bytes, f"{name}.step()", f"accumulate={accumulate}")
        self._checks = Checks(f"{name}.step()", nonfinite, optimizer)
        self._meter = Meter()

    def step(self, params: Any, grads: Any, samples: int | None = None) -> None:
        """Average the gradients over all ranks, then let the optimizer update the parameters in place. Collective.

        params: a nest of arrays. grads: the same nest of gradients, which are overwritten with the mean; numbers and
        read-only arrays are passed on as new arrays; None counts as zeros if another rank has that gradient.
        None takes the parameter's dtype, a Python number too.
        samples: how many samples the gradients are the mean of; known by itself inside `allred.data.batches`. Ranks
        with more count for more; if no rank says, all count alike.

        With accumulate=k only every k-th call reduces and updates, with the mean over the samples of k calls (over the
        calls, where samples are not counted); the gradients are added up here and not overwritten.

        Silent mistakes are looked for (allred/modes/detect): gradients that are not finite, and, at the first steps and
        every check_steps, ranks that have drifted apart, have the same batch, or average twice.

        Raises InputError, MismatchError, DriftError or NonFiniteError, with the same text on every rank, before
        anything has been changed (a sum that overflows is found when the gradients have been overwritten).
        """
        communicator = collectives.current()
        tensors, values, problem = _pair(params, grads)
        try:
            samples = claim(None if samples is None else _whole(samples))
            if self._accumulator.micro_steps > 1 and not problem:
                if not self._accumulator.add(tensors, values, samples):
                    return
                values, samples = self._accumulator.take()
        except InputError as error:
            problem = str(error)
        if problem:  # the others hear of it when they reduce
            tensors, values, samples = [], [], None
            self._accumulator.clear()
        self._meter.begin(communicator)
        self._checks.begin(params)
        mean = self._reducer.reduce(tensors, values, samples, problem, self._checks)
        if not self._meter.steps:
            report.inform(_first_step(self.optimizer, self._reducer, tensors))
        if mean is not None:
            self.optimizer.step(params, nest.rebuild(grads, mean))
        self._checks.end(updated=mean is not None)
        self._meter.end(communicator, self._reducer.samples)

    @property
    def skipped(self) -> int:
        """Steps left out so far because gradients were not finite, with nonfinite="skip"."""
        return self._checks.skipped

    def broadcast(self, params: Any, root: int = 0) -> None:
        """Give every rank the root's parameters, in place, and the state of its optimizer. Collective.

        Raises MismatchError on every rank, naming ranks and tensor, if their parameters differ in name, shape or dtype.
        """
        communicator = collectives.current()
        try:
            problem, tensors = "", [_parameter(name, leaf) for name, leaf in nest.leaves(params)]
        except InputError as error:
            problem, tensors = str(error), []
        title, settings = f"{self.name}.broadcast()", f"optimizer has a state: {_has_state(self.optimizer)}"
        communicator.check("parameters", title, [str(t) for t in tensors], settings, problem=problem).wait()
        for name, leaf in nest.leaves(params):
            communicator.broadcast_(leaf, root, name).wait()
        if _has_state(self.optimizer):
            state = self.optimizer.state_dict() if communicator.rank == root else None
            state = communicator.broadcast_object(state, root, f"state of {self.name}").wait()
            if communicator.rank != root:
                self.optimizer.load_state_dict(state)

    def state_dict(self) -> Any:
        """The optimizer's own state, as it is without allred. Gradients waiting in `accumulate` are not in it."""
        self._needs_state()
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Restore what state_dict gave, on this rank."""
        self._needs_state()
        self.optimizer.load_state_dict(state)

    def _needs_state(self) -> None:
        if not _has_state(self.optimizer):
            raise InputError(f"{type(self.optimizer).__name__} has no state_dict and load_state_dict; add both to it")

    def summary(self) -> str:
        """World, backend and why, speed, and where the time of a step went on this rank; one line a topic."""
        world, config = topology.current(), collectives.config()
        skipped = f"\nskipped: {self.skipped} steps with gradients that were not finite" if self.skipped else ""
        return (
            f"world: {world.size} rank{'s' * (world.size > 1)} on {world.nodes} node{'s' * (world.nodes > 1)}, "
            f"mode {config.mode}\n"
            f"backend: {collectives.current().name} ({collectives.reason()})\n"
            f"speed: {self._meter.text()}{skipped}"
        )


def _pair(params: Any, grads: Any) -> tuple[list[Tensor], list[Any], str]:
    """What a plan knows of each gradient, the gradients, and the words for what is wrong with them, if anything."""
    named, given = nest.leaves(params), nest.leaves(grads)
    names, given_names = [name for name, _ in named], [name for name, _ in given]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        return [], [], f"two parameters are named '{twice}': dict keys must differ as text"
    if names != given_names:
        odd = sorted(set(names) ^ set(given_names))[:5]
        return [], [], f"params and grads differ in structure, in {', '.join(map(repr, odd)) or 'their order'}"
    tensors = []
    try:
        for (name, param), (_, grad) in zip(named, given, strict=True):
            expected = _parameter(name, param)
            got = expected if grad is None else tensor_of(name, grad)
            if got.shape != expected.shape:
                return [], [], f"the gradient of {expected} has shape {got.shape}"
            tensors.append(expected if isinstance(grad, (int, float)) else got)  # Python's numbers have no dtype
    except InputError as error:
        return [], [], str(error)
    return tensors, [grad for _, grad in given], ""


def _parameter(name: str, leaf: Any) -> Tensor:
    if type(leaf) is np.ndarray and leaf.flags.writeable:
        return tensor_of(name, leaf)
    arrays.as_host_array(leaf)  # raises its own words about devices, torch and masks
    if not isinstance(leaf, np.ndarray) or not leaf.flags.writeable:
        what = "a read-only array" if isinstance(leaf, np.ndarray) else type(leaf).__name__
        raise InputError(f"parameter '{name}' is {what}; it is updated in place, so it must be a writable array")
    return tensor_of(name, leaf)


def _whole(samples: Any) -> int:
    try:
        number = operator.index(samples)
    except TypeError:
        number = -1
    if number < 0:
        raise InputError(f"samples={samples!r} must be a whole number of at least 0")
    return number


def _has_state(optimizer: Any) -> bool:
    return hasattr(optimizer, "state_dict") and hasattr(optimizer, "load_state_dict")


def _first_step(optimizer: Any, reducer: Reducer, tensors: list[Tensor]) -> str:
    """What this job does at each step, in a line; said once."""
    plan, size, rate = reducer.plan(tensors), topology.size(), getattr(optimizer, "lr", None)
    batch = f"; global batch {reducer.samples} over {size} rank{'s' * (size > 1)}" if reducer.samples else ""
    lr = f"; learning rate {rate:g}, not scaled by the number of ranks" if isinstance(rate, float) else ""
    return (
        f"{reducer.op.value} of {len(tensors)} gradients ({plan.nbytes / 1e6:.2f} MB) "
        f"in {len(plan.buckets)} bucket{'s' * (len(plan.buckets) != 1)}{batch}{lr}"
    )
