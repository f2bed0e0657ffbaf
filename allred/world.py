"""The world: the state of this rank from init() to shutdown().

A process has at most one world, which all of its threads see. Only `allred.testing.threads` overrides it: there each
thread is a rank with a world of its own.
"""

import dataclasses
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakSet

from allred.config import Config
from allred.counters import Counters
from allred.errors import AllredError, NotInitializedError
from allred.numbering import Numbering

if TYPE_CHECKING:
    from allred.watch.watcher_client import WatcherClient

T = TypeVar("T")


@dataclasses.dataclass(eq=False)
class World:
    """The state of one rank that all layers share. Made by init(), closed by shutdown().

    topology: the numbers of this rank. communicator: of all workers; inside functions.within() of a process set. Its
    class is above this module: `functions.current()` returns it with its type. reason: why its backend was selected.
    workers_job: the name of the workers' job. cores: this rank's share of the cores of its node.
    watcher: the connection to the watcher; None without one. in_cluster: whether allred.Server() made this world.
    queues: the `WorkQueue`s that make progress in every wait of this rank.
    failure: the error of another rank, to be raised here (testing.threads; between processes the watcher has it).
    counters: of the steps of this rank, for monitors. slots: see `Slot`.
    generation: the number of this world in the job, from 1; the same on all ranks. Headers carry it, so an operation of
    a rank that is still in an older world is an error.
    recovery: the `Recovery`, which forms the next world, in a job of `allred run --elastic`; else None. Its class is
    above this module.
    """

    topology: Numbering
    communicator: Any = None  # tests have worlds without communicators
    config: Config = dataclasses.field(default_factory=Config)
    reason: str = ""
    workers_job: str = "worker"
    cores: int = 1
    watcher: "WatcherClient | None" = None
    in_cluster: bool = False
    queues: WeakSet[Any] = dataclasses.field(default_factory=WeakSet)
    failure: AllredError | None = None
    counters: Counters = dataclasses.field(default_factory=Counters)
    process: int = dataclasses.field(default_factory=os.getpid)  # the rank's own process, not a fork
    slots: "dict[Slot[Any], Any]" = dataclasses.field(default_factory=dict)
    generation: int = 1
    recovery: Any = None


class Slot(Generic[T]):
    """Storage in each world for a module above this one, like `threading.local` for worlds. first: makes the first one.

    >>> from allred.numbering import number
    >>> counts, here = Slot(list), World(number([0], 0))
    >>> counts.of(here).append(3)
    >>> counts.of(here)
    [3]
    """

    def __init__(self, first: Callable[[], T]) -> None:
        self._first = first

    def of(self, here: World) -> T:
        """Return the value of a world."""
        if self not in here.slots:
            here.slots.setdefault(self, self._first())  # two threads may be here at once
        return here.slots[self]  # type: ignore[no-any-return]

    def set(self, here: World, value: T) -> None:
        here.slots[self] = value


_DEFAULTS = Config()

_world: World | None = None
_overrides: threading.local | None = None  # `world` of a thread, while testing.threads runs
last_generation = 0  # the generation of the last world of this process
_last_watcher: Any = None  # of a world that was closed after a verdict, which still decides how this process exits


def install(world: World | None) -> None:
    """Set the world of this process; None removes it."""
    global _world, _last_watcher, last_generation
    _last_watcher = _world.watcher if _world is not None else None
    _world = world
    if world is not None:
        last_generation = world.generation


def note_generation(number: int) -> None:
    """Note the number of a world that other processes of this job have had."""
    global last_generation
    last_generation = max(last_generation, number)


def override(overrides: threading.local | None) -> None:
    """Let threads have worlds of their own, the attribute `world` of `overrides`; None: no more."""
    global _overrides
    _overrides = overrides


def current_or_none() -> World | None:
    """Return the world; None before init() and after shutdown()."""
    return _world if _overrides is None else getattr(_overrides, "world", _world)


def current() -> World:
    """Return the world. Raises NotInitializedError before init() and after shutdown()."""
    here = _world if _overrides is None else getattr(_overrides, "world", _world)
    if here is None:
        raise NotInitializedError(
            "allred is not initialized: call allred.init() first; after allred.shutdown() it may be called again"
        )
    return here


def is_initialized() -> bool:
    """Return whether this process is a rank: after init(), before shutdown()."""
    return current_or_none() is not None


def config() -> Config:
    """Return the settings; the defaults without a world."""
    here = current_or_none()
    return _DEFAULTS if here is None else here.config


def watcher() -> "WatcherClient | None":
    """Return the connection to the watcher; None without one."""
    here = _world if _overrides is None else getattr(_overrides, "world", _world)
    return _last_watcher if here is None else here.watcher


def queues() -> WeakSet[Any]:
    """Return the queues that make progress in every wait of this rank; none without a world."""
    here = current_or_none()
    return WeakSet() if here is None else here.queues


def error() -> AllredError | None:
    """Return the error that this rank has to raise because another rank failed; None if there is none."""
    link = watcher()
    if link is not None and link.has_error:
        return link.error()
    here = current_or_none()
    if here is None or here.recovery is None:
        return None if here is None else here.failure
    error: AllredError | None = here.recovery.error()
    return error
