"""Several hosts on one machine: a network namespace each, a bridge between them, and a stand-in for ssh.

Requires root; for other users a test that uses `hosts` is skipped. The names contain the process id, so that two runs
do not share one. The end of the `with` block removes them, also after an exception.
"""

import contextlib
import os
import pathlib
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence

import pytest
from harness import BIN, Result, run

_AGENT = """#!/bin/sh
# HOST COMMAND..., with ssh's options before it
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec ip netns exec $host unshare --uts sh -c 'hostname "$0"; exec sh -c "$1"' $host "$*"
"""


class Hosts:
    """`names` are the hosts' names, and those of their namespaces. `hub` is the namespace of the bridge."""

    def __init__(self, names: list[str], agent: pathlib.Path, hub: str) -> None:
        self.names, self._agent, self.hub = names, agent, hub

    def set_link(self, number: int, state: str) -> None:
        """Cut the link of a host (down), or repair it (up)."""
        _ip(self.hub, f"link set p{number} {state}")

    def drop_sent(self, number: int) -> None:
        """Drop all that a host sends; what others send to it still arrives."""
        subprocess.run(
            ["tc", "-n", self.names[number], *["qdisc", "add", "dev", "eth0", "root", "blackhole"]], check=True
        )

    def route(self, number: int, route: str) -> None:
        """Add a route to a host, as for `ip route add`."""
        _ip(self.names[number], f"route add {route}")

    def processes(self, number: int) -> list[int]:
        """Return the ids of the processes of a host."""
        found = subprocess.run(["ip", "netns", "pids", self.names[number]], check=True, capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]

    def wait_for_end(self) -> None:
        """Wait at most 10 s until no host has a process: the launchers' processes may end after mpirun."""
        for _ in range(100):
            left = {name: self.processes(number) for number, name in enumerate(self.names)}
            if not any(left.values()):
                return
            time.sleep(0.1)
        raise AssertionError(f"processes are left: {left}")

    def inside(self, number: int) -> list[str]:
        """The words before a command that runs it on a host."""
        name = self.names[number]
        return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', name]

    def command(self, mpi: str, ranks: list[int], *arguments: object, options: Sequence[object] = ()) -> list[object]:
        """Return the words that start a program with so many ranks on each host, from the first. options: of mpirun."""
        places = ",".join(f"{name}:{count}" for name, count in zip(self.names, ranks, strict=True) if count)
        tcp = ["-genv", "MPIR_CVAR_CH4_NETMOD", "ofi", "-genv", "FI_PROVIDER", "tcp", "-genv", "FI_TCP_IFACE", "eth0"]
        launcher = {
            "mpich": ["-launcher", "ssh", "-launcher-exec", self._agent, "-hosts", places, *tcp],
            "openmpi": ["--prtemca", "plm_ssh_agent", self._agent, "--bind-to", "none", "--host", places],
        }[mpi]
        mpirun = [BIN[mpi] / "mpirun", *launcher, *options, "-np", sum(ranks), BIN[mpi] / "python"]
        return [*self.inside(0), *mpirun, *arguments]

    def run(
        self, mpi: str, ranks: list[int], *arguments: object, options: Sequence[object] = (), **more: object
    ) -> Result:
        """Run the words of `command` until they end. more: as in `harness.run`."""
        return run(self.command(mpi, ranks, *arguments, options=options), **more)


@contextlib.contextmanager
def hosts(count: int, directory: pathlib.Path, networks: int = 1) -> Iterator[Hosts]:
    """`count` hosts with the interfaces eth0 and so on, one for each network: 10.99.0.0/24, 10.99.1.0/24.

    The names of the hosts belong to eth0. Skips the test, with the reason, where namespaces cannot be made."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces can be made by root only")
    with contextlib.ExitStack() as stack:
        try:
            here = _make(stack, count, directory, networks)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no namespaces here: {error}")
        yield here


def _make(stack: contextlib.ExitStack, count: int, directory: pathlib.Path, networks: int) -> Hosts:
    mark = f"{os.getpid()}x{uuid.uuid4().hex[:4]}"
    hub, names = f"arhub{mark}", [f"ar{mark}n{number}" for number in range(count)]
    _namespace(stack, hub)
    for network in range(networks):
        _ip(hub, f"link add br{network} type bridge")
        _ip(hub, f"link set br{network} up")
    table = "127.0.0.1 localhost\n" + "".join(f"10.99.0.{n + 1} {name}\n" for n, name in enumerate(names))
    for number, name in enumerate(names):
        _namespace(stack, name)
        own_etc = pathlib.Path("/etc/netns", name)
        own_etc.mkdir(parents=True)
        stack.callback(own_etc.rmdir)
        (own_etc / "hosts").write_text(table)
        stack.callback((own_etc / "hosts").unlink)
        _ip(name, "link set lo up")
        for network in range(networks):
            port, device = f"p{number}" + f"x{network}" * (network > 0), f"eth{network}"
            _ip(name, f"link add {device} type veth peer name {port} netns {hub}")
            _ip(name, f"addr add 10.99.{network}.{number + 1}/24 dev {device}")
            _ip(name, f"link set {device} up")
            _ip(hub, f"link set {port} master br{network}")
            _ip(hub, f"link set {port} up")
    agent = directory / "agent"
    agent.write_text(_AGENT)
    os.chmod(agent, 0o755)
    return Hosts(names, agent, hub)


def _namespace(stack: contextlib.ExitStack, name: str) -> None:
    subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
    stack.callback(subprocess.run, ["ip", "netns", "del", name], check=True)


def _ip(namespace: str, words: str) -> None:
    subprocess.run(["ip", "-n", namespace, *words.split()], check=True, capture_output=True)
