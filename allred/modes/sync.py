"""Mode sync: every rank averages its gradients with all others, then updates its own copy of the parameters.

A step, from top to bottom: scan, negotiate, check, reduce (`reduce_gradients`), clip, apply (`SyncMode.step`).

The parameters start equal (`broadcast`), and every rank applies the same mean with the same optimizer, so they stay
equal bit for bit without being sent again.
"""

import operator
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from allred import arena, arrays, checkpoint, log, native, nest, world
from allred.comm import functions, node_memory
from allred.comm.communicator import Communicator
from allred.comm.ops import Compression, ReduceOp
from allred.comm.replicas import Owner, Replica
from allred.counters import Counters, shares
from allred.errors import AllredError, InputError
from allred.fusion import Tensor
from allred.gpu.device_arrays import to_host
from allred.modes.clipping import Clipper
from allred.modes.detect.mistake_checks import MistakeChecks, restored
from allred.modes.not_in_place import NotInPlace
from allred.modes.options import Mode, StepInput, StepOptions
from allred.modes.overlap import Overlap
from allred.modes.rank_tables import RankTables
from allred.modes.reducer import Reducer, writable
from allred.modes.sharded import new_sharded_update, share
from allred.modes.step_header import DEFERRED, MAY_REPEAT, MISSING, OVERLAPPED, PREPARED, SAVED, Agreement, StepHeader
from allred.native import arena_attach, arena_pause
from allred.optim.base import Optimizer, load_new_state
from allred.ps.variable import checkpoint_names
from allred.timeline import recorder
from allred.timeline.recorder import span
from allred.wording import count


def reduce_gradients(
    communicator: Communicator, reducer: Reducer, checks: MistakeChecks, given: StepInput, title: str,
    settings: str = "", overlapped: bool = False,
) -> list[Any] | None:  # fmt: skip
    """Reduce the gradients of one step over all ranks; None if the checks skip the step. Collective.

    Writable arrays are overwritten; numbers and read-only arrays give new arrays. A missing gradient (None) counts as
    zeros if another rank has it, and stays None otherwise.

    Arguments:
        settings: text that must be the same on all ranks.
        overlapped: whether this rank has passed gradients to opt.reduce().

    Raises InputError, MismatchError, DriftError or NonFiniteError, with the same text on all ranks. If some gradients
    are not finite, the others may have been overwritten already.
    """
    passes = None if overlapped else _reduce_steady(communicator, reducer, checks, given, settings)
    if passes is None:
        return _negotiate_and_reduce(communicator, reducer, checks, given, title, settings, overlapped)
    return given.values if passes else None


def _reduce_steady(
    communicator: Communicator, reducer: Reducer, checks: MistakeChecks, given: StepInput, settings: str
) -> bool | None:
    """Reduce the gradients in place if this step is like the last one on all ranks (`SteadyStep`). Return whether they
    are used; None if it is not: then all ranks negotiate. Collective."""
    arena_attach()
    steady, errors = reducer.steady, reducer.errors
    if errors is not None and errors.saved:  # all ranks drop their errors in `_negotiate_and_reduce`
        steady = None
    if steady is None or not steady.reduce(communicator, checks, given, settings, reducer.more_flags):
        reducer.steady = None
        return None
    reducer.samples, reducer.weight, reducer.overlapped = steady.samples, steady.weight, False
    return checks.passes_steady(steady.plan, given.values, communicator.nonfinite)


