"""Tasks started one by one, without mpirun: each a process of its own, in a thread that waits for its end."""

import concurrent.futures
import contextlib
import json
from collections.abc import Iterator

from harness import BIN, Result, run
from ports import reserved_ports

# What tells of the wait speaks more often here than a person wants it.
HEAD = """
import json, os, signal, sys, time
import numpy as np
import allred
from allred.launch import rendezvous_client
rendezvous_client.REMIND_TASKS_S = 0.5
cluster, job, index = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
{before}
server = allred.Server(cluster, job, index)
print("in", server.target, flush=True)
params = {{"w": np.zeros(1000)}}

def train(steps, pause_s=0.0, step=lambda number: None):
    opt = allred.distributed(allred.optim.SGD(lr=1.0))
    opt.broadcast(params)
    for number in range(steps):
        time.sleep(pause_s)
        step(number)
        opt.step(params, {{"w": np.ones(1000)}})
    return opt
"""


def cluster(servers: int = 1, workers: int = 2, host: str = "localhost") -> dict[str, list[str]]:
    """Addresses on this machine."""
    found = [f"{host}:{port}" for port in reserved_ports(servers + workers)]
    jobs = {"ps": found[:servers], "worker": found[servers:]}
    return {job: addresses for job, addresses in jobs.items() if addresses}


class Tasks:
    """Starts tasks of one cluster."""

    def __init__(self, jobs: dict[str, list[str]], pool: concurrent.futures.Executor) -> None:
        self.jobs, self._pool = jobs, pool

    def start(
        self, job: str, index: int, body: str = "", before: str = "", mpi: str = "mpich", jobs: object = None,
        inside: tuple[object, ...] = (), **settings: object,
    ) -> "concurrent.futures.Future[Result]":  # fmt: skip
        """`body` is what the task does then. inside: a command in which it runs."""
        code = HEAD.format(before=before) + body
        words = [*inside, BIN[mpi] / "python", "-c", code, json.dumps(jobs or self.jobs), job, index]
        env = {"ALLRED_BANNER": "0", "ALLRED_START_TIMEOUT_S": "60"}
        env |= {name if name.isupper() else f"ALLRED_{name.upper()}": str(value) for name, value in settings.items()}
        return self._pool.submit(run, words, 110, env)

    def all(self, bodies: dict[tuple[str, int], str], **options: object) -> dict[tuple[str, int], Result]:
        """Start them all, and wait for their ends."""
        started = {task: self.start(*task, body, **options) for task, body in bodies.items()}
        return {task: future.result() for task, future in started.items()}


@contextlib.contextmanager
def tasks(jobs: dict[str, list[str]]) -> Iterator[Tasks]:
    """Of these jobs."""
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        yield Tasks(jobs, pool)


def text(results: dict[tuple[str, int], Result]) -> str:
    """All of it, for the message of a failing assertion."""
    return "\n".join(f"==== {job} {index}: {result.text}" for (job, index), result in results.items())
