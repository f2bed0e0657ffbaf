"""Learning-rate schedules: callables from the number of updates done so far, 0 at the first, to a learning rate.

Any such callable will do as an optimizer's `lr`; these are the common ones. They are frozen records, so they can be
compared, pickled and sent to another rank, and their repr is the call that makes them. Steps count optimizer updates
over the whole job, not epochs: multiply by the steps of an epoch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from allred.errors import InputError
from allred.optim.hyper import non_negative, positive, whole

# The names are written like functions because that is how they are used.
# ruff: noqa: N801

Schedule = Callable[[int], float]
"""From the number of updates done so far, 0 at the first one, to the learning rate of the next."""


@dataclass(frozen=True)
class constant:
    """lr(step) = lr.

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
    """lr(step) = lr * decay_rate ** (step / decay_steps); with `staircase` the exponent is rounded down.

    With decay_steps=1 this is torch's ExponentialLR; with staircase=True its StepLR: a factor every so many steps.

    >>> [exponential_decay(0.8, decay_steps=10, decay_rate=0.5, staircase=True)(step) for step in (0, 9, 10, 20)]
    [0.8, 0.8, 0.4, 0.2]
    """

    lr: float
    decay_steps: int
    decay_rate: float
    staircase: bool = False

    def __post_init__(self) -> None:
        non_negative("exponential_decay", "lr", self.lr)
        whole("exponential_decay", "decay_steps", self.decay_steps, least=1)
        positive("exponential_decay", "decay_rate", self.decay_rate)

    def __call__(self, step: int) -> float:
        exponent = step // self.decay_steps if self.staircase else step / self.decay_steps
        return float(self.lr * self.decay_rate**exponent)


@dataclass(frozen=True)
class step_decay:
    """lr(step) = lr * factor ** (number of milestones <= step), torch's MultiStepLR: "divide by 10 at 30, 60 and 80".

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
        milestones = tuple(whole("step_decay", "each milestone", milestone, least=0) for milestone in self.milestones)
        if list(milestones) != sorted(set(milestones)):
            raise InputError(f"step_decay: milestones must increase, but are {milestones}; sort them, each once")
        object.__setattr__(self, "milestones", milestones)  # a list was welcome, but would not be frozen

    def __call__(self, step: int) -> float:
        return float(self.lr * self.factor ** sum(milestone <= step for milestone in self.milestones))


@dataclass(frozen=True)
class cosine:
    """lr(step) = final + (lr - final) * (1 + cos(pi * step / total_steps)) / 2, and `final` from total_steps on.

    `final` is a learning rate, not a fraction: eta_min of torch's CosineAnnealingLR, which rises again afterwards.

    >>> [round(cosine(0.2, total_steps=100)(step), 6) for step in (0, 50, 100, 150)]
    [0.2, 0.1, 0.0, 0.0]

    I. Loshchilov, F. Hutter: SGDR: stochastic gradient descent with warm restarts. ICLR 2017.
    """

    lr: float
    total_steps: int
    final: float = 0.0

    def __post_init__(self) -> None:
        non_negative("cosine", "lr", self.lr)
        whole("cosine", "total_steps", self.total_steps, least=1)
        non_negative("cosine", "final", self.final)

    def __call__(self, step: int) -> float:
        if step >= self.total_steps:
            return self.final
        return self.final + (self.lr - self.final) * (1.0 + math.cos(math.pi * step / self.total_steps)) / 2.0


@dataclass(frozen=True)
class linear_warmup:
    """lr(step) = schedule(step) * min(1, (step + 1) / warmup_steps), the start of training with large batches.

    The schedule is not shifted: its step 1000 stays the job's step 1000. The first update already moves (by
    1/warmup_steps), and update number warmup_steps is the first with the full rate.

    Arguments:
        schedule: a schedule, or a number for a constant one.
        warmup_steps: length of the rise, >= 0; at 0 and 1 there is none.

    >>> [linear_warmup(0.4, warmup_steps=4)(step) for step in (0, 1, 3, 100)]
    [0.1, 0.2, 0.4, 0.4]

    P. Goyal et al.: Accurate, large minibatch SGD: training ImageNet in 1 hour. arXiv:1706.02677, 2017.
    """

    schedule: Schedule | float
    warmup_steps: int

    def __post_init__(self) -> None:
        if not callable(self.schedule):
            object.__setattr__(self, "schedule", constant(self.schedule))
        whole("linear_warmup", "warmup_steps", self.warmup_steps, least=0)

    def __call__(self, step: int) -> float:
        assert callable(self.schedule)  # since __post_init__
        full = self.schedule(step)
        return full if step + 1 >= self.warmup_steps else full * (step + 1) / self.warmup_steps
