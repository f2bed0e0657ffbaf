"""What init() made for mode ps, on this rank."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from allred.cluster import topology
from allred.errors import NotInitializedError


@dataclasses.dataclass(frozen=True)
class Running:
    """World ranks 0 to servers - 1 serve, the others work. `nodes` names the node of each rank. `comm`: of all ranks,
    for nothing but the traffic between workers and servers. `config`: the settings. `joins`: servers may be in
    `Server.join()`, where they learn from worker 0 what to serve with."""

    comm: Any
    rank: int
    servers: int
    nodes: tuple[int, ...]
    config: Any
    joins: bool = False

    @property
    def workers(self) -> int:
        return len(self.nodes) - self.servers

    @property
    def serves(self) -> bool:
        """Whether this rank is a server."""
        return self.rank < self.servers

    @property
    def worker(self) -> int:
        """This worker's number."""
        return self.rank - self.servers


_current: Running | None = None
_taken = False  # an optimizer has registered with the servers
_process = 0  # of this rank: not that of its forks
_left = False  # by this worker, for good: the servers do not come back
_farewell: Callable[[], None] | None = None  # what it does then


def install(running: Running | None) -> None:
    """Make it the one that `current` gives; None to take it away. For allred.init and allred.shutdown."""
    global _current, _taken, _farewell, _process
    _current, _taken, _farewell, _process = running, False, None, os.getpid()


def running() -> bool:
    """Whether mode ps runs."""
    return _current is not None


def on_leave(farewell: Callable[[], None]) -> None:
    """Have this called when this worker leaves; it tells the servers so."""
    global _farewell
    _farewell = farewell


def leave() -> None:
    """This worker asks for nothing any more. In a fork of it nothing happens."""
    global _left
    if os.getpid() != _process:
        return
    if _farewell is not None:
        _farewell()
    else:
        from allred.ps.client import leave  # imports MPI

        leave(current())
    install(None)
    _left = True


def left() -> bool:
    """Whether this process was a worker before, and its servers have left since."""
    return _left


def take() -> bool:
    """Whether this is the first optimizer that registers with the servers."""
    global _taken
    first, _taken = not _taken, True
    return first


def serves() -> bool:
    """Whether this rank is a parameter server."""
    return _current is not None and _current.serves


def current() -> Running:
    """Raises NotInitializedError where mode ps does not run."""
    if _current is None:
        topology.current()  # raises its own words
        raise NotInitializedError("this needs mode ps: allred.init(mode='ps'), or ALLRED_MODE=ps")
    return _current
