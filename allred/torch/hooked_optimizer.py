"""Hooks that make a torch optimizer distributed: `allred.distributed(torch_optimizer)` returns the same object.

Mode sync: at the end of each backward pass the gradients of all ranks are averaged, before `loss.backward()` returns.
Everything after it (GradScaler, clipping, loggers, LBFGS) sees the averages, and `step` is that of torch.

    at a gradient   (hook of the parameter) ask for a call at the end of the backward pass; if a core is free, send the
                    buckets that are complete (modes/overlap.py)
    at the end      a step of mode sync (modes/sync.py): negotiate, check, reduce, clip, assign to `.grad`
    in opt.step()   torch's own update

Mode ps: `step` sends the gradients to the parameter servers, which run their copies of the torch optimizer.
"""

import itertools
import os
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from allred import log, world
from allred.cluster import processors
from allred.comm import functions
from allred.comm.ops import ReduceOp
from allred.data.loader import claim_samples
from allred.errors import CheckpointError, InputError
from allred.modes.match import Accumulator
from allred.modes.optimizer import DistributedOptimizer
from allred.modes.options import StepOptions
from allred.modes.sync import SyncMode
from allred.ps import context
from allred.session import state_pickle
from allred.torch.backward_end import call_at_end
from allred.torch.torch_optimizer import OtherTensors, TorchOptimizer, host_view

_numbers = itertools.count()
_graph_task = torch._C._current_graph_task_id
_hooked: "weakref.WeakSet[HookedOptimizer]" = weakref.WeakSet()  # those with hooks, in mode sync


def attach(optimizer: torch.optim.Optimizer, options: StepOptions) -> torch.optim.Optimizer:
    """Make a torch optimizer distributed, and return it. Raises TypeError if it is distributed already."""
    if isinstance(getattr(optimizer, "allred", None), HookedOptimizer):
        raise TypeError("this optimizer is distributed already; wrapping it twice would average twice")
    optimizer.allred = HookedOptimizer(optimizer, options)
    return optimizer


