"""Selects the backend, with the reason that the banner shows."""

from collections.abc import Callable
from typing import Any

from allred.comm.backends.backend import Backend
from allred.comm.backends.single import SingleBackend
from allred.config import Config
from allred.errors import ConfigError
from allred.gpu import binding
from allred.gpu.binding import VisibleGpus


def _single(_: Any, nodes: list[int]) -> Backend:
    return SingleBackend()


def _mpi(comm: Any, nodes: list[int]) -> Backend:
    from allred.comm.backends.mpi import MpiBackend  # imports MPI

    return MpiBackend(comm)


def _shm(comm: Any, nodes: list[int]) -> Backend:
    from allred.comm.backends.hierarchical import connect  # imports MPI, and the C extension

    return connect(comm, nodes)


# Each makes a backend from an mpi4py communicator (None without MPI) and the node of every rank.
BACKENDS: dict[str, Callable[[Any, list[int]], Backend]] = {"single": _single, "mpi": _mpi, "shm": _shm}


def choose(wanted: str, nodes: list[int], has_mpi: bool, kernels: list[bool]) -> tuple[str, str]:
    """Return the name of the backend, and the reason.

    wanted: the setting `backend`. nodes, kernels: for every rank, its node and whether it has the C extension.

    Raises ConfigError if the backend in `wanted` cannot be used.

    >>> choose("auto", [0, 0, 1], has_mpi=True, kernels=[True] * 3)
    ('shm', 'ranks share a node')
    """
    size = len(nodes)
    if wanted == "single" and size > 1:
        raise ConfigError(f"backend 'single' is for one rank, but there are {size}; use auto, shm or mpi")
    if wanted in ("mpi", "shm") and not has_mpi:
        raise ConfigError(f"backend '{wanted}' needs an MPI, but none could be loaded; pip install 'allred[mpich]'")
    if wanted == "shm" and not all(kernels):
        raise ConfigError(
            f"backend 'shm' needs the C extension, but rank {kernels.index(False)} does not have it (python -m "
            "allred.native shows the reason); or use backend mpi"
        )
    if wanted not in ("auto", "nccl"):  # NCCL is added to a host backend, not used instead of it
        return wanted, "as requested"
    if size == 1:
        return "single", "one rank"
    if len(set(nodes)) == size:
        return "mpi", "every rank is on a node of its own"
    if not all(kernels):
        return "mpi", f"rank {kernels.index(False)} lacks the C extension, which shared memory needs"
    return "shm", "ranks share a node"


def devices(config: Config, seen: list[VisibleGpus], nodes: list[int]) -> tuple[bool, str]:
    """Return whether collectives accept arrays on GPUs; if there are GPUs but they do not, also the reason.

    seen, nodes: for every rank, the GPUs that it sees and its node.

    Raises ConfigError if the setting `backend` is nccl but NCCL cannot be used.
    """
    if config.backend not in ("auto", "nccl") or (config.backend == "auto" and not any(one.devices for one in seen)):
        return False, ""
    problem = binding.binding_error(seen, nodes, config.gpu_oversubscribe)
    if problem and config.backend == "nccl":
        raise ConfigError(f"backend 'nccl': {problem}")
    return not problem, problem and f"GPUs are not used: {problem}"
