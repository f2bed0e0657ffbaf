"""The numbers of this rank in the running job (numbering.py), its role, and the network interfaces of this host."""

import contextlib
import fcntl
import pathlib
import socket
import struct

from allred import world


def rank() -> int:
    """Return this worker's number, 0 to size() - 1; worker 0 is the chief."""
    return world.current().topology.rank


def size() -> int:
    """Return the number of workers."""
    return world.current().topology.size


def local_rank() -> int:
    """Return this rank's number on its node."""
    return world.current().topology.local_rank


def local_size() -> int:
    """Return the number of ranks on this node."""
    return world.current().topology.local_size


def cross_rank() -> int:
    """Return this rank's number among the ranks of all nodes that have its local rank."""
    return world.current().topology.cross_rank


def cross_size() -> int:
    """Return the number of nodes that have a rank with this local rank."""
    return world.current().topology.cross_size


def world_rank() -> int:
    """Return this process's number in the MPI world."""
    return world.current().topology.world_rank


def world_size() -> int:
    """Return the number of processes of the MPI world."""
    return world.current().topology.world_size


def is_chief() -> bool:
    """Return whether this is worker 0, which writes checkpoints and messages; never true on a parameter server."""
    return world.current().topology.rank == 0


def job_name() -> str:
    """Return the job of this task: "ps" on a parameter server, "client" on a client, else "worker" or the name of the
    workers' job in the `ClusterSpec`."""
    here = world.current()
    if here.topology.rank < here.topology.size:
        return here.workers_job
    return "ps" if here.topology.world_rank < here.topology.servers else "client"


def role() -> str:
    """Return the job and the index of this task, for messages."""
    names = {"ps": "parameter server", "client": "client"}
    return f"{names.get(job_name(), 'worker')} {task_index()}"


def task_index() -> int:
    """Return this task's number in its job; for a worker, rank()."""
    here = world.current().topology
    first = {"ps": here.size, "client": here.size + here.servers}.get(job_name(), 0)
    return here.rank - first


def fabric(sys_class: pathlib.Path = pathlib.Path("/sys/class")) -> str:
    """Return an active network device of this host that MPI drives without TCP: "InfiniBand mlx5_0" (EFA devices have
    this class too) or "Slingshot cxi0"; "" if there is none."""
    for state in sorted(sys_class.glob("infiniband/*/ports/*/state")):
        with contextlib.suppress(OSError):
            if "ACTIVE" in state.read_text():
                return f"InfiniBand {state.parts[-4]}"
    return next((f"Slingshot {device.name}" for device in sorted(sys_class.glob("cxi/*"))), "")


_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915  # linux/sockios.h
_IFF_RUNNING = 0x40  # linux/if.h


def ipv4_addresses() -> dict[str, str]:
    """Return the IPv4 address of each interface that has one, is up, and has a link."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                [flags] = struct.unpack("16xH", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request)[:18])
                address = socket.inet_ntoa(fcntl.ioctl(any_socket, _SIOCGIFADDR, request)[20:24])
            except OSError:  # it has no IPv4 address, or was removed
                continue
            if flags & _IFF_RUNNING:
                found[name] = address
    return found
