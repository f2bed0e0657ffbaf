"""The distributed part of a torch optimizer. `allred.distributed(torch_optimizer)` returns the same object, with hooks.

Mode sync: at the end of each backward pass the gradients of all ranks are averaged, before `loss.backward()` returns.
Everything after it (clipping, loggers, LBFGS) sees the averages, and `step` is that of torch.

    parameter hook   request a call at the end of the backward pass; with overlap, send the complete buckets
                     (modes/overlap.py)
    end of backward  the reduction of mode sync (modes/sync.py): negotiate, check, reduce, assign to `.grad`
    opt.step()       clip, then the update by torch

Mode ps: `step` sends the gradients to the parameter servers, which run their copies of the torch optimizer.
"""

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from allred import arena, log, world
from allred.comm.ops import Compression, ReduceOp
from allred.data.loader import claim_samples
from allred.embeddings.embedding import Embedding
from allred.errors import AllredError, InputError, RanksChanged
from allred.modes.clipping import UpdateClipper
from allred.modes.match import Accumulator, SampleCount
from allred.modes.options import StepInput, StepOptions
from allred.modes.reducer import Reducer
from allred.modes.sync import SyncMode
from allred.ps import context
from allred.torch import arena_allocator, elastic_group
from allred.torch.backward_state import BackwardPass, NextStep, ReductionAgreement, decide_overlap
from allred.torch.module_checkpoints import ModuleCheckpoints
from allred.torch.optimizer_adapter import OptimizerAdapter, is_trained, layout_of
from allred.torch.optimizer_hooks import (
    BOTH_MARKS,
    MARK_REDUCED,
    GradientHooks,
    call_after_backward,
    mark_reduced,
    mark_refusal,
    marked,
    uncompiled,
)
from allred.torch.replaced_methods import replace_methods, restore_methods, weak_method
from allred.torch.tensors import copy_like

_call_orders = itertools.count()
_graph_task = torch._C._current_graph_task_id
_hooked: "weakref.WeakSet[HookedOptimizer]" = weakref.WeakSet()  # those with hooks, in mode sync


def attach(optimizer: torch.optim.Optimizer, options: StepOptions) -> torch.optim.Optimizer:
    """Make a torch optimizer distributed, and return it. Raises TypeError if it is distributed already."""
    if isinstance(getattr(optimizer, "allred", None), HookedOptimizer):
        raise TypeError("this optimizer is distributed already; wrapping it twice would average twice")
    optimizer.allred = HookedOptimizer(optimizer, options)
    return optimizer


def _forget_gradients_of_tables(optimizer: torch.optim.Optimizer, tables: Sequence[Embedding]) -> None:
    """Let `zero_grad` forget the gradients of embedding tables, too."""
    zero_parameters = weak_method(optimizer, "zero_grad")

    def zero_grad(set_to_none: bool = True) -> None:
        zero_parameters(set_to_none)
        for table in tables:
            table.forget_gradients()

    optimizer.zero_grad = zero_grad


