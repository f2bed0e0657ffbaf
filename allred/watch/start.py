"""Starts the watchers in init(), one on every node, and connects the ranks to them; the time limit of MPI_Init."""

import contextlib
import dataclasses
import ipaddress
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from allred import launcher_variables, log, native, world
from allred.cluster.launcher import launched_size
from allred.config import Config
from allred.numbering import Numbering
from allred.runtime import detached
from allred.runtime.timings import LEAST_MPI_INIT_S
from allred.watch import runner_link
from allred.watch.records import WatcherSettings
from allred.watch.watcher_client import WatcherClient

_MODULE = "allred.watch.process"
_spawned: detached.Process | None = None


def spawn_early(settings: dict[str, Any] | str) -> None:
    """Spawn the process of this node's watcher before MPI starts: it imports its modules while MPI starts.

    Does nothing unless this process is the first of its host, and the job may have several ranks. `start` uses the
    process if this node needs a watcher. settings: of this rank, or why they are invalid.
    """
    global _spawned
    is_wanted = isinstance(settings, dict) and settings.get("watcher", Config.watcher)
    if is_wanted and launcher_variables.local_rank(os.environ) == 0 and launched_size(os.environ) != 1:
        with contextlib.suppress(OSError):  # `start` tries again, and reports it
            _spawned = detached.spawn(_MODULE)


def discard_spawned() -> None:
    """End the process of `spawn_early` if no watcher was started in it."""
    if (process := _take_spawned()) is not None:
        process.kill()
        process.communicate()


def _take_spawned() -> detached.Process | None:
    global _spawned
    process, _spawned = _spawned, None
    return process