class HookedOptimizer(DistributedOptimizer):
    """The distributed part of a torch optimizer, its attribute `allred`.

    The methods are those of `DistributedOptimizer`; where these take a nest of parameters, None stands for the
    parameters of the optimizer, and a torch module for its parameters and buffers.

    samples: set it before `backward()` if the ranks have different numbers of samples and the data is not from
        allred.data: `opt.allred.samples = len(x)`. It counts for one backward pass.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, options: StepOptions) -> None:
        self.number = next(_numbers)
        self.samples: int | None = None
        self._made_in_mode_ps = context.is_active()
        self._torch = TorchOptimizer(optimizer)
        self._gradients_of_step = options.accumulate
        super().__init__(self._torch, **vars(options))  # a parameter server does not return
        self._accumulator = Accumulator(1)  # torch adds up the gradients of micro-steps
        self._micro_samples: list[int | None] = []  # of the backward passes since the last reduction
        self._is_reduced = False  # whether the gradients were reduced since the last step
        self._is_skipped = False  # whether that reduction has skipped the step
        self._reduced: dict[str, Any] = {}  # op=Sum: weak references to the gradients that were reduced
        self._known: tuple[str, ...] = ()  # names of the parameters when sparse gradients were agreed on
        self._hooks: dict[
            int, tuple[torch.Tensor, Any]
        ] = {}  # by id of the parameter, which the reference keeps unique
        self._graph_task = -1  # the run of the autograd engine that called a hook last
        self._overlaps: bool | None = None  # the decision; None: not made yet
        self._sends_early = False  # whether the current backward pass sends gradients before its end
        self._replace_methods(optimizer)
        self._add_hooks()
        _hooked.add(self)

    def _replace_methods(self, optimizer: Any) -> None:
        """Replace `step` and `add_param_group` of this optimizer object."""
        update, add_group = optimizer.step, optimizer.add_param_group

        def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
            self._opt_called = True  # for torch's learning rate schedulers
            return self.allred.torch_step(closure)

        def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
            self.allred.check_new_group()
            add_group(param_group)
            self.allred.add_hooks()

        if hasattr(update, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = types.MethodType(step, optimizer)
        optimizer.add_param_group = types.MethodType(add_param_group, optimizer)

    # Hooks.

    def add_hooks(self) -> None:
        """Internal: attach hooks to parameters that have none."""
        self._add_hooks()

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

    def _add_hooks(self) -> None:
        reference = weakref.ref(self)
        for name, parameter in self._torch.named():
            if id(parameter) not in self._hooks and parameter.requires_grad:

                def hook(parameter: torch.Tensor, name: str = name) -> None:
                    if (owner := reference()) is not None:
                        owner.on_gradient(name, parameter)

                self._hooks[id(parameter)] = parameter, parameter.register_post_accumulate_grad_hook(hook)

    def on_gradient(self, name: str, parameter: Any) -> None:
        """Internal: a gradient of the current backward pass is complete."""
        if (task := _graph_task()) != self._graph_task:
            self._graph_task = task
            if context.is_active():
                if self._gradients_of_step > 1:
                    call_at_end(self)
            elif call_at_end(self):
                self._sends_early = self._may_send_early()
        if self._sends_early and name not in self._torch.sparse.names and not parameter.grad.is_sparse:
            super().reduce(name, self._torch.gradient(name, parameter), self.samples)

    def _may_send_early(self) -> bool:
        """Whether the current backward pass sends gradients before its end. The order of buckets is that of one
        optimizer with unchanged parameters."""
        if self._overlaps is None:
            self._overlaps = self.decide_overlap()
        if not self._overlaps or self._gradients_of_step > 1 or len(_hooked) > 1:
            return False
        return self._known in ((), tuple(self._trained()))

    def _trained(self) -> dict[str, Any]:
        """Return the parameters that require a gradient, by name."""
        return {name: parameter for name, parameter in self._torch.named() if parameter.requires_grad}

    def decide_overlap(self) -> bool:
        """Internal: whether the setting allows gradients to be sent during the backward pass."""
        setting, threads, cores = world.config().overlap, torch.get_num_threads(), processors.cores_per_rank()
        on_gpu = any(parameter.is_cuda for _, parameter in self._torch.named())
        auto = on_gpu or cores > threads
        reason = f"this rank has {cores} core(s) and {threads} thread(s) of torch"
        reason = "the model is on a GPU" if on_gpu else reason
        overlaps = setting == "always" or (setting == "auto" and auto)
        reason = reason if setting == "auto" else f"ALLRED_OVERLAP={setting}"
        if functions.current(self.process_set).size == 1:
            return False
        when = "during the backward pass" if overlaps else "in one group at the end of the backward pass"
        log.info(f"{self.name}: gradients are sent {when}, because {reason}")
        return overlaps

    def send_early(self, early: bool) -> None:
        """Internal, for measurements: set whether the next steps send gradients during the backward pass. Called on all
        ranks, between steps."""
        self._overlaps = early
        if not early:
            self._sync_mode().forget_order()

    def end_of_backward(self) -> None:
        """Internal: reduce the gradients, or count a micro-step. Collective in mode sync; in mode ps `step` pushes."""
        if self._gradients_of_step > 1:
            self._micro_samples.append(claim_samples(self.samples))
            self.samples = None
            if len(self._micro_samples) < self._gradients_of_step or context.is_active():
                return
        self._reduce_all()

    def _reduce_all(self) -> None:
        """Replace the gradients by their mean over the ranks. Collective."""
        mode, parameters = self._sync_mode(), self._trained()
        self._overlaps = self.decide_overlap() if self._overlaps is None else self._overlaps
        with functions.within(self.process_set):
            if self._known != tuple(parameters):  # on all ranks
                self._torch.sparse.agree(parameters, self.name)
                if self._known:
                    mode.forget_order()
                self._known = tuple(parameters)
            problem = self._torch.sparse.problem(parameters) or self._problem_of_sum(parameters)
        samples = self._samples_of_step()
        before = self.skipped
        self._step(*(({}, {}) if problem else self._torch.step_input()), samples, problem)
        self._is_reduced, self._is_skipped = True, self.skipped > before
        if self._options.op is ReduceOp.SUM:
            self._reduced = {n: weakref.ref(p.grad) for n, p in parameters.items() if p.grad is not None}
        self._torch.release_gradients()

    def _samples_of_step(self) -> int | None:
        samples, self.samples = self.samples, None
        if self._micro_samples:
            counts = [count for count in self._micro_samples if count is not None]
            samples = sum(counts) if len(counts) == len(self._micro_samples) else None
            self._micro_samples = []
        return samples

    def _problem_of_sum(self, parameters: dict[str, torch.Tensor]) -> str:
        """Return why gradients cannot be summed again; a mean of means is the mean, but sums would be summed twice."""
        for name, reference in self._reduced.items() if self._is_reduced else ():
            if name in parameters and parameters[name].grad is not None and reference() is parameters[name].grad:
                return (
                    f"op=allred.Sum: '{name}' has a sum over the ranks already, and a second backward() would add it "
                    "again on each rank; pass accumulate=2 to allred.distributed, or call opt.step() or "
                    "opt.zero_grad() in between"
                )
        return ""

    def _sync_mode(self) -> SyncMode:
        mode = self._get_mode()
        assert isinstance(mode, SyncMode)
        return mode

    # The step of torch.

    def torch_step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Internal: the method `step` of the torch optimizer."""
        if context.is_active():
            return self._push(closure)
        loss, arguments = None, list[Any]()
        if closure is not None and isinstance(self._torch.optimizer, torch.optim.LBFGS):  # it calls closure repeatedly
            arguments = [lambda: self._mean_loss(closure)]
        elif closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not arguments and (not self._is_reduced or self._micro_samples):
            self._reduce_all()
        is_skipped, self._is_reduced, self._is_skipped = self._is_skipped, False, False
        if is_skipped and not arguments:  # the closures of LBFGS reduce their own gradients
            return loss
        with self._sync_mode().updating():
            result = self._torch.update_parameters(*arguments)
        self._updates.known = self._torch.global_step
        self._add_hooks()  # to parameters that require a gradient now
        return result if arguments else loss

    def _mean_loss(self, closure: Callable[[], Any]) -> Any:
        """Call the closure; return the mean of its loss over the ranks, so that all ranks make the same decisions."""
        samples, loss = self.samples, closure()
        value = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        with functions.within(self.process_set):
            total = functions.allgather_object((value, samples), f"{self.name}: loss of the closure")
        counts = [1 if count is None else count for _, count in total]
        mean = sum(value * count for (value, _), count in zip(total, counts, strict=True)) / sum(counts)
        return torch.tensor(mean, dtype=loss.dtype, device=loss.device) if isinstance(loss, torch.Tensor) else mean

    def _push(self, closure: Callable[[], Any] | None) -> Any:
        """Mode ps: push the gradients and pull the parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for _, parameter in self._torch.named():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        grads = {name: self._torch.gradient(name, parameter) for name, parameter in self._torch.named()}
        self._step(self._torch.views(), grads, self._samples_of_step())
        self._torch.release_gradients()
        return loss

    def step(self, *arguments: Any, **options: Any) -> None:
        """Not available: call `opt.step()` of the torch optimizer."""
        raise InputError(f"{self.name}.allred.step(): call step() of the torch optimizer itself")

    # Parameters and state.

    @property
    def accumulates(self) -> bool:
        """Whether the backward passes of a step are incomplete."""
        return bool(self._micro_samples)

    def nest_of(self, params: Any) -> Any:
        """Return parameters as a nest of arrays that share their memory. None: the parameters of this optimizer. A
        torch module: these, and in mode sync the buffers and other parameters of the module."""
        if params is None:
            return self._torch.views()
        if isinstance(params, torch.nn.Module):
            return self._torch.views() | ({} if context.is_active() else self._others_of(params))
        return params

    def _others_of(self, module: torch.nn.Module) -> dict[str, Any]:
        """Return arrays over the tensors of a module that this optimizer does not train, named "module.<name>"."""
        own = {id(parameter) for _, parameter in self._torch.named()}
        return {f"module.{name}": host_view(value) for name, value in OtherTensors(module, own).state_dict().items()}

    def session_parts(self, params: Any) -> tuple[Any, dict[str, Any]]:
        """Internal: see `DistributedOptimizer`."""
        if not isinstance(params, torch.nn.Module):
            return self.nest_of(params), {}
        others = OtherTensors(params, {id(parameter) for _, parameter in self._torch.named()})
        return self.nest_of(None), {"module": others} if others.state_dict() else {}

    def save(self, directory: str | os.PathLike[str], params: Any = None) -> str | None:
        """As `DistributedOptimizer.save`. params: None, or a module, whose buffers are saved too."""
        nest, others = self.session_parts(params)
        if functions.current(self.process_set).rank != 0:
            return None
        extra = {f"'{name}'": [state_pickle.dumps(each.state_dict())] for name, each in others.items()}
        return self.saving(nest, extra or None)(os.fspath(directory))

    def restore(self, directory: str | os.PathLike[str], params: Any = None) -> int | None:
        """As `DistributedOptimizer.restore`. params: None, or a module, whose buffers are restored too. Raises
        CheckpointError if the checkpoint has no buffers of the module."""
        nest, others = self.session_parts(params)
        step, extra = self.restore_all(directory, nest)
        if step is None:
            self.broadcast_others(params)
            return None
        for name, each in others.items():
            pickled = (extra or {}).get(f"'{name}'", [None])[0]
            if pickled is None:
                raise CheckpointError(
                    f"{os.fspath(directory)}, step {step} has no buffers of the module, because it was saved without "
                    "the module; call restore(directory) without the module, and broadcast(module)"
                )
            each.load_state_dict(state_pickle.loads(pickled))
        return step

    def broadcast(self, params: Any = None, root: int | None = None) -> None:
        """As `DistributedOptimizer.broadcast`. params: None, or a module, whose buffers are copied too."""
        if context.is_active():
            self.broadcast_others(params, root)
        self._known = ()  # a rank that had joined may not have taken part in the agreement
        super().broadcast(self.nest_of(params), root)

    def broadcast_others(self, params: Any, root: int | None = None) -> None:
        if isinstance(params, torch.nn.Module):
            for name, array in self._others_of(params).items():
                functions.broadcast_(array, 0 if root is None else root, name)

    def pull(self, params: Any = None) -> None:
        """As `DistributedOptimizer.pull`. params: None or a module, for the parameters of this optimizer. Mode ps:
        raises InputError for other parameters."""
        super().pull(self.nest_of(params) if context.is_active() else None)
