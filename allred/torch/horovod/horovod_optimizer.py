"""`DistributedOptimizer`: a torch optimizer that averages gradients, with Horovod's arguments and methods.

It is a hooked optimizer (allred/torch/hooked_optimizer.py): the gradients are averaged at the end of each backward
pass, so `synchronize` has nothing to wait for. `CompressedReducer` is for compressors of the program and
gradient_predivide_factor. All else of a step of mode sync, such as its checks, is the same.
"""

import contextlib
import dataclasses
import numbers
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch

from allred import world
from allred.comm import functions, ops
from allred.comm.communicator import Communicator
from allred.comm.device_reduce import PreparedReduction
from allred.comm.ops import ReduceOp
from allred.comm.work import Work
from allred.errors import InputError
from allred.fusion import Plan
from allred.horovod.basics import check_mode_sync, size
from allred.horovod.horovod_errors import as_horovod_error
from allred.horovod.operators import Average, Sum, operator
from allred.horovod.process_sets import ProcessSet, check_initialized, global_process_set, rank_set
from allred.modes.options import StepOptions
from allred.modes.reducer import Reducer, tensor_of
from allred.torch.backward_state import NextStep
from allred.torch.hooked_optimizer import HookedOptimizer
from allred.torch.horovod.operations import Compression, check_compression, view
from allred.torch.replaced_methods import NO_COPY
from allred.torch.tensors import as_tensor, copy_like

