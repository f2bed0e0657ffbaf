"""Trainings with random faults: `python tests/fuzz/soak.py --seconds 3600`. Ends with a table of outcomes.

A seed selects a training (soak_program.py), a fault, its victim and its time. A training has one of these outcomes:

survived   exit code 0, and the result of a training without a fault, bit for bit
named      another exit code, and a line that names the cause after the fault: the rank, or the host
ended      the launcher was killed; all its processes have ended too
silent     anything else: a wrong result, a hang, processes that are left, an end without a cause. There must be none

The seed is printed before the training starts; `--seed N` repeats it. Cuts of links and full disks require root.
"""

import argparse
import collections
import contextlib
import importlib.util
import os
import pathlib
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "integration"))

from harness import BIN, environment, gone, processes  # noqa: E402
from hosts import hosts  # noqa: E402
from soak_program import EPOCHS, ROWS, numbers_of  # noqa: E402

PROGRAM, STEPS, LIMIT_S = HERE / "soak_program.py", 150, 90
TIMEOUT_S = {"hang": "4", "cut": "10"}  # of ALLRED_TIMEOUT_S
PS = {"ALLRED_MODE": "ps"}


class Training(NamedTuple):
    """A way to train. ranks: in all. servers: of these. recovers: whether it survives a killed rank."""

    name: str
    kind: str
    ranks: int
    env: dict[str, str]
    servers: int = 0
    launcher: str = "mpich"
    recovers: bool = False


TRAININGS = [
    Training("sync", "plain", 3, {}),
    Training("sync, Open MPI", "plain", 3, {}, launcher="openmpi"),
    Training("sync, TCP", "plain", 3, {"ALLRED_TRANSPORT": "tcp", "ALLRED_PRETEND_NODES": "1,1,1"}),
    Training("ps async", "plain", 4, {**PS, "ALLRED_CONSISTENCY": "async"}, 2),
    Training("ps bounded", "plain", 3, {**PS, "ALLRED_CONSISTENCY": "bounded"}, 1),
    Training("ps sync", "plain", 4, {**PS, "ALLRED_CONSISTENCY": "sync"}, 2),
    Training("torch", "torch", 2, {}),
    Training("torch DDP", "ddp", 2, {}),
    Training("session", "session", 3, {}),
    Training("run --restarts", "session", 2, {}, launcher="restarts", recovers=True),
    Training("run --elastic", "session", 3, {}, launcher="elastic", recovers=True),
    Training("two hosts", "plain", 4, {}, launcher="hosts"),
]
FAULTS = ("none", "kill", "kill", "kill", "stop", "stop", "hang", "launcher")
OF_HOSTS = ("cut", "cut and repair")
OF_DISKS = ("disk full", "disk full and freed")
DISK_BYTES = 1 << 20


class Job(NamedTuple):
    seed: int
    training: Training
    fault: str
    victim: int
    after_s: float
    stopped_s: float

    def __str__(self) -> str:
        victim = f" of rank {self.victim}" if self.fault in ("kill", "stop", "hang") else ""
        return f"seed {self.seed}: {self.training.name}, {self.fault}{victim} after {self.after_s:.2f} s"


class End(NamedTuple):
    outcome: str
    text: str
    noticed_s: float | None  # from the fault to the first line that names it


def job_of(seed: int) -> Job:
    chance = random.Random(seed)
    training = chance.choice(TRAININGS)
    more = OF_HOSTS * 3 if training.launcher == "hosts" else OF_DISKS if training.kind == "session" else ()
    fault = chance.choice((*FAULTS, *more))
    return Job(seed, training, fault, chance.randrange(training.ranks), chance.random(), chance.uniform(0.2, 2.0))


def is_possible(job: Job) -> bool:
    """Whether this machine has torch, or makes namespaces and mounts disks, if the job needs it."""
    if job.training.kind in ("torch", "ddp"):
        return importlib.util.find_spec("torch") is not None
    return os.geteuid() == 0 or (job.training.launcher != "hosts" and job.fault not in OF_DISKS)


