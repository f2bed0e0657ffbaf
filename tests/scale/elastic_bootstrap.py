"""Measures the start of a large job of `allred run --elastic` on one machine, in which this process is `allred run`.

    python tests/scale/elastic_bootstrap.py --hosts 64 --ranks 16

AgentJob and the agents are the real ones; a script takes the place of ssh. The agents start processes that sleep. The
ranks are sockets of one more process: each joins, gives the values of init() to the exchanges and reports that it runs.

It prints one JSON object: seconds until all agents have connected, until the world is formed, and until all ranks run;
messages and bytes that this process has sent and received; its connections, CPU seconds and memory.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import pathlib
import resource
import secrets
import socket
import sys
import tempfile
import time

from bootstrap import Exchanging, usage, values_of

from allred.membership.agent_process import end_with_parent
from allred.run.agent_job import AgentJob
from allred.runtime import open_files
from allred.runtime.channel import Channel, Listener, open_listener
from allred.runtime.loop import Loop
from allred.watch import runner_link

SSH = """#!/bin/sh
shift
exec sh -c "$*"
"""
PROGRAM = 'echo "$ALLRED_AGENT $$" >> "$STARTED"; exec sleep 600'


class Rank(Exchanging):
    """A rank. where: the socket of its agent. pid: of the process that the agent has started for it."""

    def __init__(self, loop: Loop, ranks: int, where: str, name: str, pid: int) -> None:
        super().__init__(limit_s=60.0)
        self.name, self.ranks, self.generation, self.values = name, ranks, 0, []
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(f"\0{where}")
        page, pidfd = os.memfd_create("page"), os.pidfd_open(pid)
        os.ftruncate(page, os.sysconf("SC_PAGESIZE"))
        socket.send_fds(connection, [json.dumps({"name": name}).encode()], [pidfd, page])
        os.close(page)
        os.close(pidfd)
        self.channel = Channel(connection)
        self.channel.serve(loop, self.handle, lambda error: None)

    def handle(self, messages: list[dict]) -> None:
        for message in messages:
            if "form" in message:
                form = message["form"]
                self.rank, self.size = form["members"].index(self.name), len(form["members"])
                self.generation, self.members = form["generation"], tuple(range(self.size))
                self.values = values_of(self.rank, self.ranks, self.size)
                self.begin_next()
            elif "line" in message:
                self.take_line(message["line"])
        if self.is_done:
            self.channel.send({"report": "running", "generation": self.generation})

    def _send(self, line: str) -> None:
        self.channel.send({"line": line, "generation": self.generation})


def run_ranks(started: pathlib.Path, ranks: int) -> None:
    """Be the rank of each process that an agent has started: a line of the file `started`."""
    end_with_parent()
    open_files.allow(100_000)
    loop, found = Loop(), []
    with started.open() as file:
        while True:
            for line in file:
                where, name, _, pid = line.split()
                found.append(Rank(loop, ranks, where, name, int(pid)))
            loop.turn(0.02)


class Counts:
    """The lines and bytes of all channels of this process."""

    def __init__(self) -> None:
        self.lines_out = self.bytes_out = self.lines_in = self.bytes_in = 0
        send, receive = Channel.send_bytes, Channel.receive_lines

        def send_bytes(channel: Channel, lines: bytes) -> None:
            self.lines_out += lines.count(b"\n")
            self.bytes_out += len(lines)
            send(channel, lines)

        def receive_lines(channel: Channel) -> list[str]:
            lines = receive(channel)
            self.lines_in += len(lines)
            self.bytes_in += sum(map(len, lines)) + len(lines)
            return lines

        self._patches = {"send_bytes": send_bytes, "receive_lines": receive_lines}

    @contextlib.contextmanager
    def counting(self):
        kept = {name: getattr(Channel, name) for name in self._patches}
        for name, function in self._patches.items():
            setattr(Channel, name, function)
        try:
            yield
        finally:
            for name, function in kept.items():
                setattr(Channel, name, function)


def measure(hosts: int, ranks: int, directory: pathlib.Path, limit_s: float = 300.0) -> dict[str, float]:
    """Return the figures of a start of hosts * ranks processes. directory: an empty one."""
    open_files.allow(100_000)
    started, ssh = directory / "started", directory / "ssh"
    started.touch()
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    child = multiprocessing.get_context("fork").Process(target=run_ranks, args=(started, ranks))
    child.start()
    loop, counts, secret = Loop(), Counts(), secrets.token_hex(16)
    listening = open_listener("127.0.0.1")
    names = [f"192.0.2.{host + 1}" for host in range(hosts)]
    environ = {"PATH": os.environ["PATH"], "STARTED": str(started)}
    os.environ["HYDRA_LAUNCHER_EXEC"] = str(ssh)
    times, begun, cpu_s = {}, time.monotonic(), time.process_time()
    with counts.counting():
        job = AgentJob(
            dict.fromkeys(names, ranks), {}, ["sh", "-c", PROGRAM], environ,
            ("127.0.0.1", listening.getsockname()[1], secret), loop, spares=0, minimum=1, replacements=0,
            start_s=limit_s, limit_s=limit_s, say=lambda text: print(text, file=sys.stderr),
        )  # fmt: skip
        Listener(loop, listening, runner_link.PURPOSE, secret, job.connect)
        while job._coordinator.phase != "training" and not job.has_ended() and time.monotonic() < begun + limit_s:
            loop.turn(1.0)
            if "agents_s" not in times and all(agent.channel for agent in job._agents.values()):
                times["agents_s"] = time.monotonic() - begun
            if "formed_s" not in times and job._coordinator.generation:
                times["formed_s"], before_s = time.monotonic() - begun, time.process_time()
                of_forming = vars(counts).copy()
    now_s, is_complete = time.process_time(), job._coordinator.phase == "training"
    times["all_s"] = time.monotonic() - begun
    found = usage(os.getpid())
    for agent in job._agents.values():
        if agent.channel is not None:
            agent.channel.close()
    for agent in job._agents.values():
        agent.popen.wait()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    child.kill()
    child.join()
    return {
        "ranks": hosts * ranks, "is_complete": is_complete, **{name: round(each, 2) for name, each in times.items()},
        **{name: getattr(counts, name) for name in ("lines_out", "bytes_out", "lines_in", "bytes_in")},
        "exchange_lines_out": counts.lines_out - of_forming["lines_out"],
        "cpu_s": round(now_s - cpu_s, 2), "exchange_cpu_s": round(now_s - before_s, 2),
        "agents_cpu_s": round(used.ru_utime + used.ru_stime, 1), "files": found["files"], "mb": round(found["mb"], 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=16, help="of each host")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(measure(options.hosts, options.ranks, pathlib.Path(directory))))


if __name__ == "__main__":
    main()
