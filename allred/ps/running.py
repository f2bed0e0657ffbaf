"""What init() made for mode ps, on this rank."""

import dataclasses
from typing import Any

from allred.cluster import topology
from allred.errors import NotInitializedError


@dataclasses.dataclass(frozen=True)
class Running:
    """World ranks 0 to servers - 1 serve, the others work. `nodes` names the node of each rank. `comm`: of all ranks,
    for nothing but the traffic between workers and servers. `config`: the settings."""

    comm: Any
    rank: int
    servers: int
    nodes: tuple[int, ...]
    config: Any

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


def install(running: Running | None) -> None:
    """Make it the one that `current` gives; None to take it away. For allred.init and allred.shutdown."""
    global _current, _taken
    _current, _taken = running, False


def running() -> bool:
    """Whether mode ps runs."""
    return _current is not None


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
