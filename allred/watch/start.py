"""Starting the watchers, one on every node, and connecting each rank to its node's. Collective, in init()."""

import contextlib
import ipaddress
import secrets
import socket
from typing import Any

from allred import detached, world
from allred.cluster import report
from allred.cluster.topology import Topology
from allred.config import Config
from allred.watch.line import Line


def start(
    communicator: Any, shape: Topology, config: Config, reach: str, spares: tuple[int, ...] = (), launcher: bool = True
) -> None:
    """Have all ranks of `communicator` watched. `reach`: how the watchers reach each other: "" with one node, "host" if
    all nodes are on this host, else "network".
    `spares`: the ranks without which the others can go on, if the setting `worker_failure` says that they do.
    `launcher`: whether one has started the ranks, which ends them all when one of them ends the job.

    Where that cannot be, a line says so, and the job goes on without.
    """
    if shape.size == 1 or not config.watcher:
        return
    spares = spares if config.worker_failure == "go_on" else ()
    hosts = communicator.allgather_object(socket.gethostname()).wait() if reach == "network" else []
    address = own_address(hosts) if reach == "network" and shape.rank == 0 else "127.0.0.1" if reach else ""
    mine = _spawn(shape, config, address, spares, launcher) if shape.local_rank == 0 else None
    found = communicator.allgather_object(mine).wait()
    here = found[shape.leader]
    problem = here["problem"]
    if not problem:
        chief = {key: found[0][key] for key in ("address", "port", "token")}
        hello = {"rank": shape.rank, "host": socket.gethostname(), "token": here["token"], "chief": chief}
        try:
            world.current().watcher = Line(here["name"], hello, shape.local_rank == 0, config.stall_warning_s)
        except OSError as error:
            problem = f"{error.strerror or error}"
    problems = communicator.allgather_object(problem).wait()
    bad = {rank: text for rank, text in enumerate(problems) if text}
    if bad:
        rank, text = next(iter(bad.items()))
        report.say(
            f"no watcher for {len(bad)} of {shape.size} ranks (rank {rank}: {text}); there a rank that stalls is "
            "noticed by the time limit only"
        )


def _spawn(shape: Topology, config: Config, address: str, spares: tuple[int, ...], launcher: bool) -> dict[str, Any]:
    """Where this node's watcher is: name, port, address, token; or the problem, in words."""
    token = secrets.token_hex(16)
    settings = {
        "token": token, "ranks": shape.local_size, "size": shape.size, "nodes": shape.nodes,
        "warn_s": config.stall_warning_s, "chief": shape.rank == 0, "address": address,
        "spares": spares, "launcher": launcher,
    }  # fmt: skip
    here = {"token": token, "address": address, "name": "", "port": 0}
    return here | detached.start("allred.watch.process", settings)


def own_address(hosts: list[str]) -> str:
    """Return the address at which the other `hosts` reach this one.

    The first of these that is not loopback: the address of this host's name, the source address towards the first other
    host, the source address of the default route. Else loopback; then the watchers of other nodes report that they
    cannot reach this one.
    """
    here = socket.gethostname()
    for host in (here, *[host for host in hosts if host != here][:1], "192.0.2.1"):  # reserved by RFC 5737: no host's
        with contextlib.suppress(OSError):
            found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
            family, _, _, _, where = min(found, key=lambda each: each[0])  # IPv4 first
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(where)  # sends nothing: the kernel chooses the source address
                address = str(probe.getsockname()[0])
            kind = ipaddress.ip_address(address)
            if not kind.is_loopback and not (kind.version == 6 and kind.is_link_local):  # that needs a scope
                return address
    return "127.0.0.1"


def name_this(words: str) -> None:
    """What this rank is, for what the watchers say of it; see `Line.known_as`."""
    if (watcher := world.watcher()) is not None:
        watcher.known_as(words)


def stop() -> None:
    """This process is no rank any more."""
    here = world.current()
    if here.watcher is not None and here.watcher.verdict is None:
        here.watcher.tell("left")
        here.watcher.close()
        here.watcher = None
