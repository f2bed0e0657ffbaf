"""Coordination of the ranks of a session: stop signals, settings at the start, a report of each step, waits at the end.

Stop signals are SIGTERM, SIGUSR1 (sent by batch systems before their time limit), and one Ctrl-C. The handler records
the signal, and all ranks end the loop after a step. A second Ctrl-C raises KeyboardInterrupt.

The report is one small allreduce: the logged values, averaged by examples, and the requests to stop or to save. All
ranks must log the same names, `examples` included: they are the operation's name, so a difference is a MismatchError.
"""

import contextlib
import io
import math
import os
import pickle
import signal
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from allred import world
from allred.cluster import topology
from allred.comm import functions
from allred.comm.ops import ReduceOp
from allred.errors import AllredError, InputError, MismatchError, RanksChanged
from allred.modes.detect.batch_arguments import arguments_of, difference
from allred.modes.optimizer import DistributedOptimizer
from allred.session.saver import random_states
from allred.watch.runner_link import RESTART
from allred.watch.wait import has_watcher

NO_LIMIT_S = 1e9
OTHER_RANK = "stop request of another rank"
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_REASONS = (*(number.name for number in SIGNALS), RESTART, OTHER_RANK)  # the stop reasons that other ranks receive


class StopSignals:
    """Handlers of the stop signals. `reason`: the name of the first signal, or RESTART; "" before."""

    def __init__(self) -> None:
        self.reason = ""
        self._on_signal: Callable[[], None] = lambda: None
        self._previous: dict[int, Any] = {}
        self._process = os.getpid()

    def install(self) -> None:
        """Install the handlers. Has no effect outside of the main thread, and for signals that the program ignores
        (nohup, background jobs) or handles in C."""
        with contextlib.suppress(ValueError):
            for number in SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._previous[number] = signal.signal(number, self._handle)

    def notify(self, on_signal: Callable[[], None]) -> None:
        """Call `on_signal` in the handler of each signal; at once if a signal was received before."""
        self._on_signal = on_signal
        if self.reason:
            on_signal()

    def restore(self) -> None:
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)
        self._previous = {}

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked process, such as a data loader: the previous handler applies
            signal.signal(number, self._previous.get(number) or signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if number == signal.SIGINT:
            signal.signal(number, self._previous[number])
        self.stop(signal.Signals(number).name)

    def stop(self, reason: str) -> None:
        """Do what a signal does."""
        self.reason = self.reason or reason
        self._on_signal()


class StepReport(NamedTuple):
    """Result of a step on all ranks. values: averages by name. examples: their sum. stop: the reason to stop, or "".
    save: whether a checkpoint is due."""

    values: dict[str, float]
    examples: float
    stop: str
    save: bool


class StepMetrics:
    """The values that this rank logs in one step."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}  # of the current micro-batch
        self._examples: float | None = None
        self._micro_batches: list[tuple[dict[str, float], float | None]] = []  # the earlier ones of this step

    def add(self, values: dict[str, Any], examples: Any) -> None:
        """Record numbers; a name that is recorded again keeps the last value. Raises InputError for other types."""
        for name, value in values.items():
            self._values[name] = _number(name, value)
        if examples is not None:
            number = _number("examples", examples)
            if not 0 <= number < math.inf:
                raise InputError(f"session.log(examples={examples!r}): expected a number of at least 0")
            self._examples = number

    def next_micro_batch(self) -> None:
        """Begin another micro-batch of the step. The result is the mean over all, weighted by examples."""
        self._micro_batches.append((self._values, self._examples))
        self._values, self._examples = {}, None

    def report_local(self, stop: str, save: bool) -> StepReport:
        """Return the report of this rank alone, and begin the next step."""
        values, examples = self.take()
        return StepReport(values, examples or 0.0, stop, save)

    def report_all(self, stop: str, save: bool) -> StepReport:
        """Return the report of all ranks, and begin the next step. Collective. stop: the reason on this rank, or ""."""
        values, examples = self.take()
        names, weight = sorted(values), 1.0 if examples is None else examples
        sent_reason = stop if stop in _REASONS or not stop else OTHER_RANK
        mine = [float(save), examples or 0.0, weight, *(float(sent_reason == reason) for reason in _REASONS)]
        first = len(mine)
        mine += [values[name] * weight if weight else 0.0 for name in names]
        title = f"session.log({', '.join(['examples'] * (examples is not None) + names)})"
        try:
            total = functions.allreduce(np.array(mine), ReduceOp.SUM, name=title).tolist()
        except RanksChanged:
            self._values, self._examples = values, examples  # for `report_local`
            raise
        save_votes, all_examples, all_weight, *stop_votes = total[:first]
        means = {
            name: value / all_weight if all_weight else math.nan
            for name, value in zip(names, total[first:], strict=True)
        }
        reason = stop or next((reason for reason, votes in zip(_REASONS, stop_votes, strict=True) if votes), "")
        return StepReport(means, all_examples, reason, save_votes > 0)

    def take(self) -> tuple[dict[str, float], float | None]:
        """Return the values and the examples of this rank, and begin the next step."""
        self.next_micro_batch()
        batches, self._micro_batches = self._micro_batches, []
        if len(batches) == 1:
            return batches[0]
        sums: dict[str, list[float]] = {}
        for values, examples in batches:
            weight = 1.0 if examples is None else examples
            for name, value in values.items():
                total = sums.setdefault(name, [0.0, 0.0])
                total[0] += value * weight if weight else 0.0
                total[1] += weight
        counted = [examples for _, examples in batches if examples is not None]
        means = {name: value / weight if weight else math.nan for name, (value, weight) in sums.items()}
        return means, sum(counted) if counted else None


def mean_values(ranks: Sequence[tuple[dict[str, float], float | None]]) -> dict[str, float]:
    """Return the means of the values of some ranks, as `StepMetrics.report_all`. ranks: values and examples of each.

    >>> mean_values([({"loss": 1.0}, 1.0), ({"loss": 4.0}, 2.0), ({}, 0.0)])
    {'loss': 3.0}
    """
    weights = [1.0 if examples is None else examples for _, examples in ranks]
    total = sum(weight for weight, (values, _) in zip(weights, ranks, strict=True) if values)
    names = dict.fromkeys(name for values, _ in ranks for name in values)
    return {
        name: sum(
            weight * values[name]
            for weight, (values, _) in zip(weights, ranks, strict=True)
            if name in values and weight
        )
        / total
        if total
        else math.nan
        for name in names
    }


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InputError(
            f"session.log({name}={value!r}): expected a number, or an array of one element; got {type(value).__name__}"
        ) from None


def tracked(params: Any, optimizer: Any, more: dict[str, Any]) -> tuple[Any, DistributedOptimizer, dict[str, Any]]:
    """Return the arguments of `Session.track` as a nest of arrays, a DistributedOptimizer, and the objects of
    `session_parts` by name. Raises InputError if they cannot be used."""
    value = optimizer if isinstance(optimizer, DistributedOptimizer) else getattr(optimizer, "allred", optimizer)
    _check_optimizer(value)
    second = [name for name, each in more.items() if isinstance(getattr(each, "allred", each), DistributedOptimizer)]
    if second and world.config().mode == "local":
        raise InputError(
            f"session.track({second[0]}=...): in mode local a session has one distributed optimizer; put all "
            "parameters into one, or use optimizer.save and optimizer.restore"
        )
    nest, others = value.session_parts(params)
    if both := sorted(others.keys() & more.keys()):
        raise InputError(
            f"session.track({both[0]}=...): the name {both[0]!r} is reserved for buffers and untrained parameters of "
            "the torch module passed as params; choose another keyword"
        )
    return nest, value, others


def _check_optimizer(value: Any) -> None:
    """Raise InputError unless `value` is a distributed optimizer without process set."""
    if not isinstance(value, DistributedOptimizer):
        raise InputError(f"session.track(): optimizer={value!r}: expected the result of allred.distributed(...)")
    if value.process_set is not None:
        raise InputError(
            "session.track(): a session trains on all ranks, but this optimizer has a process set; use optimizer.save "
            "and optimizer.restore instead of a session"
        )


def agree(directory: str, max_steps: int | None, tracked: list[str], data: Any) -> str:
    """Compare the settings that must be equal on all ranks. Returns the directory of the chief. Raises MismatchError.

    data: the argument of `session.track`."""
    names = "checkpoint_dir", "max_steps", "the names given to session.track()"
    gathered = functions.allgather_object(((directory or None, max_steps, tracked), arguments_of(data)))
    given = [settings for settings, _ in gathered]
    if problem := difference([arguments for _, arguments in gathered], range(len(gathered))):
        raise MismatchError(f"session.track(): {problem}")
    for rank, settings in enumerate(given):
        for name, value, chief in zip(names, settings, given[0], strict=True):
            if value != chief and (name != "checkpoint_dir" or value is not None):
                raise MismatchError(
                    f"Session: {name} is {value!r} on rank {rank}, but {chief!r} on rank 0; give all ranks the same"
                )
    return given[0][0] or ""


@contextlib.contextmanager
def extended_timeout(seconds: float = NO_LIMIT_S) -> Iterator[None]:
    """Extend the time limit of operations to `seconds`."""
    queue = functions.current().queue
    before, queue.timeout_s = queue.timeout_s, max(seconds, queue.timeout_s)
    try:
        yield
    finally:
        queue.timeout_s = before


def gather_random_states(optimizer: DistributedOptimizer, title: str = "", root: int = 0) -> dict[int, bytes] | None:
    """Return the pickled random states of all ranks on the rank `root`; None on the others, and in mode ps. Collective.
    title: the operation's name in errors. The other ranks do not unpickle them: these may be thousands."""
    if not optimizer.session_support.is_lockstep:
        return None
    sent = np.frombuffer(pickle.dumps((topology.rank(), random_states())), np.uint8)
    received = functions.allgather(sent, title)  # a gather needs a matrix of ranks times ranks
    if topology.rank() != root:
        return None
    stream, found = io.BytesIO(received.tobytes()), {}
    while stream.tell() < received.size:
        rank, states = pickle.load(stream)
        found[rank] = states
    return found


def raise_on_all(optimizer: DistributedOptimizer, failure: AllredError | None) -> None:
    """Raise the `failure` of the chief on all ranks. Collective. The watchers suspend the time limit while the chief
    writes a checkpoint; without watchers there is no time limit."""
    with contextlib.nullcontext() if has_watcher() else extended_timeout():
        failure = optimizer.session_support.broadcast_failure(failure)
    if failure is not None:
        raise failure
