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

A rank whose parameters are not finite sends zeros with weight 0, and begins again from the base.

A. Douillard et al.: DiLoCo: Distributed low-communication training of language models. arXiv:2311.08105, and Streaming
DiLoCo with overlapping communication. arXiv:2501.18512, 2025.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from allred import arrays, log, native, world
from allred.arrays import Array
from allred.comm import functions
from allred.comm.arguments import memory_conflicts
from allred.comm.communicator import Communicator
from allred.comm.header import mix
from allred.comm.ops import Compression, ReduceOp
from allred.comm.work import Work
from allred.errors import DriftError, InputError, NonFiniteError
from allred.fusion import Tensor
from allred.modes.options import StepOptions
from allred.nest import quoted
from allred.optim.base import optimizer_kind
from allred.timeline.recorder import span
from allred.wording import count, named

_HASH_BITS = 20  # of the base; the squares of all ranks fit into an int64
_WEIGHT_UNIT = 2**20  # weights are whole multiples of 1 / _WEIGHT_UNIT


class _FragmentRound(NamedTuple):
    """The exchange of a fragment that is under way.

    number, names: of the fragment and its parameters. changes, record: sums over the ranks, when it is complete. lost:
    whether this rank begins again from the base. due: the step at which it is completed. delayed: whether the rank
    makes steps before. sent_bytes: of the communicator before it. weight, counted: of this rank's steps.

    record: int64, shape (7,)
        0     weight, in units of 1 / _WEIGHT_UNIT
        1, 2  number of ranks; of these, ranks whose parameters are not finite
        3, 4  ranks that know their numbers of samples; that do not
        5, 6  a hash of the base, of _HASH_BITS bits; its square. If all bases are equal, [6] * [1] == [5] ** 2
    """

    work: Work[list[Array]]
    number: int
    names: list[str]
    changes: list[Array]
    record: Array
    lost: bool
    due: int
    delayed: bool
    sent_bytes: int
    weight: float
    counted: bool


