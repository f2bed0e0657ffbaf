"""Mode ps with `every`: each worker trains alone, as in mode local, and exchanges its change with the parameter servers
after every `every` steps.

    change = base - parameters      base: the parameters that the servers had at the last exchange
    the servers move their parameters with the outer optimizer: by each change, or with policy sync by the mean of
    several, weighted by samples
    base = parameters of the servers
    parameters = base

With policy sync a change may come too late for its step. Then the servers drop it, and the worker keeps its work: it
moves its parameters by the difference between the new base and the old one (it rebases), so the next change contains
the dropped one.
"""

import contextlib
import copy
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from allred import arrays, nest, world
from allred.arrays import Array
from allred.comm import functions
from allred.errors import AllredError, InputError, ShutdownError
from allred.fusion import Tensor
from allred.modes.clipping import Clipper
from allred.modes.local import OUTER_STATE, LocalMode
from allred.modes.match import parameter
from allred.modes.options import StepInput, StepOptions
from allred.modes.ps import PsMode
from allred.modes.rounds import Rounds
from allred.optim.base import Optimizer
from allred.optim.optimizers import SGD
from allred.ps import context
from allred.ps.consistency import Sync
from allred.ps.protocol import Statistics
from allred.timeline.recorder import span
from allred.wording import count

_LARGEST_MOMENTUM = 0.5


def options_of_rounds(options: StepOptions) -> StepOptions:
    """Return the options with the outer optimizer of the servers. Raises InputError: see `check_outer`."""
    here = context.current()
    policy, workers = options.policy(here.config), here.workers
    options = dataclasses.replace(options, fragments=1, delay=0)
    if isinstance(policy, Sync):
        return dataclasses.replace(options, outer=options.outer or SGD(0.7, momentum=0.5, nesterov=True))
    outer = options.outer or SGD(1.0 / workers)
    check_outer(options.name, outer, workers)
    return dataclasses.replace(options, outer=outer)


def check_outer(name: str, outer: Optimizer, workers: int) -> None:
    """Raise InputError if its rate is above 1 / workers, or its momentum is large. With policies async and bounded the
    servers apply the change of each worker separately: then `workers` updates would move the parameters further than
    the workers have moved, which may diverge."""
    momentum, rate = getattr(outer, "momentum", 0.0), outer.learning_rate
    how = "and is applied to the change of each worker alone (policies async and bounded)"
    if momentum > _LARGEST_MOMENTUM:
        raise InputError(
            f"{name}: outer has momentum={momentum:g}, {how}; use at most {_LARGEST_MOMENTUM:g}, or "
            "consistency=allred.ps.Sync()"
        )
    if rate > 1.0 / workers:
        raise InputError(
            f"{name}: outer has lr={rate:g}, {how}; use at most 1 / workers = {1 / workers:g}, or "
            "consistency=allred.ps.Sync()"
        )


