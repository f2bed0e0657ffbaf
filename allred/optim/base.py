"""Optimizer, the base class of all optimizers, and the format of their state.

A subclass has a constructor and two functions per tensor: `slots` (optax's init) and `update`. `Optimizer.step` does
the rest: it walks the nests, checks all input before it changes anything, keeps the slots of each tensor under the
tensor's name, counts the updates, and evaluates the learning-rate schedule. Slots are TensorFlow's word for an
optimizer's per-variable state. The state of an optimizer is

    {"global_step": int, "slots": {parameter name: {slot name: array}}}

Any checkpoint format of dicts, numbers and arrays can hold it. Arrays may be restored with another type (numpy instead
of cupy) or dtype; the first step after loading converts them to those of the parameter.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from allred import native
from allred.arrays import Array, view_as_complex, view_as_real
from allred.errors import InputError
from allred.gpu import kernels
from allred.nest import Leaf, leaves, quoted, structure
from allred.optim.schedules import Schedule
from allred.optim.step_input import CheckedInput, Kernel, Kind, Known, PendingUpdates, Slots, kind_of
from allred.validators import integer, non_negative


def compute_dtype(tensor: Array) -> np.dtype[Any]:
    """Dtype of the slots of a tensor and of the arithmetic of its update: its own, but at least float32.

    >>> compute_dtype(np.zeros(3, np.float16)), compute_dtype(np.zeros(3))
    (dtype('float32'), dtype('float64'))
    """
    return np.promote_types(tensor.dtype, np.float32)


def is_inexact_tensor(value: Any) -> bool:
    """Whether `value` is a numpy or cupy array of floats, bfloat16 (a user-defined dtype in NumPy) included, or of
    complex numbers."""
    if not (hasattr(value, "__array_ufunc__") and hasattr(value, "shape")):  # numpy scalars lack the first attribute
        return False
    return bool(value.dtype.kind in "fc" or value.dtype.name == "bfloat16")


def describe(value: Any) -> str:
    """Description of a value in error messages.

    >>> describe(np.zeros((2, 3), np.float32)), describe([1.0])
    ('a float32 ndarray of shape (2, 3)', 'a list')
    """
    kind = type(value).__name__
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"a {value.dtype} {kind} of shape {tuple(value.shape)}"
    return f"a {kind}"


def check_writable(who: str, what: str, value: Any) -> None:
    """Raise InputError unless `value` is a writable float array. what: its name in the error."""
    if not is_inexact_tensor(value):
        raise InputError(
            f"{who}: {what} must be a numpy or cupy array of floats, because it is changed in place, "
            f"but is {describe(value)}"
        )
    if not getattr(value.flags, "writeable", True):  # cupy arrays are always writable and lack this flag
        raise InputError(f"{who}: {what} must be writable, but is read-only; pass a copy")


def check_gradient(who: str, name: str, param: Array, grad: Any) -> None:
    """Raise InputError unless `grad` can be the gradient of `param`."""
    number = isinstance(grad, (float, int, complex, np.inexact))
    if (isinstance(grad, complex) or (not number and is_inexact_tensor(grad) and grad.dtype.kind == "c")) and (
        param.dtype.kind != "c"
    ):
        raise InputError(
            f"{who}: the gradient of {quoted(name)} is complex, but its parameter is {describe(param)}; pass its real "
            "part"
        )
    if not number and not is_inexact_tensor(grad):
        raise InputError(
            f"{who}: the gradient of {quoted(name)} must be an array of floats, but is {describe(grad)}; convert it "
            "first"
        )
    shape = () if number else tuple(grad.shape)
    if shape != tuple(param.shape):
        raise InputError(
            f"{who}: the gradient of {quoted(name)} must have its parameter's shape {tuple(param.shape)}, but has "
            f"{shape}; reduce or reshape it first"
        )
    if not number and isinstance(grad, np.ndarray) != isinstance(param, np.ndarray):
        raise InputError(
            f"{who}: {quoted(name, 'parameter')} is {describe(param)} but its gradient {describe(grad)}; "
            "copy both to the same device first"
        )


def decayed_gradient(param: Array, grad: Array, weight_decay: float) -> Array:
    """Return grad + weight_decay * param in the dtype of `grad`; `grad` itself if weight_decay is 0."""
    if weight_decay == 0.0:
        return grad
    decayed = np.empty_like(grad)
    np.multiply(param, weight_decay, out=decayed, dtype=decayed.dtype)
    np.add(decayed, grad, out=decayed)
    return decayed


def fold_in(average: Array, value: Array, decay: float, scratch: Array) -> None:
    """Update a moving average in place: decay * average + (1 - decay) * value. `scratch` may be `value`."""
    np.multiply(value, 1.0 - decay, out=scratch)
    np.multiply(average, decay, out=average)
    np.add(average, scratch, out=average)


def fused(rule: str, arrays: tuple[Array | None, ...], numbers: tuple[float, ...]) -> bool:
    """Update a tensor by a kernel, in C or on the GPU, if it supports the arguments. Return whether it did.

    The kernel produces the same bits as numpy, without numpy's floating-point warnings. It supports contiguous arrays
    that do not overlap, of one shape, not 0-d, and one dtype, float32 or float64; and numbers of type float. In C the
    GIL is released for more than 16 KiB. If it returns False, nothing has changed.

    rule: "sgd", "adagrad", "rmsprop", "adam" or "adamw". arrays: the parameter, the gradient and the slots, in the
    order of csrc/update.h; None for a missing slot. numbers: the hyper-parameters in that order.
    """
    param = arrays[0]
    if type(param) is np.ndarray:
        return param.dtype.char in "fd" and native.update(rule, arrays, numbers)
    return type(param).__module__.partition(".")[0] == "cupy" and kernels.update(rule, arrays, numbers)


def fused_by(kernel: Kernel, param: Array, grad: Array, slots: Slots) -> bool:
    """As `fused`, with the slots by name."""
    held = (slots[name] if name is not None else None for name in kernel.slots)
    return fused(kernel.rule, (param, grad, *held), kernel.numbers)


def cast_gradient(param: Array, grad: Any) -> Array:
    """Return a gradient in the dtype that `Optimizer.update` expects; a copy only if it has another one."""
    return np.asarray(grad, dtype=compute_dtype(param), like=param)


class Optimizer(ABC):
    """Base class of all optimizers.

    Arguments:
        lr: learning rate, a number >= 0, or a schedule: a callable from the number of updates done so far (0 at the
            first update) to the learning rate of the next update.

    Attributes:
        lr: as given; may be assigned between steps.
        global_step: number of updates done.
        elementwise: class attribute. True promises that `update` treats every element separately, so that parts of a
            tensor can be updated separately with the same result. False is the safe default.

    A complete subclass:

    >>> class SignSGD(Optimizer):
    ...     elementwise = True
    ...     def slots(self, param):
    ...         return {}
    ...     def update(self, param, grad, slots, lr, step):
    ...         np.subtract(param, lr * np.sign(grad), out=param)
    >>> params = [np.array([1.0, 2.0])]
    >>> SignSGD(lr=0.25).step(params, [np.array([-3.0, 7.0])])
    >>> print(params)
    [array([1.25, 1.75])]
    """

    elementwise: ClassVar[bool] = False
    _known: Known | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """A class that overrides `update` only has no kernel: that of its base class makes another update."""
        super().__init_subclass__(**options)
        if "update" in vars(cls) and "kernel" not in vars(cls):
            cls.kernel = Optimizer.kernel  # type: ignore[method-assign]

    def __init__(self, lr: float | Schedule) -> None:
        self.lr: float | Schedule = lr if callable(lr) else non_negative(type(self).__name__, "lr", lr)
        self.global_step = 0
        self._slots: dict[str, Slots] = {}
        self._made_for: dict[str, Kind] = {}  # kind of parameter that the slots of this name fit

    @abstractmethod
    def slots(self, param: Array) -> Slots:
        """Initial state of one tensor: new arrays by name, in the dtype `compute_dtype(param)`."""

    @abstractmethod
    def update(self, param: Array, grad: Array, slots: Slots, lr: float, step: int) -> None:
        """Apply one gradient to one tensor: change `param` and the arrays in `slots` in place, and nothing else.

        Arguments:
            param: array of any float dtype. Complex numbers (...) are passed as floats (..., 2).
            grad: array of the same shape, in the dtype `compute_dtype(param)`; must not be changed.
            slots: result of `slots(param)`, changed by earlier updates.
            lr: learning rate of this step.
            step: number of this update of the optimizer, 1 at the first.
        """

    def kernel(self, lr: float, step: int) -> Kernel | None:
        """Return the kernel that makes the same change as `update`; None if there is none. Arguments as in `update`."""
        return None

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step. Raises InputError if the schedule returns no number >= 0."""
        value = self.lr(self.global_step) if callable(self.lr) else self.lr
        return non_negative(type(self).__name__, f"the learning rate of step {self.global_step}", value)

    @property
    def kind(self) -> str:
        """Name of the class, in messages and checkpoints. A checkpoint can be restored only by an optimizer of the same
        kind; a renamed class may set `kind` to its former name."""
        return type(self).__name__

    def hyperparameters(self) -> Any:
        """Nest of the values that the optimizer was made with. Ranks and parameter servers must have the same."""
        return {name: value for name, value in vars(self).items() if name != "global_step" and name[0] != "_"}

    def step(self, params: Any, grads: Any) -> None:
        """Update all parameters in place with one gradient each.

        Arguments:
            params: nest of writable arrays of any shape and layout: float16, bfloat16, float32, float64, complex64,
                complex128. A complex number is updated as two real ones, as in torch.
            grads: nest of the same structure. Each gradient has the shape of its parameter and any float dtype; for a
                0-d parameter it may be a Python float. None skips a parameter and its slots. Not changed. The gradient
                of z = x + iy is dL/dx + i dL/dy, as torch returns it (JAX and autograd return its conjugate).

        Raises InputError: names, shapes or dtypes do not match, or the schedule returns no number >= 0. Neither
        parameters nor the optimizer have changed then.
        """
        known, pending = self._known, self.begin_step(params, grads)
        if known is not None and pending.slots is known.slots:  # input like that of the last step
            self.update_all(pending)
        else:
            self._update_each(pending, 0, len(pending.params))

    def begin_step(self, params: Any, grads: Any) -> PendingUpdates:
        """Check the input of `step` and count the step. The caller makes the updates. Raises as `step`."""
        again = self._checked_again(params, grads)
        work = again or self._checked(params, grads)
        lr = self.lr if type(self.lr) is float and 0.0 <= self.lr < math.inf else self.learning_rate
        self.global_step += 1
        if again is None:
            self._remember(params, work)
        return PendingUpdates(*work, lr, self.global_step)

    def _checked_again(self, params: Any, grads: Any) -> CheckedInput | None:
        """Check input like that of the last step, which is the common case; None if it differs from it."""
        if (known := self._known) is None:
            return None
        tensors, gradients = native.leaves_of(known.structure, params), native.leaves_of(known.structure, grads)
        if tensors is None or gradients is None or not native.match(known.kinds, tensors, gradients):
            return None
        return CheckedInput(known.names, tensors, gradients, known.slots)

    def _remember(self, params: Any, work: CheckedInput) -> None:
        """Keep new slots, and what the next step can be compared with."""
        for name, param, slots in zip(work.names, work.params, work.slots, strict=True):
            if self._slots.get(name) is not slots or name not in self._made_for:
                self._slots[name], self._made_for[name] = slots, kind_of(param)
        self._known, kinds = None, [self._made_for[name] for name in work.names]
        if not native.match(kinds, work.params, work.grads):
            return
        form = structure(params)
        if len(native.leaves_of(form, params) or []) == len(kinds):  # no gradient is None
            self._known = Known(form, work.names, kinds, work.slots)

    def has_slots(self, name: str, slots: Slots) -> bool:
        """Whether these are the slots of the tensor `name`, the same object."""
        return self._slots.get(name) is slots

    def replace_slots(self, name: str, slots: Slots) -> None:
        """Keep the slots of a tensor in other arrays, of the same shapes and dtypes."""
        self._slots[name], self._known = slots, None

    def update_all(self, pending: PendingUpdates) -> None:
        """Make the updates in order: by the kernel where C supports it, else one by one."""
        _, params, grads, slots, lr, step = pending
        if (kernel := self.kernel(lr, step)) is None:
            return self._update_each(pending, 0, len(params))
        rule, names, numbers = kernel
        done = native.update_group(rule, params, grads, slots, names, numbers)
        while done < len(params):
            self._update_each(pending, done, done + 1)
            done = native.update_group(rule, params, grads, slots, names, numbers, done + 1)

    def _update_each(self, pending: PendingUpdates, start: int, stop: int) -> None:
        _, params, grads, slots, lr, step = pending
        for index in range(start, stop):
            param = params[index]
            self.update_tensor(param, cast_gradient(param, grads[index]), slots[index], lr, step)

    def update_tensor(self, param: Array, grad: Array, slots: Slots, lr: float, step: int) -> None:
        """As `update`, also of complex numbers."""
        if param.dtype.kind == "c":
            param, grad = view_as_real(param), view_as_real(grad)
            slots = {name: view_as_real(slot) for name, slot in slots.items()}
        self.update(param, grad, slots, lr, step)

    def _checked(self, params: Any, grads: Any) -> CheckedInput:
        """Check the input of `step`."""
        who = f"{type(self).__name__}.step"
        named = leaves(params)
        gradients = _by_name(who, named, leaves(grads))
        work = CheckedInput([], [], [], [])
        for name, param in named:
            grad = gradients[name]
            if grad is None:
                continue
            if self._checked_before(name, param, grad):
                slots = self._slots[name]
            else:
                check_writable(who, quoted(name, "parameter"), param)
                check_gradient(who, name, param, grad)
                slots = self._fitting_slots(who, name, param)
            work.names.append(name)
            work.params.append(param)
            work.grads.append(grad)
            work.slots.append(slots)
        return work

    def _checked_before(self, name: str, param: Any, grad: Any) -> bool:
        """Whether these are numpy arrays like those that an earlier step has checked, which is the common case."""
        if not type(param) is type(grad) is np.ndarray:
            return False
        return self._made_for.get(name) == kind_of(param) == kind_of(grad) and param.flags.writeable

    def new_slots(self, param: Array) -> Slots:
        """Return the initial state of one tensor. That of complex numbers is complex, as in torch."""
        real = view_as_real(param)
        fresh = self.slots(real)
        if real is param:
            return fresh
        return {slot: view_as_complex(array) if array.shape == real.shape else array for slot, array in fresh.items()}

    def _fitting_slots(self, who: str, name: str, param: Array) -> Slots:
        """Slots of a parameter: those in use, new ones, or loaded ones converted to its dtype and device."""
        if self._made_for.get(name) == kind_of(param):
            return self._slots[name]
        fresh = self.new_slots(param)
        return _convert_slots(who, name, self._slots[name], fresh) if name in self._slots else fresh

    def state_dict(self) -> dict[str, Any]:
        """Copy of the state that a later run needs to continue with the same bits.

        Returns {"global_step": int, "slots": {parameter name: {slot name: array}}}. Hyper-parameters are not included.
        """
        return {"global_step": self.global_step, "slots": _copy_slots(self._slots)}

    def live_state(self) -> dict[str, Any]:
        """State as in state_dict, without copies: to read before the next step, and not to change."""
        return {"global_step": self.global_step, "slots": self._slots}

    def load_state_dict(self, state: Any) -> None:
        """Continue from a copy of a result of `state_dict`.

        Raises InputError: `state` has another format; nothing has changed then. The next `step` checks whether the
        slots match their parameters.
        """
        global_step, slots = _check_state(f"{type(self).__name__}.load_state_dict", state)
        self._take_state(global_step, _copy_slots(slots))

    def _take_state(self, global_step: int, slots: dict[str, Slots]) -> None:
        self.global_step, self._slots, self._made_for = global_step, slots, {}
        self._known = None

    def check_state(self, params: Mapping[str, Array], state: Mapping[str, Any], is_same_kind: bool) -> None:
        """Raise InputError if `state` is of another optimizer. Compares the slots of the smallest parameter.

        params: by name. state: a result of `state_dict`. is_same_kind: whether the checkpoint names this `kind`. If
        not, a state with updates but without slots is refused if this optimizer has slots.
        """
        slots = state["slots"]
        known = [name for name in params if name in slots]
        if known or (params and state["global_step"] and not is_same_kind):
            smallest = min(known or params, key=lambda name: params[name].size)
            _convert_slots(self.kind, smallest, slots.get(smallest, {}), self.new_slots(params[smallest]))

    def __repr__(self) -> str:
        hyper = self.hyperparameters()
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in hyper.items())})"