def _negotiate_and_reduce(
    communicator: Communicator, reducer: Reducer, checks: MistakeChecks, given: StepInput, title: str, settings: str,
    overlapped: bool,
) -> list[Any] | None:  # fmt: skip
    """Reduce the gradients of a step that differs from the one before."""
    may_repeat = given.plain and given.tensors is reducer.negotiated and not node_memory.any_shared(given.values)
    reducer.negotiated = given.tensors
    plan = reducer.plan(given.tensors)
    problem, values = given.problem or reducer.refusal(plan), list(given.values)
    flags = 0 if problem else checks.requests(communicator, given.samples)
    # Scan, unless the reduction can check its results.
    prepared = None if problem else reducer.prepare(communicator, values, checks.can_defer_scan)
    if prepared is None and not problem:  # prepared gradients are writable and do not overlap
        values = writable(given.tensors, values, given.leaves)
    defers = not problem and checks.can_defer_scan and reducer.can_check(communicator, values)
    if not problem:
        flags |= PREPARED * (prepared is not None)
        may_repeat = may_repeat and all(map(operator.is_, values, given.values))
        flags |= MAY_REPEAT * (may_repeat and (defers or checks.policy == "ignore"))
        flags |= DEFERRED if defers else checks.scan(plan, values, given.plain)
    # Negotiate.
    if not given.plain and any(value is None for value in values):
        flags |= MISSING
    errors = reducer.errors
    flags |= OVERLAPPED * overlapped | SAVED * (errors is not None and errors.saved)
    window = checks.window(plan, given, values) if prepared is None and not problem else 0
    with span("negotiate", title):
        fields = reducer.start_negotiation(
            communicator, title, plan.lines, settings,
            StepHeader(given.samples, flags, content_hash=window if prepared is None else prepared.hash), problem,
        ).wait()  # fmt: skip
    agreement = reducer.agreement(communicator, fields)
    checks_finite, negotiated = _all_have(communicator, DEFERRED, agreement), agreement
    if errors is not None and agreement.any(SAVED):
        errors.drop()
    reducer.steady = None
    windows = [] if agreement.any(PREPARED) else agreement.hashes
    if not (len(set(agreement.hashes)) == 1 and _all_have(communicator, PREPARED, agreement)):
        prepared = None
    missing = agreement.any(MISSING)
    if not checks_finite and agreement.any(DEFERRED):
        flags |= checks.scan(plan, values, given.plain) if defers else 0
        again = StepHeader(flags=flags)
        agreement = reducer.exchange_flags(communicator, f"{title}: scan of the gradients", again)
    if missing:
        values = reducer.fill_missing(communicator, given.tensors, values, given.leaves)
    # Check.
    if not checks.passes(agreement, windows, plan, values, given.params):
        return None
    if negotiated.all(MAY_REPEAT) and not reducer.overlapped:
        checks_all = checks.policy != "ignore"
        reducer.steady = reducer.new_steady(communicator, given, negotiated, title, settings, checks_all)
    # Reduce.
    nonfinite = reducer.allreduce_(communicator, plan, values, agreement.weight, checks_finite, prepared)
    return values if checks.passes_reduced(agreement, plan, values, nonfinite) else None


def _all_have(communicator: Communicator, flag: int, agreement: Agreement) -> bool:
    """Whether all ranks have set DEFERRED, or PREPARED, and count equally, and none lacks a gradient. The same on all
    ranks."""
    counts_equally = agreement.weight is None and not agreement.any(MISSING)
    return counts_equally and communicator.active.size == communicator.size and agreement.all(flag)


