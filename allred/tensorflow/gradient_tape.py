"""`DistributedGradientTape`: a tape whose gradients are reduced over the ranks."""

from typing import Any

import tensorflow as tf

from allred.horovod.operators import Average
from allred.horovod.process_sets import ProcessSet, global_process_set
from allred.tensorflow.tensor_compression import TensorCompression as Compression
from allred.tensorflow.tensor_reduction import TensorReduction, check_groups, layers_of, reference_of


class ReducedGradientTape(tf.GradientTape):
    """The methods of a distributed tape. `DistributedGradientTape` gives a tape this class."""

    reduction: TensorReduction

    @property
    def process_set(self) -> ProcessSet:
        return self.reduction.process_set

    def register_local_source(self, source: Any) -> None:
        """Do not reduce the gradients of this variable. They are divided by the number of ranks, unless
        scale_local_gradients=False."""
        self.reduction.local.add(reference_of(source))

    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False, **options: Any
    ) -> Any:
        """As `tf.GradientTape.gradient`, reduced over the ranks. Collective. use_generic_names: without effect."""
        found = super().gradient(target, sources, output_gradients, **options)
        reduced = self.reduction.reduce(tf.nest.flatten(found), tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(sources, reduced)

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return (source, gradient) of local sources, and of those that are reduced."""
        pairs = list(zip(sources, self.gradient(target, sources, output_gradients), strict=True))
        local = [pair for pair in pairs if reference_of(pair[0]) in self.reduction.local]
        return local, [pair for pair in pairs if reference_of(pair[0]) not in self.reduction.local]


def DistributedGradientTape(  # noqa: N802  (Horovod's name)
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a tape, the one that is given, whose `gradient` reduces the gradients over all ranks, as one operation.

    sparse_as_dense: whether tf.IndexedSlices are reduced as dense tensors; else the rows of all ranks are gathered.
    gradient_predivide_factor: with Average, gradients are divided by it before the sum, and multiplied after it.
    device_dense, device_sparse, num_groups, groups: without effect; all gradients are one group.

    Raises ValueError for an argument that cannot be used. `gradient` raises errors as `allreduce`.

    Example: `tape = hvd.DistributedGradientTape(tape)`, then `tape.gradient(loss, model.trainable_variables)`.
    """
    check_groups(num_groups, groups)
    kind = type(gradtape)
    gradtape.__class__ = type(kind.__name__, (ReducedGradientTape, kind), {})
    gradtape.reduction = TensorReduction(
        "DistributedGradientTape", compression, sparse_as_dense, op, gradient_predivide_factor, process_set,
        scale_local_gradients, for_tape=True,
    )  # fmt: skip
    return gradtape


def PartialDistributedGradientTape(  # noqa: N802  (Horovod's name)
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """As `DistributedGradientTape`, without the gradients of `local_layers`, a layer of Keras or a list of layers.

    Example: `tape = hvd.PartialDistributedGradientTape(tape, local_layers=model.layers[:1])`.
    """
    layers = layers_of(local_layers)
    tape = DistributedGradientTape(
        gradtape, device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor, num_groups,
        groups, process_set, scale_local_gradients,
    )  # fmt: skip
    for layer in layers:
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape
