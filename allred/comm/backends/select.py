"""Which backend serves, chosen in one place that says why."""

from collections.abc import Callable
from typing import Any

from allred.comm.backends.single import SingleCommunicator
from allred.comm.communicator import Communicator
from allred.config import Config
from allred.errors import ConfigError
from allred.gpu import places
from allred.gpu.places import Seen


def _single(_: Any, timeout_s: float, nodes: list[int]) -> Communicator:
    return SingleCommunicator(timeout_s)


def _mpi(comm: Any, timeout_s: float, nodes: list[int]) -> Communicator:
    from allred.comm.backends.mpi import MpiCommunicator  # imports MPI

    return MpiCommunicator(comm, timeout_s)


def _shm(comm: Any, timeout_s: float, nodes: list[int]) -> Communicator:
    from allred.comm.backends.hierarchical import connect  # imports MPI, and the C extension

    return connect(comm, timeout_s, nodes)


# From an mpi4py communicator (None where there is no MPI), the time limit, and the name of every rank's node.
BACKENDS: dict[str, Callable[[Any, float, list[int]], Communicator]] = {"single": _single, "mpi": _mpi, "shm": _shm}


def choose(wanted: str, nodes: list[int], has_mpi: bool, kernels: list[bool]) -> tuple[str, str]:
    """The backend to use and the reason, in words.

    wanted: the setting `backend`. nodes, kernels: of every rank the name of its node, and whether it has the C
    extension.

    Raises ConfigError if what was asked for cannot serve.
    """
    size = len(nodes)
    if wanted == "single" and size > 1:
        raise ConfigError(f"backend 'single' is for one rank, and there are {size}; use auto, shm or mpi")
    if wanted in ("mpi", "shm") and not has_mpi:
        raise ConfigError(f"backend '{wanted}' needs an MPI, and none could be loaded; pip install 'allred[mpich]'")
    if wanted == "shm" and not all(kernels):
        raise ConfigError(
            f"backend 'shm' needs the C extension, and rank {kernels.index(False)} has none (python -m allred.native "
            "says why there); or use backend mpi"
        )
    if wanted not in ("auto", "nccl"):  # which is a second one beside that of host arrays
        return wanted, "as asked"
    if size == 1:
        return "single", "one rank"
    if len(set(nodes)) == size:
        return "mpi", "every rank is on a node of its own"
    if not all(kernels):
        return "mpi", f"rank {kernels.index(False)} lacks the C extension, which shared memory needs"
    return "shm", "ranks share a node"


def devices(config: Config, seen: list[Seen], nodes: list[int]) -> tuple[bool, str]:
    """Whether arrays on GPUs are taken too, and if not, and there are GPUs, why, in words.

    seen, nodes: of every rank what GPUs it sees, and the name of its node.

    Raises ConfigError if the setting `backend` asks for nccl and that cannot serve.
    """
    if config.backend not in ("auto", "nccl") or (config.backend == "auto" and not any(one.devices for one in seen)):
        return False, ""
    problem = places.refusal(seen, nodes, config.gpu_oversubscribe)
    if problem and config.backend == "nccl":
        raise ConfigError(f"backend 'nccl': {problem}")
    return not problem, problem and f"GPUs are not used: {problem}"


def with_devices(host: Communicator, config: Config, seen: list[Seen], nodes: list[int]) -> tuple[Communicator, str]:
    """A communicator that takes arrays on GPUs too, where it can, and a few words about it; from that of host arrays,
    of whose ranks `seen` and `nodes` are. Collective."""
    wanted, words = devices(config, seen, nodes)
    if not wanted:
        return host, words
    from allred.comm.create import connect  # imports cupy

    return connect(host, config, places.bind(seen, nodes, host.rank), len(set(nodes)) > 1)
