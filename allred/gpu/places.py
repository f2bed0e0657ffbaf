"""Which GPU each rank uses: a pure function of what the ranks of a node see.

The driver is asked directly (libcuda), since cupy takes a second to load; on a machine without one this costs a failed
dlopen. A rank takes the first GPU it sees that no rank before it on its node has: its local rank's where all see the
same ones, its own where the launcher has given each rank one (`srun --gpus-per-task=1`).
"""

import ctypes
import dataclasses
import importlib.util
from collections.abc import Sequence

_UUID_BYTES = 16


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a rank sees: the GPUs by their identity, in CUDA's order, and whether cupy, through which they are used, is
    installed. `local_rank`: the number of this rank on its host is not known here; `bind` counts."""

    devices: tuple[str, ...] = ()
    cupy: bool = False


NOTHING = Seen()


@dataclasses.dataclass(frozen=True)
class Place:
    """A rank's GPU: its index as CUDA counts, and how many ranks of this node share it."""

    index: int
    sharing: int = 1


def look() -> Seen:
    """The GPUs that this process may use."""
    cupy = importlib.util.find_spec("cupy") is not None
    return Seen(_identities(), cupy) if cupy else NOTHING


def _identities() -> tuple[str, ...]:
    """The UUID of each GPU; empty without a driver, or where CUDA_VISIBLE_DEVICES hides them."""
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


def refusal(seen: Sequence[Seen], nodes: Sequence[int], oversubscribe: bool) -> str:
    """Why these ranks cannot have a GPU each, in words that say what to do; "" if they can. nodes: of each rank."""
    for rank, one in enumerate(seen):
        if not one.cupy:
            return f"rank {rank} has no cupy, through which GPUs are used; pip install cupy-cuda12x, or your CUDA's"
        if not one.devices:
            return f"rank {rank} sees no GPU; look at CUDA_VISIBLE_DEVICES and nvidia-smi there"
    for node in dict.fromkeys(nodes):
        here = [rank for rank, name in enumerate(nodes) if name == node]
        devices = {device for rank in here for device in seen[rank].devices}
        if not oversubscribe and any(place.sharing > 1 for place in _places([seen[rank] for rank in here])):
            return (
                f"{len(here)} ranks (rank {here[0]} and others) share a node on which they see {len(devices)} GPU"
                f"{'s' * (len(devices) != 1)}; start one rank a GPU, or let several share one, which is slow and for "
                "tests, by ALLRED_GPU_OVERSUBSCRIBE=1"
            )
    return ""


def bind(seen: Sequence[Seen], nodes: Sequence[int], rank: int) -> Place:
    """This rank's GPU, where `refusal` has nothing against it.

    >>> two = Seen(("GPU-a", "GPU-b"), cupy=True)
    >>> [bind([two, two], [0, 0], rank).index for rank in range(2)]
    [0, 1]
    >>> [bind([Seen(("GPU-a",), True), Seen(("GPU-b",), True)], [0, 0], rank).index for rank in range(2)]
    [0, 0]
    """
    here = [other for other, name in enumerate(nodes) if name == nodes[rank]]
    return _places([seen[other] for other in here])[here.index(rank)]


def _places(seen: Sequence[Seen]) -> list[Place]:
    """Of the ranks of one node, in order. Where there are fewer GPUs than ranks they are dealt out in turn."""
    users: dict[str, int] = {}
    chosen = []
    for one in seen:
        device = min(one.devices, key=lambda name: users.get(name, 0))  # the first of those that fewest have
        users[device] = users.get(device, 0) + 1
        chosen.append((one.devices.index(device), device))
    return [Place(index, users[device]) for index, device in chosen]


def nccl_variables(place: Place, rank: int, version: int, host: str) -> dict[str, str]:
    """What NCCL needs in the environment for several ranks on one GPU; nothing where they have one each.

    From 2.30 on it has a switch. Before that it refuses two ranks with one GPU on one host; told that they are on
    different hosts it goes through sockets.

    >>> nccl_variables(Place(0, sharing=2), 1, 22907, "node7")
    {'NCCL_HOSTID': 'node7-1'}
    """
    if place.sharing == 1:
        return {}
    return {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if version >= 23000 else {"NCCL_HOSTID": f"{host}-{rank}"}
