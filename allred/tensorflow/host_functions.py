"""How programs of TensorFlow call functions of allred.

A function gets arrays and returns arrays. Outside of graphs it is called at once. In a graph, of a `tf.function` or of
TensorFlow 1, it is a `tf.numpy_function`, which runs in a thread of TensorFlow. The arguments are the memory of
tensors, which other operations use, too: a function never writes to them. TensorFlow takes the memory of the results
without a copy if it is aligned (`new_array`).

TensorFlow reports an exception of a function in a graph as an error of its own with the same text. `original` returns
the exception itself.
"""

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from allred import arena, native
from allred.arrays import Array
from allred.errors import InputError
from allred.watch import excepthook

Function = Callable[[list[Array]], list[Array]]

_ALIGNMENT = 64  # bytes, of memory that TensorFlow takes without a copy
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of operations, by graph
_last_error: BaseException | None = None
_order_variable: Any = None
_forward_order: list[Any] = []  # of `gradient_of`
_one_at_a_time = threading.Lock()  # a session of TensorFlow 1 may run several operations at once


def new_array(shape: tuple[int, ...], dtype: Any) -> Array:
    """Return a new array, in the arena if there is one, whose memory TensorFlow takes without a copy."""
    dtype = np.dtype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if nbytes >= arena.MIN_BYTES:
        array = arena.empty(shape, dtype)
        if not array.ctypes.data % _ALIGNMENT:
            return array
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    aligned: Array = memory[begin : begin + nbytes].view(dtype).reshape(shape)
    return aligned


def copy_of(source: Array) -> Array:
    """Return a copy as `new_array`."""
    copy = new_array(source.shape, source.dtype)
    copy[...] = source
    return copy


def label(kind: str, name: str | None) -> str:
    """Return the name of an operation for allred, which the ranks compare. In a graph an operation without a name has a
    number: operations of one graph could otherwise be mistaken for each other."""
    if name or tf.executing_eagerly():
        return name or ""
    graph = tf.compat.v1.get_default_graph()
    number = _numbers[graph] = _numbers.get(graph, 0) + 1
    return f"{kind} {number} of the graph"


@tf.autograph.experimental.do_not_convert
def call(function: Function, tensors: Sequence[Any], results: Sequence[tf.TensorSpec]) -> list[Any]:
    """Call a function with the memory of tensors. Returns tensors of these shapes and dtypes."""
    if tf.executing_eagerly():
        return [_as_tensor(array) for array in function([_memory(tensor) for tensor in tensors])]
    _refuse_jit()

    def run(*arguments: Any) -> list[Array]:
        return _run(function, [np.asarray(argument) for argument in arguments])

    order = order_of_operations()
    with tf.device("/cpu:0"), tf.control_dependencies(_next(order)):
        found = tf.numpy_function(run, list(tensors), [spec.dtype for spec in results], stateful=True)
        with tf.control_dependencies(found):
            _next(order)
    for tensor, spec in zip(found, results, strict=True):
        tensor.set_shape(spec.shape)
    return list(found)


def order_of_operations() -> Any:
    """Return the handle, in the current graph, of a variable that each operation in a `tf.function` changes before and
    after it runs: TensorFlow runs functions, branches and operations that change one variable in the order of the
    program. None in a graph of TensorFlow 1, and outside of graphs."""
    global _order_variable
    if tf.executing_eagerly():
        return None
    with tf.init_scope():  # outside of all functions
        if not tf.executing_eagerly():
            return None
        if _order_variable is None:
            _order_variable = tf.Variable(0, trainable=False, dtype=tf.int64, name="order_of_operations")
    if _forward_order:
        return _forward_order[-1]
    return tf.compat.v1.get_default_graph().capture(_order_variable.handle)


@contextlib.contextmanager
def gradient_of(order: Any) -> Iterator[None]:
    """Make operations of a gradient. order: the result of `order_of_operations` where the operation itself was made.
    The graph of a gradient of a branch or loop may refer to tensors of the graph of this branch or loop only."""
    if order is None:
        yield
        return
    _forward_order.append(order)
    try:
        yield
    finally:
        _forward_order.pop()


def _next(order: Any) -> list[Any]:
    """Change the variable of `order_of_operations`."""
    return [] if order is None else [tf.raw_ops.AssignAddVariableOp(resource=order, value=tf.constant(1, tf.int64))]


def _memory(tensor: Any) -> Array:
    """Return the memory of a tensor as an array; a copy of a tensor of shape ()."""
    return np.asarray(tensor) if tensor.shape.rank else np.array(tensor.numpy())


def _as_tensor(array: Array) -> tf.Tensor:
    """Return a tensor that has the memory of an array; small and unaligned arrays are copied. Nothing else may refer to
    the array."""
    is_usual = array.dtype.kind in "fiu" and array.dtype.type.__module__ == "numpy"
    if array.nbytes < arena.MIN_BYTES or not is_usual or array.ctypes.data % _ALIGNMENT:
        return tf.convert_to_tensor(array)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def _run(function: Function, arguments: list[Array]) -> list[Array]:
    """Call a function in a thread of TensorFlow."""
    global _last_error
    try:
        with _one_at_a_time:
            return native.call_interruptibly(function, arguments)  # type: ignore[no-any-return]
    except BaseException as error:
        _last_error = error.with_traceback(None)  # its frames have the memory of tensors
        raise


def original(error: BaseException) -> BaseException:
    """Return the exception of allred, or KeyboardInterrupt, that TensorFlow replaced by `error`; else `error`. While it
    traces a function, TensorFlow replaces exceptions by StagingError."""
    global _last_error
    last = _last_error
    of_tensorflow = isinstance(error, tf.errors.OpError) or type(error).__module__.startswith("tensorflow.")
    if isinstance(last, KeyboardInterrupt):  # the main thread raises it too, while it makes the error of TensorFlow
        of_tensorflow = of_tensorflow or isinstance(error, RuntimeError)
    text = "KeyboardInterrupt" if isinstance(last, KeyboardInterrupt) else str(last)
    if last is None or error is last or not of_tensorflow or not text or text not in str(error):
        return error
    _last_error = None
    return last.with_traceback(error.__traceback__)


def _refuse_jit() -> None:
    """Raise InputError while TensorFlow traces a function for XLA, which cannot run a `tf.numpy_function`."""
    global _last_error
    frame: Any = sys._getframe()
    while frame is not None:
        of_framework = frame.f_globals.get("__name__", "").partition(".")[0] in ("keras", "tensorflow", "tf_keras")
        owner = frame.f_locals.get("self") if of_framework else None
        if getattr(owner, "jit_compile", None) is True or getattr(owner, "_jit_compile", None) is True:
            _last_error = InputError(
                "XLA cannot compile operations of allred for TensorFlow, but a function with jit_compile=True calls "
                "one; pass jit_compile=False to tf.function, or to model.compile()"
            )
            raise _last_error
        frame = frame.f_back


excepthook.originals.append(original)
