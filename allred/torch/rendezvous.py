"""Rendezvous: assigns allred's ranks to the processes of a torch program.

under mpirun     MPI knows rank and size; rank 0 opens a TCPStore, and MPI broadcasts its address
under torchrun   torch knows rank and size; the ranks exchange addresses and a secret through torch's store, and
                 then join as the tasks of allred.Server do without a launcher, without MPI
no launcher      one rank
"""

import datetime
import json
import os
import secrets
import socket
import threading
import urllib.parse
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch.distributed as dist

import allred
from allred import log, world
from allred.cluster import launcher
from allred.comm.functions import broadcast_object
from allred.errors import ConfigError, InputError
from allred.launch.rendezvous_client import open_listener, shared_memory_domain
from allred.server import enter_rendezvous
from allred.startup import joined_tasks
from allred.watch import runner_link
from allred.watch.start import own_address
from allred.world_creation import Cluster

_REPORT_S = 30.0


def env_rendezvous(
    url: str, timeout: datetime.timedelta = datetime.timedelta(minutes=30), **_: Any
) -> tuple[Any, int, int] | None:
    """Return store, rank and size of the ranks that mpirun started, or of one rank without a launcher. None if the
    variables of `env://` are set, not by `allred run`; torchrun started this process; or rank and size are given
    without a launcher.

    url: with the rank and world_size of init_process_group, if given. Raises InputError if they differ from MPI's.

    It calls allred.init() if the program has not. Sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, which torch
    programs read, where they are not set.
    """
    has_variables = all(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    if _started_by_torchrun() or (has_variables and not runner_link.address()):
        return None
    given = dict(urllib.parse.parse_qsl(urllib.parse.urlparse(url).query))
    by_hand = (
        os.environ.get("RANK") != _own_variables.get("RANK") or int(given.get("world_size", 1)) > 1
    )  # for example by torch.multiprocessing.spawn
    if by_hand and launcher.launched_size(os.environ) == 1 and not world.is_initialized():
        return None  # torch says which variable is missing
    if not world.is_initialized():
        allred.init()
    rank, size = allred.rank(), allred.size()
    _check_rank_and_size(int(given.get("rank", rank)), int(given.get("world_size", size)))
    set_env_variables(os.environ)
    recovery = world.current().recovery
    if recovery is not None and recovery.joins_alone:  # it finds no store of the others; nothing needs one
        return dist.HashStore(), rank, size
    host = "127.0.0.1"
    if world.current().topology.nodes > 1:  # the same on all ranks
        host = own_address(allred.allgather_object(socket.gethostname()))
    store = dist.TCPStore(host, 0, size, True, timeout, wait_for_workers=False) if rank == 0 else None
    host, port = broadcast_object((host, store.port) if store is not None else None)
    return store or dist.TCPStore(host, port, size, False, timeout, wait_for_workers=False), rank, size


def report_wait(steps: Iterator[Any]) -> Iterator[Any]:
    """Yield what `steps` yields. If that takes 30 s, print a line: torch waits for the other ranks silently."""
    where = f"MASTER_ADDR={os.environ.get('MASTER_ADDR')} MASTER_PORT={os.environ.get('MASTER_PORT')}"
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    text = (
        f"init_process_group: rank {rank} has waited {_REPORT_S:g} s for the other ranks; start all {size} ranks with "
        f"{where} WORLD_SIZE={size}, and RANK from 0"
    )
    timer = threading.Timer(_REPORT_S, lambda: log.rank_warning(text))
    timer.daemon = True
    timer.start()
    try:
        yield from steps
    finally:
        timer.cancel()


def init_from_store(store: Any, rank: int, size: int) -> None:
    """Initialize allred as rank `rank` of `size`, unless it is initialized. store: shared by these processes.

    Raises ConfigError if the processes cannot be joined, InputError if allred's rank or size differs.
    """
    if not world.is_initialized():
        has_launcher = launcher.launched_size(os.environ) > 1 and not _started_by_torchrun()
        if size == 1 or has_launcher or joined_tasks():
            allred.init()
        else:
            _join_tasks(store, rank, size)
    _check_rank_and_size(rank, size)


def _check_rank_and_size(rank: int, size: int) -> None:
    """Raise an error if allred's rank or size differs, or allred has parameter servers."""
    if world.config().mode == "ps":
        raise ConfigError('init_process_group("allred") is for mode sync; ALLRED_MODE is ps')
    if (rank, size) != (allred.rank(), allred.size()):
        raise InputError(
            f"init_process_group: this is rank {rank} of {size} for torch, but rank {allred.rank()} of {allred.size()} "
            "for MPI; give no rank and no world_size under mpirun, or the same numbers"
        )


def _join_tasks(store: Any, rank: int, size: int) -> None:
    """Exchange addresses and a secret through the store, and join the other ranks. A rank makes few requests; the last
    one finds whether all are on one node, and the first one collects the addresses."""
    prefix = f"allred/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"  # torchrun keeps its store at a restart
    node = shared_memory_domain()
    if rank == 0:
        store.set(f"{prefix}/node", node)
    store.add(f"{prefix}/elsewhere", int(store.get(f"{prefix}/node").decode() != node))
    if store.add(f"{prefix}/counted", 1) == size:
        store.set(f"{prefix}/nodes", "several" if store.add(f"{prefix}/elsewhere", 0) else "one")
    one_node = store.get(f"{prefix}/nodes") == b"one"
    listener, address = open_listener(one_node, os.environ.get("MASTER_ADDR", socket.gethostname()))
    store.set(f"{prefix}/address/{rank}", address)
    if rank == 0:
        found = [store.get(f"{prefix}/address/{other}").decode() for other in range(size)]
        store.set(f"{prefix}/job", json.dumps([secrets.token_hex(32), *found]))
    secret, *every = json.loads(store.get(f"{prefix}/job"))
    addresses = {f"rank {other}": where for other, where in enumerate(every)}
    cluster = Cluster(tasks=tuple(addresses))
    enter_rendezvous(addresses, f"rank {rank}", secret, cluster, listener, mode="sync")


def _started_by_torchrun() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


_own_variables: dict[str, str] = {}  # that this module has set


def set_env_variables(environ: MutableMapping[str, str]) -> None:
    """Set the variables of torch programs for this rank, if the program or a launcher has not set others."""
    found = {"RANK": allred.rank(), "WORLD_SIZE": allred.size()}
    found |= {"LOCAL_RANK": allred.local_rank(), "LOCAL_WORLD_SIZE": allred.local_size()}
    for name, number in found.items():
        if environ.get(name) == _own_variables.get(name):  # not set by the program or a launcher
            environ[name] = _own_variables[name] = str(number)
