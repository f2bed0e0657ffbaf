"""Trainings with random faults: `python tests/fuzz/soak.py --seconds 3600`. Ends with a table of outcomes.

A seed selects a training (soak_program.py), a fault, its victim and its time. A training has one of these outcomes:

survived   exit code 0, and the remaining workers have the result of a training without a fault, bit for bit; a session
           has written its last checkpoint
named      another exit code, and an error, printed after the fault, that names the rank, the host or the disk
ended      the launcher was killed; all its processes have ended too
late       the fault came when a worker had completed its last step
silent     anything else: a wrong result, a hang, processes that are left, an end without a cause. There must be none

The seed is printed before the training starts. `--seed N` selects the same training and fault again, but the threads of
the processes take their steps at other times. Faults of links and disks require root.
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
sys.path[:0] = [str(HERE.parent / "integration"), str(HERE.parent / "faults")]

from harness import BIN, environment, gone, processes  # noqa: E402
from hosts import Hosts, hosts  # noqa: E402
from nth_failure import CRASH, has_own_shm  # noqa: E402
from soak_program import EPOCHS, ROWS, samples_of  # noqa: E402

from allred.checkpoint.directory import list_committed  # noqa: E402

PROGRAM, STEPS, LIMIT_S = HERE / "soak_program.py", 300, 90
TIMEOUT_S = {"rank stopped": "4", "link down": "10"}  # ALLRED_TIMEOUT_S
PS = {"ALLRED_MODE": "ps"}


class Training(NamedTuple):
    """A way to train. ranks: their number, with servers. servers: how many of them are parameter servers. recovers:
    whether the job continues without a rank, or starts again."""

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
    Training("local", "local", 2, {"ALLRED_MODE": "local"}),
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
OF_RANKS = ("rank killed", "rank paused", "rank stopped")  # paused: stopped for some time
OF_HOSTS = ("link down", "link down and up")
OF_DISKS = ("disk full", "disk full and freed")
FAULTS = ("none", *["rank killed"] * 3, *["rank paused"] * 2, "rank stopped", "launcher killed")
HARMLESS = ("none", "rank paused", "link down and up")
DISK_BYTES = 1 << 20


class Job(NamedTuple):
    seed: int
    training: Training
    fault: str
    victim: int
    after_s: float  # from the first step to the fault
    fault_s: float  # how long a fault lasts that ends

    def __str__(self) -> str:
        victim = f" (rank {self.victim})" if self.fault in OF_RANKS else ""
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


class Launcher:
    """The launcher of a training, and each line of its output with the time at which it was read."""

    def __init__(self, words: list[object], env: dict[str, str | None], directory: pathlib.Path) -> None:
        variables = {**os.environ, **env}
        own = {name: value for name, value in variables.items() if value is not None}
        self.popen = subprocess.Popen(
            list(map(str, words)), env=own, cwd=directory, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        self.lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        with self.popen.stdout as lines:
            for line in lines:
                self.lines.append((time.monotonic(), line))

    def wait(self, limit_s: float) -> int | None:
        """Return the exit code, None after the limit."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(limit_s)
            self._reader.join(5)
        return self.popen.returncode


def run(job: Job) -> End:
    """Run a training with its fault."""
    with contextlib.ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True)
        directory = pathlib.Path(stack.enter_context(temporary))
        mark = {"TEST_MARK": uuid.uuid4().hex}
        training, program = job.training, [PROGRAM, job.training.kind, directory, STEPS]
        env = {**training.env, **mark, "ALLRED_STALL_WARNING_S": "1", "XDG_RUNTIME_DIR": str(directory)}
        env["TMPDIR"] = str(directory)
        if training.servers:
            env["ALLRED_NUM_PS"] = str(training.servers)
        if job.fault in TIMEOUT_S:
            env["ALLRED_TIMEOUT_S"] = TIMEOUT_S[job.fault]
        own_hosts = stack.enter_context(hosts(2, directory)) if training.launcher == "hosts" else None
        if job.fault in OF_DISKS:
            stack.enter_context(small_disk(directory / "checkpoints"))
        allred_run = [BIN["mpich"] / "python", "-m", "allred", "run", "-np", training.ranks]
        if own_hosts is not None:
            words = own_hosts.command("mpich", [2, 2], *program)
        elif training.launcher in ("restarts", "elastic"):
            words = [*allred_run, *(["--restarts", 3] if training.launcher == "restarts" else ["--elastic"]), *program]
        else:
            where = BIN[training.launcher]
            words = [where / "mpirun", "-np", training.ranks, where / "python", *program]
        if has_own_shm():  # killed ranks of Open MPI leave files there
            words = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh", *words]
        launcher = Launcher(words, environment(env), directory)
        try:
            if not await_ranks(launcher, directory, training.ranks):
                return End("silent", f"did not start\n{text_of(launcher)}", None)
            time.sleep(job.after_s)
            fault_at = time.monotonic()
            is_late = not inject(job, launcher, directory, own_hosts, mark)
            code = launcher.wait(LIMIT_S)
            return classify(job, launcher, directory, code, fault_at, is_late, mark)
        finally:
            while pids := processes(mark):  # `allred run` may start processes meanwhile
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                launcher.wait(0.1)


