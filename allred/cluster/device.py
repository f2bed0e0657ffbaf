"""`allred.device`: where functions run and variables live, in TensorFlow's words: "/job:worker/task:1/cpu:0"."""

import contextlib
import contextvars
import dataclasses
import re
from collections.abc import Iterator
from typing import Any, Protocol

from allred.cluster.spec import task_name
from allred.errors import InputError


@dataclasses.dataclass(frozen=True)
class Place:
    """A task and a unit, such as cpu:0 or gpu:1. Parts may be missing: "", None, ""."""

    job: str = ""
    task: int | None = None
    unit: str = ""

    def within(self, outer: "Place") -> "Place":
        """Return this place with its missing parts taken from `outer`."""
        job = self.job or outer.job
        task = outer.task if self.task is None and job == outer.job else self.task
        return Place(job, task, self.unit or outer.unit)

    @property
    def task_name(self) -> str:
        """The name of the task; task 0 if the task is missing."""
        return task_name(self.job, self.task or 0)

    def __str__(self) -> str:
        return f"{self.task_name}/{self.unit or 'cpu:0'}"


def parse(text: str) -> Place:
    """Return the place that a string names. Raises InputError if it names none.

    >>> parse("/job:ps/task:1")
    Place(job='ps', task=1, unit='')
    >>> str(parse("/job:worker/replica:0/device:CPU:0"))
    '/job:worker/task:0/cpu:0'
    """
    pattern = r"(/job:(?P<job>\w+))?(/replica:0)?(/task:(?P<task>\d+))?(/(device:)?(?P<unit>[cg]pu:\d+))?"
    found = re.fullmatch(pattern, text, flags=re.IGNORECASE) if isinstance(text, str) else None
    if found is None:
        raise InputError(f"allred.device({text!r}): expected /job:NAME/task:NUMBER, such as /job:worker/task:1")
    task = found["task"]
    return Place(found["job"] or "", None if task is None else int(task), (found["unit"] or "").lower())


class Chooser(Protocol):
    """Chooses places for functions and variables; `allred.replica_device_setter` returns one."""

    def of_function(self) -> Place: ...

    def of_variable(self, tensor: Any) -> Place: ...


@dataclasses.dataclass(frozen=True)
class _Fixed:
    place: Place

    def of_function(self) -> Place:
        return self.place

    def of_variable(self, tensor: Any) -> Place:
        return self.place


_blocks: contextvars.ContextVar[tuple[Chooser, ...]] = contextvars.ContextVar("allred.device", default=())


@contextlib.contextmanager
def device(place: "str | Chooser | None") -> Iterator[None]:
    """Inside this block functions run at a place (`ClientSession.run`), and variables are stored there
    (`allred.variable`).

        with allred.device("/job:worker/task:1"):
            y = session.run(function, x)

    place: "/job:NAME/task:NUMBER", parts of it, or the result of `allred.replica_device_setter`. In nested blocks the
    inner block takes missing parts from the outer one. None: ignore the outer blocks.
    Raises InputError if the string names no place.
    """
    if place is None:
        blocks: tuple[Chooser, ...] = ()
    elif isinstance(place, str) or not hasattr(place, "of_variable"):
        blocks = (*_blocks.get(), _Fixed(parse(place)))  # type: ignore[arg-type]
    else:
        blocks = (*_blocks.get(), place)
    token = _blocks.set(blocks)
    try:
        yield
    finally:
        _blocks.reset(token)


def of_function() -> Place:
    """Return the place for a function, from the blocks around the caller."""
    found = Place()
    for block in _blocks.get():
        found = block.of_function().within(found)
    return found


def of_variable(tensor: Any) -> Place:
    """Return the place for a variable, which has a name, shape and dtype."""
    found = Place()
    for block in _blocks.get():
        found = block.of_variable(tensor).within(found)
    return found
