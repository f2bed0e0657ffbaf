"""The network: interfaces and their speed, InfiniBand, and what MPI is likely to use between hosts."""

import dataclasses
import fcntl
import os
import pathlib
import socket
import struct
from collections.abc import Mapping

from allred.doctor.line import NOTE, OK, WARN, Line
from allred.doctor.ranks import Seen, compared, who

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_VIRTUAL = ("docker", "virbr", "br-", "veth", "cni", "podman", "lxc", "tun", "tap")
_SLOW_MBPS = 10_000
_CHOICES = (
    *("OMPI_MCA_pml", "OMPI_MCA_btl", "OMPI_MCA_btl_tcp_if_include"),
    *("MPIR_CVAR_CH4_NETMOD", "FI_PROVIDER", "UCX_TLS", "UCX_NET_DEVICES", "I_MPI_FABRICS"),
)


@dataclasses.dataclass(frozen=True)
class Interface:
    """One that is up. `mbps` is 0 where the kernel does not say."""

    name: str
    address: str
    mbps: int

    def __str__(self) -> str:
        speed = f" {self.mbps / 1000:g} Gbit/s" if self.mbps else " unknown speed"
        return f"{self.name} {self.address or 'no IPv4 address'}{speed}"


@dataclasses.dataclass(frozen=True)
class Network:
    """What a rank's host has, and what the user has told MPI about it."""

    interfaces: tuple[Interface, ...]
    infiniband: tuple[str, ...]  # "mlx5_0 port 1: ACTIVE, 200 Gb/sec (4X HDR)"
    choices: Mapping[str, str]


def look(sys_class: pathlib.Path = pathlib.Path("/sys/class")) -> Network:
    """Look at this host."""
    names = sorted(path.name for path in (sys_class / "net").iterdir()) if (sys_class / "net").is_dir() else []
    up = [name for name in names if name != "lo" and _read(sys_class / "net" / name / "operstate") in ("up", "unknown")]
    interfaces = [Interface(name, _address(name), _speed(sys_class / "net" / name / "speed")) for name in up]
    choices = {name: os.environ[name] for name in _CHOICES if name in os.environ}
    return Network(tuple(one for one in interfaces if one.address or one.mbps), tuple(_infiniband(sys_class)), choices)


def _infiniband(sys_class: pathlib.Path) -> list[str]:
    found = []
    for port in sorted(sys_class.glob("infiniband/*/ports/*")):
        state = _read(port / "state").split(":")[-1].strip()
        found.append(f"{port.parts[-3]} port {port.name}: {state}, {_read(port / 'rate')}")
    return found


def _address(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            request = struct.pack("256s", name.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError:  # it has none
            return ""


def _speed(path: pathlib.Path) -> int:
    value = _read(path)
    return int(value) if value.isdigit() else 0  # -1 or an error on virtual ones


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def judge(ranks: list[Seen[Network]]) -> list[Line]:
    """Interfaces, InfiniBand and, with several hosts, what is likely to carry the bytes."""
    several = len({rank.host for rank in ranks}) > 1
    found = compared(ranks, lambda facts: ", ".join(map(str, facts.interfaces)) or "only loopback")
    alone = [rank for rank in ranks if not rank.facts.interfaces and not rank.facts.infiniband]
    if several and alone:
        remedy = "docker run --network=host ..., or an interface with an address on every host"
        lines = [Line(WARN, "network", f"{who(alone)} has no interface to the other hosts; {found}", remedy)]
    else:
        lines = [Line(OK, "network", found)]
    lines += _fabric(ranks)
    return [*lines, *_between(ranks)] if several else lines


def _fabric(ranks: list[Seen[Network]]) -> list[Line]:
    if not any(rank.facts.infiniband for rank in ranks):
        return []
    found = compared(ranks, lambda facts: ", ".join(facts.infiniband) or "none")
    down = [rank for rank in ranks if not any("ACTIVE" in port for port in rank.facts.infiniband)]
    if down:
        return [Line(WARN, "InfiniBand", f"no active port for {who(down)}; {found}", "ibstat, on that host")]
    return [Line(OK, "InfiniBand", found)]


def _between(ranks: list[Seen[Network]]) -> list[Line]:
    facts = ranks[0].facts
    chosen = " ".join(f"{name}={value}" for name, value in facts.choices.items())
    fabric = all(any("ACTIVE" in port for port in rank.facts.infiniband) for rank in ranks)
    carrier = "InfiniBand, if this MPI was built for it (ucx_info -d, fi_info)" if fabric else "TCP"
    found = f"likely over {carrier}; told by you: {chosen or 'nothing'}"
    lines = [Line(OK if fabric else NOTE, "between hosts", found)]
    extra = [one.name for one in facts.interfaces if one.name.startswith(_VIRTUAL)]
    real = [one.name for one in facts.interfaces if one.name not in extra and one.address]
    if extra and real and not chosen and not fabric:
        remedy = f"Open MPI: mpirun --mca btl_tcp_if_include {real[0]}; MPICH: mpirun -iface {real[0]}"
        lines.append(
            Line(NOTE, "between hosts", f"{', '.join(extra)} of {ranks[0].host} lead to no other host", remedy)
        )
    known = [one.mbps for one in facts.interfaces if one.mbps]
    if not fabric and known and max(known) < _SLOW_MBPS:
        found = f"{max(known) / 1000:g} Gbit/s is {max(known) / 8000:.3g} GB/s for all ranks of a host together"
        lines.append(Line(NOTE, "between hosts", found, "larger batches, or accumulate=, send gradients less often"))
    return lines
