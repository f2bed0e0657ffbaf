"""Starting the watchers, one on every node, and connecting each rank to its node's. Collective, in init()."""

import secrets
import socket
from typing import Any

from allred import detached
from allred.cluster import report
from allred.cluster.topology import Topology
from allred.config import Config
from allred.watch import line
from allred.watch.line import Line
from allred.watch.link import own_addresses


def start(
    communicator: Any, world: Topology, config: Config, reach: str, spares: tuple[int, ...] = (), launcher: bool = True
) -> None:
    """Have all ranks of `communicator` watched. `reach`: how the watchers reach each other, see `process.Watcher`.
    `spares`: the ranks without which the others can go on, if the setting `worker_failure` says that they do.
    `launcher`: whether one has started the ranks, which ends them all when one of them ends the job.

    Where that cannot be, a line says so, and the job goes on without.
    """
    if world.size == 1 or not config.watcher:
        return
    spares = spares if config.worker_failure == "go_on" else ()
    mine = _spawn(world, config, reach, spares, launcher) if world.local_rank == 0 else None
    found = communicator.allgather_object(mine).wait()
    here = found[world.leader]
    problem = here["problem"]
    if not problem:
        chief = {key: found[0][key] for key in ("addresses", "port", "token")}
        hello = {"rank": world.rank, "host": socket.gethostname(), "token": here["token"], "chief": chief}
        try:
            line.current = Line(here["name"], hello, world.local_rank == 0, config.stall_warning_s)
        except OSError as error:
            problem = f"{error.strerror or error}"
    problems = communicator.allgather_object(problem).wait()
    bad = {rank: text for rank, text in enumerate(problems) if text}
    if bad:
        rank, text = next(iter(bad.items()))
        report.say(
            f"no watcher for {len(bad)} of {world.size} ranks (rank {rank}: {text}); there a rank that stalls is "
            "noticed by the time limit only"
        )


def _spawn(world: Topology, config: Config, reach: str, spares: tuple[int, ...], launcher: bool) -> dict[str, Any]:
    """Where this node's watcher is: name, port, addresses, token; or the problem, in words."""
    token = secrets.token_hex(16)
    settings = {
        "token": token, "ranks": world.local_size, "size": world.size, "nodes": world.nodes,
        "warn_s": config.stall_warning_s, "chief": world.rank == 0, "reach": reach,
        "spares": spares, "launcher": launcher,
    }  # fmt: skip
    addresses = own_addresses() if reach == "network" else ["127.0.0.1"]
    here = {"token": token, "addresses": addresses, "name": "", "port": 0}
    return here | detached.start("allred.watch.process", settings)


def name_this(words: str) -> None:
    """What this rank is, for what the watchers say of it; see `Line.known_as`."""
    if line.current is not None:
        line.current.known_as(words)


def stop() -> None:
    """This process is no rank any more."""
    if line.current is not None and line.current.verdict is None:
        line.current.tell("left")
        line.current.close()
        line.current = None