class SyncMode(Mode):
    """Mode sync of one optimizer. meta: for the manifest of checkpoints. owner: the `DistributedOptimizer`."""

    is_lockstep = True
    update_interrupted = False
    in_skipped_step = False  # set by a hooked torch optimizer: an earlier reduction of this step was skipped
    was_skipped = False  # whether the last reduction was
    title_of_call = ""  # of the operation in a program of JAX that makes the step; the same on all ranks

    def __init__(
        self,
        optimizer: Any,
        options: StepOptions,
        clipper: Clipper,
        meta: dict[str, str],
        owner: Owner,
        reducer: Reducer,
    ) -> None:
        self._optimizer, self._options, self._clipper, self._meta = optimizer, options, clipper, meta
        self._title = options.title
        self._reducer = reducer
        self._checks = MistakeChecks(options, self._title, optimizer)
        self._overlap: Overlap | None = None  # after the first opt.reduce() of any rank
        self._timer, self._not_in_place = StepTimer(), NotInPlace(options.compression)
        self._sharded = new_sharded_update(functions.current(), optimizer, self._title) if options.sharded else None
        self._tables = RankTables(options.tables, self._title, options.op) if options.tables else None
        self._last: StepInput | None = None  # of the last `step`, without gradients, if it can be repeated
        self._replica = Replica(owner) if options.process_set is None else None
        self._committed_steps = 0  # `_checks.steps` after the last committed step
        self._updates = 0  # for an optimizer that does not count them; includes those before a restore
        self._counts = isinstance(optimizer, Optimizer)
        self._completes = getattr(optimizer, "complete_reduction", None)

    def step(self, given: StepInput) -> None:
        communicator, clipper, timer = given.communicator, self._clipper, self._timer
        self._checks.in_skipped_step = self.in_skipped_step
        if self._overlap is None or not self._overlap.has_begun:
            self._begin(communicator)
        tables, has_tables = self._tables, False
        try:
            if tables is not None:
                has_tables = tables.prepare(communicator, self._checks, given.problem, given.samples != 0)
                self._checks.in_skipped_step |= not has_tables
            mean = self._reduce(given) if self._overlap is None else self._reduce_overlapped(self._overlap, given)
        except AllredError:  # on all ranks
            self.abandon_step()
            raise
        if tables is not None:
            mean = mean if has_tables else None
            tables.commit(communicator, mean is not None, self._reducer.weight)
        if not timer.steps:
            log.info(self._first_step(communicator, given.tensors))
        if mean is not None:
            if self._completes is not None:  # a hooked torch optimizer reduces its sparse gradients
                mean = self._completes(
                    communicator, given.tensors, mean, self._reducer.weight, self._options.op is ReduceOp.AVERAGE
                )
            if clipper.limit is not None or clipper.scaler is not None:
                mean = clipper.clip_reduced(communicator, mean)
            if recorder.current is None:
                self._apply(given, mean)
            else:
                with span("apply", self._options.name):
                    self._apply(given, mean)
        if clipper.scaler is not None and not (mean is None and self.in_skipped_step):
            scale = clipper.scaler.get_scale()
            clipper.scaler.update(mean is None, self._title)
            if clipper.scaler.get_scale() != scale:
                self._reducer.drop_residuals()
        self._end(given, mean is not None)
        repeats = given.plain and self._sharded is None and tables is None
        self._last = given._replace(grads=None, values=[]) if repeats else None  # frees the gradients

    @property
    def table_link(self) -> RankTables | None:
        return self._tables

    def forget_arrays(self) -> None:
        """Drop the references to parameters, whose memory belongs to a framework after a step. Then `repeat` returns
        False, and ranks that join get no parameters from this optimizer."""
        self._last = self._replica = None

    def repeat(self, communicator: Communicator, values: list[Any], samples: int | None) -> bool:
        """As `step`, of an optimizer that makes its update later, if the step is like the last one on all ranks except
        for the arrays of the gradients. Return False if it is not, with nothing changed. Collective."""
        last = self._last
        if last is None or self._overlap is not None or not native.match(last.tensors, last.leaves, values):
            return False
        given = StepInput(communicator, last.params, None, last.tensors, last.leaves, values, samples, "", True)
        self._checks.in_skipped_step = self.in_skipped_step
        self._begin(communicator)
        used = _reduce_steady(communicator, self._reducer, self._checks, given, "")
        if used is not None:
            self._end(given, used)
        return used is not None

    def count_step(self, given: StepInput) -> bool:
        """Count a step whose gradients are averaged already. Return whether they are used; `commit` follows. Collective
        in steps with a check. Raises NonFiniteError and DriftError, on all ranks."""
        self._begin(given.communicator)
        used = self._checks.passes_averaged(given, self._reducer.plan(given.tensors))
        self._reducer.samples = given.samples or 0
        self._end(given, used)
        return used

    def _end(self, given: StepInput, used: bool) -> None:
        """End a step. used: whether the gradients are used."""
        communicator, timer = given.communicator, self._timer
        self.was_skipped = not used
        ignores = self._reducer.errors is not None and self._checks.policy == "ignore"
        if not used or (ignores and not _sums_are_finite(given.values)):  # torch's GradScaler skips such a step
            self._reducer.drop_residuals()
        self._checks.end(used)
        if self._completes is None:
            self.commit(used)
        if (replica := self._replica) is not None:
            if given.tensors is not replica.tensors or communicator is not replica.communicator:
                replica.begin_steps(communicator, given.tensors)
            replica.steps, replica.leaves = self._checks.steps, given.leaves
        timer.end(communicator, self._reducer.samples, self.global_step, given.samples or 0)
        if not timer.steps & (timer.steps - 1):
            self._not_in_place.end(timer.steps, given.values, communicator)

    def commit(self, used: bool) -> None:
        """Commit a step, with its update if there is one. used: whether there is."""
        if (recovery := world.current().recovery) is not None:
            self._committed_steps = self._checks.steps
            recovery.commit(self.global_step - used)

    def _begin(self, communicator: Communicator) -> None:
        """Call before the first gradient of a step is reduced."""
        self._timer.begin(communicator)
        if not self._timer.steps & (self._timer.steps + 1):  # see NotInPlace
            self._not_in_place.begin(communicator)

    def _reduce(self, given: StepInput, overlapped: bool = False) -> list[Any] | None:
        communicator, clipper = given.communicator, self._clipper
        clips = clipper.limit is not None or clipper.scaler is not None
        settings = f"{self.title_of_call}{clipper.settings}" if clips else self.title_of_call
        mean = reduce_gradients(communicator, self._reducer, self._checks, given, self._title, settings, overlapped)
        if self._reducer.overlapped and not communicator.checks_places:  # the line that sends a bucket varies
            self._overlap = self._overlap or self._new_overlap()
            self._overlap.agree_on_order(given, given.values if mean is None else mean)
            self._reducer.drop_residuals()  # buckets follow
        return mean

    def _apply(self, given: StepInput, mean: list[Any]) -> None:
        if self._sharded is not None and not self._sharded.prepare(given.communicator, given.tensors, given.leaves):
            log.info(f"{self._title}: sharded=True has no effect: the ranks of a node cannot share memory")
            self._sharded = None
        same = mean is given.values or (len(mean) == len(given.values) and all(map(operator.is_, mean, given.values)))
        update = self._optimizer if self._sharded is None else self._sharded
        self.update_interrupted = True
        arena_pause(True)
        try:
            update.step(given.params, given.grads if same else nest.rebuild(given.grads, mean))
        finally:
            arena_pause(False)
        self.update_interrupted = False
        self._updates += 1

    # Overlap of communication and computation, after the first opt.reduce().

    def reduce(self, communicator: Communicator, name: str, grad: Any, samples: int | None) -> None:
        self._overlap = self._overlap or self._new_overlap()
        if not self._overlap.has_begun:
            self._begin(communicator)
        self._overlap.add(communicator, name, grad, samples)

    def cancel_reduce(self) -> bool:
        """Forget the gradients passed to `reduce` since the last step. Return False if that is not possible: then all
        ranks must call `step`."""
        return self._overlap is None or self._overlap.cancel()

    def _new_overlap(self) -> Overlap:
        return Overlap(self._reducer, self._checks, self._clipper, self._title)

    def _reduce_overlapped(self, overlap: Overlap, given: StepInput) -> list[Any] | None:
        try:
            given = overlap.with_problem(given)
            if not overlap.has_order:
                return self._reduce(given, overlap.has_begun)
            if overlap.needs_all_gradients(given.communicator, given.samples):
                self._reducer.drop_residuals()  # of buckets
                try:
                    return self._reduce(given)
                finally:
                    self._reducer.drop_residuals()
            return overlap.finish(given)
        except AllredError:
            overlap.forget_order()  # on all ranks
            raise
        finally:
            overlap.end_step()

    def abandon_step(self) -> None:
        """Forget a step whose gradients were reduced, but make no update. Called on all ranks."""
        self._reducer.drop_residuals()

    # Parameters and state.

    def broadcast(self, params: Any, tensors: list[Tensor], root: int, problem: str, values: bool) -> None:
        communicator, name = functions.current(), self._options.name
        settings = f"optimizer has a state: {has_state(self._optimizer)}, scaler: {self._clipper.scaler is not None}"
        self._reducer.plan(tensors)  # its sizes are known before the first gradient is allocated
        lines = [str(tensor) for tensor in tensors]
        communicator.check("parameters", f"{name}.broadcast()", lines, settings, problem=problem).wait()
        for leaf_name, leaf in nest.leaves(params) if values else ():
            communicator.broadcast(leaf, root, leaf_name, in_place=True).wait()
        self._broadcast_state(communicator, params, root, values)
        if self._sharded is not None:
            self._sharded.forget_state()
        self.forget_order()  # a rank that had joined does not know it
        self._reducer.drop_residuals()

    def _broadcast_state(self, communicator: Communicator, params: Any, root: int, values: bool) -> None:
        """Copy the numbers of steps and updates, and if `values` the state of the optimizer."""
        sent: Any = None
        replica, with_state = self._replica, has_state(self._optimizer) and values
        if communicator.number == root:
            number = None if replica is None else replica.number(communicator)
            live = getattr(self._optimizer, "live_state", getattr(self._optimizer, "state_dict", dict))
            sent = number, self._checks.steps, self._updates, live() if with_state else None
        title = f"state of {self._options.name}"
        number, steps, self._updates, state = communicator.broadcast_object(sent, root, title).wait()
        self._checks.begin(steps)
        self._committed_steps = steps
        if with_state:
            if communicator.number != root:
                self.load_new_state(state)
            restored(self._optimizer)
        if replica is not None:
            replica.copied(number, self._checks.steps, params)

    def share(self, params: Any) -> Any:
        title = f"{self._options.name}.share()"
        if not self._options.sharded:
            raise InputError(f"{title} needs allred.distributed(optimizer, sharded=True)")
        return params if self._sharded is None else share(functions.current(), params, title)

    @property
    def counters(self) -> tuple[int, ...]:
        """The numbers of steps and updates, which are equal on all ranks."""
        return self._checks.steps, self._updates

    @counters.setter
    def counters(self, given: tuple[int, ...]) -> None:
        self._checks.steps, self._updates = given
        self._committed_steps = self._checks.steps

    def begin_world(self) -> None:
        """Forget what belongs to the last world, and a step that was begun there and is lost."""
        self._reducer.drop_residuals()
        self._reducer.steady, self._reducer.negotiated, self._last = None, (), None
        self._checks.begin(self._committed_steps)
        self._overlap = None

    def forget_order(self) -> None:
        """Forget the order of gradients (overlap.py). Called on all ranks, between steps."""
        if self._overlap is not None:
            self._overlap.forget_order()
            self._overlap.end_step()

    def state_dict(self) -> Any:
        return self._optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._optimizer.load_state_dict(state)
        self._reducer.drop_residuals()

    def load_new_state(self, state: Any) -> None:
        load_new_state(self._optimizer, state)
        self._reducer.drop_residuals()

    def save(self, params: Any, extra: Any, copy: bool) -> Callable[[str], str]:
        with arena.paused():
            state, step, named = self._optimizer.state_dict(), self.global_step, nest.leaves(params)
            names = checkpoint_names(named)
            entries = [
                checkpoint.whole(names.get(path, path), np.array(to_host(leaf)) if copy else to_host(leaf))
                for path, leaf in named
            ]
        meta: dict[str, Any] = {"optimizer": None, **self._meta}
        tables = self._tables
        if isinstance(self._optimizer, Optimizer):
            slots, state["global_step"] = state.pop("slots"), step  # in mode local it counts the steps of this rank
            entries += [
                checkpoint.whole(names.get(path, path), to_host(value), slot)
                for path, part in slots.items()
                for slot, value in part.items()
            ]
            meta["optimizer"] = state
        else:
            entries.append(checkpoint.pickled_state(state))
        if extra is not None:
            entries.append(checkpoint.pickled_extra(extra))
        if self._reducer.errors is not None:
            self._reducer.errors.saved = True
        if tables is None:
            return lambda directory: str(checkpoint.write(directory, step, entries, meta))
        write_rows = tables.take_gathered()
        return lambda directory: str(checkpoint.write(directory, step, entries, meta, write_rows))

    @property
    def saves_in_rounds(self) -> bool:
        return self._tables is not None

    @property
    def can_save(self) -> bool:
        return self._tables is None and super().can_save  # other ranks have a part of the rows

    def before_checkpoint(self) -> None:
        if self._tables is not None:
            self._tables.gather()

    # Counters and texts.

    @property
    def skipped(self) -> int:
        return self._checks.skipped

    @property
    def samples(self) -> int | None:
        """Return the samples of this rank in the last step; None if unknown."""
        return self._checks.samples

    @property
    def global_step(self) -> int:
        return self._optimizer.global_step if self._counts else self._updates

    def summary(self) -> str:
        shape, config = world.current().topology, world.config()
        skipped = f"\nskipped: {self.skipped} steps with gradients that were not finite" if self.skipped else ""
        wire, compression = "", self._options.compression
        if self._timer.sent_bytes:
            how = "" if compression is Compression.none else f" as {compression.name}{self._ratio()}"
            in_place = 100 * self._timer.in_place_bytes / self._timer.sent_bytes
            wire = (
                f"\ngradients: {arrays.amount(self._timer.sent_bytes / self._timer.steps)} a step{how}; "
                f"{in_place:.0f} % reduced in place{self._not_in_place.text()}"
            )
        return (
            f"world: {count(shape.size, 'rank')} on {count(shape.nodes, 'node')}, mode {config.mode}\n"
            f"backend: {functions.current().name} ({world.current().reason})\n"
            f"speed: {self._timer.text()}{skipped}{wire}"
        )

    def _ratio(self) -> str:
        """Return what compression saved, as text."""
        communicator, whole = functions.current(), self._reducer.last_nbytes
        if self._options.compression.is_quantized and not communicator.backend.encodes:
            return ", which has an effect only between hosts that are connected by TCP"
        return f", {self._timer.sent_bytes / self._timer.steps / whole:.3f} of their size" if whole else ""

    def _first_step(self, communicator: Communicator, tensors: list[Tensor]) -> str:
        reducer, size, rate = self._reducer, communicator.size, getattr(self._optimizer, "lr", None)
        plan = reducer.plan(tensors)
        batch = f"; global batch {reducer.samples} over {count(size, 'rank')}" if reducer.samples else ""
        lr = f"; learning rate {rate:g}, not scaled by the number of ranks" if isinstance(rate, float) else ""
        return (
            f"{self._options.op.value} of {count(len(tensors), 'gradient')} ({arrays.amount(plan.nbytes)}) "
            f"in {count(len(plan.buckets), 'bucket')}{batch}{lr}"
        )

    # SessionSupport.

    def latest_step(self) -> int:
        return self.global_step

    def count_from(self, step: int) -> None:
        self._updates = step

    def broadcast_failure(self, failure: AllredError | None) -> AllredError | None:
        received: AllredError | None = functions.broadcast_object(failure)
        return received