_FUSED_COMPRESSION = {
    Compression.none: ops.Compression.none, Compression.fp16: ops.Compression.fp16,
    Compression.int8: ops.Compression.int8, Compression.int4: ops.Compression.int4,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class HorovodOptions(StepOptions):
    """Options of a step, with each operator of Horovod."""

    ops: ClassVar[tuple[ReduceOp, ...]] = tuple(ReduceOp)


@dataclasses.dataclass(frozen=True)
class GradientReduction:
    """The arguments of `DistributedOptimizer` that say how gradients are reduced."""

    compression: Any
    op: ReduceOp
    predivide_factor: float
    sparse_as_dense: bool
    process_set: ProcessSet

    @property
    def is_fused(self) -> bool:
        """Whether the reducer of allred can do it."""
        return self.predivide_factor == 1.0 and self.compression in _FUSED_COMPRESSION

    @property
    def fused_compression(self) -> ops.Compression:
        if self.is_fused:
            return _FUSED_COMPRESSION[self.compression]
        return getattr(self.compression, "encoding", ops.Compression.none)


class CompressedReducer(Reducer):
    """Compresses gradients by a compressor of the program, reduces the results, and decompresses them."""

    def __init__(self, reduction: GradientReduction, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._reduction = reduction

    def checks_finite(self, communicator: Communicator) -> bool:
        return False

    checks_finite_on_gpu = checks_finite

    def new_steady(self, *arguments: Any) -> None:
        """Return None: a step allreduce would not compress."""

    def start_negotiation(
        self, communicator: Communicator, title: str, lines: Any, settings: str, *arguments: Any
    ) -> Work[Any]:
        kind, factor = self._reduction.compression, self._reduction.predivide_factor
        name = getattr(kind, "__name__", type(kind).__name__)
        settings = f"{settings} compressor={name} gradient_predivide_factor={factor}"
        return super().start_negotiation(communicator, title, lines, settings, *arguments)

    def prepare(self, *arguments: Any) -> PreparedReduction | None:
        return None

    def allreduce_(
        self, communicator: Communicator, plan: Plan, values: list[Any], weight: float | None, *checks: Any
    ) -> int | None:
        compression, factor = self._reduction.compression, self._reduction.predivide_factor
        given = [(tensor.name, value) for tensor, value in zip(plan.tensors, values, strict=True) if value is not None]
        gradients = [value if isinstance(value, torch.Tensor) else as_tensor(value) for _, value in given]
        compressed, kept = [], []
        for gradient in gradients:
            made, context = compression.compress(gradient)
            compressed.append(made.mul_(1.0 / factor) if factor != 1.0 else made)
            kept.append(context)
        arrays = [view(each) for each in compressed]
        tensors = [tensor_of(name, array) for (name, _), array in zip(given, arrays, strict=True)]
        super().allreduce_(communicator, self.plan(tensors), arrays, weight)
        for gradient, made, context in zip(gradients, compressed, kept, strict=True):
            gradient.copy_(compression.decompress(made.mul_(factor) if factor != 1.0 else made, context))
        return None


class HorovodStep(HookedOptimizer):
    """The distributed part of a torch optimizer, with Horovod's rules for `synchronize` and `step`."""

    _make_options = HorovodOptions

    def __init__(
        self, optimizer: torch.optim.Optimizer, reduction: GradientReduction, passes: int, names: dict[int, str]
    ) -> None:
        self._reduction = reduction
        self._sparse_dims: dict[str, int] = {}  # by name: of sparse gradients that are reduced as dense ones
        self.is_synchronized = False  # by `synchronize`, since the last step
        self.should_synchronize = True  # in `step`
        options = HorovodOptions(
            op=reduction.op,
            accumulate=passes,
            nonfinite="ignore",
            process_set=rank_set(reduction.process_set),
            compression=reduction.fused_compression,
        )
        super().__init__(optimizer, options, names)

    def new_reducer(self) -> Reducer:
        if self._reduction.is_fused:
            return super().new_reducer()
        return CompressedReducer(self._reduction, self._options, self._options.title, self.reduction_agreement)

    @property
    def passes(self) -> int:
        """Backward passes per step."""
        return self._gradients_of_step

    @passes.setter
    def passes(self, passes: int) -> None:
        self._gradients_of_step = passes

    def decide_overlap(self) -> bool:
        return self._reduction.is_fused and super().decide_overlap()

    @contextlib.contextmanager
    def _reset_step_on_error(self) -> Iterator[None]:
        with as_horovod_error(), super()._reset_step_on_error():
            yield

    def reduce_all(self) -> None:
        with as_horovod_error():
            if self._reduction.sparse_as_dense:
                self._make_dense()
            if self._reduction.op not in (Average, Sum):
                self._backward.problem = self._backward.problem or self._operator_problem()
            super().reduce_all()
            self._average_over_joined()
            self._make_sparse_again()

    def _make_dense(self) -> None:
        """Make sparse gradients dense, and note their parameters."""
        for name, parameter in self._trained().items():
            if parameter.grad is not None and parameter.grad.is_sparse:
                self._sparse_dims[name] = parameter.grad.sparse_dim()
                parameter.grad = copy_like(parameter, parameter.grad.to_dense())

    def _make_sparse_again(self) -> None:
        """Undo `_make_dense`, also in steps in which this rank lacks such a gradient: torch cannot add a dense gradient
        to a sparse momentum."""
        if self._sparse_dims:
            for name, parameter in self._trained().items():
                if name in self._sparse_dims and parameter.grad is not None and not parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_sparse(self._sparse_dims[name])

    def _operator_problem(self) -> str:
        """Return why op=hvd.Min, Max or Product cannot reduce the gradients, or ""."""
        for name, parameter in self._trained().items():
            kind = (
                "complex" if parameter.is_complex() else "sparse" if getattr(parameter.grad, "is_sparse", False) else ""
            )
            if kind:
                return f"op=hvd.{self._reduction.op.value}: '{name}' is {kind}; use op=hvd.Average or hvd.Sum"
        return ""

    def _average_over_joined(self) -> None:
        """Divide by the number of all ranks if some have joined, as Horovod does."""
        communicator = functions.current(self.process_set)
        active = communicator.active.size
        if self._reduction.op is Average and active < communicator.size:
            for parameter in self._trained().values():
                if parameter.grad is not None:
                    parameter.grad.mul_(active).div_(communicator.size)

    def synchronize(self) -> None:
        """Reduce the gradients if no backward pass has done it. A gradient that all ranks lack becomes zeros."""
        super().reduce_in_step()
        sparse = self._adapter.sparse
        for name, parameter in self._trained().items():
            if parameter.grad is None:
                parameter.grad = sparse.zeros(parameter) if name in sparse.names else torch.zeros_like(parameter)
        self._make_sparse_again()
        self.is_synchronized = True

    def reduce_in_step(self) -> None:
        if self.should_synchronize:
            super().reduce_in_step()

    def forget_gradients(self) -> None:
        """Discard the gradients of an unfinished step. `load_state_dict` calls it."""
        super().forget_gradients()
        self._next = NextStep()
        self.is_synchronized, self.should_synchronize = False, True

    def step_torch_optimizer(self, closure: Any = None) -> Any:
        if self.should_synchronize and closure is None:
            if self.is_synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(); put step() into `with optimizer.skip_synchronize():`",
                    stacklevel=4,
                )
            self.synchronize()
        self.is_synchronized = False
        return super().step_torch_optimizer(closure)


class _HorovodMethods:
    """The methods that `DistributedOptimizer` adds to a torch optimizer. `allred` is None if nothing is reduced: on
    ranks outside of the process set, and if there is one rank."""

    allred: HorovodStep | None

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(NO_COPY)

    def synchronize(self) -> None:
        """Wait until the gradients are reduced. They are after `backward()`; if a rank made no backward pass, this call
        reduces them. Collective.

        Example: `optimizer.synchronize()`, clip the gradients, then `with optimizer.skip_synchronize():
        optimizer.step()`.
        """
        if self.allred is not None:
            self.allred.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside of this context `step` does not reduce gradients.

        Example: `with optimizer.skip_synchronize(): optimizer.step()`, after `optimizer.synchronize()`.
        """
        if self.allred is None:
            yield
            return
        self.allred.should_synchronize = False
        try:
            yield
        finally:
            self.allred.should_synchronize = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes per step, from the next step on.

        Example: `optimizer.set_backward_passes_per_step(4)`.
        """
        self.backward_passes_per_step = _passes(passes)
        if self.allred is not None:
            self.allred.passes = passes


def DistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Make a torch optimizer average gradients over the ranks. Returns the same object, whose class gets the methods
    synchronize, skip_synchronize and set_backward_passes_per_step.

    named_parameters: names and parameters, for messages; default: the names of the optimizer, else "0.3" for parameter
        3 of group 0.
    compression: hvd.Compression.none, .fp16, .int8 or .int4, or a class with static methods `compress` and
        `decompress`.
    backward_passes_per_step: the gradients of this number of backward passes are added, and reduced once.
    op: hvd.Average, Sum, Min, Max or Product.
    gradient_predivide_factor: with hvd.Average: gradients are divided by it before the sum, and multiplied after it.
    num_groups, groups: checked, without effect: all gradients are reduced together.
    sparse_as_dense: sparse gradients are reduced as dense ones.
    process_set: the ranks that train together.

    Raises ValueError if an argument cannot be used; NotImplementedError for hvd.Adasum; TypeError if the optimizer is
    distributed already.

    Example: `optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())`.
    """
    check_initialized("DistributedOptimizer()")
    check_mode_sync()
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"DistributedOptimizer({type(optimizer).__name__}): expected an optimizer of torch")
    op = operator(op)
    check_compression(compression)
    _check_predivide_factor(gradient_predivide_factor, op)
    if num_groups:
        warnings.warn("num_groups is deprecated; pass groups", DeprecationWarning, stacklevel=2)
    _check_groups(groups if groups is not None or not num_groups else num_groups)
    passes, names = _passes(backward_passes_per_step), _names(optimizer, named_parameters)
    if isinstance(getattr(optimizer, "allred", None), HookedOptimizer) or isinstance(optimizer, _HorovodMethods):
        raise TypeError("this optimizer is distributed already; wrapping it twice would average twice")
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (_HorovodMethods, kind), {"__doc__": kind.__doc__})
    optimizer.backward_passes_per_step, optimizer.allred = passes, None
    if process_set.included() and (size() > 1 or world.current().recovery is not None):
        reduction = GradientReduction(compression, op, gradient_predivide_factor, sparse_as_dense, process_set)
        optimizer.allred = HorovodStep(optimizer, reduction, passes, names)
    return optimizer


def _passes(count: int) -> int:
    if not isinstance(count, int) or count < 1:
        raise InputError(f"backward_passes_per_step={count!r} must be a whole number of at least 1")
    return count


def _check_predivide_factor(factor: Any, op: Any) -> None:
    if not (isinstance(factor, numbers.Real) and float(factor) > 0):
        raise InputError(f"gradient_predivide_factor={factor!r} must be a positive number")
    if factor != 1.0 and op is not Average:
        raise InputError(f"gradient_predivide_factor={factor} needs op=hvd.Average, got op=hvd.{op.value}")


def _check_groups(groups: Any) -> None:
    if groups is None or (isinstance(groups, int) and groups > 0):
        return
    if not isinstance(groups, list):
        raise InputError(f"groups={groups!r}: expected a number of at least 1, or a list of lists of tensors")
    tensors = [tensor for group in groups for tensor in group]
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        raise InputError(f"groups={groups!r}: expected lists of tensors")
    if len({id(tensor) for tensor in tensors}) < len(tensors):
        raise InputError("groups: a parameter is in two groups")


def _names(optimizer: torch.optim.Optimizer, named_parameters: Any) -> dict[int, str]:
    """Return the names by the id of the parameter. Raises ValueError if they do not fit the optimizer."""
    if named_parameters is None:
        return {}
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise InputError("named_parameters must be pairs (name, parameter), such as model.named_parameters()")
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise InputError(f"named_parameters: names must be unique, but these are not: {', '.join(twice)}")
    found = {id(parameter): name for name, parameter in pairs}
    missing = sum(id(each) not in found for group in optimizer.param_groups for each in group["params"])
    if missing:
        raise InputError(f"named_parameters: {missing} parameters of the optimizer have no name; pass all of the model")
    return found
