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
    """A part of it may be missing: "", None, and "" for the unit, which is cpu:0 or gpu:1."""

    job: str = ""
    task: int | None = None
    unit: str = ""

    def within(self, outer: "Place") -> "Place":
        """What is missing here as it is there."""
        job = self.job or outer.job
        task = outer.task if self.task is None and job == outer.job else self.task
        return Place(job, task, self.unit or outer.unit)

    @property
    def task_name(self) -> str:
        """Without the unit; a job's first task where none is given."""
        return task_name(self.job, self.task or 0)

    def __str__(self) -> str:
        return f"{self.task_name}/{self.unit or 'cpu:0'}"


def parse(text: str) -> Place:
    """The place that a string names. Raises InputError.

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
    """What `device` takes besides a string: `allred.replica_device_setter` makes one."""

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
    """Inside this block functions run at a place (`ClientSession.run`), and variables live there (`allred.variable`).

        with allred.device("/job:worker/task:1"):
            y = session.run(function, x)

    place: "/job:NAME/task:NUMBER", parts of it, or what `allred.replica_device_setter` gives. Blocks may stand in each
    other: what the inner one leaves out is as in the outer one. None: as if there was no outer block.
    Raises InputError for what names no place.
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
    """Where a function is to run, as far as the blocks around this line say."""
    found = Place()
    for block in _blocks.get():
        found = block.of_function().within(found)
    return found


def of_variable(tensor: Any) -> Place:
    """Where a variable, which has a name, shape and dtype, is to live."""
    found = Place()
    for block in _blocks.get():
        found = block.of_variable(tensor).within(found)
    return found