class Rounds:
    """The rounds of one optimizer. title: prefix of errors. Collective where it says so; then all ranks call it after
    the same number of steps."""

    def __init__(self, options: StepOptions, title: str) -> None:
        self._options, self._title = options, title
        self._every: int = options.every or 1
        self.on_exchange: Callable[[], None] = lambda: None  # called when the exchange of a fragment is complete
        self.on_lost: Callable[[], None] = lambda: None  # called when this rank begins again from the base
        self.has_state = True  # else this process has joined an elastic job, and its parameters do not count
        self._unit = 1.0  # samples that have weight 1
        self.base: dict[str, Array] = {}
        self.completed = self.lost = 0  # exchanges of fragments; those that this rank has lost its steps in
        self._sent_bytes = self._full_bytes = 0  # of changes: as they travelled, and without compression
        self._residuals: dict[tuple[str, ...], Array] = {}
        self._pending: list[_FragmentRound] = []
        self.reset_outer()
        self._begin_schedule()

    def _begin_schedule(self) -> None:
        self.steps = 0  # of fragment f an exchange begins at every * (f + 1) // fragments
        self.is_global = True  # whether the parameters of all ranks are the base
        self._weights = [0.0] * self._options.fragments  # of the steps of this rank since the last exchange of each
        self._counted = [True] * self._options.fragments  # whether the numbers of samples of these steps are known

    def describe(self) -> str:
        options = self._options
        parts = f" in {options.fragments} fragments" if options.fragments > 1 else ""
        later = f", {options.delay} steps later with mix={options.mix:g}" if options.delay else ""
        return f"every={self._every}{parts}{later}, outer={self.outer.kind}({self._numbers()})"

    def _numbers(self) -> str:
        found = self.outer.hyperparameters()
        return ", ".join(f"{name}={value:g}" for name, value in found.items() if isinstance(value, (int, float)))

    # The outer optimizer. Each fragment counts its own updates.

    def reset_outer(self) -> None:
        """Begin with a new outer optimizer."""
        self.outer: Any = copy.deepcopy(self._options.outer)
        self._updates = [0] * self._options.fragments

    def outer_state(self) -> dict[str, Any]:
        return {"kind": optimizer_kind(self.outer), "state": self.outer.state_dict()}

    def load_outer_state(self, saved: dict[str, Any]) -> None:
        """Load the result of `outer_state`; begin with a new outer optimizer if that is of another kind."""
        self.reset_outer()
        if saved["kind"] != (own := optimizer_kind(self.outer)):
            log.warning(f"{self._title}: the checkpoint has the state of outer={saved['kind']}; {own} begins without")
            return
        self.outer.load_state_dict(saved["state"])
        self._updates = [self.outer.global_step] * self._options.fragments

    # Before a step.

    def prepare(self, names: Sequence[str], leaves: Sequence[Any], samples: int | None) -> None:
        """Take parameters that are not known into the base. Collective in the first call after `restart`. samples: of
        this rank in the step. Raises InputError for arrays that it cannot average; DriftError, on all ranks, if
        parameters differ between the ranks."""
        if self.base.keys() >= set(names) and all(
            leaf.shape == self.base[name].shape for name, leaf in zip(names, leaves, strict=True)
        ):
            return
        is_first = not self.base
        for name, leaf in zip(names, leaves, strict=True):
            title = f"{self._title}: {quoted(name, 'parameter')}"
            if not isinstance(leaf, np.ndarray):
                raise InputError(f"{title} is on a GPU; mode local takes numpy arrays")
            if not arrays.is_inexact(leaf.dtype):
                raise InputError(f"{title} is {leaf.dtype}; mode local averages floats and complex numbers")
            if name not in self.base:
                self.base[name] = leaf.copy()
            elif self.base[name].shape != leaf.shape:
                raise InputError(
                    f"{title} has shape {leaf.shape}, and had {self.base[name].shape}; call opt.broadcast(params) "
                    "after such a change"
                )
        if self._options.fragments > 1 or self._options.delay:
            for first, second in memory_conflicts(list(leaves)):
                raise InputError(
                    f"{self._title}: '{names[first]}' and '{names[second]}' share memory; in mode local with fragments "
                    "or delay pass such a parameter once"
                )
        if is_first:
            try:
                given = [each for each in self._compare(samples) if each is not None]
            except BaseException:
                self.base = {}  # the next step compares again
                raise
            self._unit = max(1.0, float(np.mean(given))) if given else 1.0

    def _compare(self, samples: int | None = None) -> list[int | None]:
        """Raise DriftError on all ranks if their bases differ. Collective. Returns the `samples` of all ranks."""
        communicator = functions.current()
        mine = dict(zip(self.base, native.hashes([arrays.as_bytes(each) for each in self.base.values()]), strict=True))
        title = f"{self._title}: the parameters before a round"
        everyone = communicator.allgather_object((mine, samples), title).wait()
        ranks, found = communicator.active.ranks, [each for each, _ in everyone]
        for name in mine:
            odd = [rank for rank, each in zip(ranks, found, strict=True) if each.get(name) != found[0].get(name)]
            if odd:
                raise DriftError(
                    f"{self._title}: {quoted(name, 'parameter')} of {named('rank', odd)} is not that of rank "
                    f"{ranks[0]}. In mode local all ranks begin with the same parameters: call opt.broadcast(params) "
                    "before training, and do not change the parameters of one rank"
                )
        return [number for _, number in everyone]

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
        self._counted = [each and samples is not None for each in self._counted]
        weight = 1.0 if samples is None else samples / self._unit
        self._weights = [each + weight / self._every for each in self._weights]
        while self._pending and self._pending[0].due <= self.steps:
            self._complete_first(leaves)
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
        self._begin_schedule()

    def restart(self) -> None:
        """Forget the base: the next step begins with the parameters that it finds. Called on all ranks."""
        for exchange in self._pending:
            exchange.work.wait()
        self._pending, self.base = [], {}
        self._begin_schedule()
        self.drop_residuals()

    def broadcast(self, params: Any, tensors: list[Tensor], root: int, values: bool) -> None:
        """Begin with parameters that are equal on all ranks. Collective. values: whether the state of the outer
        optimizer is copied from the root; else it is equal already."""
        if values:
            state = self.outer_state() if functions.current().number == root else None
            self.load_outer_state(functions.broadcast_object(state, root, f"outer optimizer of {self._title}"))

    def global_parameters(self, params: Any, leaves: dict[str, Array]) -> Any:
        """Return the parameters of a checkpoint, a nest like `params`. leaves: the parameters of this rank. Raises
        InputError between two rounds."""
        if not self.is_global:
            raise InputError(
                f"{self._title}: in mode local a checkpoint is written after a round: call opt.round() on all ranks "
                "before opt.save()"
            )
        return params

    def drop_residuals(self) -> None:
        """Drop the residuals of compression. On all ranks."""
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
        names, own, counted = self._fragment(number), self._weights[number], self._counted[number]
        changes = [self._change(name, leaves[name]) for name in names]
        lost = not all(np.isfinite(change).all() for change in changes)
        weight = own if self.has_state else 0.0
        units = 0 if lost or not weight else max(1, round(weight * _WEIGHT_UNIT))
        weight = units / _WEIGHT_UNIT
        for change in changes:
            if weight == 0:
                change[...] = 0
            else:
                np.multiply(change, weight, out=change)
        hashed = 0
        for found in native.hashes([arrays.as_bytes(self.base[name]) for name in names]):
            hashed = mix(hashed, found)
        hashed >>= 64 - _HASH_BITS  # each bit has an effect on the upper ones only
        numbers = units, 1, lost, counted and own > 0, not counted, hashed, hashed * hashed
        record = np.array(numbers, np.int64) * self.has_state  # integers are not compressed
        name = f"{self._title}: round of fragment {number} of {options.fragments}, {self.describe()}"
        if delay:
            functions.enable_progress(communicator)
        sent_bytes = communicator.sent_bytes
        with span("round", name):
            work = communicator.grouped_allreduce(
                [*changes, record], ReduceOp.SUM, name, options.compression, in_place=True,
                residual=self._residual(communicator, names, [*changes, record]),
            )  # fmt: skip
        due = self.steps + delay
        self._pending.append(
            _FragmentRound(work, number, names, changes, record, lost, due, delay > 0, sent_bytes, own, counted)
        )
        self._weights[number], self._counted[number] = 0.0, True

    def _change(self, name: str, leaf: Array) -> Array:
        wide = arrays.accumulator(leaf.dtype)
        return np.asarray(self.base[name].astype(wide, copy=False) - leaf.astype(wide, copy=False))

    def _residual(self, communicator: Communicator, names: list[str], group: list[Array]) -> Array | None:
        if not (self._options.keeps_residuals and communicator.backend.encodes):
            return None
        key = tuple(names)
        if key not in self._residuals:
            self._residuals[key] = np.zeros(sum(each.size for each in group), np.float32)
        return self._residuals[key]

    def begin_world(self) -> None:
        """Take back the exchanges that a change of the ranks has interrupted: their steps count in the next round."""
        for exchange in self._pending:
            self._weights[exchange.number] += exchange.weight
            self._counted[exchange.number] &= exchange.counted
        self._pending = []
        self.drop_residuals()

    def complete(self, leaves: dict[str, Array]) -> None:
        """Make a round after a change of the ranks, whatever the number of steps. Collective. leaves: all parameters in
        the order of the base of the others. The next step begins with a new base."""
        self.is_global = False
        if not self.has_state or not self.base:
            self.base = {name: leaf.copy() for name, leaf in leaves.items()}
        self.round(leaves)
        self.base = {}

    def _complete_all(self, leaves: dict[str, Array]) -> None:
        while self._pending:
            self._complete_first(leaves)

    def _complete_first(self, leaves: dict[str, Array]) -> None:
        with span("round", f"{self._title}: end of a round"):
            self._pending[0].work.wait()  # if the ranks change, `begin_world` takes it back
        self._complete(self._pending.pop(0), leaves)
        self.on_exchange()

    def _complete(self, exchange: _FragmentRound, leaves: dict[str, Array]) -> None:
        """Move the base and the parameters by an exchange that is complete."""
        self._sent_bytes += functions.current().sent_bytes - exchange.sent_bytes
        self._full_bytes += sum(change.nbytes for change in exchange.changes)
        weight, ranks, lost, counted, uncounted, hashed, squares = exchange.record.tolist()
        if squares * ranks != hashed**2:
            self._compare()
            raise DriftError(f"{self._title}: the parameters of the last round differed between the ranks")
        if counted and uncounted:
            raise InputError(f"{self._title}: some ranks gave no number of samples, but others did; pass it on all")
        if lost == ranks:
            self._refuse("the parameters of all ranks are not finite")
        if weight:
            self._move_base(exchange, weight / _WEIGHT_UNIT)
        share = self._options.mix if exchange.delayed and not exchange.lost else 0.0
        for name in exchange.names:
            leaf = leaves[name]
            if share:
                leaf[...] = share * leaf + (1.0 - share) * self.base[name]
            else:
                leaf[...] = self.base[name]
        self.completed += 1
        world.current().counters.count_round()
        if exchange.lost:
            self._count_lost()

    def _count_lost(self) -> None:
        self.lost += 1
        self.on_lost()
        log.warning(f"{self._title}: the parameters of this rank were not finite; it begins again from those of others")

    def _move_base(self, exchange: _FragmentRound, weight: float) -> None:
        """Update the base. A parameter that no rank has changed, such as a frozen one, stays, whatever the momentum."""
        for change in exchange.changes:
            np.divide(change, weight, out=change)
        if not all(np.isfinite(change).all() for change in exchange.changes):
            self._refuse("the mean of the changes of all ranks is not finite")
        base = {name: self.base[name] for name in exchange.names}
        moved = [change if change.any() else None for change in exchange.changes]
        if self._options.outer is not None:
            self.outer.lr = self._options.outer.lr  # the program may assign it
        self.outer.global_step = self._updates[exchange.number]
        self.outer.step(base, dict(zip(exchange.names, moved, strict=True)))
        self._updates[exchange.number] = self.outer.global_step

    def _refuse(self, problem: str) -> None:
        raise NonFiniteError(f"{self._title}: {problem} in a round; lower the learning rate, or look at the loss")

    def summary(self) -> str:
        options, rounds = self._options, max(1, self.completed)
        how = "" if options.compression is Compression.none or not self._full_bytes else (
            f" as {options.compression.name}, {self._sent_bytes / self._full_bytes:.3f} of their size"
        )  # fmt: skip
        lost = f"; {count(self.lost, 'exchange')} of parameters that were not finite" if self.lost else ""
        each = arrays.amount(self._sent_bytes / rounds)
        return f"rounds: {count(self.completed, 'exchange')} of {each}{how}; {self.describe()}{lost}"
