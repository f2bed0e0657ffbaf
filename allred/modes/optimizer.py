"""`DistributedOptimizer`: the part of a distributed optimizer that is the same in every mode; see options.py.

The mode is selected at the first use, because the optimizer may be made before allred.init(). A parameter server
serves where the optimizer is made or first used, and exits there.
"""

import dataclasses
import functools
import importlib
import os
import pathlib
import secrets
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from allred import log, nest, world
from allred.checkpoint import SavedTensors
from allred.checkpoint.files import check_bytes
from allred.checkpoint.table_rows import row_files, tables_in
from allred.comm import functions
from allred.comm.communicator import Communicator
from allred.comm.header import hash_text
from allred.comm.ops import Compression, ReduceOp
from allred.embeddings.embedding import Embedding, TableLink
from allred.embeddings.row_store import widths
from allred.errors import CheckpointError, InputError, MismatchError, NonFiniteError, RanksChanged
from allred.modes.clipping import Clipper
from allred.modes.detect.mistake_checks import restored, updates_of
from allred.modes.load_checkpoint import load_newest
from allred.modes.match import Accumulator, Matcher, SampleCount, parameter
from allred.modes.options import Mode, SessionSupport, StepInput, StepOptions
from allred.modes.ps import PsMode
from allred.modes.reducer import Reducer
from allred.modes.sync import SyncMode, has_state
from allred.optim.base import optimizer_kind
from allred.ps import context
from allred.ps.protocol import Statistics
from allred.timeline import recorder
from allred.timeline.recorder import span

_SCALER, _EXTRA = "the optimizer's scaler", "what else there is"  # keys in checkpoints, which exist: keep them


def is_torch_optimizer(value: Any) -> bool:
    """Whether a value is an instance of torch.optim.Optimizer. Does not import torch."""
    optim = getattr(sys.modules.get("torch"), "optim", None)
    return optim is not None and isinstance(value, optim.Optimizer)


def _without_more(extra: Any) -> Any:
    return extra[_EXTRA] if isinstance(extra, dict) and _EXTRA in extra else extra


def _check_parts(
    names: Iterable[str], tables: Sequence[Embedding], verifies: bool, content: SavedTensors, extra: Any,
    path: pathlib.Path,
) -> None:  # fmt: skip
    """Raise CheckpointError if a checkpoint lacks one of the parts of `session_parts`, or a table. verifies: read the
    files of the tables, before anything changes."""
    saved = tables_in(content.meta)
    for table in tables:
        if table.name not in saved:
            raise CheckpointError(f"{path} is of another model: it has no table {table.name!r}, only {list(saved)}")
        own = widths(table.form)
        for part in saved[table.name]["parts"]:
            found = {each["slot"].lstrip("\0"): tuple(each["shape"][1:]) for each in part["entries"]}
            if found != own:
                raise CheckpointError(
                    f"{path} is of another model: the rows of table {table.name!r} have {found} in it, and {own} here"
                )
    parts = _without_more(extra) or {}
    if verifies:
        for table in tables:
            for base, part in row_files(path, table.name):
                check_bytes("checkpoint", base, part)
    if missing := [name for name in names if not parts.get(f"'{name}'", [None])[0]]:
        raise CheckpointError(
            f"{path} has no state of the {missing[0]}, because it was saved without the {missing[0]}; nothing was "
            f"restored. To restore only parameters and optimizer, call restore(directory) without the {missing[0]} "
            f"and broadcast({missing[0]})"
        )


_new_input = functools.partial(tuple.__new__, StepInput)  # 0.2 us less than StepInput(...), in each step


