"""`DistributedOptimizer`: what is the same in every mode. What differs, a mode does: sync.py, ps.py.

The mode is chosen when the optimizer is first used, because it may be made before allred.init(). On a parameter server,
making or first using the optimizer serves the workers and then exits (`_serve`).
"""

import os
from collections.abc import Callable
from typing import Any, NoReturn

from allred import nest
from allred.cluster import report
from allred.comm import functions
from allred.comm.ops import ReduceOp
from allred.comm.process_set import ProcessSet
from allred.compression import Compression
from allred.errors import AllredError, InputError
from allred.modes import checkpoints
from allred.modes.accumulate import Accumulator
from allred.modes.clipping import Clipper
from allred.modes.detect.outside import restored
from allred.modes.mode import Mode
from allred.modes.options import Options
from allred.modes.pairs import Pairs, parameter
from allred.modes.ps import ServersMode
from allred.modes.samples import Samples
from allred.modes.scaler import GradScaler
from allred.modes.sync import SyncMode, has_state
from allred.ps import context
from allred.ps.stats import Statistics
from allred.timeline.recorder import span


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
        self._pairs = Pairs(f"{name}.step()")
        self._samples = Samples()
        self._chosen: Mode | None = None
        if optimizer is not None and context.serves():
            self._serve()

    def _serve(self) -> NoReturn:
        """Serve on a parameter server until the workers are done, and exit."""
        from allred.modes.ps_join import serve_until_done  # imports MPI

        self._check_mode()
        context.current().servers_return = False
        serve_until_done(self.optimizer, self._options)
        raise SystemExit(0)

    def _check_mode(self) -> None:
        """Raise InputError for arguments of mode sync in mode ps."""
        if context.is_active() and self._op is not ReduceOp.AVERAGE:
            raise InputError(
                f"{self.name}: op=allred.{self._op.name.title()} is of mode sync; parameter servers apply each "
                "gradient as it is, or the mean. Leave op out"
            )
        if context.is_active() and self.process_set is not None:
            raise InputError(f"{self.name}: process_set is of mode sync; in mode ps all workers train together")

    def _get_mode(self) -> Mode:
        """Return the mode, which the first call after allred.init() chooses. A parameter server serves instead."""
        if self._chosen is None:
            if context.serves():
                self._serve()
            self._check_mode()
            in_sync = functions.current() and not context.is_active()
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
        first steps and every check_steps, ranks that have drifted apart, have the same batch, or average twice. The
        first step also compares the arguments of allred.data.batches and stream between the ranks.

        Raises InputError, MismatchError, DriftError or NonFiniteError before anything has been changed (a sum that
        overflows is found when the gradients have been overwritten); in mode sync with the same text on every rank.
        """
        mode = self._get_mode()
        tensors, leaves, values, problem = self._pairs.match(params, grads)
        try:
            samples = self._samples.of_step(samples)
            if self._accumulator.micro_steps > 1 and not problem:
                if not self._accumulator.add(tensors, values, samples):
                    return
                values, samples = self._accumulator.take()
                grads, tensors = nest.rebuild(grads, values), list(tensors)  # others than those that were matched
            if self._clipper.active and not problem:
                problem = self._clipper.refusal(tensors)
        except InputError as error:
            problem = str(error)
        if problem:  # the others hear of it when they reduce
            tensors, leaves, values, samples = [], [], [], None
            self._accumulator.clear()
        with span("step", self.name), functions.within(self.process_set):
            mode.step(params, grads, tensors, leaves, values, samples, problem)

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
        twice, another shape, dtype or place, one memory for two) are an InputError on all ranks in `step`,
        before the parameters are changed. Gradients that are not finite are found as ever, but the other gradients are
        overwritten then.

        Mode ps: nothing happens, gradients are pushed in `step`. Raises InputError with accumulate: what is added up
        is known only in `step`.
        """
        if self._accumulator.micro_steps > 1:
            raise InputError(
                f"{self.name}.reduce() with accumulate={self._accumulator.micro_steps}: a step's gradients are the sum "
                "of several, which step() has only with the last of them; leave reduce() out"
            )
        mode = self._get_mode()
        with functions.within(self.process_set):
            mode.reduce(name, grad, self._samples.of_reduce(samples))

    @property
    def accumulates(self) -> bool:
        """Whether gradients of some micro-steps wait for the rest of their step."""
        return self._accumulator.filled > 0

    @property
    def skipped(self) -> int:
        """Steps left out so far because gradients were not finite, with nonfinite="skip" or a scaler."""
        return self._get_mode().skipped

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
        with functions.within(self.process_set):
            root = functions.current().ranks[0] if root is None else root
            self._get_mode().broadcast(params, tensors, root, problem)
            if (scaler := self._clipper.scaler) is not None:
                title = f"scaler of {self.name}"
                scaler.load_state_dict(functions.broadcast_object(scaler.state_dict(), root, title))

    def pull(self, params: Any) -> None:
        """Mode ps: overwrite the parameters with what the servers have now. Mode sync: nothing, they are equal."""
        self._get_mode().pull(params)

    @property
    def dropped(self) -> int:
        """Mode ps, policy sync: gradients of this worker that came too late for their step, so far."""
        return self._get_mode().dropped

    def finish(self) -> None:
        """Mode ps: this worker makes no more steps, and the others need not wait for it; `pull` and `save` still serve.

        The end of the program says so too. Call it where workers may make different numbers of steps and then meet in
        a collective. Mode sync: nothing.
        """
        self._get_mode().finish()

    def meet(self) -> None:
        """For a session: mode ps: `finish`, and wait until all workers have, or are gone. Mode sync: nothing."""
        self._get_mode().meet()

    def hear(self, failure: AllredError | None) -> AllredError | None:
        """For a session: worker 0's failure, on all workers; None: there is none."""
        return self._get_mode().hear(failure)

    def statistics(self) -> Statistics:
        """Mode ps: gradients, updates, bytes and staleness at the servers so far. Raises InputError in mode sync."""
        return self._get_mode().statistics()

    def state_dict(self) -> Any:
        """The optimizer's own state, as it is without allred; in mode ps it is gathered from the servers. Gradients
        waiting in `accumulate` are not in it."""
        self._needs_state()
        return self._get_mode().state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Restore what state_dict gave, on this rank; in mode ps worker 0 gives it to the servers."""
        self._needs_state()
        self._get_mode().load_state_dict(state)
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
        if functions.current(self.process_set).rank != 0:
            return None
        return self._get_mode().save(params, checkpoints.with_scaler(None, self._clipper.scaler), False)(
            os.fspath(directory)
        )

    def restore(self, directory: str | os.PathLike[str], params: Any) -> int | None:
        """Continue on all ranks from the newest complete checkpoint in `directory`: parameters, optimizer. Collective.

        The number of its step; None if there is no checkpoint, then everybody starts from worker 0's parameters.
        Raises CheckpointError, on all ranks, if worker 0 cannot read it or it is of another model.
        """
        return self.restore_all(directory, params)[0]

    def restore_all(self, directory: str | os.PathLike[str], params: Any) -> tuple[int | None, Any]:
        """The same, and what the session that saved it added, on all ranks; None where there is nothing."""
        self._needs_state()
        step = extra = failure = None
        with functions.within(self.process_set):
            first = functions.current().ranks[0]
            if functions.current().rank == 0:
                try:
                    step, extra = checkpoints.load(directory, params, self._get_mode())
                except AllredError as error:
                    failure = error
            if heard := functions.broadcast_object(failure, first):
                raise failure or heard
            self.broadcast(params)
            if step is not None:
                self._get_mode().count_from(step)
            step, extra = functions.broadcast_object((step, extra), first)
            if step is not None:
                restored(self.optimizer)
                if self._get_mode().in_step:
                    self._get_mode().count_from(step)
        return step, checkpoints.without_scaler(extra, self._clipper.scaler)

    def saving(self, params: Any, extra: Any, copy: bool = False) -> Callable[[str], str]:
        """For a session: what `save` does, of this moment, as a function of the directory to be called once, later if
        it is a `copy`. On any rank. extra: something to be pickled, that `restore_all` gives back."""
        self._needs_state()
        return self._get_mode().save(params, checkpoints.with_scaler(extra, self._clipper.scaler), copy)

    @property
    def global_step(self) -> int:
        """Updates of the parameters so far, those before a restore included; in mode ps as of the last pull."""
        return self._get_mode().global_step

    def latest_step(self) -> int:
        """For a session: the global step of this moment. In mode ps this is a request to the servers."""
        return self._get_mode().latest_step()

    @property
    def torn(self) -> bool:
        """Whether an exception has cut an update short, so that the parameters are of no step."""
        return self._get_mode().torn

    @property
    def in_step(self) -> bool:
        """Whether all ranks make every step together: in mode sync."""
        return self._get_mode().in_step

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has spent in communication so far, waiting for others included."""
        with functions.within(self.process_set):
            return self._get_mode().waited_s

    def ask_to_end(self) -> None:
        """Mode ps: have every worker's next step raise ShutdownError, after a checkpoint. Mode sync: nothing."""
        self._get_mode().ask_to_end()

    def end_with(self, save: Callable[[], str]) -> None:
        """For a session: what writes that checkpoint, and gives its path."""
        self._get_mode().end_with(save)

    def summary(self) -> str:
        """World, backend and why, speed, and where the time of a step went on this rank; one line a topic."""
        with functions.within(self.process_set):
            return self._get_mode().summary()
