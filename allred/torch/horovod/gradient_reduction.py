"""How `DistributedOptimizer` reduces gradients (`GradientReduction`).

`CompressedReducer` is for compressors of the program and gradient_predivide_factor. All else of a step of mode sync,
such as its checks, is the same.
"""

import dataclasses
from typing import Any, ClassVar

import torch

from allred.comm import ops
from allred.comm.communicator import Communicator
from allred.comm.device_reduce import PreparedReduction
from allred.comm.ops import ReduceOp
from allred.comm.work import Work
from allred.fusion import Plan
from allred.modes.options import StepOptions
from allred.modes.reducer import Reducer, tensor_of
from allred.torch.horovod.compression import Compression
from allred.torch.horovod.operations import view
from allred.torch.horovod.process_sets import ProcessSet
from allred.torch.tensors import as_tensor

_FUSED_COMPRESSION = {Compression.none: ops.Compression.none, Compression.fp16: ops.Compression.fp16}


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
        return _FUSED_COMPRESSION[self.compression] if self.is_fused else ops.Compression.none


class CompressedReducer(Reducer):
    """Compresses gradients by a compressor of the program, reduces the results, and decompresses them."""

    def __init__(self, reduction: GradientReduction, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._reduction = reduction

    def checks_finite(self, communicator: Communicator) -> bool:
        return False

    checks_finite_on_gpu = checks_finite

    def expect_steady(self, *arguments: Any) -> None:
        """A step allreduce would not compress."""

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
