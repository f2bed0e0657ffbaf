"""The variables of torch's launcher: programs of torch.distributed read them before they call allred or MPI.

Without them such a program assumes that it runs alone. MASTER_ADDR, MASTER_PORT and WORLD_SIZE are the same on all
ranks; rank_variables.sh sets RANK and LOCAL_RANK from the variables of MPI's launcher.
"""

import secrets
import socket
from collections.abc import Mapping
from pathlib import Path

from allred.run import host_list
from allred.watch.start import own_address

_PORTS = range(20000, 30000)  # no system gives them to outgoing connections
_TRIES = 100


def settings(ranks: Mapping[str, int], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are the same on all ranks; not those that the user has set. ranks: their number on each
    host; rank 0 is on the first."""
    first = next(iter(ranks))
    remote = [name for name in ranks if not host_list.is_local(name)]
    here = first not in remote
    address = first if not here else own_address(remote) if remote else "127.0.0.1"
    found = {"MASTER_ADDR": address, "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(sum(ranks.values()))}
    return {name: value for name, value in found.items() if name not in environ}


def with_rank(words: list[str]) -> list[str]:
    """Return the command of a rank, with its own variables."""
    return ["/bin/sh", str(Path(__file__).with_name("rank_variables.sh")), *words]


def _free_port() -> int:
    """Return a port at which no program of this host listens, as far as it can be found out."""
    for _ in range(_TRIES):
        port = secrets.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        break
    return port
