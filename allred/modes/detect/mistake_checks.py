"""`MistakeChecks`: the checks for silent mistakes that a distributed optimizer or gradient function makes at each step.

Every step: a scan of this rank's gradients, unless the reduction checks its results; flags, and a hash of some of the
parameters, in the header exchange.
In the steps of a check, and where a rank has a reason for one: one more header exchange, with two hashes. More is
exchanged only if something is wrong. A result or error follows from what all ranks know, so it is the same on all.

Updates that an optimizer makes without its wrapper are found in its own counter `global_step`, if it has one, as all of
allred.optim have. Other optimizers are only found when the parameters are compared (drift.py).
"""

import weakref
from collections.abc import Sequence
from typing import Any

from allred import log, native, nest, world
from allred.comm.communicator import Communicator
from allred.comm.header import mix
from allred.data import loader
from allred.errors import DriftError, InputError, NonFiniteError
from allred.fusion import Plan
from allred.gpu.device_arrays import leading_bytes
from allred.modes.detect import drift, drift_window, finite
from allred.modes.detect.batch_arguments import BatchArguments
from allred.modes.options import StepInput, StepOptions
from allred.modes.step_header import BATCHES, CHECK, LARGE, NONFINITE, Agreement
from allred.watch import exit_callbacks

_FIRST = 3  # steps that are always checked
_BITS = 32  # of the hash of gradients


