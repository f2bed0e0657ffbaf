"""Learning-rate schedules: callables from the number of updates done so far, 0 at the first, to a learning rate.

Any such callable can be the `lr` of an optimizer. These classes are frozen dataclasses: they can be compared, pickled
and sent to another rank, and their repr is the call that makes them. Steps count optimizer updates over the whole job,
not epochs: multiply epochs by `steps_per_epoch`. Constructors raise InputError for arguments out of range.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from allred.errors import InputError
from allred.validators import integer, non_negative, positive

# Class names are lower case because the classes are used like functions.
# ruff: noqa: N801

_REMEDY = "it counts steps"

Schedule = Callable[[int], float]
"""Callable from the number of updates done so far (0 at the first) to the learning rate of the next update."""


@dataclass(frozen=True)
class constant:
    """Constant learning rate: lr(step) = lr.

    >>> constant(0.1)(1000)
    0.1
    """

    lr: float

    def __post_init__(self) -> None:
        non_negative("constant", "lr", self.lr)

    def __call__(self, step: int) -> float:
        return self.lr


@dataclass(frozen=True)
class exponential_decay:
    """Exponential decay: lr(step) = lr * decay_rate ** (step / decay_steps).

    With `staircase` the exponent is rounded down. With decay_steps=1 this is torch's ExponentialLR; with staircase=True
    it is torch's StepLR, which multiplies by decay_rate every decay_steps steps.

    >>> [exponential_decay(0.8, decay_steps=10, decay_rate=0.5, staircase=True)(step) for step in (0, 9, 10, 20)]
    [0.8, 0.8, 0.4, 0.2]
    """

    lr: float
    decay_steps: int
    decay_rate: float
    staircase: bool = False

    def __post_init__(self) -> None:
        non_negative("exponential_decay", "lr", self.lr)
        integer("exponential_decay: decay_steps", self.decay_steps, 1, _REMEDY)
        positive("exponential_decay", "decay_rate", self.decay_rate)

    def __call__(self, step: int) -> float:
        exponent = step // self.decay_steps if self.staircase else step / self.decay_steps
        return float(self.lr * self.decay_rate**exponent)


@dataclass(frozen=True)
class step_decay:
    """Step decay: lr(step) = lr * factor ** (number of milestones <= step), as torch's MultiStepLR.

    For a factor every k steps use exponential_decay(lr, k, factor, staircase=True).

    >>> [step_decay(0.8, milestones=(30, 60), factor=0.5)(step) for step in (0, 29, 30, 60)]
    [0.8, 0.8, 0.4, 0.2]

    K. He, X. Zhang, S. Ren, J. Sun: Deep residual learning for image recognition. CVPR 2016.
    """

    lr: float
    milestones: tuple[int, ...]
    factor: float = 0.1

    def __post_init__(self) -> None:
        non_negative("step_decay", "lr", self.lr)
        non_negative("step_decay", "factor", self.factor)
        milestones = tuple(
            integer("step_decay: each milestone", milestone, 0, _REMEDY) for milestone in self.milestones
        )
        if list(milestones) != sorted(set(milestones)):
            raise InputError(f"step_decay: milestones must increase, but are {milestones}; sort them")
        object.__setattr__(self, "milestones", milestones)  # a list would be mutable

    def __call__(self, step: int) -> float:
        return float(self.lr * self.factor ** sum(milestone <= step for milestone in self.milestones))


@dataclass(frozen=True)
class cosine:
    """Cosine decay: lr(step) = final + (lr - final) * (1 + cos(pi * step / total_steps)) / 2, then `final`.

    `final` is a learning rate, not a fraction: eta_min of torch's CosineAnnealingLR, which rises again after
    total_steps.

    >>> [round(cosine(0.2, total_steps=100)(step), 6) for step in (0, 50, 100, 150)]
    [0.2, 0.1, 0.0, 0.0]

    I. Loshchilov, F. Hutter: SGDR: stochastic gradient descent with warm restarts. ICLR 2017.
    """

    lr: float
    total_steps: int
    final: float = 0.0

    def __post_init__(self) -> None:
        non_negative("cosine", "lr", self.lr)
        integer("cosine: total_steps", self.total_steps, 1, _REMEDY)
        non_negative("cosine", "final", self.final)

    def __call__(self, step: int) -> float:
        if step >= self.total_steps:
            return self.final
        return self.final + (self.lr - self.final) * (1.0 + math.cos(math.pi * step / self.total_steps)) / 2.0


@dataclass(frozen=True)
class linear_warmup:
    """Linear warm-up: lr(step) = schedule(step) * min(1, (step + 1) / warmup_steps), for training with large batches.

    The schedule is not shifted: its step 1000 is step 1000 of the job. The first update uses 1/warmup_steps of the
    rate, and update number warmup_steps is the first with the full rate.

    Arguments:
        schedule: schedule, or a number for a constant learning rate.
        warmup_steps: number of steps, >= 0; 0 and 1 mean no warm-up.

    >>> [linear_warmup(0.4, warmup_steps=4)(step) for step in (0, 1, 3, 100)]
    [0.1, 0.2, 0.4, 0.4]

    P. Goyal et al.: Accurate, large minibatch SGD: training ImageNet in 1 hour. arXiv:1706.02677, 2017.
    """

    schedule: Schedule | float
    warmup_steps: int

    def __post_init__(self) -> None:
        if not callable(self.schedule):
            object.__setattr__(self, "schedule", constant(self.schedule))
        integer("linear_warmup: warmup_steps", self.warmup_steps, 0, _REMEDY)

    def __call__(self, step: int) -> float:
        assert callable(self.schedule)  # __post_init__ has replaced a number
        full = self.schedule(step)
        return full if step + 1 >= self.warmup_steps else full * (step + 1) / self.warmup_steps
