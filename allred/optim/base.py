"""The optimizer contract: two functions per tensor, `slots` and `update`; everything else is here, once for all.

`Optimizer.step` walks the nests, checks all of its input before it changes anything, keeps each tensor's slots under
the tensor's name, counts the updates and asks the schedule for the learning rate. A new optimizer is a subclass with a
constructor and the two functions. The split is optax's (init, update); slots are TensorFlow's word for an optimizer's
per-variable state.
"""

from abc import ABC, abstractmethod
from collections import Counter
from typing import Any, ClassVar

import numpy as np

from allred.arrays import Array
from allred.errors import InputError
from allred.nest import Leaf, leaves
from allred.optim.hyper import non_negative
from allred.optim.schedules import Schedule
from allred.optim.state import Slots, check_state, copy_slots, fit_slots
from allred.optim.tensors import check_gradient, check_writable, compute_dtype


class Optimizer(ABC):
    """Base of all optimizers.

    Arguments:
        lr: the learning rate, a number >= 0, or a schedule: any callable from the number of updates done so far
            (0 at the first update) to the learning rate of the next one.

    Attributes:
        lr: as given; may be assigned between steps.
        global_step: number of updates done.
        elementwise: class attribute; True promises that `update` treats every element alone, so that a tensor may be
            split and its parts be updated separately, with the same result. False is the safe default.

    A subclass, complete:

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

    def __init__(self, lr: float | Schedule) -> None:
        self.lr: float | Schedule = lr if callable(lr) else non_negative(type(self).__name__, "lr", lr)
        self.global_step = 0
        self._slots: dict[str, Slots] = {}
        self._made_for: dict[str, tuple[Any, ...]] = {}  # kind of parameter that the slots of this name fit

    @abstractmethod
    def slots(self, param: Array) -> Slots:
        """The state of one tensor before its first update: new arrays by name, in the dtype `compute_dtype(param)`."""

    @abstractmethod
    def update(self, param: Array, grad: Array, slots: Slots, lr: float, step: int) -> None:
        """Apply one gradient to one tensor: change `param` and the arrays in `slots` in place, and nothing else.

        Arguments:
            param: of any float dtype.
            grad: of the same shape, in the dtype `compute_dtype(param)`; must not be changed.
            slots: what `slots(param)` gave, as earlier updates left it.
            lr: learning rate of this step.
            step: number of this update, 1 at the first; counted for the optimizer, not for the tensor.
        """

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        value = self.lr(self.global_step) if callable(self.lr) else self.lr
        return non_negative(type(self).__name__, f"the learning rate of step {self.global_step}", value)

    def step(self, params: Any, grads: Any) -> None:
        """Update all parameters in place with one gradient each.

        Arguments:
            params: nest of writable float arrays (float16, bfloat16, float32, float64), of any shape and layout.
            grads: nest of the same structure; each gradient has its parameter's shape and any float dtype. A 0-d
                parameter's may be a Python float. None leaves its parameter and its slots as they are. Not changed.

        Raises:
            InputError: names, shapes or dtypes do not fit, or the schedule gives no valid learning rate. Then nothing
                has changed: neither a parameter nor the optimizer.
        """
        work = self._checked(params, grads)
        lr = self.learning_rate
        self.global_step += 1
        for name, param, _, slots in work:
            if self._slots.get(name) is not slots or name not in self._made_for:
                self._slots[name], self._made_for[name] = slots, _kind(param)
        for _, param, grad, slots in work:
            cast = np.asarray(grad, dtype=compute_dtype(param), like=param)  # a copy only where the dtype differs
            self.update(param, cast, slots, lr, self.global_step)

    def _checked(self, params: Any, grads: Any) -> list[tuple[str, Array, Any, Slots]]:
        """Name, parameter, gradient and slots of all that `step` will update. Changes nothing."""
        who = f"{type(self).__name__}.step"
        named = leaves(params)
        gradients = _by_name(who, named, leaves(grads))
        work = []
        for name, param in named:
            grad = gradients[name]
            if self._fits_again(name, param, grad):
                work.append((name, param, grad, self._slots[name]))
            elif grad is not None:
                check_writable(who, f"parameter {name!r}", param)
                check_gradient(who, name, param, grad)
                work.append((name, param, grad, self._fitting_slots(who, name, param)))
        return work

    def _fits_again(self, name: str, param: Any, grad: Any) -> bool:
        """Whether these are plain arrays as in an earlier step, which has checked them; most are."""
        if not type(param) is type(grad) is np.ndarray:
            return False
        return self._made_for.get(name) == _kind(param) == _kind(grad) and param.flags.writeable

    def _fitting_slots(self, who: str, name: str, param: Array) -> Slots:
        """The slots of this parameter: those in use, new ones, or loaded ones brought to its dtype and device."""
        if self._made_for.get(name) == _kind(param):
            return self._slots[name]
        fresh = self.slots(param)
        return fit_slots(who, name, self._slots[name], fresh) if name in self._slots else fresh

    def state_dict(self) -> dict[str, Any]:
        """All that a later run needs to continue bit for bit, as copies.

        Returns:
            {"global_step": int, "slots": {parameter name: {slot name: array}}}. Hyper-parameters are not in it.
        """
        return {"global_step": self.global_step, "slots": copy_slots(self._slots)}

    def live_state(self) -> dict[str, Any]:
        """What state_dict holds, without the copies: to be looked at before the next step, and not to be changed."""
        return {"global_step": self.global_step, "slots": self._slots}

    def load_state_dict(self, state: Any) -> None:
        """Continue from what `state_dict` returned; copies it.

        Raises:
            InputError: `state` has another format; nothing has changed then. Whether slots fit their parameters shows
                at the next `step`.
        """
        global_step, slots = check_state(f"{type(self).__name__}.load_state_dict", state)
        self.global_step, self._slots, self._made_for = global_step, copy_slots(slots), {}

    def __repr__(self) -> str:
        hyper = {name: value for name, value in vars(self).items() if name != "global_step" and name[0] != "_"}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in hyper.items())})"


def _kind(param: Array) -> tuple[Any, ...]:
    """What must stay the same for a parameter's slots to stay usable."""
    return type(param), param.shape, param.dtype


def _by_name(who: str, params: list[Leaf], grads: list[Leaf]) -> dict[str, Any]:
    """The gradients by name. Raises InputError unless they are those of the parameters, and all names differ."""
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
