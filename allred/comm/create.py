"""Makes communicators: a host backend by name, and a device backend if every rank has a GPU that can be used."""

from typing import Any

from allred.comm.backends import select
from allred.comm.backends.nccl import NcclBackend
from allred.comm.backends.nccl_guard import Guard
from allred.comm.backends.single import SingleBackend
from allred.comm.backends.staged import StagedBackend
from allred.comm.communicator import Communicator
from allred.comm.device_collectives import DeviceCollectives
from allred.comm.group import T
from allred.comm.work import Steps, Work
from allred.config import Config
from allred.errors import ConfigError, InputError
from allred.gpu import binding
from allred.gpu.binding import GpuBinding, VisibleGpus
from allred.gpu.streams import Device

_devices: dict[int, Device] = {}  # of this process, by index: shared by all communicators


def create(name: str, comm: Any, timeout_s: float, nodes: list[int]) -> Communicator:
    """Make a communicator on backend `name`. Collective.

    comm: an mpi4py communicator, which the backend owns; None without MPI. nodes: the node of every rank.
    """
    return Communicator(select.BACKENDS[name](comm, nodes), timeout_s)


def add_devices(communicator: Communicator, config: Config, seen: list[VisibleGpus], nodes: list[int]) -> str:
    """Let the communicator take arrays on GPUs too, if possible. Return what the banner says about it. Collective.

    seen, nodes: for every rank of the communicator, the GPUs that it sees and its node.

    Raises ConfigError if the setting `backend` is nccl and the GPU of some rank cannot be used.
    """
    wanted, reason = select.devices(config, seen, nodes)
    if not wanted:
        return reason
    place, across = binding.bind(seen, nodes, communicator.rank), len(set(nodes)) > 1
    problems = communicator.allgather_object(_open(place, communicator.rank)).wait()
    if any(problems):
        rank = next(rank for rank, text in enumerate(problems) if text)
        problem = f"cupy or its NCCL does not work on rank {rank} ({problems[rank]}); run python -m allred doctor"
        if config.backend == "nccl":
            raise ConfigError(f"backend 'nccl': {problem}")
        return f"GPUs are not used: {problem}"
    return add_device(communicator, _devices[place.index], staged=across and config.nccl_cross == "mpi")


def _open(place: GpuBinding, rank: int) -> str:
    """Open this rank's GPU. Return "", or the problem."""
    try:
        if place.index not in _devices:
            _devices[place.index] = Device(place, rank)
    except Exception as error:  # cupy is for another CUDA version or lacks NCCL; the other ranks have to know
        return f"{type(error).__name__}: {error}"
    return ""


def add_device(communicator: Communicator, device: Device, staged: bool) -> str:
    """Add a device backend. Return what the banner says about it. staged: copy through the host instead of NCCL."""
    host, guard = communicator.backend, Guard(communicator.queue)
    if staged:
        communicator.devices = StagedBackend(host, device, guard)
        how = "through the host, as requested by ALLRED_NCCL_CROSS"
    else:
        communicator.devices = NcclBackend(host, communicator.ranks, device, guard)
        how = "by NCCL"
    communicator.gpu, communicator.name = DeviceCollectives(communicator), "nccl"
    return f"device arrays {how}, host arrays by {host.name}"


class NoCollectives(Communicator):
    """The communicator of a parameter server or a client: collectives are only for workers, and raise InputError."""

    def __init__(self, timeout_s: float, is_client: bool = False) -> None:
        super().__init__(SingleBackend(), timeout_s)
        self.name = "none"
        self._is_client = is_client

    def start(self, kind: str, name: str, body: Steps[T]) -> Work[T]:
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
