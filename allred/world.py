"""The world: the state of this rank from init() to shutdown().

A process has at most one world, which all of its threads see. Only `allred.testing.threads` overrides it: there each
thread is a rank with a world of its own.
"""

import dataclasses
import os
import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from allred.config import Config
from allred.counters import Counters
from allred.errors import AllredError, NotInitializedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from allred.client.call import ClientGroup
    from allred.cluster.topology import Topology
    from allred.comm.communicator import Communicator
    from allred.comm.process_set import ProcessSets
    from allred.comm.replicas import Replica
    from allred.comm.work import WorkQueue
    from allred.ps.context import Context
    from allred.watch.watcher_client import WatcherClient


@dataclasses.dataclass(eq=False)
class World:
    """The state of one rank. Made by init(), closed by shutdown().

    communicator: of all workers; inside functions.within() of a process set. reason: why its backend was selected.
    workers_job: the name of the workers' job. cores: this rank's share of the cores of its node.
    ps: mode ps; None in other modes. watcher: the connection to the watcher; None without one.
    in_cluster: whether allred.Server() made this world. client_group: the tasks of a cluster
    with clients; None without clients.
    queues: the queues that make progress in every wait of this rank. iterations: the running iterations over batches;
    data/loader.py makes it on first use.
    join_observers: called with the rank that joined last. replicas: the parameters and states that `join` makes equal.
    failure: the error of another rank, to be raised here (testing.threads; between processes the watcher has it).
    counters: of the steps of this rank, for monitors.
    """

    topology: "Topology"
    communicator: "Communicator" = None  # type: ignore[assignment]  # tests have worlds without communicators
    config: Config = dataclasses.field(default_factory=Config)
    reason: str = ""
    workers_job: str = "worker"
    cores: int = 1
    process_sets: "ProcessSets | None" = None
    ps: "Context | None" = None
    watcher: "WatcherClient | None" = None
    in_cluster: bool = False
    client_group: "ClientGroup | None" = None
    queues: "WeakSet[WorkQueue]" = dataclasses.field(default_factory=WeakSet)
    iterations: Any = None
    join_observers: "list[Callable[[int], None]]" = dataclasses.field(default_factory=list)
    replicas: "WeakSet[Replica]" = dataclasses.field(default_factory=WeakSet)
    failure: AllredError | None = None
    counters: Counters = dataclasses.field(default_factory=Counters)
    process: int = dataclasses.field(default_factory=os.getpid)  # the rank's own process, not a fork


_DEFAULTS = Config()

_world: World | None = None
_overrides: threading.local | None = None  # `world` of a thread, while testing.threads runs
_last_watcher: Any = None  # of a world that was closed after a verdict, which still decides how this process exits


def install(world: World | None) -> None:
    """Set the world of this process; None removes it."""
    global _world, _last_watcher
    _last_watcher = _world.watcher if _world is not None else None
    _world = world


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


def queues() -> "WeakSet[WorkQueue]":
    """Return the queues that make progress in every wait of this rank; none without a world."""
    here = current_or_none()
    return WeakSet() if here is None else here.queues


def error() -> AllredError | None:
    """Return the error that this rank has to raise because another rank failed; None if there is none."""
    link = watcher()
    if link is not None and link.has_error:
        return link.error()
    here = current_or_none()
    return None if here is None else here.failure