def await_ranks(launcher: Launcher, directory: pathlib.Path, ranks: int) -> bool:
    """Wait until all ranks are in their training."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until and launcher.popen.poll() is None:
        if len(list(directory.glob("pid-1-*"))) == ranks:
            return True
        time.sleep(0.01)
    return False


def inject(
    job: Job, launcher: Launcher, directory: pathlib.Path, own_hosts: Hosts | None, mark: dict[str, str]
) -> bool:
    """Cause the fault. Return whether it came before a worker completed its last step."""
    pid = int((directory / f"pid-1-{job.victim}").read_text())
    if launcher.popen.poll() is not None or (job.fault in OF_RANKS and pid not in processes(mark)):
        return False
    if job.fault == "launcher killed":
        launcher.popen.kill()
    elif job.fault in OF_RANKS:
        os.kill(pid, signal.SIGKILL if job.fault == "rank killed" else signal.SIGSTOP)
    elif own_hosts is not None and job.fault in OF_HOSTS:
        own_hosts.set_link(1, "down")
    filler = directory / "checkpoints" / "filler"
    if job.fault in OF_DISKS:
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    is_early = not list(directory.glob("completed-*"))
    if job.fault in ("rank paused", "link down and up", "disk full and freed"):
        time.sleep(job.fault_s)
    if job.fault == "rank paused":
        os.kill(pid, signal.SIGCONT)
    elif own_hosts is not None and job.fault == "link down and up":
        own_hosts.set_link(1, "up")
    elif job.fault == "disk full and freed":
        filler.unlink()
    return is_early


def expected(training: Training) -> np.ndarray:
    """Return how often each sample was used."""
    if training.kind == "session":
        return np.full(ROWS, float(EPOCHS))
    workers = training.ranks - training.servers
    counts = [np.bincount(samples_of(rank, step), minlength=ROWS) for rank in range(workers) for step in range(STEPS)]
    total = np.sum(counts, axis=0).astype(float)
    is_mean = training.kind in ("ddp", "local") or training.env.get("ALLRED_CONSISTENCY") == "sync"
    return total / workers if is_mean else total


def mention(job: Job) -> str:
    """Return the pattern of a line that names what has the fault: an error, or for a rank a warning."""
    rank = rf"rank {job.victim}\b"
    return {
        "rank killed": rf"{rank}.* killed by signal 9",
        "rank stopped": rf"{rank}.*(stopped|has not|made no|silent)|waits? for .*{rank}",
        "link down": r"host \S+ \(ranks? [\d-]+\).*(lost|unreachable|no answer)",
        **dict.fromkeys(OF_DISKS, r"checkpoints.*No space left on device"),
    }.get(job.fault, r"(?!)")


def is_named(job: Job, text: str) -> bool:
    """Return whether the output has an error that names what has the fault."""
    ends, disk = r"(RemoteRankError|CollectiveTimeout|ends the job):", r"CheckpointError:"
    error = {"rank stopped": ends, "link down": ends, **dict.fromkeys(OF_DISKS, disk)}.get(job.fault, "")
    found = re.search(error, text)
    return bool(found and re.search(mention(job), text[found.start() :]))


def classify(
    job: Job, launcher: Launcher, directory: pathlib.Path, code: int | None, fault_at: float, is_late: bool,
    mark: dict[str, str],
) -> End:  # fmt: skip
    """Return the outcome. code: the exit code, None if the training did not end."""
    text = "".join(line for at, line in launcher.lines if at >= fault_at)
    noticed = [at - fault_at for at, line in launcher.lines if at >= fault_at and re.search(mention(job), line)]
    noticed_s = noticed[0] if noticed else None
    problems = []
    if code is None:
        problems.append(f"no end within {LIMIT_S} s")
    victim_pid = int((directory / f"pid-1-{job.victim}").read_text())
    if job.fault == "rank stopped" and victim_pid in processes(mark):  # launchers leave a rank that is stopped
        os.kill(victim_pid, signal.SIGKILL)
    if not gone(mark, 30 if job.fault == "link down" else 10):
        problems.append("processes are left")
    results = [np.loadtxt(path) for path in directory.glob("result-*")]
    if not all(np.array_equal(result, expected(job.training)) for result in results):
        problems.append("a wrong result")
    workers = job.training.ranks - job.training.servers
    if job.training.launcher == "elastic" and job.fault in ("rank killed", "rank stopped"):
        workers -= 1
    if code == 0 and len(results) < workers:
        problems.append(f"only {len(results)} results")
    completed = {path.read_text() for path in directory.glob("completed-*")}
    if code == 0 and job.training.kind == "session":
        newest = max(list_committed(directory / "checkpoints"), default=0)
        if completed != {str(newest)}:
            problems.append(f"the last checkpoint is of step {newest}, the last steps are {sorted(completed)}")
    if crash := CRASH.search(text):
        problems.append(f"a crash: {crash[0]}")
    must_survive = job.fault in HARMLESS or (job.fault == "rank killed" and job.training.recovers)
    if is_late and job.fault not in HARMLESS:
        outcome = "late"
        if not completed:
            problems.append("it ended before the fault")
    elif code == 0:
        outcome = "survived"
        if job.fault in ("rank killed", "rank stopped", "link down") and not job.training.recovers:
            problems.append("exit code 0")
    elif job.fault == "launcher killed" and code == -signal.SIGKILL:
        outcome = "ended"
    else:
        outcome = "named"
        if must_survive or not is_named(job, text):
            problems.append(f"exit code {code}")
    return End("silent" if problems else outcome, f"{problems}\n{text_of(launcher)}", noticed_s)


def text_of(launcher: Launcher) -> str:
    return "".join(line for _, line in launcher.lines)


def print_table(what: str, ends: dict[str, list[End]]) -> None:
    print(f"| {what} | survived | named | ended | late | silent | seconds to the message: median | maximum |")
    print("|---|---|---|---|---|---|---|---|")
    for key, found in ends.items():
        counts = collections.Counter(end.outcome for end in found)
        times = [end.noticed_s for end in found if end.noticed_s is not None]
        seconds = f"{statistics.median(times):.2f} | {max(times):.2f}" if times else " | "
        numbers = " | ".join(str(counts[each]) for each in ("survived", "named", "ended", "late", "silent"))
        print(f"| {key} | {numbers} | {seconds} |")
    print()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0, help="duration; default: one training")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3)), help="the first seed")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # to end the training, and remove its hosts and disks
    ends = collections.defaultdict(list)
    seed, start = given.seed, time.monotonic()
    while seed == given.seed or time.monotonic() - start < given.seconds:
        job = job_of(seed)
        seed += 1
        if not is_possible(job):
            print(f"{job}: not possible here")
            continue
        print(job, end=": ", flush=True)
        end = run(job)
        noticed = "" if end.noticed_s is None else f", named after {end.noticed_s:.2f} s"
        print(f"{end.outcome}{noticed}", flush=True)
        if end.outcome == "silent":
            print(end.text, flush=True)
        ends[job.training.name, job.fault].append(end)
    count = sum(map(len, ends.values()))
    print(f"\n{count} trainings from seed {given.seed} in {time.monotonic() - start:.0f} s\n")
    for number, what in ((0, "training"), (1, "fault")):
        print_table(what, {key: [end for each, found in ends.items() if each[number] == key for end in found]
                           for key in sorted({each[number] for each in ends})})  # fmt: skip
    return not count or any(end.outcome == "silent" for found in ends.values() for end in found)


if __name__ == "__main__":
    sys.exit(main())
