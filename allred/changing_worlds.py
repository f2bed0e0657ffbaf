"""Worlds whose ranks change: those of `allred run --elastic`, and of the process group of dist._reconfigure.

The ranks have neither MPI nor a launcher that ends all of them. A process leaves such a world alone (`abandon`).
"""

import os
from typing import Any

from allred import world
from allred.comm.bootstrap import Bootstrap
from allred.comm.process_set import PROCESS_SETS
from allred.config import explicit_settings, settle
from allred.errors import AllredError, ConfigError
from allred.launch.rendezvous_bootstrap import RendezvousBootstrap, RendezvousConnection
from allred.membership.agent_connection import AgentConnection
from allred.membership.recovery import Recovery
from allred.runtime import process_end
from allred.watch import excepthook
from allred.world_creation import Cluster, close_world, create_world, exchange_facts, raised_by_all

_recovery: Recovery | None = None  # after init() in a job of `allred run --elastic`


def join_elastic(agent: str, settings: dict[str, Any] | str) -> None:
    """Join a job of `allred run --elastic`, whose worlds are formed again when ranks die or join."""
    global _recovery
    if _recovery is not None:
        raise AllredError("allred.init() was called again after allred.shutdown(), in a job of `allred run --elastic`")
    connection = AgentConnection(agent)

    def create() -> None:
        bootstrap = RendezvousBootstrap(connection)
        bootstrap.generation = connection.member.generation
        world.note_generation(bootstrap.generation - 1)
        _create(bootstrap, settings, Cluster(), "`allred run --elastic`", recovery)

    _recovery = recovery = Recovery(connection, create, abandon)
    process_end.register(_stop_watcher)
    excepthook.watch(lambda status: None)  # its agent sees the end of this process
    recovery.join()


def join_group(connection: RendezvousConnection) -> None:
    """Join the other tasks of a connection, as `init`. They need neither MPI nor watchers, because the connection
    reports their ends. Raises ConfigError for settings that this cannot have."""
    settings = explicit_settings(os.environ, {"mode": "sync", "banner": False})
    settings["watcher"] = False
    cluster = Cluster(tasks=connection.tasks, has_watchers=False)
    _create(RendezvousBootstrap(connection), settings, cluster, "dist._reconfigure", None)


def _create(
    bootstrap: Bootstrap, settings: dict[str, Any] | str, cluster: Cluster, what: str, recovery: Recovery | None
) -> None:
    """Create and install a world. what: changes its ranks, for errors."""
    facts = exchange_facts(bootstrap, "", settings)
    with raised_by_all(bootstrap):
        config = settle([each.settings for each in facts])
        refused = {
            f"mode {config.mode}": config.mode == "ps",
            "allred.init(mode='local') without `--mode local`": config.mode == "local" != os.environ.get("ALLRED_MODE"),
            "backend mpi": "mpi" in (config.backend, config.transport),
            "backend nccl": config.backend == "nccl", "ALLRED_TIMELINE": config.timeline not in ("", "none"),
            "a rank without allred's C extension": not all(each.transport.has_kernels for each in facts),
        }  # fmt: skip
        if any(refused.values()):
            names = ", ".join(name for name, is_used in refused.items() if is_used)
            raise ConfigError(f"{names} cannot be used with {what}")
    try:
        create_world(bootstrap, "no MPI", facts, cluster, recovery)
    except AllredError:
        bootstrap.close()
        raise


def _stop_watcher() -> None:
    """At the end of a process of an elastic job."""
    if (watcher := world.watcher()) is not None:
        watcher.send("left")
        watcher.ending()


def abandon() -> None:
    """Leave a world whose ranks change, if there is one. Not collective."""
    here = world.current_or_none()
    if here is None:
        return
    sets = PROCESS_SETS.of(here)
    assert sets is not None
    for communicator in (here.communicator, *sets.made.values()):
        communicator.queue.poison("the ranks of the job have changed")
    close_world(here)
    sets.bootstrap.close()