class MistakeChecks:
    """The checks of one optimizer or gradient function. title: prefix of errors. optimizer: the wrapped optimizer; None
    for a gradient function, which has no parameters and no steps that could be skipped."""

    def __init__(self, options: StepOptions, title: str, optimizer: Any = None) -> None:
        self.skipped = 0  # steps
        self.in_skipped_step = False  # an earlier reduction of the current step was skipped
        self._title, self._nonfinite, self._compression = title, options.nonfinite, options.compression
        self._optimizer = optimizer
        self._updates = None if optimizer is None else updates_of(optimizer)
        self._duplicates = DuplicateBatch(title)
        self._batches = BatchArguments(title)
        self.compares = False  # whether the ranks compare parameters in the current step
        self.samples: int | None = None  # of the current step on this rank
        self._communicator: Communicator  # of the current step
        self._found: dict[str, str] = {}  # gradients of the current step that are not finite, in `scan_bucket`
        self.steps = 0  # completed negotiations, those of the root after a broadcast
        self._checked_until = _FIRST  # `passes_averaged` compares the ranks in each step until then
        self._equal_at = 0  # the last step before which the parameters of all ranks were equal

    @property
    def policy(self) -> str:
        return self._nonfinite or world.config().nonfinite

    def requests(self, communicator: Communicator, samples: int | None) -> int:
        """Begin a step of this communicator. Return the flags of the comparisons that this rank requests."""
        self._communicator, self.samples, self._found = communicator, samples, {}
        here, step = world.current(), self.steps + 1
        every = here.config.check_steps if communicator.size > 1 else 0
        self.compares = bool(every) and self._optimizer is not None
        due = every and (step <= _FIRST or step % every == 0 or (self._updates and self._updates.outside()))
        return CHECK * bool(due) | BATCHES * (loader.ITERATIONS in here.slots and self._batches.new(communicator, step))

    @property
    def can_defer_scan(self) -> bool:
        """Whether the gradients of this step must be finite, so that the reduction may check its results instead. Call
        `requests` before."""
        return self.policy != "ignore" and self.samples != 0

    def scan(self, plan: Plan, values: Sequence[Any], plain: bool = False) -> int:
        """Return this rank's flags of its gradients. plain: see `StepInput`."""
        if self.policy == "ignore" or self.samples == 0:  # gradients of 0 samples are not used
            return 0
        return finite.scan(plan, values, self._communicator.size, self._compression, plain)

    def scan_bucket(self, plan: Plan, values: Sequence[Any]) -> int:
        """As `scan`, for some of the gradients, which are overwritten afterwards."""
        flags = self.scan(plan, values)
        if flags & NONFINITE:
            self._found |= finite.describe(plan, values)
        return flags

    def window(self, plan: Plan, given: StepInput, values: list[Any]) -> int:
        """Return the hash of the parameters that the ranks compare in this step; 0 if they compare none."""
        return drift_window.window_hash(self.steps, plan, given.leaves, values, given.plain) if self.compares else 0

    def passes(self, agreement: Agreement, windows: list[int], plan: Plan, values: Sequence[Any], params: Any) -> bool:
        """Make the requested comparisons before the reduction. Return whether the gradients are used. windows: the
        result of `window` of all ranks. Raises DriftError, InputError, MismatchError or NonFiniteError on all ranks."""
        if agreement.any(BATCHES):
            self._batches.compare(self._communicator, self.steps + 1)
        if agreement.any(CHECK):
            self._duplicates.compare(self._compare_ranks(plan, values, params))
        elif drift_window.windows_differ(windows):
            self._compare_ranks(plan, values, params)
        self.steps += 1
        if agreement.any(NONFINITE):
            own = agreement.headers[self._communicator.active.rank].flags
            return self._refuse_nonfinite(self._found or finite.describe(plan, values) if own & NONFINITE else {})
        return True

    def passes_reduced(
        self, agreement: Agreement | None, plan: Plan, values: Sequence[Any], nonfinite: int | None
    ) -> bool:
        """Check the reduced gradients. Return whether they are used. Raises NonFiniteError on all ranks. nonfinite: the
        result of `Reducer.allreduce_`."""
        self._duplicates.remember(values)
        if nonfinite is not None:  # numbers that are not finite are not overwritten
            problem = finite.overflow_of(plan, nonfinite, self._compression)
            return self._refuse_nonfinite(finite.describe(plan, values), problem)
        large = agreement is not None and agreement.any(LARGE)
        problem = finite.overflow(plan, values, self._compression) if large else ""
        return self._refuse(problem) if problem else True

    def passes_steady(self, plan: Plan, values: Sequence[Any], nonfinite: int) -> bool:
        """As `passes` and `passes_reduced`, for a `SteadyStep`. nonfinite: the index of a result that is not finite; -1
        if there is none."""
        self.steps += 1
        if nonfinite < 0:
            _averaged.clear()
            return True
        return self.passes_reduced(None, plan, values, nonfinite)

    def passes_tables(self, communicator: Communicator, found: dict[str, str]) -> bool:
        """As `passes`, if a rank has gradients of embedding tables that are not finite. found: descriptions of this
        rank's, by table. Return False if the step is skipped."""
        self._communicator = communicator
        return self._refuse_nonfinite(found)

    def begin(self, steps: int) -> None:
        """Begin after this number of steps, the same on all ranks: with another rank's state, or in a new world."""
        self.steps, self._checked_until = steps, steps + _FIRST

    def passes_averaged(self, given: StepInput, plan: Plan) -> bool:
        """Check gradients that were averaged outside of this library: they are the same on all ranks. Return whether
        they are used. Some steps compare the ranks, which is collective. Raises NonFiniteError and DriftError."""
        self._communicator, self.samples = given.communicator, given.samples
        every, step = world.current().config.check_steps if given.communicator.size > 1 else 0, self.steps + 1
        if every and (step <= self._checked_until or step % every == 0):
            self._compare_ranks(plan, given.values, given.params)
        self.steps += 1
        if self.policy == "ignore" or not finite.scan(plan, given.values, ranks=1) & NONFINITE:
            return True
        (name, found), *more = finite.describe(plan, given.values).items()
        others = f"; and {len(more)} more" if more else ""
        return self._refuse(f"averaged gradients are not finite: {nest.quoted(name)} ({found}){others}")

    def end(self, updated: bool) -> None:
        """End a step. updated: whether the optimizer has made an update."""
        if updated and self._updates:
            self._updates.stepped(self, self._title)

    def _refuse_nonfinite(self, found: dict[str, str], overflow: str = "") -> bool:
        """found: this rank's gradients that are not finite. overflow: the problem if no rank has any."""
        everyone = self._communicator.allgather_object(found, f"{self._title}: not finite").wait()
        verdict = finite.verdict(everyone, self._communicator.active.ranks) if any(everyone) else overflow
        return self._refuse(verdict)

    def _refuse(self, problem: str) -> bool:
        if self.policy == "skip" and self._optimizer is not None:
            if self.in_skipped_step:
                return False
            self.skipped += 1
            world.current().counters.skip()
            if self.skipped == 1:
                log.warning(
                    f"{self._title}: step {self.steps} is skipped, like all later steps with this problem: {problem}"
                )
            return False
        skip = "; nonfinite='skip' (ALLRED_NONFINITE=skip) skips such steps" if self._optimizer is not None else ""
        raise NonFiniteError(
            f"{self._title}: {problem}. Look at that rank's batch, or lower the learning rate{skip}; "
            "nonfinite='ignore' uses such gradients"
        )

    def _compare_ranks(self, plan: Plan, values: Sequence[Any], params: Any) -> list[int]:
        """Compare what must be equal on all ranks. Raises DriftError or InputError on all. Return the hashes of their
        gradients."""
        parts, note, problem = [], 0, ""
        try:
            trained = {tensor.name for tensor, value in zip(plan.tensors, values, strict=True) if value is not None}
            if self._optimizer is not None:
                parts = drift.parts_of(params, trained, self._optimizer)
            gradients = self._duplicates.hash(values) if self.samples != 0 else 0
            note = drift.fingerprint(parts) >> _BITS << _BITS | gradients
        except Exception as error:  # such as of the user's state_dict: the other ranks wait in the exchange
            problem = f"comparing the ranks' parameters: {type(error).__name__}: {error}"
        title = f"{self._title}: check of the ranks' parameters"
        notes = [each.note for each in self._communicator.check("step", title, note=note, problem=problem).wait()]
        if len({note >> _BITS for note in notes}) > 1:
            self._raise_drift(parts)
        self._equal_at = self.steps + 1
        return [note % 2**_BITS for note in notes]

    def _raise_drift(self, parts: list[drift.Part]) -> None:
        """Find the parts that differ. Raises DriftError, unless only the payloads of NaN differ."""
        outside = self._updates.outside() if self._updates else 0
        mine = drift.table(parts), outside, self.steps + 1, self._equal_at
        communicator = self._communicator
        everyone = communicator.allgather_object(mine, f"{self._title}: what differs").wait()
        tables, counts, steps, equal_at = (list(each) for each in zip(*everyone, strict=True))
        ranks = communicator.active.ranks
        missed_steps = len(set(steps)) > 1  # by ranks that had joined
        title = f"{self._title}: search for the first difference"
        values = drift.describe_first_differences(
            parts, drift.differing_parts(tables), ranks, lambda mine: communicator.allgather_object(mine, title).wait()
        )
        if problem := drift.verdict(tables, max(steps), max(equal_at), counts, ranks, missed_steps, values):
            raise DriftError(f"{self._title}: {problem}")


