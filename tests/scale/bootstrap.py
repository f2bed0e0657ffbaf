"""Measures the start of a large job on one machine: the rendezvous process, and the exchanges of init().

    python tests/scale/bootstrap.py --hosts 64 --ranks 16

The rendezvous process is the real one. The tasks are sockets of a few processes: each uses the real handshake, hello
and encoding of values, and gives values of the size that init() gives. One task of 64 also decodes what it receives.

It prints one JSON object: seconds until "go" and until the last exchange is complete; lines and bytes that the
rendezvous process has sent and received; its connections, CPU seconds and memory.
"""

import argparse
import contextlib
import ctypes
import errno
import json
import multiprocessing
import os
import pickle
import resource
import secrets
import socket
import time
from collections.abc import Iterator

from allred.cluster.processors import Cores
from allred.comm.select import TransportFacts
from allred.gpu.streams import NO_GPUS
from allred.launch.rendezvous_bootstrap import TaskConnection
from allred.launch.rendezvous_server import PURPOSE, digest
from allred.membership.agent_process import end_with_parent
from allred.runtime import channel, detached
from allred.runtime.channel import Channel
from allred.runtime.loop import Loop
from allred.runtime.timings import RETRY_S
from allred.world_creation import Facts

SECRET = "the secret of the simulation"
DECODES = 64  # one task of these decodes the values


def values_of(rank: int, ranks: int, size: int) -> list[bytes]:
    """Return what a rank gives to the exchanges of init() with several hosts, in their order."""
    host, first = rank // ranks, rank // ranks * ranks
    domain = f"6b4e3a0c-9d1f-4c55-8a1e-{host:012} 25 net:[4026531840] ipc:[4026531839] pid:[4026531836]"
    name = f"node-{host:04}.cluster.example"
    cores = Cores(frozenset({2 * rank % 256, (2 * rank + 1) % 256}), 256, None, 1, "openblas")
    transport = TransportFacts(first, False, True, "", NO_GPUS)
    facts = Facts({"transport": "tcp", "timeout_s": 60.0}, first, cores, transport, "", rank, 0)
    token = secrets.token_hex
    addresses = [(f"10.1.{host}.{7}", 30000 + rank % ranks)]
    watcher = {
        "token": token(16), "host": name, "address": f"10.1.{host}.7" if rank == 0 else "127.0.0.1",
        "name": f"\0{rank:05x}", "port": 40000, "problem": "",
    }  # fmt: skip
    return [
        domain.encode(),
        pickle.dumps(facts),
        pickle.dumps(("", domain, name, token(32) if rank == 0 else "", token(16), addresses[0])),
        pickle.dumps(True),
        pickle.dumps(token(32)) if rank == 0 else b"",
        pickle.dumps(("", addresses, name)),
        pickle.dumps(""),
        pickle.dumps(""),
        pickle.dumps((True, name)),
        pickle.dumps(secrets.randbits(64)) if rank == 0 else b"",
        pickle.dumps(name),
        pickle.dumps(watcher if rank == first else None),
        pickle.dumps(""),
    ]


class Exchanging(TaskConnection):
    """A task that makes the exchanges of init(), one after the other. values: what it has not given yet."""

    own_host = ""
    is_done = False

    def begin_next(self) -> None:
        """Begin the next exchange. values: what this task gives."""
        if not self.values:
            self.is_done = True
            return
        self.given = self.values.pop(0)
        self.key = self.begin(self.members, self.given, "0 ")

    def take_line(self, line: str) -> None:
        """Handle a line of the other end; begin the next exchange after the last line of one."""
        if self.rank % DECODES == 0:
            self._handle(line)
        elif line[:100].partition(" left=")[2].startswith("0 "):
            self._values[self.key] = []
        if self._values[self.key] is None:
            return
        found = self.take(self.key)
        if self.rank % DECODES == 0:
            assert len(found) == self.size
            assert found[self.rank] == self.given, "another value than this task has given"
        self.begin_next()

    def _receive(self, timeout_s: float) -> None: ...