@contextlib.contextmanager
def small_disk(path: pathlib.Path) -> Iterator[None]:
    """Mount a file system of DISK_BYTES at `path`."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", path], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)


class Process:
    """A training in progress: its lines on stderr with their times."""

    def __init__(self, words: list[object], env: dict[str, str | None], directory: pathlib.Path) -> None:
        variables = {**os.environ, **env}
        own = {name: value for name, value in variables.items() if value is not None}
        self.process = subprocess.Popen(
            list(map(str, words)), env=own, cwd=directory, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        self.lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line))

    def wait(self, limit_s: float) -> int | None:
        """Return the exit code, None after the limit."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(limit_s)
            self._reader.join(5)
        return self.process.returncode


def play(job: Job) -> End:
    with contextlib.ExitStack() as stack:
        directory = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        mark = {"TEST_MARK": uuid.uuid4().hex}
        training, program = job.training, [PROGRAM, job.training.kind, directory, STEPS]
        env = {**training.env, **mark, "ALLRED_STALL_WARNING_S": "1", "XDG_RUNTIME_DIR": str(directory)}
        if training.servers:
            env["ALLRED_NUM_PS"] = str(training.servers)
        if job.fault in TIMEOUT_S:
            env["ALLRED_TIMEOUT_S"] = TIMEOUT_S[job.fault]
        own_hosts = stack.enter_context(hosts(2, directory)) if training.launcher == "hosts" else None
        if job.fault in OF_DISKS:
            stack.enter_context(small_disk(directory / "checkpoints"))
        run = [BIN["mpich"] / "python", "-m", "allred", "run", "-np", training.ranks]
        if own_hosts is not None:
            words = own_hosts.command("mpich", [2, 2], *program)
        elif training.launcher in ("restarts", "elastic"):
            words = [*run, *(["--restarts", 3] if training.launcher == "restarts" else ["--elastic"]), *program]
        else:
            where = BIN[training.launcher]
            words = [where / "mpirun", "-np", training.ranks, where / "python", *program]
        process = Process(words, environment(env), directory)
        try:
            if not await_ranks(process, directory, training.ranks):
                return End("silent", f"did not start\n{text_of(process)}", None)
            time.sleep(job.after_s)
            fault_at = time.monotonic()
            strike(job, process, directory, own_hosts)
            code = process.wait(LIMIT_S)
            return judge(job, process, directory, code, fault_at, mark)
        finally:
            for pid in processes(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait(10)
            process.process.stdout.close()


def await_ranks(process: Process, directory: pathlib.Path, ranks: int) -> bool:
    """Wait until all ranks are in their training."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until and process.process.poll() is None:
        if len(list(directory.glob("pid-1-*"))) == ranks:
            return True
        time.sleep(0.01)
    return False


def strike(job: Job, process: Process, directory: pathlib.Path, own_hosts: object) -> None:
    pid = int((directory / f"pid-1-{job.victim}").read_text())
    with contextlib.suppress(ProcessLookupError):  # the training may be over
        if job.fault == "kill":
            os.kill(pid, signal.SIGKILL)
        elif job.fault in ("stop", "hang"):
            os.kill(pid, signal.SIGSTOP)
            if job.fault == "stop":
                time.sleep(job.stopped_s)
                os.kill(pid, signal.SIGCONT)
        elif job.fault == "launcher":
            process.process.kill()
        elif job.fault in OF_HOSTS:
            own_hosts.set_link(1, "down")
            if job.fault == "cut and repair":
                time.sleep(job.stopped_s)
                own_hosts.set_link(1, "up")
        elif job.fault in OF_DISKS:
            filler = directory / "checkpoints" / "filler"
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            if job.fault == "disk full and freed":
                time.sleep(job.stopped_s)
                filler.unlink()


def expected(training: Training) -> np.ndarray:
    if training.kind == "session":
        return np.full(ROWS, float(EPOCHS))
    workers = training.ranks - training.servers
    counts = [np.bincount(numbers_of(rank, step), minlength=ROWS) for rank in range(workers) for step in range(STEPS)]
    total = np.sum(counts, axis=0).astype(float)
    is_mean = training.kind == "ddp" or training.env.get("ALLRED_CONSISTENCY") == "sync"
    return total / workers if is_mean else total


def causes(job: Job) -> str:
    """Return the pattern of a line that names the cause."""
    rank = rf"rank {job.victim}\b"
    return {
        "kill": rf"{rank}.* killed by signal 9",
        "hang": rf"{rank}.*(stopped|has not|made no|silent)|waits? for .*{rank}",
        "cut": r"host \S+ \(ranks? [\d-]+\).*(lost|unreachable|no answer)",
        **dict.fromkeys(OF_DISKS, r"checkpoints.*No space left on device"),
    }.get(job.fault, r"(?!)")


def judge(
    job: Job, process: Process, directory: pathlib.Path, code: int | None, fault_at: float, mark: dict[str, str]
) -> End:
    text, noticed_s = text_of(process), None
    for at, line in process.lines:
        if at >= fault_at and re.search(causes(job), line):
            noticed_s = at - fault_at
            break
    problems = []
    if code is None:
        problems.append(f"no end within {LIMIT_S} s")
    if job.fault == "hang":  # launchers leave a rank that is stopped
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((directory / f"pid-1-{job.victim}").read_text()), signal.SIGKILL)
    if not gone(mark, 30 if job.fault == "cut" else 10):
        problems.append("processes are left")
    result = directory / "result"
    if problems:
        return End("silent", f"{problems}\n{text}", noticed_s)
    if code == 0:
        is_right = result.exists() and np.array_equal(np.loadtxt(result), expected(job.training))
        return End("survived" if is_right else "silent", f"result is right: {is_right}\n{text}", noticed_s)
    if job.fault == "launcher":
        return End("ended", text, None)
    must_survive = job.fault in ("none", "stop", "cut and repair") or (job.fault == "kill" and job.training.recovers)
    is_named = noticed_s is not None and not must_survive
    return End("named" if is_named else "silent", f"exit code {code}\n{text}", noticed_s)


def text_of(process: Process) -> str:
    return "".join(line for _, line in process.lines)


def print_table(what: str, ends: dict[str, list[End]]) -> None:
    print(f"| {what} | survived | named | ended | silent | median s to the message | largest |")
    print("|---|---|---|---|---|---|---|")
    for key, found in ends.items():
        counts = collections.Counter(end.outcome for end in found)
        times = [end.noticed_s for end in found if end.noticed_s is not None]
        late = f"{statistics.median(times):.2f} | {max(times):.2f}" if times else " | "
        numbers = " | ".join(str(counts[each]) for each in ("survived", "named", "ended", "silent"))
        print(f"| {key} | {numbers} | {late} |")
    print()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0, help="duration; default: one training")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3)), help="the first seed")
    given = parser.parse_args()
    ends = collections.defaultdict(list)
    seed, start = given.seed, time.monotonic()
    while seed == given.seed or time.monotonic() - start < given.seconds:
        job = job_of(seed)
        seed += 1
        if not is_possible(job):
            print(f"{job}: not possible here")
            continue
        print(job, end=": ", flush=True)
        end = play(job)
        late = "" if end.noticed_s is None else f", named after {end.noticed_s:.2f} s"
        print(f"{end.outcome}{late}", flush=True)
        if end.outcome == "silent":
            print(end.text, flush=True)
        ends[job.training.name, job.fault].append(end)
    count = sum(map(len, ends.values()))
    print(f"\n{count} trainings from seed {given.seed} in {time.monotonic() - start:.0f} s\n")
    for number, what in ((0, "training"), (1, "fault")):
        print_table(what, {key: [end for each, found in ends.items() if each[number] == key for end in found]
                           for key in sorted({each[number] for each in ends})})  # fmt: skip
    return any(end.outcome == "silent" for found in ends.values() for end in found)


if __name__ == "__main__":
    sys.exit(main())
