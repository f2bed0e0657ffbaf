"""The environment variables of launchers."""

import os
from collections.abc import Mapping, Sequence

PREFIXES = ("PMI", "PRTE_", "HYDI_", "HYDRA_", "MPI_", "OMPI_")  # MPIR_CVAR_... are settings of MPICH
_RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")  # set by an MPI launcher for each rank

_LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
_LOCAL_SIZE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


AGENT = "ALLRED_AGENT"  # of a process of an elastic job: the socket of its agent, its name, its host's address

_agent: str | None = None  # before the first call of `agent`


def agent() -> str:
    """Return the value of AGENT; "" without it. Removes it from the environment: programs that this one starts are no
    processes of the job."""
    global _agent
    if _agent is None:
        _agent = os.environ.pop(AGENT, "")
    return _agent


def rank(environ: Mapping[str, str]) -> int | None:
    """Return the rank of this process; None if no launcher has started it. Works before MPI has started."""
    return _first_number(environ, (*_RANK, "SLURM_PROCID"))


def local_rank(environ: Mapping[str, str]) -> int | None:
    """Return the local rank of this process on its host; None if no launcher has set it."""
    return _first_number(environ, _LOCAL_RANK)


def local_size(environ: Mapping[str, str]) -> int | None:
    """Return the number of ranks on the host of this process; None if no launcher has set it."""
    return _first_number(environ, _LOCAL_SIZE)


def _first_number(environ: Mapping[str, str], names: Sequence[str]) -> int | None:
    found = (environ.get(name, "") for name in names)
    return next((int(value) for value in found if value.isdigit()), None)


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a program that is not a rank of this process's job. In a rank, the settings of its
    launcher are removed too: they cannot be told from what the launcher adds.

    >>> without_launcher({"PMI_RANK": "1", "HYDRA_IFACE": "eth1", "HOME": "/root"})
    {'HOME': '/root'}
    >>> without_launcher({"HYDRA_IFACE": "eth1", "HOME": "/root"})
    {'HYDRA_IFACE': 'eth1', 'HOME': '/root'}
    """
    if not any(name in environ for name in _RANK):
        return dict(environ)
    return {name: value for name, value in environ.items() if not name.startswith(PREFIXES)}