class HookedOptimizer(ModuleCheckpoints):
    """The distributed part of a torch optimizer, its attribute `allred`.

    The methods are those of `DistributedOptimizer`; where these take a nest of parameters, None stands for the
    parameters of the optimizer, and a torch module for its parameters and buffers.

    samples: set it before `backward()` if the ranks have different numbers of samples and the data is not from
        allred.data: `opt.allred.samples = len(x)`. It counts for one backward pass.

    Raises NonFiniteError, MismatchError and DriftError in backward(), the same on all ranks.

    Example:
        opt = allred.distributed(torch.optim.SGD(model.named_parameters(), lr=0.1))
        opt.allred.broadcast(model)
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, options: StepOptions, names: Mapping[int, str] | None = None
    ) -> None:
        """names: the names of parameters by their id, if the optimizer does not know them."""
        self.call_order = next(_call_orders)
        self.samples: int | None = None
        self._made_in_mode_ps = context.is_active()
        if self._made_in_mode_ps and isinstance(optimizer, (torch.optim.LBFGS, torch.optim.SparseAdam)):
            kind = type(optimizer).__name__
            raise InputError(f"{options.name}: torch.optim.{kind} is not available in mode ps; use mode sync")
        self._adapter = OptimizerAdapter(optimizer, names)
        self._gradients_of_step = options.accumulate
        super().__init__(self._adapter, **vars(options))  # a parameter server does not return
        self._accumulator = Accumulator(1)  # torch adds up the gradients of micro-steps
        self._clipper: UpdateClipper = UpdateClipper(options.clip_norm, options.scaler, self.name)
        self._backward, self._next = BackwardPass(), NextStep()
        self._kept: list[dict[str, Any]] = []  # the settings of the groups when a step was lost
        self.reduction_agreement = ReductionAgreement(options.title)
        self._is_local = False  # inside of no_sync()
        self._averages = True  # else DistributedDataParallel does
        self._last_grad: Any = None  # a weak reference to a gradient of the last reduction, and its version
        self._in_closure = False  # during an update that evaluates the program's closure
        self._marks = options.op is not ReduceOp.AVERAGE or options.scaler is not None  # gradients are reduced once
        # The parameters when sparse gradients were agreed on; None: not yet.
        self._agreed_layout: tuple[Any, ...] | None = None
        self._hooks = GradientHooks(self._marks)
        self._graph_task = self.idle_task = -1  # the run of the autograd engine that called a hook last
        self._overlaps: bool | None = None  # the decision; None: not made yet
        self._repeats = False  # whether a backward pass has called the hook of a parameter twice
        try:
            self._adapter.check_hyperparameters()
        except InputError as error:
            log.warning(f"{self.name}: save() and checkpoints of a session will fail: {error}")
        self._replaced = replace_methods(optimizer)
        if options.tables:
            _forget_gradients_of_tables(optimizer, options.tables)
        self.add_hooks()
        arena_allocator.install()
        arena_allocator.learn(parameter for _, parameter in self._adapter.named_parameters())
        weakref.finalize(self, self._hooks.remove).atexit = False
        _hooked.add(self)

    # Hooks.

    def check_new_group(self) -> None:
        """Internal: raise InputError in mode ps if the servers have their copies of the optimizer already."""
        if not context.is_active():
            return
        here = context.current()
        if here.has_optimizer or (self._made_in_mode_ps and not here.joins):
            when = "the first step() or broadcast()" if here.joins else "allred.distributed(optimizer)"
            raise InputError(
                f"{self.name}: add_param_group() in mode ps: the parameter servers have their copies of the optimizer "
                f"already, without this group; add all groups before {when}, or use mode sync"
            )

    def add_hooks(self) -> None:
        """Internal: attach hooks to parameters that have none."""
        if self._averages:
            self._hooks.add(self, self._adapter.named_parameters())

    def detach(self) -> None:
        """Remove the hooks: the optimizer is that of torch again, and each rank trains alone. Call it on all ranks.

        `del optimizer` removes the hooks too, where it drops the last reference to the optimizer. Call `detach` if
        other objects may keep the optimizer alive, before the parameters get another optimizer.
        """
        optimizer = self._adapter.optimizer
        self._hooks.remove()
        restore_methods(optimizer, self._replaced)
        _hooked.discard(self)
        del optimizer.allred

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside of this context are not collective: gradients are added to `.grad` of this rank. The
        next backward pass outside, or `step`, reduces the sum.

            with optimizer.allred.no_sync():
                loss_function(model(x[:8]), y[:8]).backward()
            loss_function(model(x[8:]), y[8:]).backward()      # reduces

        A backward pass inside does not count for `accumulate` and `samples`. `torch.autograd.grad` and
        `loss.backward(inputs=[x])` do not need the context. Mode ps: no effect.
        """
        before, self._is_local, self.idle_task = self._is_local, True, -1
        try:
            yield
        finally:
            self._is_local = before

    def on_gradient(self, name: str, parameter: Any) -> None:
        """Internal: a gradient of the current backward pass is complete."""
        if self._is_local:
            self._next.is_reduced, self.reduction_agreement.has_local = False, True
            return
        if (task := _graph_task()) != self._graph_task:
            self._graph_task = task
            self._begin_graph_task()
        if not self._backward.overlaps:
            self.idle_task = task
        elif name not in self._adapter.sparse.names and not parameter.grad.is_sparse:
            self._send_gradient(name, parameter)

    @uncompiled
    def _begin_graph_task(self) -> None:
        if self._is_in_mode_ps():
            if self._gradients_of_step > 1:
                call_after_backward(self)
        elif call_after_backward(self):
            if self._backward.has_failed:
                self._end_failed_pass()
            self._backward.overlaps = self._may_overlap()

    def _may_overlap(self) -> bool:
        """Whether the current backward pass sends gradients before its end. The order of buckets is that of one
        optimizer with unchanged parameters."""
        if not self._has_overlap() or self._gradients_of_step > 1 or len(_hooked) > 1 or self._repeats:
            return False
        parameters = self._trained()
        if self._marks and marked(parameters, *BOTH_MARKS):
            return False
        return self._agreed_layout in (None, layout_of(parameters, True))

    @uncompiled
    def _send_gradient(self, name: str, parameter: Any) -> None:
        """Pass a gradient to `reduce`. If a backward pass calls a hook twice, such as for reentrant checkpoints that
        share a module, this rank does not overlap from then on; the other ranks may."""
        backward = self._backward
        if name not in backward.names:
            backward.names.add(name)
            try:
                super().reduce(name, self._adapter.gradient(name, parameter), self.samples)
            except RanksChanged:  # the end of the backward pass raises it
                backward.overlaps = False
            return
        self._repeats = True
        backward.overlaps = False
        if not self._sync_mode().cancel_reduce():
            backward.problem = (
                f"the backward pass has added to the gradient of '{name}' after it was sent, for example because "
                "reentrant checkpoints share a module; call zero_grad() and repeat the backward pass. From now on this "
                "rank sends gradients at the end of a backward pass, as with ALLRED_OVERLAP=never"
            )

    def backward_failed(self) -> None:
        """Internal: an exception has ended the backward pass."""
        self._backward.has_failed = True

    def _end_failed_pass(self) -> None:
        """End the step of a backward pass that an exception has ended. If gradients were sent, all ranks end this step
        with an error, which is raised on ranks whose backward pass has not failed."""
        failed, self._backward = self._backward, BackwardPass()
        self._adapter.release_gradients()
        if failed.names:
            if not self._sync_mode().cancel_reduce():
                problem = "an exception has ended the backward pass after gradients were sent"
                with contextlib.suppress(InputError), self._reset_step_on_error():
                    self._step({}, {}, None, problem)
            self._samples = SampleCount()

    def _trained(self) -> dict[str, Any]:
        """Return {name: parameter} of the parameters that `is_trained` accepts."""
        return {name: parameter for name, parameter in self._adapter.named_parameters() if is_trained(parameter)}

    def decide_overlap(self) -> bool:
        """Internal: whether the setting allows gradients to be sent during the backward pass."""
        return decide_overlap(self.name, dict(self._adapter.named_parameters()), self._communicator().size)

    def _has_overlap(self) -> bool:
        """Whether gradients may be sent during the backward pass. Decided in the first call."""
        if self._overlaps is None:
            self._overlaps = self.decide_overlap()
        return self._overlaps

    def set_overlap(self, overlaps: bool) -> bool:
        """Internal, for measurements: set whether the next steps send gradients during the backward pass; the first
        steps after a change do not. Return whether this is a change. Called on all ranks, between steps."""
        before, self._overlaps = self._overlaps, overlaps
        if not overlaps:
            self._sync_mode().forget_order()
        return before is not overlaps

    def end_of_backward(self) -> None:
        """Internal: reduce the gradients, or count a micro-step. Collective in mode sync; in mode ps `step` pushes."""
        if self._gradients_of_step > 1:
            self._next.micro_samples.append(claim_samples(self.samples))
            self.samples = None
            if len(self._next.micro_samples) < self._gradients_of_step or context.is_active():
                return
        self.reduce_all()

    def reduce_all(self) -> None:
        """Internal: replace the gradients by their mean over the ranks. Collective."""
        if (recovery := world.current().recovery) is None:
            return self._reduce_or_discard()
        recovery.begin_step(self, None)
        try:
            self._reduce_or_discard()
        except RanksChanged:
            recovery.lose_step(self)
            self._next.is_reduced = self._next.is_skipped = True

    def _reduce_or_discard(self) -> None:
        try:
            if self._averages:
                self._reduce_all()
            else:
                self._count_step()
        except AllredError:
            self._discard_step()
            raise

    @contextlib.contextmanager
    def _reset_step_on_error(self) -> Iterator[None]:
        """As `reduce_all` on an error."""
        try:
            yield
        except AllredError:
            self._discard_step()
            raise

    def _discard_step(self) -> None:
        """After an error, which all ranks raise, discard the step and all agreements between the ranks (order of
        gradients, sparse parameters): they may differ then, for example if one rank has frozen a parameter."""
        self._end_step()
        self._sync_mode().forget_order()
        self._agreed_layout, self._samples = None, SampleCount()

    def _reduce_all(self) -> None:
        samples, mode, adapter = self._samples_of_step(), self._sync_mode(), self._adapter
        backward, following = self._backward, self._next
        if backward.names or backward.problem:
            self._backward = BackwardPass()
        mode.in_skipped_step = following.is_skipped
        mode.continues_step = self._continues_step()
        repeats = not (self._marks or backward.problem or self._agreed_layout is None or self._has_overlap())
        values = adapter.repeated_gradients() if repeats else None
        if values is None or not self._repeat_step(mode, values, samples):
            self._reduce_input(backward.problem, samples, mode)
        following.is_reduced, following.is_skipped = True, mode.was_skipped
        if self._marks and not mode.was_skipped:
            mark_reduced(self._trained())
        adapter.release_gradients()

    def _continues_step(self) -> bool:
        """Whether these gradients belong to the step of the last reduction: a closure is evaluated, or a backward pass
        has added to them. Not after zero_grad(), which follows a step that torch's GradScaler has left out: there are
        new gradients, or they have changed once more than by the addition."""
        grad = next((each.grad for _, each in self._adapter.named_parameters() if each.grad is not None), None)
        last, self._last_grad = self._last_grad, None if grad is None else (weakref.ref(grad), grad._version)
        is_sum = last is not None and grad is not None and last[0]() is grad and grad._version == last[1] + 1
        return self._in_closure or is_sum

    def leave_averaging(self, module: Any) -> None:
        """Internal: average no gradients any more, because this DistributedDataParallel does. Raises InputError for
        arguments that have no effect then, and for parameters outside of it."""
        if not self._averages:
            return
        if self.trains_in_rounds:
            raise InputError(
                f"{self.name}: DistributedDataParallel averages gradients in each step; in mode local, and in mode ps "
                "with every, pass the module inside of it, and do not train the DistributedDataParallel"
            )
        inside = {id(parameter) for parameter in module.parameters()}
        if outside := [name for name, each in self._adapter.named_parameters() if id(each) not in inside]:
            raise InputError(
                f"{self.name}: {outside[0]} is not a parameter of this DistributedDataParallel, which averages the "
                "gradients; give such parameters to another optimizer"
            )
        options = self._options
        given = {
            "op": options.op is not ReduceOp.AVERAGE, "accumulate": options.accumulate > 1,
            "process_set": options.process_set is not None, "scaler": options.scaler is not None,
            "compression": options.compression is not Compression.none,
        }  # fmt: skip
        if wrong := [name for name, is_given in given.items() if is_given]:
            raise InputError(
                f"{self.name}: {', '.join(wrong)} of allred.distributed has no effect on gradients that "
                "DistributedDataParallel averages; leave it out, or pass the module inside of it"
            )
        self._averages, self.checks_operations = False, True
        self._hooks.remove()

    def _count_step(self) -> None:
        """Count a step whose gradients DistributedDataParallel has averaged."""
        if (recovery := world.current().recovery) is not None:
            recovery.check_operations()
        samples = None
        with contextlib.suppress(InputError):  # DDP counts all ranks equally, so it is needed for messages only
            samples = claim_samples(self.samples)
        trained = self._trained().values()
        has_sparse = any(each.grad is not None and each.grad.is_sparse for each in trained)
        params, grads = ({}, {}) if has_sparse else self._adapter.step_input()
        tensors, leaves, values, problem, plain = self._matcher.match(params, grads)
        communicator = self._communicator()
        given = StepInput(communicator, params, grads, tensors, leaves, values, samples, problem, plain)
        self._next.is_reduced, self._next.is_skipped = True, not self._sync_mode().count_step(given)
        self._adapter.release_gradients()

    def _reduce_input(self, problem: str, samples: int | None, mode: SyncMode) -> None:
        """Reduce gradients that may differ from those of the last step in anything. problem: of the backward pass."""
        parameters = self._trained()
        layout, sparse = layout_of(parameters, self._has_overlap()), self._adapter.sparse
        if self._agreed_layout != layout:  # on all ranks
            sparse.agree_on_names(self._communicator(), parameters, self.name)
            if self._agreed_layout is not None:
                mode.forget_order()
            self._agreed_layout = layout
        has_sparse = sparse.names or any(each.grad is not None and each.grad.is_sparse for each in parameters.values())
        if has_sparse and self.trains_in_rounds:
            raise InputError(
                f"{self.name}: sparse gradients are not available in mode local, nor in mode ps with every; use "
                "sparse=False"
            )
        if has_sparse:
            problem = problem or sparse.refusal(parameters)
        if self._marks:
            problem = problem or mark_refusal(parameters, self._options.op)
            if marked(parameters, *BOTH_MARKS):  # on all ranks
                mode.forget_order()
        params, grads = ({}, {}) if problem else self._adapter.step_input()
        reduced = marked(parameters, MARK_REDUCED) if self._marks and not problem else []
        for name in reduced:  # such as by another optimizer
            del params[name], grads[name]
        self._step(params, grads, samples, problem)

    def _samples_of_step(self) -> int | None:
        samples, self.samples = self.samples, None
        if given := self._next.micro_samples:
            counts = [count for count in given if count is not None]
            samples = sum(counts) if len(counts) == len(given) else None
            self._next.micro_samples = []
        return samples

    def new_reducer(self) -> Reducer:
        return Reducer(self._options, self._options.title, self.reduction_agreement)

    def _is_in_mode_ps(self) -> bool:
        return context.is_active() and not isinstance(self._get_mode(), SyncMode)

    def _sync_mode(self) -> SyncMode:
        mode = self._get_mode()
        assert isinstance(mode, SyncMode)
        return mode

    # The step of torch.

    def step_torch_optimizer(self, closure: Callable[[], Any] | None = None) -> Any:
        """Internal: the method `step` of the torch optimizer."""
        if (recovery := world.current().recovery) is None:
            return self._step_torch_optimizer(closure)
        try:
            return self._step_torch_optimizer(closure)
        except RanksChanged:
            recovery.lose_step(self)
            self._discard_step()
            return None

    def _step_torch_optimizer(self, closure: Callable[[], Any] | None) -> Any:
        if self._is_in_mode_ps():
            return self._push(closure)
        if self._backward.has_failed:
            self._end_failed_pass()
        if closure is not None and self._adapter.calls_closure:
            return self._update(lambda: self._mean_loss(closure))
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.reduce_in_step()
        if self._next.is_skipped:
            self._end_step()
            if not self.interrupted:
                self._sync_mode().commit(used=False)
            return loss
        if self.reduction_agreement.differs:
            self._compare()
        self._clip()
        self._update()
        return loss

    def reduce_in_step(self) -> None:
        """Internal: reduce the gradients if the end of a backward pass has not done it. Collective."""
        is_reduced = self._next.is_reduced and not self._next.micro_samples and self._adapter.has_gradients
        if is_reduced and self._averages:
            return
        self.reduction_agreement.in_step = True
        try:
            self.reduce_all()
        finally:
            self.reduction_agreement.in_step = False

    def _compare(self) -> None:
        """Compare the gradients between the ranks, if they were not reduced in the same way on all."""
        with self._reset_step_on_error():
            self.reduction_agreement.compare(self._communicator(), self._adapter.reduced_gradients)

    def _end_step(self) -> None:
        self._next = NextStep()
        self.reduction_agreement.begin_step()

    def _update(self, *arguments: Any) -> Any:
        """Call the method `step` of torch."""
        mode = self._sync_mode()
        mode.update_interrupted = True  # until the end of the update
        self._in_closure = bool(arguments)
        try:
            with contextlib.nullcontext() if arguments else arena.paused():  # a closure allocates gradients
                result = self._adapter.update_parameters(*arguments)
        finally:
            self._in_closure = False
        mode.update_interrupted = False
        self._end_step()
        mode.commit(used=True)
        self._updates.known = self._adapter.global_step
        self.add_hooks()  # to parameters that the program has put into a group itself
        return result

    def _clip(self) -> None:
        """Clip the gradients to clip_norm, if they were reduced. Collective."""
        if self._clipper.limit is None or not self._next.is_reduced or self._next.is_skipped:
            return
        scale = getattr(self._adapter.optimizer, "grad_scale", None)  # of torch's GradScaler, if the update unscales
        gradients = list(self._adapter.reduced_gradients().values())
        self._clipper.clip_for_update(self._communicator(), gradients, 1.0 if scale is None else float(scale))
        self._adapter.release_gradients()

    def _mean_loss(self, closure: Callable[[], Any]) -> Any:
        """Call the closure; return the mean of its loss over the ranks, so that all ranks make the same decisions. The
        ranks are weighted as in the reduction of the gradients."""
        loss = closure()
        self.reduce_in_step()
        samples = self._sync_mode().samples
        if self.reduction_agreement.differs:
            self._compare()
        self._clip()
        if loss is None:
            return None
        value = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        title = f"{self.name}: loss of the closure"
        total = self._communicator().allgather_object((value, samples), title).wait()
        counts = [1 if count is None else count for _, count in total]
        used = [value * count for (value, _), count in zip(total, counts, strict=True) if count]  # 0 rows: NaN
        mean = sum(used) / sum(counts)
        return torch.tensor(mean, dtype=loss.dtype, device=loss.device) if isinstance(loss, torch.Tensor) else mean

    def _push(self, closure: Callable[[], Any] | None) -> Any:
        """Mode ps: push the gradients and pull the parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for _, parameter in self._adapter.named_parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = copy_like(parameter, parameter.grad.to_dense())
        if not self._adapter.unscale_gradients():
            return loss
        self._adapter.check_pulled(self._options.title)
        grads = {name: self._adapter.gradient(name, parameter) for name, parameter in self._adapter.named_parameters()}
        self._step(self._adapter.views(), grads, self._samples_of_step())
        self._adapter.record_pull()
        self._adapter.release_gradients()
        return loss

    def step(self, *arguments: Any, **options: Any) -> None:
        """Not available: call `opt.step()` of the torch optimizer."""
        raise InputError(f"{self.name}.allred.step() is not available for torch; call opt.step()")

    @property
    def accumulates(self) -> bool:
        """Whether gradients of an incomplete step are accumulated."""
        return bool(self._next.micro_samples)

    def forget_gradients(self) -> None:
        """Internal: drop accumulated gradients; they belong to the parameters before the restore."""
        if self._next.micro_samples:
            self._next, self.samples = NextStep(), None
            for _, parameter in self._adapter.named_parameters():
                parameter.grad = None

    # Recovery (membership/recovery.py).

    @property
    def counters(self) -> tuple[int, ...]:
        """Internal: the numbers of steps and updates, which are equal on all ranks."""
        return self._adapter.global_step, *self._sync_mode().counters

    @counters.setter
    def counters(self, given: tuple[int, ...]) -> None:
        self._adapter.global_step, *counters = given
        self._sync_mode().counters = tuple(counters)
        self._updates.known = self._adapter.global_step

    def refusal(self) -> str:
        found = ["accumulate"] * (self._gradients_of_step > 1) + [
            "an optimizer with a closure"
        ] * self._adapter.calls_closure
        if self._adapter.has_parts:
            found.append("parameters that FSDP splits over the ranks (a death loses a part of them)")
        if self._averages and elastic_group.has_ddp(each for _, each in self._adapter.named_parameters()):
            found.append("a model in DistributedDataParallel without that (pass this DDP itself to broadcast or track)")
        return ", ".join([*found, *filter(None, [super().refusal()])])

    def keep_settings(self) -> None:
        groups = self._adapter.optimizer.param_groups
        self._kept = [{name: value for name, value in group.items() if name != "params"} for group in groups]

    def begin_world(self) -> None:
        for group, kept in zip(self._adapter.optimizer.param_groups, self._kept, strict=False):
            group.update(kept)
        self._kept = []
        self._backward, self._overlaps = BackwardPass(), None
        self._end_step()
        self._agreed_layout = None
        super().begin_world()

    def _begin_with(self, params: Any, root: int, values: bool) -> None:
        self._agreed_layout = None  # a rank that had joined may not have taken part in the agreement
        self.reduction_agreement.begin_step(number=1)
        super()._begin_with(params, root, values)
