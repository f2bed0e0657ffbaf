"""The names of horovod.keras and horovod.tensorflow.keras. Programs for allred use `allred.keras`."""

from typing import Any

import tensorflow as tf

from allred import tensorflow as hvd
from allred.horovod.operators import Average
from allred.horovod.process_sets import ProcessSet, global_process_set
from allred.keras.horovod_keras_optimizer import horovod_keras_optimizer
from allred.tensorflow.tensor_compression import TensorCompression as Compression
from allred.tensorflow.tensor_reduction import check_groups, layers_of


def PartialDistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """As `DistributedOptimizer`, without the gradients of `local_layers`, a layer or a list of layers."""
    check_groups(0, groups)
    return horovod_keras_optimizer(
        optimizer, name, compression, sparse_as_dense, op, gradient_predivide_factor, backward_passes_per_step,
        average_aggregated_gradients, process_set, scale_local_gradients, layers_of(local_layers),
    )  # fmt: skip


def DistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return the optimizer of Keras that is given, which reduces gradients over all ranks before it applies them.
    Arguments: see `allred.tensorflow.DistributedOptimizer`."""
    check_groups(num_groups, groups)
    return PartialDistributedOptimizer(
        optimizer, name, device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor, op,
        backward_passes_per_step, average_aggregated_gradients, groups, process_set, None, scale_local_gradients,
    )  # fmt: skip


def _evaluated(tensor: Any) -> Any:
    """Return the value of a tensor: a numpy array in a graph of TensorFlow 1."""
    return tensor if tf.executing_eagerly() else tf.compat.v1.keras.backend.get_session().run(tensor)


def broadcast_global_variables(root_rank: int) -> Any:
    """Copy all global variables of a graph of TensorFlow 1 from rank `root_rank`."""
    return _evaluated(hvd.broadcast_global_variables(root_rank))


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = Compression.none,
) -> Any:
    """Reduce a value that can be converted to a tensor; see `allred.tensorflow.allreduce`."""
    tensor = tf.constant(value)
    return _evaluated(
        hvd.allreduce(
            tensor, average=average, compression=compression, op=op, prescale_factor=prescale_factor,
            postscale_factor=postscale_factor, name=name,
        )
    )  # fmt: skip


def allgather(value: Any, name: str | None = None) -> Any:
    """Concatenate the values of all ranks; see `allred.tensorflow.allgather`."""
    return _evaluated(hvd.allgather(tf.constant(value), name))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the value of rank `root_rank`."""
    return _evaluated(hvd.broadcast(tf.constant(value), root_rank, name))


def reducescatter(value: Any, name: str | None = None, op: Any = Average) -> Any:
    """Return this rank's rows of a reduction; see `allred.tensorflow.reducescatter`."""
    return _evaluated(hvd.reducescatter(tf.constant(value), op=op, name=name))


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: Any = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Load a model of tf.keras, and make its optimizer a `DistributedOptimizer`. custom_optimizers: classes of
    optimizers of the program. legacy_opts: without effect."""
    known = {each.__name__: each for each in custom_optimizers or ()} | (custom_objects or {})
    model = tf.keras.models.load_model(filepath, custom_objects=known)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model


__all__ = ["PartialDistributedOptimizer", "load_model", *hvd.__all__]
globals().update({name: getattr(hvd, name) for name in __all__ if name not in globals()})  # init, rank, size and others
