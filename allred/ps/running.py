"""What init() made for mode ps, on this rank."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from allred import world
from allred.errors import NotInitializedError


@dataclasses.dataclass(eq=False)
class Running:
    """World ranks 0 to servers - 1 serve, the others work. `nodes` names the node of each rank. `comm`: of all ranks,
    for nothing but the traffic between workers and servers. `config`: the settings. `joins`: servers may be in
    `Server.join()`, where they learn from worker 0 what to serve with. `taken`: an optimizer has registered with the
    servers. `farewell`: what this worker does when it leaves. `process`: of this rank, not that of its forks."""

    comm: Any
    rank: int
    servers: int
    nodes: tuple[int, ...]
    config: Any
    joins: bool = False
    taken: bool = False
    farewell: Callable[[], None] | None = None
    process: int = dataclasses.field(default_factory=os.getpid)

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


_left = False  # by this worker, for good: the servers do not come back


def running() -> bool:
    """Whether mode ps runs."""
    return _find() is not None


def on_leave(farewell: Callable[[], None]) -> None:
    """Have this called when this worker leaves; it tells the servers so."""
    current().farewell = farewell


def leave() -> None:
    """This worker asks for nothing any more. In a fork of it nothing happens."""
    global _left
    here = current()
    if os.getpid() != here.process:
        return
    if here.farewell is not None:
        here.farewell()
    else:
        from allred.ps.client import leave  # imports MPI

        leave(here)
    world.current().ps = None
    _left = True


def left() -> bool:
    """Whether this process was a worker before, and its servers have left since."""
    return _left


def take() -> bool:
    """Whether this is the first optimizer that registers with the servers."""
    here = current()
    first, here.taken = not here.taken, True
    return first


def serves() -> bool:
    """Whether this rank is a parameter server."""
    here = _find()
    return here is not None and here.serves


def _find() -> Running | None:
    here = world.current_or_none()
    return None if here is None else here.ps


def current() -> Running:
    """Raises NotInitializedError where mode ps does not run."""
    here = world.current().ps
    if here is None:
        raise NotInitializedError("this needs mode ps: allred.init(mode='ps'), or ALLRED_MODE=ps")
    return here