def _by_name(who: str, params: list[Leaf], grads: list[Leaf]) -> dict[str, Any]:
    """Gradients by name. Raises InputError if their names differ from those of the parameters or are not unique."""
    expected, found = dict(params), dict(grads)
    if len(expected) < len(params):
        twice = Counter(name for name, _ in params).most_common(1)[0][0]
        raise InputError(f"{who}: two parameters are named {twice!r}, which names their slots; rename a dict key")
    if len(grads) != len(params) or found.keys() != expected.keys():
        raise InputError(
            f"{who}: gradients must have the structure of the {len(params)} parameters, but there are {len(grads)}, "
            f"without {sorted(expected.keys() - found.keys())[:3]} and with "
            f"{sorted(found.keys() - expected.keys())[:3]}; "
            "pass None for a parameter that has no gradient"
        )
    return found


def _copy_slots(slots: dict[str, Slots]) -> dict[str, Slots]:
    return {name: {slot: array.copy() for slot, array in held.items()} for name, held in slots.items()}


def _check_state(who: str, state: Any) -> tuple[int, dict[str, Slots]]:
    """Global step and slots in `state`. Raises InputError unless it has the format of a state."""
    remedy = "pass the result of state_dict()"
    if not isinstance(state, dict) or set(state) != {"global_step", "slots"}:
        got = f"a dict with {sorted(map(str, state))}" if isinstance(state, dict) else describe(state)
        raise InputError(f"{who}: expected a dict with 'global_step' and 'slots', but got {got}; {remedy}")
    slots = state["slots"]
    if not isinstance(slots, dict) or not all(isinstance(held, dict) for held in slots.values()):
        raise InputError(f"{who}: 'slots' must hold one dict for each parameter name, but is {slots!r:.80}; {remedy}")
    for name, held in slots.items():
        for slot, array in held.items():
            if not (hasattr(array, "shape") and hasattr(array, "dtype") and hasattr(array, "copy")):
                raise InputError(
                    f"{who}: slot {slot!r} of {quoted(name)} must be an array, but is {describe(array)}; {remedy}"
                )
    return integer(f"{who}: 'global_step'", state["global_step"], 0, "it counts the updates done"), slots