class PsRounds(Rounds):
    """The exchanges of one optimizer with the parameter servers. options: the result of `options_of_rounds`."""

    def __init__(self, options: StepOptions, title: str, meta: dict[str, str]) -> None:
        assert options.outer is not None
        plain = dataclasses.replace(options, clip_norm=None, scaler=None, nonfinite="ignore")
        self.servers = PsMode(options.outer, plain, Clipper(None, None, options.name), meta)
        self.servers.counts_steps = False
        super().__init__(dataclasses.replace(options, outer=copy.deepcopy(options.outer)), title)  # without a state
        here = context.current()
        self._outer: Optimizer = options.outer
        self._checked_lr, self._workers = self._outer.lr, here.workers
        self._applies_alone = not isinstance(options.policy(here.config), Sync)
        self._tensors: list[Tensor] = []  # of the base
        self._steps_before = 0  # the step of the restored checkpoint, modulo `every`

    def broadcast(self, params: Any, tensors: list[Tensor], root: int, values: bool) -> None:
        named = zip(tensors, nest.leaves(params), strict=True)
        self.base, self._tensors = {tensor.name: leaf.copy() for tensor, (_, leaf) in named}, tensors
        self.servers.broadcast(self.base, tensors, root, "", values)

    def _compare(self, samples: int | None = None) -> list[int | None]:
        return []  # the servers compare, in the first exchange

    def _begin(self, number: int, leaves: dict[str, Array], delay: int) -> None:
        """Exchange the change of this worker."""
        if self._applies_alone and self._outer.lr is not self._checked_lr:
            check_outer(self._options.name, self._outer, self._workers)
            self._checked_lr = self._outer.lr
        self.is_global = True  # also if this fails: the change is sent once
        weight, self._weights[0] = self._weights[0], 0.0
        changes = [self._change(name, leaves[name]) if name in leaves else None for name in self.base]
        lost = not all(each is None or np.isfinite(each).all() for each in changes)
        changes = [None if lost or each is None or not each.any() else each for each in changes]
        before, dropped = {name: each.copy() for name, each in self.base.items()}, self.servers.dropped
        self.servers.weight = 0.0 if lost else weight
        self._exchange(changes)
        self.completed += 1
        world.current().counters.count_round()
        if self.servers.dropped > dropped and not lost:
            self._weights[0], self.is_global = weight, False
            return self._rebase(leaves, before)
        for name, leaf in leaves.items():
            leaf[...] = self.base[name]
        if lost:
            self._count_lost()

    def end_step(self, leaves: dict[str, Array], samples: int | None) -> None:
        super().end_step(leaves, samples)
        self.is_global = self.is_global and not self._weights[0]  # a change that was dropped has its weight

    def _exchange(self, changes: list[Array | None]) -> None:
        """Push the changes, and pull the base."""
        if len(self._tensors) != len(self.base):
            self._tensors = [parameter(name, leaf) for name, leaf in self.base.items()]
        start, queue = time.perf_counter(), functions.current().queue
        base, tensors = list(self.base.values()), list(self._tensors)  # a new list: changes may be None
        with span("round", self._title):
            self.servers.step(StepInput(functions.current(), self.base, None, tensors, base, changes, None, "", False))
        took_s = time.perf_counter() - start
        queue.waited_s += took_s
        queue.waited_for_peers_s += took_s
        self._full_bytes += sum(each.nbytes for each in base)
        self._sent_bytes = self._full_bytes

    def _rebase(self, leaves: dict[str, Array], before: dict[str, Array]) -> None:
        """Move the parameters by the difference between the base and that of `before`."""
        for name, leaf in leaves.items():
            wide = arrays.accumulator(leaf.dtype)
            moved = leaf.astype(wide) + self.base[name].astype(wide) - before[name].astype(wide)
            leaf[...] = moved.astype(leaf.dtype)

    def round(self, leaves: dict[str, Array]) -> None:
        if not self.is_global:
            self._begin(0, leaves, 0)
            self.steps = 0

    def restart(self) -> None:
        """Begin a period of `every` steps. The base, the parameters of the servers, stays."""
        self._begin_schedule()

    def pull(self, params: Any) -> None:
        """Overwrite the base and the parameters with the parameters of the servers."""
        self.servers.pull(self.base)
        named = dict(nest.leaves(params))
        if missing := sorted(self.base.keys() - named):
            raise InputError(f"{self._title}: pull() needs all parameters of the optimizer, and lacks '{missing[0]}'")
        for name, base in self.base.items():
            named[name][...] = base
        self.restart()

    def global_parameters(self, params: Any, leaves: dict[str, Array]) -> Any:
        """Return a nest like `params` of the servers' parameters, on which this worker rebases."""
        before = {name: each.copy() for name, each in self.base.items()}
        self.servers.pull(self.base)
        self._rebase(leaves, before)
        return nest.rebuild(params, [self.base.get(name, leaf) for name, leaf in nest.leaves(params)])

    def outer_state(self) -> dict[str, Any]:
        return {**super().outer_state(), "state": self.servers.state_dict()}

    def load(self, saved: dict[str, Any] | None, steps: int) -> None:
        """Worker 0: give the servers the result of `outer_state`, or a new state. steps: of the checkpoint."""
        if saved is None:
            self.reset_outer()
        else:
            self.load_outer_state(saved)
        self.outer.global_step = steps // self._every
        self.servers.load_state_dict(self.outer.state_dict())

    def count_from(self, steps: int) -> None:
        self.servers.count_from(steps // self._every)
        self._steps_before = steps % self._every

    @property
    def global_step(self) -> int:
        """Updates of the servers times `every`."""
        return self.servers.global_step * self._every + self._steps_before

    def latest_step(self) -> int:
        return self.servers.latest_step() * self._every + self._steps_before


class PsLocalMode(LocalMode):
    """Mode ps of one optimizer on a worker, with `every`. Arguments: as of LocalMode."""

    is_lockstep = False

    def __init__(self, *arguments: Any, rounds: PsRounds, save: Callable[[Any], Callable[[str], str]]) -> None:
        """save: given the parameters, returns a function that writes a checkpoint into a directory."""
        super().__init__(*arguments, rounds=rounds)
        self._exchanges, self._servers = rounds, rounds.servers
        self._params: Any = None  # of the last step
        self._restored = 0  # step of the restored checkpoint
        root = context.current().config.checkpoint_dir
        if root != "none":
            self._servers.set_final_save(lambda: save(self._params)(root))

    def step(self, given: StepInput) -> None:
        self._params = given.params if not given.problem else self._params
        super().step(given)

    def commit(self, used: bool) -> None:
        super().commit(used)
        self.dropped = self._servers.dropped

    def _average(self, *arguments: Any) -> None:
        """No effect: each worker keeps its own buffers and optimizer states."""

    def pull(self, params: Any) -> None:
        self._complete_step()
        self._exchanges.pull(params)

    def finish(self) -> None:
        with contextlib.suppress(ShutdownError):  # the job is asked to end, and has its checkpoint
            self.round()
        self._servers.finish()

    def statistics(self) -> Statistics:
        return self._servers.statistics()

    @property
    def saves_in_rounds(self) -> bool:
        return False

    def before_checkpoint(self) -> None:
        """No effect: `save` takes the parameters of the servers."""

    def load_more_state(self, state: dict[str, Any]) -> None:
        saved = state.get(OUTER_STATE)
        self._exchanges.load(saved, self._restored)
        self._load_own_steps(saved)
        functions.barrier()  # no worker makes an exchange before

    # SessionSupport.

    @property
    def global_step(self) -> int:
        return self._exchanges.global_step

    def latest_step(self) -> int:
        return self._exchanges.latest_step()

    def count_from(self, step: int) -> None:
        super().count_from(step)
        self._exchanges.count_from(step)
        self._restored = step

    @property
    def can_save(self) -> bool:
        return not (self.update_interrupted or self._servers.update_interrupted)

    def end_of_step(self) -> bool:
        self._complete_step()
        return False

    def broadcast_failure(self, failure: AllredError | None) -> AllredError | None:
        return self._servers.broadcast_failure(failure)

    def request_stop(self) -> None:
        self._servers.request_stop()

    def set_final_save(self, save: Callable[[], str]) -> None:
        self._servers.set_final_save(save)

    def wait_all_workers(self) -> None:
        self.finish()
        self._servers.wait_all_workers()

    # Texts.

    def _first_step(self, communicator: Any, tensors: list[Tensor]) -> str:
        nbytes = arrays.amount(sum(tensor.nbytes for tensor in tensors))
        what = f"{count(len(tensors), 'parameter')} ({nbytes}) are exchanged with the servers"
        return f"mode ps: each worker trains alone; {what}, {self._exchanges.describe()}"

    def summary(self) -> str:
        return f"{super().summary()}\n{self._servers.statistics()}"