class Task(Exchanging):
    """A task: the rendezvous, then its exchanges. It is over at `is_done`."""

    def __init__(self, drivers: "Driver", rank: int, size: int) -> None:
        super().__init__(limit_s=60.0)
        self.driver, self.rank, self.size, self.members = drivers, rank, size, drivers.members
        self.hello = drivers.hello(rank)
        self.received = self.sent = self.lines_received = self.lines_sent = self.attempts = 0
        self.values, self.gone_at, self.text = drivers.values(rank), 0.0, b""
        self.lifeline = self.connect(self.hello, self.wait_for_go)
        self.pmi: Channel | None = None

    def connect(self, hello: dict, handle) -> Channel:
        """Open an authenticated channel, send `hello`, and let `handle` receive."""
        self.attempts += 1
        found, loop = Channel(socket.socket(socket.AF_INET)), self.driver.loop
        found.connection.setblocking(False)
        steps = channel.prove(found, PURPOSE, SECRET)
        next(steps)

        def authenticate() -> None:
            try:
                for message in found.receive():
                    self.count(message)
                    steps.send(message)
            except StopIteration:
                loop.remove(found.connection)
                found.connection.settimeout(60.0)
                loop.on_input(found.connection, handle)
                self.send(found, json.dumps(hello))
            except ConnectionError:
                found.close()
                loop.remove(found.connection)
                loop.after(RETRY_S, retry)

        def retry() -> None:
            again = self.connect(hello, handle)
            self.lifeline, self.pmi = (again, None) if self.pmi is None else (self.lifeline, again)

        error = found.connection.connect_ex(self.driver.where)
        assert error in (0, errno.EINPROGRESS), os.strerror(error)
        loop.on_input(found.connection, authenticate)
        return found

    def count(self, message: dict) -> None:
        self.lines_received += 1
        self.received += len(json.dumps(message)) + 1

    def send(self, to: Channel, line: str) -> None:
        self.lines_sent += 1
        self.sent += len(line) + 1
        to.send_line(line)

    def wait_for_go(self) -> None:
        data = b""
        with contextlib.suppress(ConnectionResetError):
            data = self.lifeline.connection.recv(1 << 20)
        self.received += len(data)
        self.lines_received += data.count(b"\n")
        assert b'"refused"' not in data, data
        if not data:
            self.driver.loop.remove(self.lifeline.connection)
            self.lifeline.close()
            self.driver.loop.after(RETRY_S, self.rejoin)
        elif data.endswith(b'{"go": true}\n'):
            self.gone_at = time.monotonic()
            self.driver.loop.remove(self.lifeline.connection)
            self.pmi = Channel(socket.socket())
            self.pmi = self.connect({"rank": self.rank}, self.exchange)

    def rejoin(self) -> None:
        self.lifeline = self.connect(self.hello, self.wait_for_go)

    def _send(self, line: str) -> None:
        self.send(self.pmi, line)

    def exchange(self) -> None:
        """Handle what arrives on the second connection."""
        data = self.pmi.connection.recv(1 << 20)
        assert data, "the rendezvous process has closed the connection"
        self.received += len(data)
        self.lines_received += data.count(b"\n")
        self.text += data
        if b"\n" not in data:
            return
        *lines, self.text = self.text.split(b"\n")
        for line in lines:
            if line == b'{"connected": true}':
                self.begin_next()
            else:
                self.take_line(line.decode())


