"""Binding of ranks to GPUs: a pure function of the GPUs that the ranks of a node see.

The driver (libcuda) lists the GPUs, because importing cupy takes a second. A rank is bound to the first GPU it sees
that no lower rank of its node uses: GPU `local_rank` if all ranks see the same GPUs, or the only GPU it sees
(`srun --gpus-per-task=1`).
"""

import ctypes
import dataclasses
import importlib.util
from collections.abc import Sequence

_UUID_BYTES = 16


@dataclasses.dataclass(frozen=True)
class VisibleGpus:
    """GPUs that a rank sees.

    Arguments:
        devices: UUID of each GPU, in CUDA's order.
        cupy: whether cupy is installed.
    """

    devices: tuple[str, ...] = ()
    cupy: bool = False


NO_GPUS = VisibleGpus()


@dataclasses.dataclass(frozen=True)
class GpuBinding:
    """GPU of a rank: its CUDA index, and the number of ranks on this node that share it."""

    index: int
    sharing: int = 1


def visible_gpus() -> VisibleGpus:
    cupy = importlib.util.find_spec("cupy") is not None
    return VisibleGpus(_uuids(), cupy) if cupy else NO_GPUS


def _uuids() -> tuple[str, ...]:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    found = []
    for index in range(count.value):
        uuid = (ctypes.c_ubyte * _UUID_BYTES)()
        if cuda.cuDeviceGetUuid(uuid, ctypes.c_int(index)):
            return ()
        found.append(bytes(uuid).hex())
    return tuple(found)


def binding_error(seen: Sequence[VisibleGpus], nodes: Sequence[int], oversubscribe: bool) -> str:
    """Error text if the ranks cannot be bound to a GPU each, else "". seen, nodes: of each rank. oversubscribe: whether
    ranks may share a GPU."""
    for rank, one in enumerate(seen):
        if not one.cupy:
            return f"cupy is not installed on rank {rank}; pip install cupy-cuda12x, or the one for your CUDA"
        if not one.devices:
            return f"rank {rank} sees no GPU; check CUDA_VISIBLE_DEVICES and nvidia-smi on its host"
    for node in dict.fromkeys(nodes):
        here = [rank for rank, name in enumerate(nodes) if name == node]
        devices = {device for rank in here for device in seen[rank].devices}
        if not oversubscribe and any(one.sharing > 1 for one in _bind_node([seen[rank] for rank in here])):
            return (
                f"{len(here)} ranks (rank {here[0]} and others) share a node with {len(devices)} GPU"
                f"{'s' * (len(devices) != 1)}; start one rank per GPU, or set ALLRED_GPU_OVERSUBSCRIBE=1 to let ranks "
                "share a GPU, which is slow and meant for tests"
            )
    return ""


def bind(seen: Sequence[VisibleGpus], nodes: Sequence[int], rank: int) -> GpuBinding:
    """GPU of a rank, if `binding_error` returned "".

    >>> two = VisibleGpus(("GPU-a", "GPU-b"), cupy=True)
    >>> [bind([two, two], [0, 0], rank).index for rank in range(2)]
    [0, 1]
    >>> [bind([VisibleGpus(("GPU-a",), True), VisibleGpus(("GPU-b",), True)], [0, 0], rank).index for rank in range(2)]
    [0, 0]
    """
    here = [other for other, name in enumerate(nodes) if name == nodes[rank]]
    return _bind_node([seen[other] for other in here])[here.index(rank)]


def _bind_node(seen: Sequence[VisibleGpus]) -> list[GpuBinding]:
    """Bindings of the ranks of one node, in rank order; round robin if there are fewer GPUs than ranks."""
    users: dict[str, int] = {}
    chosen = []
    for one in seen:
        device = min(one.devices, key=lambda name: users.get(name, 0))  # the first GPU with the fewest ranks
        users[device] = users.get(device, 0) + 1
        chosen.append((one.devices.index(device), device))
    return [GpuBinding(index, users[device]) for index, device in chosen]


def nccl_variables(binding: GpuBinding, rank: int, version: int, host: str) -> dict[str, str]:
    """Environment variables that let NCCL run several ranks on one GPU; none if each rank has its own GPU.

    NCCL 2.30 and later have a variable for it. Earlier versions refuse two ranks with one GPU on one host; with
    different host identifiers they communicate through sockets.

    >>> nccl_variables(GpuBinding(0, sharing=2), 1, 22907, "node7")
    {'NCCL_HOSTID': 'node7-1'}
    """
    if binding.sharing == 1:
        return {}
    return {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if version >= 23000 else {"NCCL_HOSTID": f"{host}-{rank}"}
