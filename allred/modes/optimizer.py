"""`DistributedOptimizer`: what is the same in every mode. What differs, a mode does: sync.py, ps.py.

The mode is chosen when the optimizer is first used, since it may be made before allred.init(). A parameter server
serves where the optimizer is made, or first used, and leaves the program there.
"""

import operator
import os
import pathlib
from collections.abc import Callable
from typing import Any, Protocol

from allred import checkpoint, nest
from allred.cluster import report
from allred.comm import collectives
from allred.comm.ops import ReduceOp
from allred.comm.process_set import ProcessSet
from allred.compression import Compression
from allred.data.share import claim
from allred.errors import AllredError, CheckpointError, InputError
from allred.fusion.plan import Tensor
from allred.gpu.values import fill
from allred.modes.accumulate import Accumulator
from allred.modes.clipping import Clipper
from allred.modes.detect.outside import restored
from allred.modes.options import Options
from allred.modes.pairs import Pairs, parameter
from allred.modes.ps import ServersMode
from allred.modes.scaler import GradScaler
from allred.modes.sync import SyncMode, has_state
from allred.ps import running
from allred.ps.account import Statistics
from allred.timeline.recorder import span

# In what goes along with a checkpoint.
_SCALER, _OTHERS = "the optimizer's scaler", "what else there is"