def start(
    bootstrap: Any, shape: Numbering, config: Config, reach: str, expendable: tuple[int, ...], launcher: bool,
    serve: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> None:  # fmt: skip
    """Start a watcher on every node and connect all ranks of `bootstrap`. Collective.

    reach: how the watchers reach each other: "" with one node, "host" if all nodes are on this host, else "network".
    expendable: the ranks that are expendable with worker_failure=go_on. launcher: whether a launcher started the ranks,
    which ends all of them when one ends the job. serve: lets the agent of this node be its watcher, in an elastic job;
    called with the settings, returns the answer of `detached.start`.

    If a watcher cannot be used, a warning says so, and the job continues without it.
    """
    WatcherClient.restore_usr1()
    if not config.watcher or (shape.size == 1 and not runner_link.address() and serve is None):
        return
    expendable = expendable if config.worker_failure == "go_on" else ()
    hosts = bootstrap.allgather_object(socket.gethostname()) if reach == "network" else []
    address = own_address(hosts) if reach == "network" and shape.rank == 0 else "127.0.0.1" if reach else ""
    mine = _start_watcher(shape, config, address, expendable, launcher, serve) if shape.local_rank == 0 else None
    found = bootstrap.allgather_object(mine)
    here = found[shape.leader]
    problem = here["problem"]
    if not problem:
        chief = {key: found[0][key] for key in ("host", "address", "port", "token")}
        hello = {"rank": shape.rank, "host": socket.gethostname(), "token": here["token"], "chief": chief}
        try:
            counters, prints = world.current().counters.share(), shape.local_rank == 0
            try:
                client = WatcherClient(here["name"], hello, counters, prints, config.stall_warning_s)
            finally:
                if counters >= 0:
                    os.close(counters)
            world.current().watcher = client
        except OSError as error:
            problem = f"{error.strerror or error}"
    is_first = serve is None or world.current().generation == 1  # else the process of the first world serves them
    if shape.rank == 0 and config.metrics != "none" and not problem and is_first:
        url, why = _serve_metrics(_job_name(config), config.metrics, serve is not None)
        log.warning(f"metrics at {url}" if url else f"ALLRED_METRICS={config.metrics}: no metrics: {why}")
    problems = bootstrap.allgather_object(problem)
    bad = {rank: text for rank, text in enumerate(problems) if text}
    if bad:
        rank, text = next(iter(bad.items()))
        log.warning(
            f"no watcher for {len(bad)} of {shape.size} ranks (rank {rank}: {text}); there a rank that stalls is "
            "detected by the time limit only"
        )


def _start_watcher(
    shape: Numbering, config: Config, address: str, expendable: tuple[int, ...], launcher: bool,
    serve: Callable[[dict[str, Any]], dict[str, Any]] | None,
) -> Any:  # fmt: skip
    """Start the watcher of this node. Return its name, port, address and token; and a problem, or ""."""
    token = secrets.token_hex(16)
    settings = WatcherSettings(
        token=token, ranks=shape.local_size, size=shape.size, nodes=shape.nodes, warn_s=config.stall_warning_s,
        limit_s=config.timeout_s, chief=shape.rank == 0, address=address, expendable=expendable, launcher=launcher,
        runner=runner_link.address(), stacks=config.stacks, elastic=serve is not None,
        about={
            "job": _job_name(config), "program": " ".join(sys.argv), "mode": config.mode, "starts": config.starts,
            "host": socket.gethostname(),
        },
    )  # fmt: skip
    here = {"token": token, "host": socket.gethostname(), "address": address, "name": "", "port": 0}
    if serve is not None:
        return here | {"problem": ""} | serve(dataclasses.asdict(settings))
    return here | detached.start(_MODULE, dataclasses.asdict(settings), process=_take_spawned())


def _serve_metrics(job: str, address: str, is_elastic: bool) -> tuple[str, str]:
    """Start the process of the metrics endpoint. Return its URL, or "" and the problem."""
    words = [sys.executable, "-m", "allred.monitor.metrics", job, address, "elastic" * is_elastic]
    with tempfile.TemporaryFile() as answers:
        try:
            process = subprocess.Popen(
                words, cwd="/", start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=answers,
            )  # fmt: skip
        except OSError as error:
            return "", str(error)
        assert process.stdout is not None
        with process.stdout:
            line = process.stdout.readline().decode().strip()
        answers.seek(0)
        last = answers.read().decode(errors="replace").strip().rpartition("\n")[2]
    return (line, "") if line.startswith("http://") else ("", line or last or "it ended at once")


def _job_name(config: Config) -> str:
    """Return the name of the job for monitors: the setting, or the program and its process id."""
    program = Path(sys.argv[0]).stem.lstrip("-")
    return config.job if config.job != "auto" else f"{program if len(program) > 1 else 'python'}-{os.getpid()}"


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


def set_role(text: str) -> None:
    """Set the role of this rank for messages; see `WatcherClient.set_role`."""
    if (watcher := world.watcher()) is not None:
        watcher.set_role(text)


def stop() -> None:
    """Disconnect from the watcher."""
    here = world.current()
    if here.watcher is not None and here.watcher.verdict is None:
        here.watcher.send("left")
        here.watcher.close()
        here.watcher = None


_WHAT = (
    "in allred.init() for the other ranks: one has not started, ended before it called init(), or cannot be reached "
    "over the network (python -m allred doctor, under the same mpirun, finds out which)"
)
_WHAT_BY_HAND = (
    "in allred.Server() for the other tasks, which had all connected: one was stopped since, or MPI cannot reach it "
    "over the network"
)


@contextlib.contextmanager
def startup_timeout(settings: dict[str, Any] | str, lifeline: int = -1) -> Iterator[None]:
    """Limit the time inside this block, which waits for the other ranks in MPI_Init. MPI_Init holds the GIL and cannot
    be interrupted: a thread of the C extension warns, and ends this rank at the time limit.

    settings: those of this rank, or a problem. lifeline: a descriptor that receives a line if another rank has died;
    then this rank ends too.
    """
    known = settings if isinstance(settings, dict) else {}
    rank = launcher_variables.rank(os.environ)
    if native.alarm is None or native.cancel_alarm is None or rank is None:
        yield
        return
    what = _WHAT if lifeline < 0 else _WHAT_BY_HAND
    warn_s, limit_s = (float(known.get(name, getattr(Config, name))) for name in ("stall_warning_s", "timeout_s"))
    native.alarm(warn_s, max(limit_s, LEAST_MPI_INIT_S), f"rank {rank} on {socket.gethostname()}", what, lifeline)
    try:
        yield
    finally:
        native.cancel_alarm()