class DistributedOptimizer:
    """The result of `allred.distributed`: an optimizer whose `step` uses the gradients of all ranks.

    optimizer: the wrapped optimizer. op, options: the arguments of `allred.distributed`. For a torch optimizer the
    result is the torch optimizer itself, with hooks (docs/torch-optimizer.md).
    """

    _make_options = StepOptions
    interrupted = False  # whether the last step made no update, because the ranks of an elastic job change
    checks_operations = False  # whether a step is lost if an operation of DDP before it was

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        target = arguments[0] if arguments else options.get("optimizer")
        if cls is DistributedOptimizer and is_torch_optimizer(target):
            given = {name: value for name, value in options.items() if name != "optimizer"}
            given |= {"op": arguments[1]} if len(arguments) > 1 else {}
            hooked = importlib.import_module("allred.torch.hooked_optimizer")  # it imports torch
            return hooked.attach(target, StepOptions(**given))
        return super().__new__(cls)

    def __init__(self, optimizer: Any, op: ReduceOp = ReduceOp.AVERAGE, **options: Any) -> None:
        if isinstance(optimizer, type) or not callable(getattr(optimizer, "step", None)):
            raise TypeError(f"DistributedOptimizer takes an object with step(params, grads), got {optimizer!r}")
        self._options = self._make_options(op=op, **options)
        self.optimizer, self.name, self.process_set = optimizer, self._options.name, self._options.process_set
        self._accumulator = Accumulator(self._options.accumulate)
        self._clipper = Clipper(self._options.clip_norm, self._options.scaler, self.name)
        self._matcher = Matcher(self._options.title)
        self._samples = SampleCount()
        # In the manifest of checkpoints, with the names "kind" and "training": keep these.
        self._meta = {"kind": optimizer_kind(optimizer), "training": secrets.token_hex(8)}
        self._updates = updates_of(optimizer)  # also counts the updates of an optimizer whose wrapper is never used
        self._chosen: Mode | None = None
        self._alone: Communicator | None = None  # of this rank, which trains in rounds
        for table in self._options.tables:
            table.attach(self)
        if context.serves():
            self._serve()

    @property
    def table_link(self) -> TableLink:
        """Internal: the way to the rows of the tables."""
        link = self._get_mode().table_link
        assert link is not None  # attached tables are in the options
        return link

    def _serve(self) -> NoReturn:
        from allred.modes.ps_join import serve_until_done  # imports MPI

        self._check_mode()
        context.current().servers_return = False
        optimizer, options = self.optimizer, self._options
        if self.trains_in_rounds:
            options = self._options_of_rounds()
            optimizer = options.outer
        serve_until_done(optimizer, options)
        raise SystemExit(0)

    def _check_mode(self) -> None:
        if world.config().mode == "local":
            self._check_local()
        if not context.is_active():
            return
        if self._options.tables and self.trains_in_rounds:
            raise InputError(f"{self.name}: every={self._options.every} cannot be used with tables; omit one of them")
        if self._options.op is not ReduceOp.AVERAGE:
            raise InputError(
                f"{self.name}: op=allred.{self._options.op.name.title()} is available in mode sync only; parameter "
                "servers apply single gradients or their mean. Omit op"
            )
        if self._options.sharded:
            raise InputError(f"{self.name}: sharded=True is available in mode sync only; omit it")
        if self.process_set is not None:
            raise InputError(
                f"{self.name}: process_set is available in mode sync only; in mode ps all workers train together"
            )

    def _check_local(self) -> None:
        options = self._options
        given = {
            f"op=allred.{options.op.name.title()}": options.op is not ReduceOp.AVERAGE, "sharded=True": options.sharded,
            "process_set": self.process_set is not None, "tables": bool(options.tables),
        }  # fmt: skip
        if wrong := [name for name, is_given in given.items() if is_given]:
            raise InputError(
                f"{self.name}: {', '.join(wrong)} is not available in mode local, in which all ranks average their "
                "parameters; leave it out"
            )

    def _get_mode(self) -> Mode:
        """Return the mode, which is selected at the first use. A parameter server serves and exits instead."""
        if self._chosen is None:
            if context.serves():
                self._serve()
            self._check_mode()
            sync = functions.current() and not context.is_active()
            if not sync and self._options.compression is not Compression.none:
                log.info(f"{self.name}: compression has no effect in mode ps: gradients are sent uncompressed")
            arguments = self.optimizer, self._options, self._clipper, self._meta
            if self.trains_in_rounds:
                self._chosen = self._local_mode()
            else:
                self._chosen = SyncMode(*arguments, self, self.new_reducer()) if sync else PsMode(*arguments)
        return self._chosen

    @property
    def trains_in_rounds(self) -> bool:
        """Internal: whether each rank trains alone between two exchanges: mode local, and mode ps with `every`."""
        mode = world.config().mode
        return mode == "local" or (mode == "ps" and (self._options.every or 1) > 1)

    def _options_of_rounds(self) -> StepOptions:
        if not context.is_active():
            return self._options.with_settings(world.config())
        from allred.modes.ps_rounds import options_of_rounds

        return options_of_rounds(self._options)

    def _local_mode(self) -> Mode:
        from allred.modes.local import LocalMode, alone

        options = self._options_of_rounds()
        self._options = dataclasses.replace(self._options, compression=Compression.none, error_feedback=None)
        self._alone = alone()
        arguments = self.optimizer, self._options, self._clipper, self._meta, self, self.new_reducer()
        if not context.is_active():
            from allred.modes.rounds import Rounds

            return LocalMode(*arguments, rounds=Rounds(options, options.title))
        from allred.modes.ps_rounds import PsLocalMode, PsRounds

        rounds = PsRounds(options, options.title, self._meta)
        return PsLocalMode(*arguments, rounds=rounds, save=lambda params: self.saving(params, None))

    def new_reducer(self) -> Reducer:
        """Internal: return the reducer of mode sync."""
        return Reducer(self._options, self._options.title)

    @property
    def session_support(self) -> SessionSupport:
        """Internal: the operations that `allred.Session` needs."""
        return self._get_mode()

    # Training.

    def step(self, params: Any, grads: Any, samples: int | None = None) -> None:
        """Update the parameters in place with the gradients of all ranks.

        Mode sync: the gradients are averaged over all ranks, then the optimizer makes its step; collective. Mode ps:
        they are pushed to the parameter servers, which apply them, and the parameters are pulled.

        With accumulate=k only every k-th call communicates and updates, with the mean over the samples of k calls (over
        the calls, if samples are unknown); gradients are then summed up here and not overwritten. All ranks raise the
        error of a micro-step in the k-th call.

        Every step checks for silent mistakes (docs/mistakes.md). In both modes: gradients that are not finite. In mode
        sync: 1024 elements of the parameters are compared between the ranks, other elements in each step. At the first
        three steps and every ALLRED_CHECK_STEPS steps: all parameters and the optimizer's state are compared, and equal
        batches and gradients that are averaged twice are reported. The first step also compares the arguments of
        allred.data.batches and stream.

        Arguments:
            params: a nest of writable arrays.
            grads: the same nest of gradients, of the shapes of their parameters. In mode sync the mean overwrites them.
                It does not overwrite numbers, read-only arrays, and arrays that overlap an earlier gradient: for these
                the optimizer gets a new array. None counts as zeros if another rank has that gradient. None and Python
                numbers take the dtype of the parameter.
            samples: how many samples the gradients are the mean of; known automatically inside `allred.data.batches`.
                In mode sync ranks are weighted by it; if no rank gives it, all count equally.

        Raises InputError, MismatchError, DriftError or NonFiniteError before parameters and optimizer state are
        changed; in mode sync with the same text on every rank. With NonFiniteError the gradients may be overwritten.

        Example: on 2 ranks, with `opt = allred.distributed(allred.optim.SGD(lr=1.0))` and `w = np.zeros(2)`,
        `opt.step({"w": w}, {"w": np.full(2, float(allred.rank()))})` sets `w` to `[-0.5, -0.5]` on both.
        """
        if (recovery := world.current().recovery) is None:
            return self._step(params, grads, samples)
        recovery.begin_step(self, params)
        try:
            self._step(params, grads, samples)
        except RanksChanged:
            recovery.lose_step(self)

    def _step(self, params: Any, grads: Any, samples: int | None, refusal: str = "") -> None:
        """As `step`. refusal: why this rank's gradients cannot be used."""
        mode, communicator = self._get_mode(), self._communicator()
        tensors, leaves, values, problem, plain = self._matcher.match(params, grads)
        problem = refusal or problem
        try:
            samples = self._samples.of_step(samples)
        except InputError as error:
            problem, samples = problem or str(error), None
        if self._accumulator.micro_steps > 1:
            if not self._accumulator.add(tensors, values, samples, problem):
                return
            problem = self._accumulator.problem
            if not problem:
                values, samples = self._accumulator.take()
                grads, tensors, plain = nest.rebuild(grads, values), list(tensors), False
        clipper = self._clipper
        if not problem and (clipper.limit is not None or clipper.scaler is not None):
            problem = clipper.check(tensors)
        if problem:  # the other ranks receive it in the header exchange
            tensors, leaves, values, samples, plain = [], [], [], None, False
            self._accumulator.clear()
        try:
            given = _new_input((communicator, params, grads, tensors, leaves, values, samples, problem, plain))
            if self.process_set is None and recorder.current is None:
                mode.step(given)
            else:
                with (
                    span("step", self.name),
                    functions.within(self.process_set),
                ):  # a custom optimizer may call collectives
                    mode.step(given)
        except (InputError, MismatchError, NonFiniteError) as error:
            world.current().communicator.queue.record_error(error)
            raise

    def _repeat_step(self, mode: SyncMode, values: list[Any], samples: int | None) -> bool:
        """As `_step`, of an optimizer that makes its update later, if the step is like the last one on all ranks.
        Return False if it is not, with nothing changed: then call `_step` with the same `samples`.

        values: the gradients, plain arrays in the order of the last step; the mean overwrites them.
        """
        clipper, communicator = self._clipper, self._communicator()
        is_plain = clipper.limit is None and clipper.scaler is None and self.process_set is None
        samples = self._samples.of_reduce(samples)
        if not is_plain or recorder.current is not None or self._samples.problem:
            return False
        try:
            if not mode.repeat(communicator, values, samples):
                return False
        except (InputError, MismatchError, NonFiniteError) as error:
            communicator.queue.record_error(error)
            raise
        self._samples.of_step(None)
        return True

    def _communicator(self) -> Communicator:
        """Return the communicator of this optimizer's ranks."""
        if self._chosen is None:
            self._get_mode()
        if self._alone is not None:
            return self._alone
        own = self.process_set
        return world.current().communicator if own is None else functions.current(own)

    def reduce(self, name: str, grad: Any, samples: int | None = None) -> None:
        """Start to reduce one gradient of the next step, while others are still computed.

            for name, grad in backward():              # the last layer first
                opt.reduce(name, grad)
            opt.step(params, grads)                    # all gradients, these arrays among them

        Gradients are reduced in buckets, in the order in which they became ready on rank 0 in the first step with
        reduce(). That first step, and steps with a check (allred/modes/detect), are reduced in `step`. So are gradients
        that are not passed here; a rank may omit reduce() altogether.

        Mistakes (an unknown name, one passed twice, another shape, dtype or device, shared memory) are an InputError on
        all ranks in `step`, before the parameters are changed. If gradients are not finite, the others are overwritten.

        Mode ps: no effect; gradients are pushed in `step`.

        Arguments:
            name: the path of the gradient in the nest passed to `step`, as in errors ("fc1.weight", "layers.0.b").
            grad: the same array object; it belongs to the operation until `step` returns.
            samples: as in `step`; counts in the first call for a step.

        Raises InputError with accumulate > 1: the sums are complete only in `step`.
        """
        if self._accumulator.micro_steps > 1:
            raise InputError(
                f"{self.name}.reduce() with accumulate={self._accumulator.micro_steps}: the gradients of "
                "a step are complete only in its last step() call; do not call reduce()"
            )
        mode = self._get_mode()
        try:
            mode.reduce(self._communicator(), name, grad, self._samples.of_reduce(samples))
        except RanksChanged:
            if not world.current().recovery.absorbs():
                raise  # else `step` finds it again

    def broadcast(self, params: Any, root: int | None = None) -> None:
        """Copy the parameters of the root to all ranks, in place, with its optimizer state and scaler. Collective.

        root: default rank 0, or the first rank of the process set. In mode ps it is worker 0; the optimizer state is
        at the servers.
        Raises MismatchError, naming ranks and tensor, if the parameters differ in name, shape or dtype.
        """
        with functions.within(self.process_set):
            root = functions.current().ranks[0] if root is None else root
            recovery = world.current().recovery
            if recovery is None:
                return self.copy_state(params, root)
        recovery.broadcast(self, params, root)

    def copy_state(self, params: Any, root: int) -> None:
        """Internal: as `broadcast`, in the ranks of this optimizer."""
        if world.current().recovery is not None:
            self._meta["training"] = functions.broadcast_object(self.training_id, root)
        with functions.within(self.process_set):
            self._begin_with(params, root, values=True)
            if (scaler := self._clipper.scaler) is not None:
                title = f"scaler of {self.name}"
                scaler.load_state_dict(functions.broadcast_object(scaler.state_dict(), root, title))

    def _begin_with(self, params: Any, root: int, values: bool) -> None:
        """Begin with parameters that are equal on all ranks. Collective. values: whether to copy parameters and state
        from the root; else they are equal already."""
        try:
            problem, tensors = "", [parameter(name, leaf) for name, leaf in nest.leaves(params)]
        except InputError as error:
            problem, tensors = str(error), []
        self._get_mode().broadcast(params, tensors, root, problem, values)
        self._samples = SampleCount()  # the mode has forgotten the gradients of reduce()

    def refusal(self) -> str:
        """Internal, for recovery.RecoverableOptimizer: which of its arguments cannot be recovered; "" if none."""
        given = {
            "accumulate": self._accumulator.micro_steps > 1, "sharded": self._options.sharded,
            "process_set": self.process_set is not None, "tables": bool(self._options.tables),
        }  # fmt: skip
        return ", ".join(name for name, is_given in given.items() if is_given)

    def keep_settings(self) -> None:
        """Internal: keep the settings that the program may change after a lost step."""

    def begin_world(self) -> None:
        """Internal: forget what belongs to the last world, and a step that was lost there."""
        self._samples = SampleCount()
        self._get_mode().begin_world()
        if self._alone is not None:
            self._alone.ranks = (functions.current().number,)

    @property
    def defers_changes(self) -> bool:
        """Internal, for recovery.RecoverableOptimizer."""
        return self._get_mode().defers_changes

    @property
    def steps_made(self) -> int:
        """Internal, for recovery.RecoverableOptimizer."""
        return self._get_mode().steps_made

    @steps_made.setter
    def steps_made(self, number: int) -> None:
        self._get_mode().steps_made = number

    def complete_round(self, params: Any, has_state: bool) -> int | None:
        """Internal, for recovery.RecoverableOptimizer."""
        return self._get_mode().complete_round(params, has_state)

    def replicated(self, trained: dict[str, Any]) -> Any:
        """Internal, for allred.join: return the parameters to copy to ranks that have missed steps. trained: those of
        the steps, by name."""
        return trained

    def share(self, params: Any) -> Any:
        """Return a nest like `params` with one copy of the arrays per node, for sharded=True. Collective.

        Train with the result and drop `params`. The new arrays contain the values of the first rank of the node. If one
        rank writes to them, for example `w *= 0.99`, all ranks of the node see the change. Arrays that overlap another
        array of `params` (tied weights) are returned unchanged: each rank keeps its own. An allreduce cannot write to
        the new arrays; `broadcast` and `restore` can. Returns `params` itself if the update is not sharded: one
        rank, another optimizer, no shared memory. Raises InputError without sharded=True, and in mode ps.

        Example: `params = opt.share(params)`, then `opt.broadcast(params)` and `opt.step(params, grads)`.
        """
        with functions.within(self.process_set):
            return self._get_mode().share(params)

    def round(self) -> None:
        """Mode local: average the parameters of all ranks now, for example before an evaluation; then they are equal.
        Collective. Mode ps with `every`: exchange with the servers now. Mode sync, and ps without: no effect.

        Example: `opt.round()`, then `accuracy = evaluate(params)` on any rank.
        """
        self._get_mode().round()

    def pull(self, params: Any) -> None:
        """Mode ps: overwrite the parameters with the parameters of the servers; with `every`, the steps since the last
        exchange are lost. Mode sync: no effect; they are equal."""
        self._get_mode().pull(params)

    def finish(self) -> None:
        """Mode ps: declare that this worker makes no more steps, so that others do not wait for it. Mode sync: no
        effect. `pull` and `save` can still be used.

        The end of the program implies it, but with `every` not the exchange of the steps since the last one, which
        this call makes. Call it if workers make different numbers of steps and then call a
        collective.
        """
        self._get_mode().finish()

    # Results.

    @property
    def accumulates(self) -> bool:
        """Whether the micro-steps of a step are incomplete."""
        return self._accumulator.filled > 0

    @property
    def skipped(self) -> int:
        """Steps skipped so far because gradients were not finite, with nonfinite="skip" or a scaler."""
        return self._get_mode().skipped

    @property
    def dropped(self) -> int:
        """Mode ps, policy sync: gradients of this worker so far that were too late for their step."""
        return self._get_mode().dropped

    @property
    def grad_norm(self) -> float | None:
        """The norm of all gradients of the last step together, before clipping; None without clip_norm, and before the
        first step. Mode sync: of the reduced gradients, the same number on all ranks. Mode ps: of this worker's."""
        return self._clipper.norm

    @property
    def global_step(self) -> int:
        """Updates of the parameters so far, including those before a restore; in mode ps at the last pull."""
        return self._get_mode().global_step

    def statistics(self) -> Statistics:
        """Mode ps: gradients, updates, bytes and staleness at the servers so far. Raises InputError in mode sync."""
        if (found := self._get_mode().statistics()) is not None:
            return found
        raise InputError(
            f"{self.name}.statistics() needs parameter servers (mode ps), but this is mode {world.config().mode}; use "
            "summary()"
        )

    def summary(self) -> str:
        """Return the world, the backend and the reason for it, speed, and the times of a step on this rank, by line."""
        with functions.within(self.process_set):
            return self._get_mode().summary()

    # State and checkpoints.

    def state_dict(self) -> Any:
        """Return the state of the wrapped optimizer; in mode ps without `every` it is gathered from the servers.
        Gradients that are being accumulated are not included."""
        self._require_state()
        return self._get_mode().state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Restore a result of `state_dict` on this rank; in mode ps worker 0 sends it to the servers. Gradients that
        are being accumulated are dropped."""
        self._require_state()
        self._get_mode().load_state_dict(state)
        self.forget_gradients()
        self._meta["training"] = f"{hash_text(self.training_id):016x}"  # equal on ranks that load equally often
        restored(self.optimizer)

    def forget_gradients(self) -> None:
        """Internal: drop accumulated gradients; they belong to the parameters before the restore."""
        self._accumulator.clear()
        for table in self._options.tables:
            table.forget_lookups()

    def _require_state(self) -> None:
        if not has_state(self.optimizer):
            raise InputError(f"{type(self.optimizer).__name__} has no state_dict and load_state_dict; add both to it")

    def save(self, directory: str | os.PathLike[str], params: Any) -> str | None:
        """Write a checkpoint of parameters and optimizer into a new directory in `directory`. Returns its path on
        worker 0, which writes, and None on the others, which need not call it; with embedding tables in mode sync all
        ranks call it.

        In mode ps each server writes its part, so `directory` must be visible to all. A checkpoint can be restored in
        either mode, on any number of ranks or servers. Raises CheckpointError.
        """
        self._require_state()
        if not self._begin_save():
            return None
        return self.saving(params, None)(os.fspath(directory))

    def _begin_save(self) -> bool:
        """Begin to write a checkpoint. Return whether this rank writes it. Collective with embedding tables in mode
        sync."""
        if self._options.tables:
            self._get_mode().before_checkpoint()
        return functions.current(self.process_set).rank == 0

    def restore(self, directory: str | os.PathLike[str], params: Any) -> int | None:
        """Restore parameters and optimizer on all ranks from the newest complete checkpoint. Collective. Gradients that
        are being accumulated are dropped.

        Returns the number of its step; None if there is no checkpoint: then all ranks get the parameters of worker 0.
        Raises CheckpointError on all ranks if worker 0 cannot read the checkpoint, or it is of another model.
        """
        return self.restore_all(directory, params)[0]

    def restore_all(
        self, directory: str | os.PathLike[str], params: Any, others: Iterable[str] = ()
    ) -> tuple[int | None, Any]:
        """As `restore`; returns the step, and the `extra` that was passed to `saving`, on all ranks, or None. others:
        the names of `session_parts`: raises CheckpointError, before anything changes, if the checkpoint lacks one."""
        self._require_state()
        with functions.within(self.process_set):
            first, control = functions.current().ranks[0], self._get_mode()
            tables = self._options.tables
            check = functools.partial(_check_parts, others, tables, functions.current().rank == 0)
            found = load_newest(
                directory, self.optimizer, params, control.load_new_state, check, everywhere=control.is_lockstep
            )
            step, extra = (None, None) if found is None else (found.step, found.extra)
            self.forget_gradients()
            if found is not None and found.everywhere:
                self._begin_with(params, first, values=False)
            else:
                self.broadcast(params)
            is_first = functions.current().rank == 0
            if step is not None and is_first:
                control.count_from(step)
            if found is not None and tables and (is_first or control.is_lockstep):
                self.table_link.load(found.path, found.tables, found.everywhere)
            self._meta["training"] = functions.broadcast_object(secrets.token_hex(8), first)
            if step is not None:
                restored(self.optimizer)
                if functions.current().rank != 0:
                    control.count_from(step)
        if isinstance(extra, dict) and _SCALER in extra and self._clipper.scaler is not None:
            self._clipper.scaler.load_state_dict(extra[_SCALER])
        if step is not None:
            self._get_mode().load_more_state(extra if isinstance(extra, dict) and _EXTRA in extra else {})
        return step, _without_more(extra)

    @property
    def training_id(self) -> str:
        """Internal: identifies a training in the manifests of its checkpoints; text. `restore` and `load_state_dict`
        assign a new one. Equal on all ranks after `restore`."""
        return self._meta["training"]

    def saving(self, params: Any, extra: Any, copy: bool = False) -> Callable[[str], str]:
        """Internal, for a session: return a function that writes a checkpoint of this moment into a directory, and
        returns its path. extra: an object to pickle into it. copy: whether it is called after later steps."""
        self._require_state()
        scaler, more = self._clipper.scaler, self._get_mode().more_state()
        if scaler is not None:
            more = {_SCALER: scaler.state_dict(), **more}
        extra = {**more, _EXTRA: extra} if more else extra
        return self._get_mode().save(params, extra, copy)

    def session_parts(self, params: Any) -> tuple[Any, dict[str, Any]]:
        """Internal: return the parameters for a session as a nest of arrays, and other objects with a state by name."""
        return params, {}

    def broadcast_others(self, params: Any) -> None:
        """Internal, for a session: copy the state of the objects of `session_parts` from rank 0. Collective."""