class Mode(Protocol):
    """How the optimizers of all ranks work together."""

    @property
    def skipped(self) -> int: ...

    @property
    def dropped(self) -> int: ...

    def step(
        self, params: Any, grads: Any, tensors: list[Tensor], leaves: list[Any], values: list[Any],
        samples: int | None, problem: str,
    ) -> None:  # fmt: skip
        """One step. leaves: of the parameters; tensors, values: of the gradients; all in the nest's order. problem: why
        there are none, in words. The same list of tensors as before means that nothing about them has changed."""

    def reduce(self, name: str, grad: Any, samples: int | None) -> None:
        """A gradient of the next step is ready. samples: as in it."""

    def broadcast(self, params: Any, tensors: list[Tensor], root: int, problem: str) -> None:
        """Start from the root's parameters and optimizer state."""

    def pull(self, params: Any) -> None: ...

    def finish(self) -> None: ...

    def meet(self) -> None:
        """`finish`, and wait until all others have."""

    def hear(self, failure: AllredError | None) -> AllredError | None:
        """On worker 0: tell all of it, or that there is none; on the others: hear of it."""

    def statistics(self) -> Statistics: ...

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...

    def save(self, params: Any, extra: Any, copy: bool) -> Callable[[str], str]:
        """What writes a checkpoint of this moment into a directory, and gives its path. copy: it is called later."""

    @property
    def in_step(self) -> bool:
        """Whether all ranks make every step together."""

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has spent in communication so far."""

    def ask_to_end(self) -> None:
        """Where they do not: all are to end, soon."""

    def end_with(self, save: Callable[[], str]) -> None:
        """What is to write the checkpoint then."""

    @property
    def torn(self) -> bool:
        """Whether an update of the parameters has begun and not ended: an exception has cut it short."""

    @property
    def global_step(self) -> int: ...

    def count_from(self, step: int) -> None:
        """Worker 0 has restored the checkpoint of that step: the next ones are later. Mode ps: on worker 0 alone."""

    def summary(self) -> str: ...


class DistributedOptimizer:
    """What `allred.distributed` makes of an optimizer: the same `step`, with the gradients of all ranks.

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
        process_set: ProcessSet | None = None,
        compression: Compression = Compression.none,
        clip_norm: float | None = None,
        scaler: GradScaler | None = None,
        consistency: Any = None,
        placement: Any = None,
        use_locking: bool | None = None,
    ) -> None:
        if not isinstance(name, str):
            raise InputError(f"allred.distributed: name={name!r} must be a string")
        self.optimizer = optimizer
        self.name = name
        self.process_set = process_set
        if not isinstance(process_set, ProcessSet | None):
            raise InputError(f"{name}: process_set={process_set!r} must be an allred.ProcessSet")
        self._accumulator = Accumulator(accumulate)
        self._clipper = Clipper(clip_norm, scaler, name)
        if scaler is not None and nonfinite not in (None, "skip"):
            raise InputError(
                f"nonfinite={nonfinite!r}: a scaler skips steps whose gradients are not finite; leave it out"
            )
        nonfinite = nonfinite if scaler is None else "skip"
        self._sync = SyncMode(optimizer, op, accumulate, bucket_bytes, nonfinite, name, compression, self._clipper)
        self._op, self._compression = op, compression
        self._options = Options(name, nonfinite, consistency, placement, use_locking)
        self._pairs = Pairs()
        self._claimed: tuple[int | None, str] | None = None  # samples of the next step, or why they are not known
        self._chosen: Mode | None = None
        if optimizer is not None and running.serves():
            self._mode  # noqa: B018  (serves, and does not come back)

    @property
    def _mode(self) -> Mode:
        if self._chosen is None:
            if running.running() and self._op is not ReduceOp.AVERAGE:
                raise InputError(
                    f"{self.name}: op=allred.{self._op.name.title()} is of mode sync; parameter servers apply each "
                    "gradient as it is, or the mean. Leave op out"
                )
            if running.running() and self.process_set is not None:
                raise InputError(f"{self.name}: process_set is of mode sync; in mode ps all workers train together")
            if running.serves():
                self._options.serve(self.optimizer)
                raise SystemExit(0)
            in_sync = collectives.current() and not running.running()
            if not in_sync and self._compression is not Compression.none:
                report.inform(
                    f"{self.name}: compression is of mode sync; to parameter servers gradients go as they are"
                )
            self._chosen = self._sync if in_sync else ServersMode(self.optimizer, self._options, self._clipper)
        return self._chosen

    def step(self, params: Any, grads: Any, samples: int | None = None) -> None:
        """Give this rank's gradients, and update the parameters in place with those of all.

        Mode sync: they are averaged over all ranks, then the optimizer makes its step; collective. Mode ps: they are
        pushed to the parameter servers, which apply them, and the parameters are pulled.

        params: a nest of arrays. grads: the same nest of gradients; in mode sync they are overwritten with the mean,
        numbers and read-only arrays are passed on as new arrays; None counts as zeros if another rank has that
        gradient. None takes the parameter's dtype, a Python number too.
        samples: how many samples the gradients are the mean of; known by itself inside `allred.data.batches`. Ranks
        with more count for more in mode sync; if no rank says, all count alike.

        With accumulate=k only every k-th call reduces and updates, with the mean over the samples of k calls (over the
        calls, where samples are not counted); the gradients are added up here and not overwritten.

        Silent mistakes are looked for (allred/modes/detect): gradients that are not finite, and in mode sync, at the
        first steps and every check_steps, ranks that have drifted apart, have the same batch, or average twice.

        Raises InputError, MismatchError, DriftError or NonFiniteError before anything has been changed (a sum that
        overflows is found when the gradients have been overwritten); in mode sync with the same text on every rank.
        """
        mode = self._mode
        tensors, leaves, values, problem = self._pairs.match(params, grads)
        try:
            samples = self._claim(samples)
            if self._accumulator.micro_steps > 1 and not problem:
                if not self._accumulator.add(tensors, values, samples):
                    return
                values, samples = self._accumulator.take()
                tensors = list(tensors)  # the values are others than those that were matched
            if self._clipper.active and not problem:
                problem = self._clipper.refusal(tensors, values if mode.in_step else ())
        except InputError as error:
            problem = str(error)
        if problem:  # the others hear of it when they reduce
            tensors, leaves, values, samples = [], [], [], None
            self._accumulator.clear()
        with span("step", self.name), collectives.within(self.process_set):
            mode.step(params, grads, tensors, leaves, values, samples, problem)

    def _claim(self, samples: Any) -> int | None:
        """The samples of this step: those that reduce() has claimed, if it was called."""
        claimed, self._claimed = self._claimed, None
        if claimed is None:
            return claim(None if samples is None else _whole(samples))
        if claimed[1]:
            raise InputError(claimed[1])
        if samples is not None and _whole(samples) != claimed[0]:
            raise InputError(f"samples={samples!r} in step(), but {claimed[0]!r} in the first reduce(); give it there")
        return claimed[0]

    def reduce(self, name: str, grad: Any, samples: int | None = None) -> None:
        """Give one gradient of the next step as soon as it is ready, so that it is reduced while others are computed.

            for name, grad in backward():              # the last layer first
                opt.reduce(name, grad)
            opt.step(params, grads)                    # all gradients, these arrays among them

        name: of the gradient in the nest that `step` gets, by its path, as errors have it ("fc1.weight", "layers.0.b").
        grad: that very array; from now on it belongs to the operation, until `step` is back. samples: as in `step`;
        counts in the first call for a step.

        Gradients travel in buckets, in the order in which they became ready on rank 0 in the first step with reduce(),
        whatever the order here; that first step, and those with a check (allred/modes/detect), are as without. What was
        not given here is reduced in `step`, a rank may do without reduce() altogether. Mistakes (an unknown name, one
        twice, another shape or dtype) are an InputError on all ranks in `step`, before the parameters are changed.
        Gradients that are not finite are found as ever, but the other gradients are overwritten then.

        Mode ps: nothing happens, gradients are pushed in `step`. Raises InputError with accumulate: what is added up
        is known only in `step`.
        """
        if self._accumulator.micro_steps > 1:
            raise InputError(
                f"{self.name}.reduce() with accumulate={self._accumulator.micro_steps}: a step's gradients are the sum "
                "of several, which step() has only with the last of them; leave reduce() out"
            )
        mode = self._mode
        if self._claimed is None:
            try:
                self._claimed = claim(None if samples is None else _whole(samples)), ""
            except InputError as error:
                self._claimed = None, str(error)
        with collectives.within(self.process_set):
            mode.reduce(name, grad, self._claimed[0])

    @property
    def accumulates(self) -> bool:
        """Whether gradients of some micro-steps wait for the rest of their step."""
        return self._accumulator.filled > 0

    @property
    def skipped(self) -> int:
        """Steps left out so far because gradients were not finite, with nonfinite="skip" or a scaler."""
        return self._mode.skipped

    @property
    def grad_norm(self) -> float | None:
        """The norm of the last step's gradients together, before they were clipped; None before the first step, and
        without clip_norm. Mode sync: of the reduced gradients, the same number on all ranks. Mode ps: of this worker's.
        """
        return self._clipper.norm

    def broadcast(self, params: Any, root: int | None = None) -> None:
        """Give every rank the root's parameters, in place, and the state of its optimizer and scaler. Collective.

        root: without it rank 0, or the first of the process set. In mode ps it is worker 0; the servers have the
        optimizer's state.
        Raises MismatchError, naming ranks and tensor, if their parameters differ in name, shape or dtype.
        """
        try:
            problem, tensors = "", [parameter(name, leaf) for name, leaf in nest.leaves(params)]
        except InputError as error:
            problem, tensors = str(error), []
        with collectives.within(self.process_set):
            root = collectives.current().ranks[0] if root is None else root
            self._mode.broadcast(params, tensors, root, problem)
            if (scaler := self._clipper.scaler) is not None:
                title = f"scaler of {self.name}"
                scaler.load_state_dict(collectives.broadcast_object(scaler.state_dict(), root, title))

    def pull(self, params: Any) -> None:
        """Mode ps: overwrite the parameters with what the servers have now. Mode sync: nothing, they are equal."""
        self._mode.pull(params)

    @property
    def dropped(self) -> int:
        """Mode ps, policy sync: gradients of this worker that came too late for their step, so far."""
        return self._mode.dropped

    def finish(self) -> None:
        """Mode ps: this worker makes no more steps, and the others need not wait for it; `pull` and `save` still serve.

        The end of the program says so too. Call it where workers may make different numbers of steps and then meet in
        a collective. Mode sync: nothing.
        """
        self._mode.finish()

    def meet(self) -> None:
        """For a session: mode ps: `finish`, and wait until all workers have, or are gone. Mode sync: nothing."""
        self._mode.meet()

    def hear(self, failure: AllredError | None) -> AllredError | None:
        """For a session: worker 0's failure, on all workers; None: there is none."""
        return self._mode.hear(failure)

    def statistics(self) -> Statistics:
        """Mode ps: gradients, updates, bytes and staleness at the servers so far. Raises InputError in mode sync."""
        return self._mode.statistics()

    def state_dict(self) -> Any:
        """The optimizer's own state, as it is without allred; in mode ps it is gathered from the servers. Gradients
        waiting in `accumulate` are not in it."""
        self._needs_state()
        return self._mode.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Restore what state_dict gave, on this rank; in mode ps worker 0 gives it to the servers."""
        self._needs_state()
        self._mode.load_state_dict(state)
        restored(self.optimizer)

    def _needs_state(self) -> None:
        if not has_state(self.optimizer):
            raise InputError(f"{type(self.optimizer).__name__} has no state_dict and load_state_dict; add both to it")

    def save(self, directory: str | os.PathLike[str], params: Any) -> str | None:
        """Write a checkpoint of parameters and optimizer into a new directory within `directory`, on worker 0, and give
        its path there; None on the others. All workers may call it, and need not wait for it.

        In mode ps each server writes its part, so all have to see that directory. Restored in either mode, on any
        number of ranks or servers. Raises CheckpointError.
        """
        self._needs_state()
        if collectives.current(self.process_set).rank != 0:
            return None
        return self._mode.save(params, self._with_scaler(None), False)(os.fspath(directory))

    def restore(self, directory: str | os.PathLike[str], params: Any) -> int | None:
        """Continue on all ranks from the newest complete checkpoint in `directory`: parameters, optimizer. Collective.

        The number of its step; None if there is no checkpoint, then everybody starts from worker 0's parameters.
        Raises CheckpointError on worker 0 if it cannot be read or is of another model.
        """
        return self.restore_all(directory, params)[0]

    def restore_all(self, directory: str | os.PathLike[str], params: Any) -> tuple[int | None, Any]:
        """The same, and what the session that saved it added, on all ranks; None where there is nothing."""
        self._needs_state()
        with collectives.within(self.process_set):
            return self._restore(directory, params)

    def _restore(self, directory: str | os.PathLike[str], params: Any) -> tuple[int | None, Any]:
        step = extra = None
        if collectives.current().rank == 0 and (newest := _newest(directory)) is not None:
            path, found = newest
            _fill(nest.leaves(params), found.params, path)
            extra = checkpoint.take_extra(found.slots)
            step, state = found.step, found.meta["optimizer"]
            own = state is None
            self._mode.load_state_dict(
                checkpoint.find_own_state(found.slots) if own else {**state, "slots": found.slots}
            )
        self.broadcast(params)
        if step is not None:
            self._mode.count_from(step)
        step, extra = collectives.broadcast_object((step, extra), collectives.current().ranks[0])
        if step is not None:
            restored(self.optimizer)
        if step is not None and self._mode.in_step and collectives.current().rank != 0:
            self._mode.count_from(step)
        return step, self._take_scaler(extra)

    def saving(self, params: Any, extra: Any, copy: bool = False) -> Callable[[str], str]:
        """For a session: what `save` does, of this moment, as a function of the directory to be called once, later if
        it is a `copy`. On any rank. extra: something to be pickled, that `restore_all` gives back."""
        self._needs_state()
        return self._mode.save(params, self._with_scaler(extra), copy)

    def _with_scaler(self, extra: Any) -> Any:
        """What goes along with a checkpoint: a session's, and the scaler's state."""
        scaler = self._clipper.scaler
        return extra if scaler is None else {_SCALER: scaler.state_dict(), _OTHERS: extra}

    def _take_scaler(self, extra: Any) -> Any:
        """The reverse, on a rank that has restored it: what the session gave."""
        if not isinstance(extra, dict) or _SCALER not in extra:
            return extra
        if self._clipper.scaler is not None:
            self._clipper.scaler.load_state_dict(extra[_SCALER])
        return extra[_OTHERS]

    @property
    def global_step(self) -> int:
        """Updates of the parameters so far, those before a restore included; in mode ps as of the last pull."""
        return self._mode.global_step

    @property
    def torn(self) -> bool:
        """Whether an exception has cut an update short, so that the parameters are of no step."""
        return self._mode.torn

    @property
    def in_step(self) -> bool:
        """Whether all ranks make every step together: in mode sync."""
        return self._mode.in_step

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has spent in communication so far, waiting for others included."""
        with collectives.within(self.process_set):
            return self._mode.waited_s

    def ask_to_end(self) -> None:
        """Mode ps: have every worker's next step raise ShutdownError, after a checkpoint. Mode sync: nothing."""
        self._mode.ask_to_end()

    def end_with(self, save: Callable[[], str]) -> None:
        """For a session: what writes that checkpoint, and gives its path."""
        self._mode.end_with(save)

    def summary(self) -> str:
        """World, backend and why, speed, and where the time of a step went on this rank; one line a topic."""
        with collectives.within(self.process_set):
            return self._mode.summary()


