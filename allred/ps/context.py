"""Context of mode ps on this rank: which ranks are parameter servers, and whether this worker still uses them."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from allred import world
from allred.errors import NotInitializedError


@dataclasses.dataclass(eq=False)
class Context:
    """Mode ps on this rank, from init() to shutdown(). World ranks 0 to servers - 1 are servers, the others workers.

    comm: mpi4py communicator of these ranks, used only between workers and servers. nodes: the node of each rank.
    config: the settings. joins: servers may be in `Server.join()`, where they take the optimizer of worker 0.
    has_optimizer: an optimizer has registered with the servers. servers_return: the server processes continue when the
    last worker has left; None until it is known. leave_servers: tells the servers that this worker leaves.
    """

    comm: Any
    rank: int
    servers: int
    nodes: tuple[int, ...]
    config: Any
    joins: bool = False
    has_optimizer: bool = False
    servers_return: bool | None = None
    leave_servers: Callable[[], None] | None = None
    process: int = dataclasses.field(default_factory=os.getpid)

    @property
    def workers(self) -> int:
        return len(self.nodes) - self.servers

    @property
    def serves(self) -> bool:
        return self.rank < self.servers

    @property
    def worker(self) -> int:
        """The number of this worker."""
        return self.rank - self.servers


CONTEXT = world.Slot[Context | None](lambda: None)  # None in other modes


def _find() -> Context | None:
    here = world.current_or_none()
    return None if here is None else CONTEXT.of(here)


def is_active() -> bool:
    """Whether mode ps is active."""
    return _find() is not None


def serves() -> bool:
    """Whether this rank is a parameter server."""
    here = _find()
    return here is not None and here.serves


def current() -> Context:
    """Return the context. Raises NotInitializedError outside mode ps."""
    here = CONTEXT.of(world.current())
    if here is None:
        raise NotInitializedError("this needs mode ps: allred.init(mode='ps'), or ALLRED_MODE=ps")
    return here


def leave() -> bool:
    """End mode ps in this process. A worker tells the servers that it makes no more requests; a forked process does
    not. Return whether the programs of the servers end when all workers have left."""
    here = current()
    if os.getpid() != here.process:
        return False
    if here.leave_servers is not None:
        here.leave_servers()
    elif not here.serves:
        from allred.ps.mpi_transport import send_leave  # imports MPI

        send_leave(here.comm, here.servers)
    CONTEXT.set(world.current(), None)
    return not (here.joins if here.servers_return is None else here.servers_return)