def _sums_are_finite(values: Sequence[Any]) -> bool:
    with np.errstate(all="ignore"):
        return all(np.isfinite(np.sum(value)) for value in values if isinstance(value, np.ndarray))


def has_state(optimizer: Any) -> bool:
    return hasattr(optimizer, "state_dict") and hasattr(optimizer, "load_state_dict")


class StepTimer:
    """Times of steps in seconds. A step lasts from the end of the step before to its own end, and contains the waits in
    other operations of the program since then."""

    def __init__(self) -> None:
        self.steps = 0
        self.samples = 0  # of all ranks
        self.seconds = 0.0
        self.communicating_s = 0.0  # without waits for other ranks
        self.waiting_s = 0.0  # until other ranks arrived
        self.sent_bytes = 0  # of gradients, after compression
        self.in_place_bytes = 0  # of these
        self._start = 0.0
        self._communicator: weakref.ref[Communicator] | None = None
        self._times = (0.0, 0.0)  # of its waits at the end of the step before
        self._traffic = (0, 0)  # at the start of this step
        self._counters = Counters()

    @staticmethod
    def _times_of(communicator: Communicator) -> tuple[float, float]:
        """Return seconds in waits, and seconds until other ranks arrived, so far."""
        return communicator.queue.waited_s, communicator.queue.waited_for_peers_s

    @staticmethod
    def _traffic_of(communicator: Communicator) -> tuple[int, int]:
        """Return bytes sent and bytes reduced in place, so far."""
        traffic, devices = communicator.backend.traffic, communicator.devices
        sent_bytes = traffic.sent + traffic.in_place + (0 if devices is None else devices.sent_bytes)
        return sent_bytes, traffic.in_place

    def begin(self, communicator: Communicator) -> None:
        """Start the communication of a step. The first step starts here too: the time before is not training."""
        self._start = self._start or time.perf_counter()
        self._counters = world.current().counters
        self._counters.begin_step()
        if self._communicator is None or self._communicator() is not communicator:
            self._communicator, self._times = weakref.ref(communicator), self._times_of(communicator)
        self._traffic = self._traffic_of(communicator)

    def end(self, communicator: Communicator, samples: int, step: int, own_samples: int) -> None:
        """End a step, after its update. samples: of all ranks. step: the global step."""
        now = time.perf_counter()
        times = self._times_of(communicator)
        waited_s, peers_s = map(operator.sub, times, self._times)
        sent_bytes, in_place_bytes = map(operator.sub, self._traffic_of(communicator), self._traffic)
        self._times = times
        self.steps += 1
        self.samples += samples
        self.seconds += now - self._start
        self.communicating_s += waited_s - peers_s
        self.waiting_s += peers_s
        self.sent_bytes += sent_bytes
        self.in_place_bytes += in_place_bytes
        self._counters.end_step(step, own_samples, now - self._start, peers_s, waited_s - peers_s, sent_bytes)
        self._start = now

    def text(self) -> str:
        """`80 steps in 0.52 s: 28000 examples/s over all ranks; of a step 80 % computing, 8 % waiting, ...`."""
        if not self.seconds:
            return "no steps yet"
        rate = (
            f"{self.samples / self.seconds:.0f} examples/s"
            if self.samples
            else f"{self.steps / self.seconds:.1f} steps/s"
        )
        parts = shares(self.seconds, self.waiting_s, self.communicating_s)
        return f"{self.steps} steps in {self.seconds:.2f} s: {rate} over all ranks; of a step {parts}"