class Driver:
    """Runs the tasks of some ranks in this process."""

    def __init__(self, where: tuple[str, int], addresses: dict[str, str], ranks: int, mine: range) -> None:
        self.loop, self.where, self.addresses, self.ranks = Loop(), where, addresses, ranks
        self.members, self.names, self.digest = tuple(range(len(addresses))), list(addresses), digest(addresses)
        self.tasks = [Task(self, rank, len(addresses)) for rank in mine]

    def hello(self, rank: int) -> dict:
        host = rank // self.ranks
        about = {"node": f"node {host}", "host": f"node-{host:04}", "pid": 1000 + rank, "user": os.geteuid()}
        return {"task": self.names[rank], "digest": self.digest, **about}

    def values(self, rank: int) -> list[bytes]:
        return values_of(rank, self.ranks, len(self.addresses))

    def run(self) -> dict[str, float]:
        """Run until all tasks are done. Return the sums over them."""
        while not all(task.is_done for task in self.tasks):
            self.loop.turn()
        found = {
            name: sum(getattr(task, name) for task in self.tasks)
            for name in ("received", "sent", "lines_received", "lines_sent", "attempts")
        }
        return found | {"gone_at": max(task.gone_at for task in self.tasks), "cpu_s": time.process_time()}

    def close(self) -> None:
        for task in self.tasks:
            task.lifeline.close()
            task.pmi.close()


def adopt_orphans() -> None:
    """Become the parent of the background processes that this process starts."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def children() -> set[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return {int(word) for word in file.read().split()}


def usage(pid: int) -> dict[str, float]:
    """Return CPU seconds, the largest memory so far, and the open files of a process."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    with open(f"/proc/{pid}/status") as file:
        [peak] = [line.split()[1] for line in file if line.startswith("VmHWM")]
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return {"cpu_s": cpu_s, "mb": int(peak) / 1024, "files": len(os.listdir(f"/proc/{pid}/fd"))}


@contextlib.contextmanager
def rendezvous_process(addresses: dict[str, str]) -> Iterator[tuple[tuple[str, int], int]]:
    """Start a rendezvous process. Return its address and pid."""
    adopt_orphans()
    before = children()
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        where = server.getsockname()
        settings = {"addresses": addresses, "secret": SECRET, "listener": server.fileno(), "pid": os.getpid()}
        answer = detached.start("allred.launch.rendezvous_server", settings, files=[server.fileno()])
    assert answer["problem"] == "", answer
    [pid] = children() - before
    try:
        yield where, pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
        os.waitpid(pid, 0)


def _drive(connection, where, addresses, ranks, mine) -> None:
    end_with_parent()
    driver = Driver(where, addresses, ranks, mine)
    connection.send(driver.run())
    connection.recv()
    driver.close()


def measure(hosts: int, ranks: int, processes: int) -> dict[str, float]:
    """Return the figures of a start of hosts * ranks tasks, which run in this number of processes."""
    size = hosts * ranks
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    addresses = {f"/job:worker/task:{rank}": f"10.1.{rank // ranks}.7:{30000 + rank % ranks}" for rank in range(size)}
    with rendezvous_process(addresses) as (where, pid):
        begun, context, drivers = time.monotonic(), multiprocessing.get_context("fork"), []
        for number in range(processes):
            ours, theirs = context.Pipe()
            mine = range(size * number // processes, size * (number + 1) // processes)
            child = context.Process(target=_drive, args=(theirs, where, addresses, ranks, mine))
            child.start()
            drivers.append((ours, child))
        found = [ours.recv() for ours, _ in drivers]
        ended, of_server = time.monotonic(), usage(pid)
        for ours, child in drivers:
            ours.send("end")
            child.join()
    total = {name: sum(each[name] for each in found) for name in found[0]}
    return {
        "ranks": size,
        "go_s": round(max(each["gone_at"] for each in found) - begun, 2),
        "all_s": round(ended - begun, 2),
        "lines_out": total["lines_received"], "bytes_out": total["received"],
        "lines_in": total["lines_sent"], "bytes_in": total["sent"],
        "connections_tried": total["attempts"],
        "server_files": of_server["files"], "server_cpu_s": of_server["cpu_s"], "server_mb": round(of_server["mb"], 1),
        "tasks_cpu_s": round(total["cpu_s"], 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=16, help="of each host")
    parser.add_argument("--processes", type=int, default=2, help="that run the tasks")
    options = parser.parse_args()
    print(json.dumps(measure(options.hosts, options.ranks, options.processes)))


if __name__ == "__main__":
    main()