def _newest(directory: str | os.PathLike[str]) -> tuple[pathlib.Path, checkpoint.Checkpoint] | None:
    """The checkpoint to restore. Those that are damaged are told of; CheckpointError if there is no other."""
    found, damaged = checkpoint.read_newest(directory)
    if damaged and found is None:
        raise CheckpointError(
            f"{damaged[0]}; no checkpoint in {os.fspath(directory)} is complete. To start anew, move them away"
        )
    for words in damaged:
        report.say(f"a later checkpoint is left out: {words}")
    return found


def _fill(named: list[tuple[str, Any]], values: dict[str, Any], path: Any) -> None:
    """Give parameters the values of a checkpoint."""
    for name, leaf in named:
        if name not in values or values[name].shape != leaf.shape:
            got = f"has shape {values[name].shape} there" if name in values else "is not in it"
            raise CheckpointError(
                f"{path} is of another model: '{name}' {leaf.shape} {got}; pass the directory of this model's"
            )
    if odd := sorted(set(values) - {name for name, _ in named}):
        raise CheckpointError(f"{path} is of another model: it has '{odd[0]}', and this one has not")
    for name, leaf in named:
        fill(leaf, values[name])


def _whole(samples: Any) -> int:
    try:
        number = operator.index(samples)
    except TypeError:
        number = -1
    if number < 0:
        raise InputError(f"samples={samples!r} must be a whole number of at least 0")
    return number