def load_new_state(optimizer: Any, state: Any) -> None:
    """As `optimizer.load_state_dict(state)`, for a state whose arrays nobody else has: allred.optim does not copy
    them."""
    if isinstance(optimizer, Optimizer) and type(optimizer).load_state_dict is Optimizer.load_state_dict:
        optimizer._take_state(*_check_state(f"{type(optimizer).__name__}.load_state_dict", state))
    else:
        optimizer.load_state_dict(state)


def _convert_slots(who: str, name: str, loaded: Slots, fresh: Slots) -> Slots:
    """Convert loaded slots to the dtypes and devices of `fresh`, the slots that a new optimizer would make.

    Raises InputError: slot names or shapes differ: the state belongs to another optimizer, other hyper-parameters or
    another model.
    """
    expected = {slot: tuple(array.shape) for slot, array in fresh.items()}
    got = {slot: tuple(array.shape) for slot, array in loaded.items()}
    if got != expected:
        raise InputError(
            f"{who}: {quoted(name, 'parameter')} needs the slots {expected}, but the state holds {got}; "
            "restore the state of the same optimizer, hyper-parameters and model, or make a new optimizer"
        )
    for slot, array in fresh.items():
        if is_inexact_tensor(loaded[slot]) and not (
            is_inexact_tensor(array) and np.can_cast(loaded[slot].dtype, array.dtype, "same_kind")
        ):
            raise InputError(
                f"{who}: slot {slot!r} of {quoted(name, 'parameter')} must be {describe(array)}, but is "
                f"{describe(loaded[slot])} in the state; restore the state of the same optimizer"
            )
    return {slot: np.asarray(loaded[slot], dtype=array.dtype, like=array) for slot, array in fresh.items()}


def optimizer_kind(optimizer: Any) -> str:
    """Return the attribute `kind` of any optimizer if it is text, else the name of its class."""
    kind = getattr(optimizer, "kind", None)
    return kind if isinstance(kind, str) else type(optimizer).__name__


def splittable(optimizer: Any) -> bool:
    """Whether parts of a tensor can be updated separately: the optimizer and its slots are elementwise."""
    if not (isinstance(optimizer, Optimizer) and optimizer.elementwise):
        return False
    return all(slot.shape == (3,) for slot in optimizer.slots(np.zeros(3, np.float32)).values())
