"""`Rounds`: what the ranks exchange in mode local.

Between rounds each rank trains alone. In a round every rank sends how far it has moved from the parameters that all
ranks had before, the base. The mean of these changes, weighted by samples, is the gradient of an outer optimizer, which
moves the base; then all ranks go on from it.

    change = base - parameters                          on each rank
    base = outer(base, mean of the changes)             the same bits on all ranks
    parameters = base

With `fragments` the parameters are divided into parts of about equal size, whose rounds begin at different steps. With
`delay` the exchange of a fragment takes that many steps, in which the ranks go on training; then

    parameters = mix * parameters + (1 - mix) * base

A rank whose parameters are not finite sends nothing, and begins again from the base.

A. Douillard et al.: DiLoCo: Distributed low-communication training of language models. arXiv:2311.08105, and Streaming
DiLoCo with overlapping communication. arXiv:2501.18512, 2025.
"""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from allred import arrays, native
from allred.arrays import Array
from allred.comm import functions
from allred.comm.communicator import Communicator
from allred.comm.ops import ReduceOp
from allred.comm.work import Work
from allred.errors import DriftError, InputError, NonFiniteError
from allred.modes.options import StepOptions
from allred.nest import quoted
from allred.timeline.recorder import span
from allred.wording import count, named

_HASH_BITS = 20  # of the base; the squares of all ranks fit into an int64
_WEIGHT_UNIT = 2**20  # weights are whole multiples of 1 / _WEIGHT_UNIT


class _FragmentRound(NamedTuple):
    """The exchange of a fragment that is under way.

    names: of its parameters. changes, record: sums over the ranks, when it is complete; of the weights of the ranks, of
    1, of `lost`, of a hash of the base and of its square. lost: whether this rank begins again from the base. due: the
    step at which it is completed. delayed: whether the rank makes steps before."""

    work: Work[list[Array]]
    names: list[str]
    changes: list[Array]
    record: Array
    lost: bool
    due: int
    delayed: bool


