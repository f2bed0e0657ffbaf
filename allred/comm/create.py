"""How the backend of device arrays is put together on this rank: its GPU, and what moves arrays between GPUs."""

from allred.comm.backends.nccl import NcclTransport
from allred.comm.backends.nccl_guard import Guard
from allred.comm.backends.staged import StagedTransport
from allred.comm.communicator import Communicator
from allred.comm.device_arguments import Transport
from allred.comm.device_collectives import NcclCommunicator
from allred.config import Config
from allred.errors import ConfigError
from allred.gpu.device import Device
from allred.gpu.places import Place

_devices: dict[int, Device] = {}  # of this process, by index: it has one for all communicators


def connect(host: Communicator, config: Config, place: Place, across: bool) -> tuple[Communicator, str]:
    """The communicator of `host`'s ranks with GPUs, and words for it. across: whether they are on several nodes.

    Where the GPU of some rank cannot be used it is `host`, and the words say why. Raises ConfigError then if the
    setting `backend` is nccl. Collective.
    """
    problem = ""
    try:
        if place.index not in _devices:
            _devices[place.index] = Device(place, host.rank)
    except Exception as error:  # cupy is for another CUDA, or has no NCCL; the other ranks have to know
        problem = f"{type(error).__name__}: {error}"
    problems = host.allgather_object(problem).wait()
    if any(problems):
        rank = next(rank for rank, text in enumerate(problems) if text)
        words = (
            f"cupy or its NCCL does not work on rank {rank} ({problems[rank]}); python -m allred doctor looks at them"
        )
        if config.backend == "nccl":
            raise ConfigError(f"backend 'nccl': {words}")
        return host, f"GPUs are not used: {words}"
    return around(host, _devices[place.index], staged=across and config.nccl_cross == "mpi")


def around(host: Communicator, device: Device, staged: bool) -> tuple[NcclCommunicator, str]:
    """Here is chosen what moves device arrays: NCCL, or the host."""
    guard = Guard(host.queue)
    transport: Transport = StagedTransport(host, device) if staged else NcclTransport(host, device, guard)
    how = "through the host, as ALLRED_NCCL_CROSS asks" if staged else "by NCCL"
    return NcclCommunicator(host, device, transport, guard), f"device arrays {how}, host arrays by {host.name}"
