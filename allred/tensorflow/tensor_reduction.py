"""How Horovod's optimizers and tapes reduce gradients: the arguments that they share."""

import dataclasses
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from allred import world
from allred.comm import ops
from allred.errors import InputError
from allred.horovod.operators import Average, operator
from allred.horovod.process_sets import ProcessSet, rank_set
from allred.modes.gradient_averager import GradientAverager, GradientReceiver, unique
from allred.tensorflow.array_reductions import ArrayReduction
from allred.tensorflow.gradient_averaging import average
from allred.tensorflow.tensor_compression import TensorCompression, check_compression
from allred.tensorflow.tensorflow_collectives import reduced

FUSED_COMPRESSION = {
    TensorCompression.none: ops.Compression.none, TensorCompression.fp16: ops.Compression.fp16,
    TensorCompression.int8: ops.Compression.int8, TensorCompression.int4: ops.Compression.int4,
}  # fmt: skip

_Averagers = dict[Any, tuple[GradientAverager, list[Any]]]  # with weak references to the variables
_tape_averagers = world.Slot(_Averagers)  # by names of the gradients, and arguments


@dataclasses.dataclass
class TensorReduction:
    """The reduction of the gradients of an optimizer or tape, with Horovod's arguments.

    Gradients that allred averages pass through mode sync. Its checks compare the variables of the ranks from the second
    step on, because programs for Horovod may broadcast them after the first step. for_tape: programs make a tape for
    each step.
    """

    name: str
    compression: Any
    sparse_as_dense: bool
    op: Any
    gradient_predivide_factor: float
    process_set: ProcessSet
    scale_local_gradients: bool = True
    for_tape: bool = False

    def __post_init__(self) -> None:
        self.op = operator(self.op)
        check_compression(self.compression)
        if self.gradient_predivide_factor != 1.0 and self.op is not Average:
            raise InputError("gradient_predivide_factor needs op=hvd.Average")
        self.local: set[Any] = set()  # references of variables whose gradients are not reduced
        self._averagers: _Averagers = {}

    @property
    def takes_part(self) -> bool:
        """Whether this rank is in the process set."""
        return bool(self.process_set.included())

    def reduce(self, grads: Sequence[Any], sources: Sequence[Any], names: Sequence[str] = ()) -> list[Any]:
        """Return the gradients, reduced except for local sources; None stays. Collective. names: of the sources."""
        results = list(grads)
        if not self.takes_part:
            return results
        chosen: list[tuple[int, Any, Any]] = []
        for index, (grad, source) in enumerate(zip(grads, sources, strict=True)):
            if grad is None:
                continue
            if self.sparse_as_dense and isinstance(grad, tf.IndexedSlices):
                grad = tf.convert_to_tensor(grad)
            if reference_of(source) in self.local:
                results[index] = self._of_local(grad)
            else:
                chosen.append((index, grad, source))
        if chosen:
            own = [names[index] if names else name_of(source) for index, _, source in chosen]
            found = self._reduce([grad for _, grad, _ in chosen], [source for *_, source in chosen], unique(own))
            for (index, *_), result in zip(chosen, found, strict=True):
                results[index] = result
        return results

    def _of_local(self, grad: Any) -> Any:
        size = self.process_set.size()
        if not self.scale_local_gradients or size is None:
            return grad
        if isinstance(grad, tf.IndexedSlices):
            return tf.IndexedSlices(grad.values / tf.cast(size, grad.dtype), grad.indices, grad.dense_shape)
        return grad / tf.cast(size, grad.dtype)

    def _reduce(self, grads: list[Any], sources: list[Any], names: list[str]) -> list[Any]:
        encoding = FUSED_COMPRESSION.get(self.compression)
        factor = self.gradient_predivide_factor
        if encoding is None or factor != 1.0 or any(not grad.dtype.is_floating for grad in grads):
            reduction = ArrayReduction(self.op, 1.0 / factor, factor)
            return reduced(grads, reduction, self.compression, None, self.process_set, "grouped_allreduce")
        variables = [tensorflow_variable(source) for source in sources]
        is_trained = all(isinstance(variable, tf.Variable) for variable in variables)
        averager = self._averager(tuple(names), encoding, variables if is_trained else [])
        found: list[Any]
        found, _ = average(averager, names, grads, variables if is_trained else None, checks_first=False)
        return found

    def _averager(self, names: tuple[str, ...], encoding: ops.Compression, variables: list[Any]) -> GradientAverager:
        """Return the averager of these gradients. Variables of another model with the same names have another one."""
        known = _tape_averagers.of(world.current()) if self.for_tape else self._averagers
        process_set = rank_set(self.process_set)
        key = names, self.op, encoding, process_set
        averager, of = known.get(key, (None, []))
        is_known = len(of) == len(variables) and all(ref() is one for ref, one in zip(of, variables, strict=True))
        if averager is None or not is_known:
            averager = GradientAverager(
                "TensorFlow", GradientReceiver(), weights=False, name=self.name, op=self.op, nonfinite="ignore",
                compression=encoding, process_set=process_set,
            )  # fmt: skip
            known[key] = averager, [weakref.ref(variable) for variable in variables]
        return averager


def tensorflow_variable(source: Any) -> Any:
    """Return the variable of TensorFlow that a variable of Keras has; other objects as they are."""
    value = getattr(source, "value", None)
    return value if isinstance(value, tf.Variable) else source


def reference_of(source: Any) -> Any:
    """Return a hashable reference to a variable or tensor."""
    source = tensorflow_variable(source)
    return source.ref() if hasattr(source, "ref") else id(source)


def name_of(source: Any) -> str:
    """Return the name of a variable or tensor for messages."""
    found = getattr(source, "path", None) or getattr(tensorflow_variable(source), "name", None) or "gradient"
    return str(found).partition(":")[0]


def layers_of(local_layers: Any) -> list[Any]:
    """Return the argument `local_layers`, a layer of Keras or several, as a list. Raises InputError for others."""
    layers = [] if local_layers is None else local_layers
    layers = list(layers) if isinstance(layers, Iterable) else [layers]
    if wrong := [layer for layer in layers if not hasattr(layer, "trainable_weights")]:
        raise InputError(f"local_layers: expected layers of Keras, got {wrong[0]!r}")
    return layers


def check_groups(num_groups: Any, groups: Any) -> None:
    """Raise ValueError for wrong `groups`, which has no effect: all gradients are reduced together."""
    if num_groups:
        warnings.warn("num_groups is deprecated; pass groups", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if groups is not None and not (isinstance(groups, list) or (isinstance(groups, int) and groups > 0)):
        raise InputError(f"groups={groups!r}: expected a number from 1, or a list of lists of variables")