class Rounds:
    """The rounds of one optimizer. title: prefix of errors. Collective where it says so; then all ranks call it after
    the same number of steps."""

    def __init__(self, options: StepOptions, title: str) -> None:
        self._options, self._title = options, title
        self.outer: Any = copy.deepcopy(options.outer)
        self.base: dict[str, Array] = {}
        self.completed = 0  # exchanges of fragments
        self.steps = 0  # since the schedule began: of fragment f an exchange begins at every * (f + 1) // fragments
        self.is_global = True  # whether the parameters of all ranks are the base
        self._every: int = options.every or 1
        self._weights = [0.0] * options.fragments  # of the steps of this rank since the last exchange of each
        self._pending: list[_FragmentRound] = []
        self._residuals: dict[tuple[str, ...], Array] = {}

    def describe(self) -> str:
        options = self._options
        parts = f" in {options.fragments} fragments" if options.fragments > 1 else ""
        later = f", {options.delay} steps later with mix={options.mix:g}" if options.delay else ""
        return f"every={self._every}{parts}{later}, outer={self.outer.kind}({self._numbers()})"

    def _numbers(self) -> str:
        found = self.outer.hyperparameters()
        return ", ".join(f"{name}={value:g}" for name, value in found.items() if isinstance(value, (int, float)))

    # Before a step.

    def prepare(self, names: Sequence[str], leaves: Sequence[Any]) -> None:
        """Take parameters that are not known into the base. Collective in the first call after `restart`. Raises
        InputError for arrays on a GPU; DriftError, on all ranks, if parameters differ between the ranks."""
        if self.base.keys() >= set(names):
            return
        is_first = not self.base
        for name, leaf in zip(names, leaves, strict=True):
            if not isinstance(leaf, np.ndarray):
                raise InputError(
                    f"{self._title}: {quoted(name, 'parameter')} is on a GPU; mode local has arrays on hosts"
                )
            if name not in self.base and arrays.is_inexact(leaf.dtype):
                self.base[name] = leaf.copy()
        if is_first:
            self._compare()

    def _compare(self) -> None:
        """Raise DriftError on all ranks if their bases differ. Collective."""
        communicator = functions.current()
        mine = dict(zip(self.base, native.hashes([arrays.as_bytes(each) for each in self.base.values()]), strict=True))
        everyone = communicator.allgather_object(mine, f"{self._title}: the parameters before a round").wait()
        for name in mine:
            odd = [rank for rank, each in zip(communicator.ranks, everyone, strict=True)
                   if each.get(name) != everyone[0].get(name)]  # fmt: skip
            if odd:
                raise DriftError(
                    f"{self._title}: {quoted(name, 'parameter')} of {named('rank', odd)} is not that of rank "
                    f"{communicator.ranks[0]}. In mode local all ranks begin with the same parameters: call "
                    "opt.broadcast(params) before training, and do not change the parameters of one rank"
                )

    # After a step.

    @property
    def at_boundary(self) -> bool:
        """Whether the last step ended a period of `every` steps."""
        return self.steps % self._every == 0

    def end_step(self, leaves: dict[str, Array], samples: int | None) -> None:
        """Count a step, and begin and complete the exchanges that are due. Collective in these steps. leaves: the
        parameters, which are overwritten."""
        options = self._options
        self.steps += 1
        self.is_global = False
        weight = 1.0 if samples is None else float(samples)
        self._weights = [each + weight / self._every for each in self._weights]
        while self._pending and self._pending[0].due <= self.steps:
            self._complete(self._pending.pop(0), leaves)
        for fragment in range(options.fragments):
            if (self.steps - self._every * (fragment + 1) // options.fragments) % self._every == 0:
                self._begin(fragment, leaves, options.delay)
        if not options.delay:
            self._complete_all(leaves)
            self.is_global = options.fragments == 1 and self.at_boundary

    def round(self, leaves: dict[str, Array]) -> None:
        """Make the parameters of all ranks the base, with all steps in it. Collective. No effect after a round without
        a step since."""
        if self.is_global:
            return
        self._complete_all(leaves)
        for fragment in range(self._options.fragments):
            self._begin(fragment, leaves, 0)
            self._complete_all(leaves)
        for name, leaf in leaves.items():
            leaf[...] = self.base[name]
        self.steps, self.is_global = 0, True

    def restart(self) -> None:
        """Forget the base: the next step begins with the parameters that it finds. Collective."""
        for exchange in self._pending:
            exchange.work.wait()
        self._pending, self.base, self.steps, self.is_global = [], {}, 0, True
        self._weights = [0.0] * self._options.fragments
        self.drop_errors()

    def drop_errors(self) -> None:
        """Drop the errors of compression. On all ranks."""
        self._residuals.clear()

    def _fragment(self, number: int) -> list[str]:
        """Return the names of the parameters of a fragment: a consecutive part of them."""
        sizes = np.cumsum([each.nbytes for each in self.base.values()], dtype=np.float64)
        if not sizes.size:
            return []
        parts = np.minimum((sizes - 1) * self._options.fragments // max(sizes[-1], 1), self._options.fragments - 1)
        return [name for name, part in zip(self.base, parts, strict=True) if part == number]

    def _begin(self, number: int, leaves: dict[str, Array], delay: int) -> None:
        options, communicator = self._options, functions.current()
        names, weight = self._fragment(number), self._weights[number]
        self._weights[number] = 0.0
        changes = [self._change(name, leaves[name]) for name in names]
        lost = not all(np.isfinite(change).all() for change in changes)
        weight = 0.0 if lost else round(weight * _WEIGHT_UNIT) / _WEIGHT_UNIT
        for change in changes:
            if weight == 0:
                change[...] = 0
            else:
                np.multiply(change, weight, out=change)
        hashed = sum(native.hashes([arrays.as_bytes(self.base[name]) for name in names])) % 2**_HASH_BITS
        record = np.array([int(weight * _WEIGHT_UNIT), 1, lost, hashed, hashed * hashed])  # integers are not compressed
        name = f"{self._title}: round of fragment {number} of {options.fragments}, {self.describe()}"
        if delay:
            functions.enable_progress(communicator)
        with span("round", name):
            work = communicator.grouped_allreduce(
                [*changes, record], ReduceOp.SUM, name, options.compression, in_place=True,
                residual=self._residual(communicator, names, [*changes, record]),
            )  # fmt: skip
        self._pending.append(_FragmentRound(work, names, changes, record, lost, self.steps + delay, delay > 0))

    def _change(self, name: str, leaf: Array) -> Array:
        wide = arrays.accumulator(leaf.dtype)
        return np.asarray(self.base[name].astype(wide, copy=False) - leaf.astype(wide, copy=False))

    def _residual(self, communicator: Communicator, names: list[str], group: list[Array]) -> Array | None:
        if not (self._options.keeps_errors and communicator.backend.encodes):
            return None
        key = tuple(names)
        if key not in self._residuals:
            self._residuals[key] = np.zeros(sum(each.size for each in group), np.float32)
        return self._residuals[key]

    def _complete_all(self, leaves: dict[str, Array]) -> None:
        while self._pending:
            self._complete(self._pending.pop(0), leaves)

    def _complete(self, exchange: _FragmentRound, leaves: dict[str, Array]) -> None:
        """Wait for an exchange, and move the base and the parameters."""
        with span("round", f"{self._title}: end of a round"):
            exchange.work.wait()
        weight, ranks, lost, hashed, squares = exchange.record.tolist()
        if squares * ranks != hashed**2:
            self._compare()
            raise DriftError(f"{self._title}: the parameters of the last round differed between the ranks")
        if lost == ranks:
            self._refuse("the parameters of all ranks are not finite")
        if weight:
            self._move_base(exchange, weight / _WEIGHT_UNIT)
        mix = self._options.mix if exchange.delayed and not exchange.lost else 0.0
        for name in exchange.names:
            leaf = leaves[name]
            if mix:
                leaf[...] = mix * leaf + (1.0 - mix) * self.base[name]
            else:
                leaf[...] = self.base[name]
        self.completed += 1

    def _move_base(self, exchange: _FragmentRound, weight: float) -> None:
        for change in exchange.changes:
            np.divide(change, weight, out=change)
        if not all(np.isfinite(change).all() for change in exchange.changes):
            self._refuse("the mean of the changes of all ranks is not finite")
        base = {name: self.base[name] for name in exchange.names}
        self.outer.step(base, dict(zip(exchange.names, exchange.changes, strict=True)))

    def _refuse(self, problem: str) -> None:
        raise NonFiniteError(f"{self._title}: {problem} in a round; lower the learning rate, or look at the loss")

    def summary(self) -> str:
        return f"rounds: {count(self.completed, 'exchange')}, {self.describe()}"