_HASHED_BYTES = 2**16  # of each gradient
_IN_A_ROW = 3
# One array of the last reduction in this process, if gradients differed before it: (DuplicateBatch, array, hash).
_averaged: list[tuple[weakref.ref[Any], weakref.ref[Any], int]] = []


class DuplicateBatch:
    """Detects gradients that are bit for bit equal on all ranks before they are averaged.

    If another wrapper has just averaged the same arrays, they are averaged twice: an error. Otherwise the ranks
    probably train on the same batch: a warning, after three checks in a row.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._in_a_row = 0
        self._differed = False  # whether the gradients of this step were compared and differ between ranks

    def hash(self, values: Sequence[Any]) -> int:
        """Return 32 bits: a hash (0 if all gradients are zero), and whether another wrapper has just averaged them."""
        present = [value for value in values if value is not None]
        heads = [leading_bytes(value, _HASHED_BYTES) for value in present]
        if not any(start.any() for start in heads):
            return 0
        total, hashes = 0, native.hashes(heads)
        for hashed in hashes:
            total = mix(total, hashed)
        again = any(
            wrapper() is not self
            and any(value is array() and h == mean_hash for value, h in zip(present, hashes, strict=True))
            for wrapper, array, mean_hash in _averaged
        )
        return total >> 33 << 1 | again

    def compare(self, hashes: list[int]) -> None:
        """Compare the hashes of all ranks. Raises InputError for gradients that would be averaged twice."""
        self._differed = len({hashed >> 1 for hashed in hashes}) > 1
        same = len(hashes) > 1 and not self._differed and hashes[0] > 1 and len(set(hashes)) == 1
        if same and hashes[0] & 1:
            raise InputError(
                f"{self._title}: these gradients are the mean over all ranks already, and would be averaged twice; use "
                "@allred.distributed.gradients on the function or wrap the optimizer, not both, and wrap it once"
            )
        self._in_a_row = self._in_a_row + 1 if same else 0
        if self._in_a_row == _IN_A_ROW:
            log.warning(
                f"{self._title}: all ranks have the same gradients, bit for bit, in {_IN_A_ROW} checks in a row. They "
                "probably train on the same batches: use allred.data.batches, or choose batches by allred.rank(). (Or "
                "the gradients are averaged before the step: average them once)"
            )

    def remember(self, values: Sequence[Any]) -> None:
        """Store the hash of one reduced array, to recognize gradients that are averaged twice. Gradients that were
        equal on all ranks before the reduction are not stored: a program may write the same values again for another
        optimizer."""
        _averaged.clear()
        for value in values if self._differed else ():
            if value is not None and (head := leading_bytes(value, _HASHED_BYTES)).size:
                _averaged.append((weakref.ref(self), weakref.ref(value), native.hashes([head])[0]))
                break
        self._differed = False


class Updates:
    """Counts the updates of one optimizer that its wrappers know. Created by `updates_of`."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer  # a reference keeps its id unique
        self.wrappers: dict[int, str] = {}  # titles of the wrappers that have made a step, by id
        self.known: int | None = None  # the counter after the last step of a wrapper

    def outside(self) -> int:
        """Return the number of updates since the last step of a wrapper; negative if the counter was set back."""
        return 0 if self.known is None else (_count(self.optimizer) or 0) - self.known

    def stepped(self, wrapper: object, title: str) -> None:
        self.known = _count(self.optimizer)
        if id(wrapper) not in self.wrappers:
            _unused.pop(id(self.optimizer), None)
            if self.wrappers:
                first = next(iter(self.wrappers.values()))
                log.warning(
                    f"{title}: the same {type(self.optimizer).__name__} object is wrapped twice and steps in {first} "
                    "too; its state is shared by both. Wrap it once, or make an optimizer for each"
                )
            self.wrappers[id(wrapper)] = title
            weakref.finalize(wrapper, self.wrappers.pop, id(wrapper), None).atexit = False


