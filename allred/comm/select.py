"""Selects what arrays travel on, from the facts of all ranks and the settings: within a node, between nodes, on GPUs.

    facts -> plan -> Choice -> create.py tries it -> the facts of the attempt, of all ranks -> plan -> ...

Pure: the same facts and settings give the same choice, or the same ConfigError, on every rank. An attempt that fails
(shared memory that cannot be mapped, a GPU that cannot be used) is a fact like the others.
"""

import dataclasses
from collections.abc import Sequence

from allred.config import Config
from allred.errors import ConfigError
from allred.gpu.streams import NO_GPUS, VisibleGpus, binding_error

MOST_NODES = 1024  # of transport tcp: ALLRED_MAX_HOSTS of csrc/network.h


@dataclasses.dataclass(frozen=True)
class TransportFacts:
    """The facts about one rank. `shares_memory` and `gpu_problem` are known after an attempt."""

    node: int = 0
    has_mpi: bool = True
    has_kernels: bool = True  # the C extension
    fabric: str = ""  # a network device of its host that MPI drives without TCP
    gpus: VisibleGpus = NO_GPUS
    shares_memory: bool = True  # with the other ranks of its node
    gpu_problem: str = ""  # the error of cupy or NCCL on its GPU


@dataclasses.dataclass(frozen=True)
class Choice:
    """Communication within a node, between nodes and on GPUs. The banner prints the reasons."""

    within: str  # shm, mpi, or single: no node has two ranks that share memory
    between: str  # mpi, tcp, or "": there is one node
    device: str  # nccl, staged (through the host), or "": arrays on GPUs are not accepted
    reasons: tuple[str, ...]

    @property
    def backend(self) -> str:
        """The `name` of the backend of host arrays: single, shm, mpi, shm_mpi or tcp."""
        if self.between == "tcp":
            return "tcp"
        return "shm_mpi" if (self.within, self.between) == ("shm", "mpi") else self.within


def plan(facts: Sequence[TransportFacts], config: Config) -> Choice:
    """Choose for the ranks of a communicator. facts: of each of them, in rank order.

    Raises ConfigError if what the settings request cannot be used.

    >>> plan([TransportFacts(node=0), TransportFacts(node=0)], Config())
    Choice(within='shm', between='', device='', reasons=('ranks share a node',))
    """
    lacking = next((f"rank {rank}" for rank, each in enumerate(facts) if not each.has_kernels), "")
    wanted = config.backend
    if wanted == "single" and len(facts) > 1:
        raise ConfigError(f"backend 'single' is for one rank, but there are {len(facts)}; use auto, shm or mpi")
    has_mpi = all(each.has_mpi for each in facts)
    if not has_mpi and (wanted == "mpi" or (wanted == "shm" and len(facts) == 1)):
        raise ConfigError(f"backend '{wanted}' needs an MPI, but none could be loaded; pip install mpich")
    if wanted == "shm" and lacking:
        raise ConfigError(
            f"backend 'shm' needs the C extension, but {lacking} does not have it (python -m allred.native shows the "
            "reason); or use backend mpi"
        )
    between, network = _between(facts, config, lacking)
    within, why = _within(facts, wanted, between, lacking)
    if not has_mpi and "mpi" in (within, between):
        raise ConfigError(f"this needs MPI: {network or why}; start the ranks with mpirun, or set ALLRED_BACKEND=mpi")
    host = Choice(within, between, "", ())
    device, how = _device(facts, config, host)
    return dataclasses.replace(host, device=device, reasons=tuple(filter(None, (why, network, how))))


def memory_nodes(facts: Sequence[TransportFacts]) -> list[int]:
    """Return the node of each rank; a rank that cannot share memory counts as a node of its own."""
    return [each.node if each.shares_memory else -1 - rank for rank, each in enumerate(facts)]


def _between(facts: Sequence[TransportFacts], config: Config, lacking: str) -> tuple[str, str]:
    """Return what connects nodes, and the reason. lacking: a rank without the C extension."""
    wanted, lacks = config.transport, f"{lacking} lacks the C extension" if lacking else ""
    if len({each.node for each in facts}) == 1:
        return "", ""
    if config.backend == "mpi":
        return "mpi", ""
    if wanted == "tcp" and lacks:
        raise ConfigError(
            f"ALLRED_TRANSPORT=tcp needs the C extension, but {lacks} (python -m allred.native shows the reason); or "
            "use ALLRED_TRANSPORT=mpi"
        )
    if (nodes := len(set(memory_nodes(facts)))) > MOST_NODES and not lacks:
        lacks = f"{nodes} nodes, but transport tcp is for at most {MOST_NODES}"
        if wanted == "tcp":
            raise ConfigError(f"ALLRED_TRANSPORT=tcp: there are {lacks}; use ALLRED_TRANSPORT=mpi")
    fabric = next((each.fabric for each in facts if each.fabric and each.has_mpi and wanted == "auto"), "")
    if lacks or fabric:
        return "mpi", f"MPI between nodes: {lacks or fabric}"
    if wanted == "auto":
        without = "no InfiniBand, EFA or Slingshot" if facts[0].has_mpi else "no MPI, which other networks need"
        return "tcp", f"TCP between nodes: {without}"
    return wanted, f"{wanted.upper()} between nodes, as requested"


def _within(facts: Sequence[TransportFacts], wanted: str, between: str, lacking: str) -> tuple[str, str]:
    """Return what connects the ranks of a node, and the reason."""
    size, otherwise = len(facts), "single" if between == "tcp" else "mpi"
    if wanted in ("single", "mpi"):
        return wanted, "as requested"
    if size == 1:
        return ("mpi", "one rank has no other to share memory with") if wanted == "shm" else ("single", "one rank")
    if len({each.node for each in facts}) == size:
        return otherwise, "every rank is on a node of its own"
    if lacking:
        return otherwise, f"{lacking} lacks the C extension, which shared memory needs"
    if len(set(memory_nodes(facts))) == size:
        return otherwise, "no two ranks could share memory; on one node that takes /proc or a Unix socket between them"
    return "shm", "as requested" if wanted == "shm" else "ranks share a node"


def _device(facts: Sequence[TransportFacts], config: Config, host: Choice) -> tuple[str, str]:
    """Return what connects GPUs, and the reason, or why they are not used."""
    gpus = [each.gpus for each in facts]
    if config.backend not in ("auto", "nccl") or (config.backend == "auto" and not any(one.devices for one in gpus)):
        return "", ""
    problem = binding_error(gpus, [each.node for each in facts], config.gpu_oversubscribe)
    rank = next((rank for rank, each in enumerate(facts) if each.gpu_problem), None)
    if rank is not None:
        error = facts[rank].gpu_problem
        problem = f"cupy or its NCCL does not work on rank {rank} ({error}); run python -m allred doctor"
    if problem and config.backend == "nccl":
        raise ConfigError(f"backend 'nccl': {problem}")
    if problem:
        return "", f"GPUs are not used: {problem}"
    if config.nccl_cross == "mpi" and host.between:
        name, how = "staged", "through the host, as requested by ALLRED_NCCL_CROSS"
    else:
        name, how = "nccl", "by NCCL"
    return name, f"device arrays {how}, host arrays by {host.backend}"
