"""The table of optimizers: every contract test runs once for each row. A new optimizer adds its rows here.

A row holds the constructor's arguments and the first step in closed form, written from the paper and not from the code:
new parameter = first(p, g). The large eps of 1/8 shows where it stands in the formula, and keeps float16 in range.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from allred import optim


@dataclass(frozen=True)
class Case:
    name: str
    first: Callable[[Any, Any], Any]
    hyper: dict[str, Any] = field(default_factory=dict)
    slots: tuple[str, ...] = ()

    def make(self, **changed: Any) -> optim.Optimizer:
        return getattr(optim, self.name)(**{**self.hyper, **changed})

    def __str__(self) -> str:
        return f"{self.name}({','.join(f'{key}={value}' for key, value in self.hyper.items() if key != 'lr')})"


E8 = {"lr": 0.5, "eps": 0.125}
CASES = [
    Case("SGD", lambda p, g: p - 0.5 * g, {"lr": 0.5}),
    Case("SGD", lambda p, g: p - 0.5 * (g + 0.25 * p), {"lr": 0.5, "weight_decay": 0.25}),
    Case("SGD", lambda p, g: p - 0.5 * g, {"lr": 0.5, "momentum": 0.9}, ("momentum_buffer",)),
    Case(
        "SGD",
        lambda p, g: p - 0.5 * 1.75 * (g + 0.25 * p),
        {"lr": 0.5, "momentum": 0.75, "nesterov": True, "weight_decay": 0.25},
        ("momentum_buffer",),
    ),
    Case("Adagrad", lambda p, g: p - 0.5 * g / (abs(g) + 0.125), E8, ("sum",)),
    Case(
        "Adagrad",
        lambda p, g: p - 0.5 * (g + 0.25 * p) / (np.sqrt(0.1 + (g + 0.25 * p) ** 2) + 0.125),
        {**E8, "initial_accumulator": 0.1, "weight_decay": 0.25},
        ("sum",),
    ),
    Case(
        "RMSProp",
        lambda p, g: p - 0.5 * g / (np.sqrt(0.25 * g**2) + 0.125),
        {**E8, "decay": 0.75},
        ("square_avg",),
    ),
    Case(
        "RMSProp",
        lambda p, g: p - 0.5 * (g + 0.25 * p) / (np.sqrt(0.75 * 0.25) * abs(g + 0.25 * p) + 0.125),
        {**E8, "decay": 0.75, "momentum": 0.9, "centered": True, "weight_decay": 0.25},
        ("square_avg", "grad_avg", "momentum_buffer"),
    ),
    Case("Adam", lambda p, g: p - 0.5 * g / (abs(g) + 0.125), {**E8, "betas": (0.8, 0.9)}, ("exp_avg", "exp_avg_sq")),
    Case(
        "Adam",
        lambda p, g: p - 0.5 * (g + 0.25 * p) / (abs(g + 0.25 * p) + 0.125),
        {**E8, "weight_decay": 0.25},
        ("exp_avg", "exp_avg_sq"),
    ),
    Case(
        "AdamW",
        lambda p, g: p - 0.5 * 0.25 * p - 0.5 * g / (abs(g) + 0.125),
        {**E8, "weight_decay": 0.25},
        ("exp_avg", "exp_avg_sq"),
    ),
]


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture
def cases() -> list[Case]:
    return CASES


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(1)
