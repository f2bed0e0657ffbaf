"""Which backend serves, chosen in one place that says why."""

from collections.abc import Callable
from typing import Any

from allred.comm.base import Communicator
from allred.comm.single import SingleCommunicator
from allred.errors import ConfigError


def _single(_: Any, timeout_s: float) -> Communicator:
    return SingleCommunicator(timeout_s)


def _mpi(comm: Any, timeout_s: float) -> Communicator:
    from allred.comm.mpi import MpiCommunicator  # imports MPI

    return MpiCommunicator(comm, timeout_s)


# From an mpi4py communicator (None where there is no MPI) and the time limit.
BACKENDS: dict[str, Callable[[Any, float], Communicator]] = {"single": _single, "mpi": _mpi}


def choose(wanted: str, size: int, has_mpi: bool) -> tuple[str, str]:
    """The backend to use and the reason, in words, given the setting `backend` and what there is.

    Raises ConfigError if what was asked for cannot serve.
    """
    if wanted == "single" and size > 1:
        raise ConfigError(f"backend 'single' is for one rank, and there are {size}; use auto or mpi")
    if wanted == "mpi" and not has_mpi:
        raise ConfigError("backend 'mpi' needs an MPI, and none could be loaded; pip install 'allred[mpich]'")
    if wanted != "auto":
        return wanted, "as asked"
    if size == 1:
        return "single", "one rank"
    return "mpi", "plain MPI on host arrays"
