"""The mpirun command of a job: for the MPI that mpi4py loads, with the options that this machine needs.

And the variables of torch's launcher: programs of torch.distributed read them before they call allred or MPI. Without
them such a program assumes that it runs alone. MASTER_ADDR, MASTER_PORT and WORLD_SIZE are the same on all ranks;
rank_variables.sh sets RANK and LOCAL_RANK from the variables of MPI's launcher.
"""

import dataclasses
import os
import secrets
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from allred.cluster import launcher, mpi
from allred.cluster.processors import THREAD_VARIABLES
from allred.errors import ConfigError
from allred.launcher_variables import PREFIXES
from allred.run import host_list
from allred.watch.start import own_address

_TORCH = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")
# Open MPI's mpirun forwards only its own variables to other hosts.
_PATHS = ("PYTHON", "VIRTUAL_ENV", "PATH", "LD_LIBRARY_PATH")
_FORWARDED = ("ALLRED_", "HOROVOD_", *_PATHS, "CUDA_VISIBLE_DEVICES", "NCCL_", *THREAD_VARIABLES, *_TORCH)

_OF_SHELL = ("PWD", "OLDPWD", "SHLVL", "_")


@dataclasses.dataclass(frozen=True)
class Launcher:
    """path: of mpirun. library: the name of the MPI."""

    path: str
    library: str

    @property
    def is_open_mpi(self) -> bool:
        return launcher.implementation(self.library) == "Open MPI"


def find() -> Launcher:
    """Return the mpirun of the MPI that mpi4py loads. Raises ConfigError if there is no MPI, or no mpirun of it."""
    library, _ = mpi.load_library()
    if not library:
        raise ConfigError(
            f"mpi4py of {sys.executable} finds no MPI library; pip install mpich, or load your site's MPI"
        )
    path = launcher.mpirun_of(library)
    if not path:
        remedy = launcher.remedy("", launcher.implementation(library) == "Open MPI", 1, "")
        raise ConfigError(f"no mpirun of {library} next to {sys.executable} or on PATH; get {remedy}")
    return Launcher(path, library)


def command(
    launch: Launcher, ranks: Mapping[str, int], program: Sequence[str], environ: Mapping[str, str], is_root: bool,
    forwards_all: bool = False,
) -> list[str]:  # fmt: skip
    """Return the command that starts the program. ranks: their number on each host. environ: the environment in which
    the command will run; from it Open MPI forwards the variables of _FORWARDED. forwards_all: all variables, as MPICH
    does, except those of launchers and of the shell."""
    hosts = ",".join(f"{name}:{count}" for name, count in ranks.items())
    total = ["-np", str(sum(ranks.values()))]
    if not launch.is_open_mpi:
        return [launch.path, "-hosts", hosts, "-bind-to", "none", *total, *program]
    root = ["--allow-run-as-root"] * is_root
    names = [name for name in sorted(environ) if name.startswith(_FORWARDED)]
    if forwards_all and [*ranks] != [host_list.LOCAL]:
        names = [name for name in sorted(environ) if name.isidentifier() and not name.startswith(PREFIXES)]
        names = [name for name in names if name not in _OF_SHELL]
    forwarded = [word for name in names for word in ("-x", name)]
    # As many slots as ranks, so mpirun accepts more ranks than cores, and fills the hosts in this order.
    return [launch.path, *root, "--host", hosts, "--map-by", "slot", "--bind-to", "none", *forwarded, *total, *program]


def program_words(words: Sequence[str], is_module: bool) -> list[str]:
    """Return the command of a rank: with this Python before a file that ends in .py, or before `-m MODULE`."""
    if is_module:
        return [sys.executable, "-m", *words]
    return [sys.executable, *words] if words[0].endswith(".py") else [*words]


def describe(settings: Mapping[str, str], words: Sequence[str]) -> str:
    """Return the command as a line for a shell. settings: variables that are added to the environment."""
    return shlex.join([*(f"{name}={value}" for name, value in settings.items()), *words])


def is_root() -> bool:
    return os.geteuid() == 0


_PORTS = range(20000, 30000)  # no system gives them to outgoing connections
_TRIES = 100


def torch_variables(ranks: Mapping[str, int], environ: Mapping[str, str]) -> dict[str, str]:
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
