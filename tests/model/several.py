"""Scenarios of several optimizers at once, and collectives between their steps: scenarios of other surfaces whose
actions alternate.
"""

import dataclasses
import importlib.util
import pathlib
import random
from collections.abc import Iterator
from typing import Any

import array_nests
import collectives
import optimizers

MODULES = {"numpy": optimizers, "collectives": collectives}
if importlib.util.find_spec("torch"):
    import hooked

    MODULES["torch"] = hooked


@dataclasses.dataclass(frozen=True, repr=False)
class Scenario(array_nests.Plan):
    parts: tuple[tuple[str, Any], ...]  # names of modules, and their scenarios
    seed: int  # of the order of the actions


def scenario(rng: random.Random, size: int) -> Scenario:
    count = rng.randint(2, 3)
    parts: list[tuple[str, Any]] = []
    while len(parts) < count:
        name = rng.choice([name for name in MODULES for _ in range(1 + (name != "collectives"))])
        part = MODULES[name].scenario(rng, size)
        if _fits(part, [other for _, other in parts]):
            parts.append((name, part))
    return Scenario(tuple(parts), rng.randrange(2**16))


def _fits(part: Any, others: list[Any]) -> bool:
    """Whether a scenario can run beside others: settings of the process are equal. A join would end an incomplete step
    of another optimizer."""
    if any(action.kind == "join" for action in getattr(part, "actions", ())):
        return False
    settings = [
        {getattr(each, name) for each in (part, *others) if hasattr(each, name)} for name in ("check_steps", "overlap")
    ]
    return all(len(values) <= 1 for values in settings)


def check(plan: Scenario, directory: pathlib.Path) -> Iterator[tuple[str, Any]]:
    rng = random.Random(plan.seed)
    running = [MODULES[name].check(part, directory / str(index)) for index, (name, part) in enumerate(plan.parts)]
    while running:
        chosen = rng.choice(running)
        try:
            yield next(chosen)
        except StopIteration:
            running.remove(chosen)
