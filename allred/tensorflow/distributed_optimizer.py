"""`DistributedOptimizer` of horovod.tensorflow: for optimizers of TensorFlow 1, and for those of Keras."""

import importlib
from typing import Any

import tensorflow as tf

from allred.horovod.operators import Average
from allred.horovod.process_sets import ProcessSet, global_process_set
from allred.tensorflow.session_optimizer import SessionOptimizer
from allred.tensorflow.tensor_compression import TensorCompression as Compression
from allred.tensorflow.tensor_reduction import TensorReduction, check_groups


def DistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return an optimizer that reduces gradients over all ranks before it applies them.

    optimizer: a `tf.compat.v1.train.Optimizer`, which is wrapped; or an optimizer of Keras, which is returned itself
        (as `horovod.tensorflow.keras.DistributedOptimizer`).
    backward_passes_per_step: the number of steps whose gradients are added up, or averaged with
        average_aggregated_gradients, before they are reduced.
    use_locking: passed to the optimizer of TensorFlow 1. Other arguments: see `DistributedGradientTape`.

    Raises ValueError for an argument that cannot be used; NotImplementedError for hvd.Adasum.

    Example: `hvd.DistributedOptimizer(tf.compat.v1.train.AdamOptimizer(0.001 * hvd.size()))`.
    """
    check_groups(num_groups, groups)
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        keras = importlib.import_module("allred.keras.horovod_keras_optimizer")  # it imports Keras
        return keras.horovod_keras_optimizer(
            optimizer, name, compression, sparse_as_dense, op, gradient_predivide_factor, backward_passes_per_step,
            average_aggregated_gradients, process_set, scale_local_gradients,
        )  # fmt: skip
    reduction = TensorReduction(
        name or f"Distributed{type(optimizer).__name__}", compression, sparse_as_dense, op, gradient_predivide_factor,
        process_set, scale_local_gradients,
    )  # fmt: skip
    return SessionOptimizer(optimizer, reduction, use_locking, backward_passes_per_step, average_aggregated_gradients)