def _count(optimizer: Any) -> int | None:
    count = getattr(optimizer, "global_step", None)
    return count if isinstance(count, int) else None


_known: weakref.WeakValueDictionary[int, Updates] = weakref.WeakValueDictionary()
_unused: dict[int, tuple[weakref.ref[Any], int]] = {}  # optimizers not stepped by a wrapper yet, and their counters


def updates_of(optimizer: Any) -> Updates:
    """Return the record of an optimizer, shared by all its wrappers."""
    record = _known.get(id(optimizer))
    if record is None:
        record = _known[id(optimizer)] = Updates(optimizer)
        count = _count(optimizer)
        if count is not None and hasattr(type(optimizer), "__weakref__"):
            exit_callbacks.unregister(_warn_unused)
            exit_callbacks.register(_warn_unused, any_thread=True)
            _unused[id(optimizer)] = weakref.ref(optimizer), count
    return record


def used(optimizer: Any) -> None:
    """Note that the wrapper of an optimizer has made a step, so it is not unused."""
    _unused.pop(id(optimizer), None)


def restored(optimizer: Any) -> None:
    """Note that the wrapper has restored an optimizer: updates are counted from its restored counter."""
    count = _count(optimizer)
    if count is not None and id(optimizer) in _unused:
        _unused[id(optimizer)] = weakref.ref(optimizer), count


def _warn_unused(_: BaseException | None) -> None:
    """Warn of optimizers that were wrapped, but stepped only without the wrapper: each rank trained alone."""
    for optimizer, before in [(reference(), count) for reference, count in _unused.values()]:
        made = (_count(optimizer) or 0) - before
        if made > 0 and world.is_initialized() and world.current().communicator.size > 1:
            log.warning(
                f"a distributed {type(optimizer).__name__} made no step, but the optimizer it wraps made {made} by "
                "itself: each rank trained alone. Call step of what allred.distributed returned"
            )
    _unused.clear()
