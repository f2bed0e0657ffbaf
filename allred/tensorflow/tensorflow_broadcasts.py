"""Broadcast of variables, and of Python objects."""

import pickle
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from allred.comm.header import quoted
from allred.errors import InputError
from allred.horovod.object_pickle import dumps
from allred.horovod.process_sets import ProcessSet, communicator_of, global_process_set
from allred.modes.gradient_averager import unique
from allred.tensorflow.tensor_reduction import tensorflow_variable
from allred.tensorflow.tensorflow_collectives import broadcast_tensors
from allred.tensorflow.tensorflow_errors import as_tensorflow_error


def _variable(variable: Any) -> Any:
    found = tensorflow_variable(variable)
    if not isinstance(found, tf.Variable):
        raise InputError(f"expected a variable of TensorFlow or Keras, got {variable!r}")
    return found


def broadcast_(
    variables: Iterable[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Copy variables of rank `root_rank` to all ranks. Returns their new values. Errors: see `allreduce`.

    Example: `hvd.broadcast_(model.trainable_variables, root_rank=0)`.
    """
    targets = [_variable(variable) for variable in variables]
    if not targets:
        return []
    names = unique([target.name.partition(":")[0] for target in targets])
    values = broadcast_tensors(targets, root_rank, [f"{name}, {own}" if name else own for own in names], process_set)
    return [target.assign(value) for target, value in zip(targets, values, strict=True)]


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Copy variables of rank `root_rank` to all ranks, as one operation. In a graph of TensorFlow 1 it returns the
    operation to run. inplace: without effect. Errors: see `allreduce`.

    Example: `hvd.broadcast_variables(model.variables, root_rank=0)` after each rank has made its model.
    """
    values = broadcast_(variables, root_rank, None, process_set)
    return None if tf.executing_eagerly() else tf.group(*values)


def broadcast_global_variables(root_rank: int) -> Any:
    """Return the operation that copies all global variables of a graph of TensorFlow 1 from rank `root_rank`.

    Raises RuntimeError outside of graphs: use `broadcast_variables`.

    Example: `session.run(hvd.broadcast_global_variables(0))`.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution; use "
            "hvd.broadcast_variables(model.variables, root_rank)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """A hook for sessions of TensorFlow 1 that copies all global variables from rank `root_rank` when the session is
    made. device: without effect.

    Example: `tf.compat.v1.train.MonitoredTrainingSession(hooks=[hvd.BroadcastGlobalVariablesHook(0)])`.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank, self.bcast_op, self.device = root_rank, None, device

    def begin(self) -> None:
        if self.bcast_op is None or self.bcast_op.graph is not tf.compat.v1.get_default_graph():
            self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        session.run(self.bcast_op)


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of rank `root_rank`. It is pickled. session: without effect.

    Raises hvd.HorovodInternalError, on all ranks, if the calls differ.

    Example: `start = hvd.broadcast_object(epoch, root_rank=0)`.
    """
    is_root = communicator_of(process_set).number == root_rank
    data = _exchange("broadcast_object", name, process_set, obj if is_root else None, root_rank)
    return obj if is_root else pickle.loads(data)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """Return a function that returns the object of rank `root_rank`; see `broadcast_object`.

    Example: `copy = hvd.broadcast_object_fn(root_rank=0)`, then `start = copy(epoch)`.
    """
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, in rank order. They are pickled. session: without effect.

    Example: on 2 ranks, `hvd.allgather_object(hvd.rank())` returns `[0, 1]`.
    """
    return [pickle.loads(data) for data in _exchange("allgather_object", name, process_set, obj)]


def _exchange(kind: str, name: str | None, process_set: ProcessSet, value: Any, *arguments: Any) -> Any:
    """Return the result of a collective on the pickle of an object. If it cannot be pickled, all ranks raise it."""
    communicator = communicator_of(process_set)
    with as_tensorflow_error():
        try:
            data = dumps(value)
        except InputError as error:
            communicator.check(kind, f"{kind}(){quoted(name or '')}", problem=str(error)).wait()
            raise
        return getattr(communicator, kind)(data, *arguments, name or "").wait()
