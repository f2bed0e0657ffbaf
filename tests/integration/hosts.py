"""Several hosts on one machine: a network namespace each, a bridge between them, and a stand-in for ssh.

Requires root; for other users a test that uses `hosts` is skipped. The names contain the process id, so that two runs
do not share one. The end of the `with` block removes them, also after an exception.
"""

import contextlib
import os
import pathlib
import subprocess
import uuid
from collections.abc import Iterator

import pytest
from harness import BIN, Result, run

_AGENT = """#!/bin/sh
# HOST COMMAND..., with ssh's options before it
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec ip netns exec $host unshare --uts sh -c 'hostname "$0"; exec sh -c "$1"' $host "$*"
"""


class Hosts:
    """`names` are the hosts' names, and those of their namespaces."""

    def __init__(self, names: list[str], agent: pathlib.Path, hub: str) -> None:
        self.names, self._agent, self._hub = names, agent, hub

    def set_link(self, number: int, state: str) -> None:
        """Cut the link of a host (down), or repair it (up)."""
        _ip(self._hub, f"link set p{number} {state}")

    def run(self, mpi: str, ranks: list[int], *arguments: object, **options: object) -> Result:
        """A program with so many ranks on each host, started from the first."""
        places = ",".join(f"{name}:{count}" for name, count in zip(self.names, ranks, strict=True))
        tcp = {"mpich": ["-genv", "MPIR_CVAR_CH4_NETMOD", "ofi", "-genv", "FI_PROVIDER", "tcp"]}
        launcher = {
            "mpich": ["-launcher", "ssh", "-launcher-exec", self._agent, "-hosts", places, *tcp["mpich"]],
            "openmpi": ["--prtemca", "plm_ssh_agent", self._agent, "--bind-to", "none", "--host", places],
        }[mpi]
        own = ["ip", "netns", "exec", self.names[0], "unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"']
        mpirun = [BIN[mpi] / "mpirun", *launcher, "-np", sum(ranks), BIN[mpi] / "python"]
        return run([*own, self.names[0], *mpirun, *arguments], **options)


@contextlib.contextmanager
def hosts(count: int, directory: pathlib.Path) -> Iterator[Hosts]:
    """`count` hosts. Skips the test, with the reason, where namespaces cannot be made."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces can be made by root only")
    with contextlib.ExitStack() as stack:
        try:
            here = _make(stack, count, directory)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no namespaces here: {error}")
        yield here


def _make(stack: contextlib.ExitStack, count: int, directory: pathlib.Path) -> Hosts:
    mark = f"{os.getpid()}x{uuid.uuid4().hex[:4]}"
    hub, names = f"arhub{mark}", [f"ar{mark}n{number}" for number in range(count)]
    _namespace(stack, hub)
    _ip(hub, "link add br0 type bridge")
    _ip(hub, "link set br0 up")
    table = "127.0.0.1 localhost\n" + "".join(f"10.99.0.{n + 1} {name}\n" for n, name in enumerate(names))
    for number, name in enumerate(names):
        _namespace(stack, name)
        own_etc = pathlib.Path("/etc/netns", name)
        own_etc.mkdir(parents=True)
        stack.callback(own_etc.rmdir)
        (own_etc / "hosts").write_text(table)
        stack.callback((own_etc / "hosts").unlink)
        _ip(name, f"link add eth0 type veth peer name p{number} netns {hub}")
        for words in ("link set lo up", f"addr add 10.99.0.{number + 1}/24 dev eth0", "link set eth0 up"):
            _ip(name, words)
        _ip(hub, f"link set p{number} master br0")
        _ip(hub, f"link set p{number} up")
    agent = directory / "agent"
    agent.write_text(_AGENT)
    os.chmod(agent, 0o755)
    return Hosts(names, agent, hub)


def _namespace(stack: contextlib.ExitStack, name: str) -> None:
    subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
    stack.callback(subprocess.run, ["ip", "netns", "del", name], check=True)


def _ip(namespace: str, words: str) -> None:
    subprocess.run(["ip", "-n", namespace, *words.split()], check=True, capture_output=True)
