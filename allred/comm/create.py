"""Makes communicators: selects the host backend, with the reason that the banner shows, and adds a device backend if
every rank has a GPU that can be used."""

from typing import Any

from allred.comm.backends.backend import SingleBackend
from allred.comm.backends.nccl import NcclBackend
from allred.comm.backends.staged import StagedBackend
from allred.comm.communicator import Communicator
from allred.comm.device_collectives import DeviceCollectives
from allred.comm.group import T
from allred.comm.work import Steps, Work, WorkQueue
from allred.config import Config
from allred.errors import ConfigError, InputError
from allred.gpu import streams
from allred.gpu.launch_order import LaunchTurn
from allred.gpu.streams import Device, VisibleGpus

BACKENDS = ("mpi", "shm", "single", "tcp")  # of host arrays


def select_backend(
    wanted: str, nodes: list[int], has_mpi: bool, kernels: list[bool], transport: str = "mpi"
) -> tuple[str, str]:
    """Return the name of the backend, and the reason.

    wanted, transport: the settings `backend` and `transport`. nodes, kernels: for every rank, its node and whether it
    has the C extension.

    Raises ConfigError if the backend in `wanted` cannot be used.

    >>> select_backend("auto", [0, 0, 1], has_mpi=True, kernels=[True] * 3)
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
    if transport == "tcp" and wanted != "mpi" and all(kernels) and has_mpi and len(set(nodes)) > 1:
        return "tcp", "ranks share a node" if len(set(nodes)) < size else "every rank is on a node of its own"
    if wanted not in ("auto", "nccl"):  # NCCL is added to a host backend, not used instead of it
        return wanted, "as requested"
    if size == 1:
        return "single", "one rank"
    if len(set(nodes)) == size:
        return "mpi", "every rank is on a node of its own"
    if not all(kernels):
        return "mpi", f"rank {kernels.index(False)} lacks the C extension, which shared memory needs"
    return "shm", "ranks share a node"


def select_transport(wanted: str, fabrics: list[str], kernels: list[bool]) -> tuple[str, str]:
    """Return the transport between several nodes, mpi or tcp, and the reason.

    wanted: the setting `transport`. fabrics, kernels: for every rank, a network device of its host that MPI drives
    without TCP, or "", and whether it has the C extension.

    Raises ConfigError if the transport in `wanted` cannot be used.

    >>> select_transport("auto", ["", "InfiniBand mlx5_0"], [True, True])
    ('mpi', 'MPI between nodes: InfiniBand mlx5_0')
    """
    if not all(kernels):
        lacking = f"rank {kernels.index(False)} lacks the C extension"
        if wanted == "tcp":
            raise ConfigError(
                f"ALLRED_TRANSPORT=tcp needs the C extension, but {lacking} (python -m allred.native shows the "
                "reason); or use ALLRED_TRANSPORT=mpi"
            )
        return "mpi", f"MPI between nodes: {lacking}"
    if wanted != "auto":
        return wanted, f"{wanted.upper()} between nodes, as requested"
    if found := next(filter(None, fabrics), ""):
        return "mpi", f"MPI between nodes: {found}"
    return "tcp", "TCP between nodes: no InfiniBand, EFA or Slingshot"


def select_devices(config: Config, seen: list[VisibleGpus], nodes: list[int]) -> tuple[bool, str]:
    """Return whether collectives accept arrays on GPUs; if there are GPUs but they do not, also the reason.

    seen, nodes: for every rank, the GPUs that it sees and its node.

    Raises ConfigError if the setting `backend` is nccl but NCCL cannot be used.
    """
    if config.backend not in ("auto", "nccl") or (config.backend == "auto" and not any(one.devices for one in seen)):
        return False, ""
    problem = streams.binding_error(seen, nodes, config.gpu_oversubscribe)
    if problem and config.backend == "nccl":
        raise ConfigError(f"backend 'nccl': {problem}")
    return not problem, problem and f"GPUs are not used: {problem}"


def create(name: str, comm: Any, timeout_s: float, nodes: list[int], network: str = "auto") -> Communicator:
    """Make a communicator on backend `name`. Collective. comm: an mpi4py communicator, which the backend owns; None
    without MPI. nodes: the node of every rank. network: the setting of that name."""
    if name == "single":
        return Communicator(SingleBackend(), timeout_s)
    if name == "mpi":
        from allred.comm.backends.mpi import MpiBackend  # imports MPI

        return Communicator(MpiBackend(comm), timeout_s)
    from allred.comm.backends.hierarchical import connect  # imports MPI, and the C extension

    return Communicator(connect(comm, nodes, name, network, timeout_s), timeout_s)


def add_devices(communicator: Communicator, config: Config, seen: list[VisibleGpus], nodes: list[int]) -> str:
    """Choose the GPU of each rank, and let the communicator take arrays on GPUs too, if possible. Return what the
    banner says about it. Collective. Only for the communicator of all workers: a rank has the same GPU in all others.

    seen, nodes: for every rank of the communicator, the GPUs that it sees and its node.

    Raises ConfigError if the setting `backend` is nccl and the GPU of some rank cannot be used.
    """
    wanted, reason = select_devices(config, seen, nodes)
    if not wanted:
        return reason
    problem = ""
    try:
        device = Device(streams.bind(seen, nodes, communicator.rank), communicator.rank)
    except Exception as error:  # cupy is for another CUDA version or lacks NCCL; the other ranks have to know
        problem = f"{type(error).__name__}: {error}"
    problems = communicator.allgather_object(problem).wait()
    if any(problems):
        rank = next(rank for rank, text in enumerate(problems) if text)
        problem = f"cupy or its NCCL does not work on rank {rank} ({problems[rank]}); run python -m allred doctor"
        if config.backend == "nccl":
            raise ConfigError(f"backend 'nccl': {problem}")
        return f"GPUs are not used: {problem}"
    return add_device(communicator, device, is_staged(config, nodes), config.nccl_16bit == "native")


def is_staged(config: Config, nodes: list[int]) -> bool:
    """Return whether arrays on GPUs are copied through the host instead of NCCL. nodes: of the ranks."""
    return config.nccl_cross == "mpi" and len(set(nodes)) > 1


def add_device(
    communicator: Communicator,
    device: Device,
    staged: bool,
    native_halves: bool = False,
    queue: WorkQueue | None = None,
) -> str:
    """Add a device backend. Return what the banner says about it.

    Arguments:
        staged: see `is_staged`. native_halves: see NcclBackend.
        queue: that of the communicator that starts the operations; default: of this one.
    """
    host = communicator.backend
    if staged:
        communicator.devices = StagedBackend(host, device)
        how = "through the host, as requested by ALLRED_NCCL_CROSS"
    else:
        communicator.devices = NcclBackend(host, communicator.ranks, device, queue or communicator.queue, native_halves)
        how = "by NCCL"
    communicator.gpu, communicator.name = DeviceCollectives(communicator), "nccl"
    return f"device arrays {how}, host arrays by {host.name}"


class NoCollectives(Communicator):
    """The communicator of a parameter server or a client: collectives are only for workers, and raise InputError."""

    def __init__(self, timeout_s: float, is_client: bool = False) -> None:
        super().__init__(SingleBackend(), timeout_s)
        self.name = "none"
        self._is_client = is_client

    def start(self, kind: str, name: str, body: Steps[T], turn: LaunchTurn | None = None) -> Work[T]:
        body.close()
        if self._is_client:
            raise InputError(
                f"{kind} was called by a client, but collectives are for workers. Call it in a function that all "
                "workers run: session.start(function) for each"
            )
        raise InputError(
            f"{kind} was called by a parameter server, but collectives are for workers. A server runs the script up to "
            "allred.distributed(...), where it serves: create the optimizer before this call, or make the call only if "
            "allred.rank() < allred.size()"
        )
