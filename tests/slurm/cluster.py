"""A private Slurm of two virtual nodes on this host: munged, slurmctld and two slurmd, for the time of a `with` block.

All of it lives in one directory under the system's temporary directory: configuration, key, socket, state, spool, pid
and log files; it listens on loopback, on free ports, and touches neither /etc/slurm nor /run/munge. The daemons stay
in the foreground as children, so their pids are known, and the kernel ends them when the tests are killed. What they
leave (steps, ranks) is recognised by its environment, which names this cluster's slurm.conf; the next run ends it.
Every wait has a limit.
"""

import contextlib
import ctypes
import fcntl
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ports import reserved_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo")
PREFIX = "allred-slurm-"
NODES = ("nd0", "nd1")
FINISHED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "DEADLINE")

# Both nodes claim 16 cores (config_overrides), so that a batch script's own #SBATCH lines fit on a small machine.
# FirstJobId is a random number: MPICH names its shared memory after the job, and what a killed job of an earlier run
# left under the same name makes MPI_Init fail ("Message truncated"). A real cluster never uses a number again.
CONFIG = """\
ClusterName=allredtest
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
FirstJobId={first_job}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool.%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=2
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=16 State=UNKNOWN
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=16 State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Job:
    """A job that has ended: Slurm's final state, the batch script's exit code, what was printed."""

    state: str
    exit_code: int
    output: str


@dataclass(frozen=True)
class Submitted:
    """A job that may still run: its number, and the file of its output."""

    number: str
    output: Path


@dataclass(frozen=True)
class Cluster:
    """A running private Slurm; `root` is its directory, `env` what a Slurm command needs to find it."""

    root: Path
    env: dict[str, str]
    shared_memory: set[Path]  # what the ranks have mapped; MPICH leaves it behind when a rank is killed

    def run(self, script: list[str], options: list[str], env: dict[str, str], cwd: Path, timeout_s: float) -> Job:
        """Submits `script` with its arguments, waits until the job has ended, cancels it after `timeout_s`."""
        return self.wait(self.submit(script, options, env, cwd), timeout_s)

    def submit(self, script: list[str], options: list[str], env: dict[str, str], cwd: Path) -> Submitted:
        """Submits `script` with its arguments."""
        output = Path(tempfile.mkstemp(suffix=".out", dir=self.root)[1])
        command = ["sbatch", "--parsable", f"--output={output}", *options, *script]
        return Submitted(self.command(command, env=env, cwd=cwd).strip(), output)

    def start_without_delay(self, job_id: str, timeout_s: float) -> None:
        """Waits until the job is queued again, and sets the delay of its start to 3 s, instead of two minutes. A start
        in the same second would fail: the job's credential was revoked then."""
        deadline = time.monotonic() + timeout_s
        while "Restarts=0" in (shown := self.command(["scontrol", "show", "job", "--oneliner", job_id])):
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job_id} is not queued again\n{shown}\n{log_ends(self.root)}")
            time.sleep(0.1)
        subprocess.run(["scontrol", "update", f"JobId={job_id}", "StartTime=now+3"], env=self.env, timeout=15)

    def wait(self, job: Submitted, timeout_s: float) -> Job:
        """Waits until a job has ended; cancels it after `timeout_s`."""
        job_id, output = job.number, job.output
        deadline = time.monotonic() + timeout_s
        while True:
            self.shared_memory.update(mapped_shared_memory(self.root / "slurm.conf"))
            shown = self.command(["scontrol", "show", "job", "--oneliner", job_id])
            state = re.search(r"JobState=(\w+)", shown)[1]
            if state in FINISHED:
                # ExitCode=code:signal; a script ended by a signal counts as a shell would count it
                code, by_signal = map(int, re.search(r"\bExitCode=(\d+):(\d+)", shown).groups())
                return Job(state, code or (128 + by_signal if by_signal else 0), output.read_text())
            if time.monotonic() > deadline:
                self.command(["scancel", job_id])
                raise TimeoutError(
                    f"job {job_id} is {state} after {timeout_s} s\n{shown}\n{output.read_text()}\n{log_ends(self.root)}"
                )
            time.sleep(0.1)

    def wait_until_idle(self, timeout_s: float) -> None:
        """Returns when both nodes are idle: at the start, and after a job when its last process has gone."""
        deadline = time.monotonic() + timeout_s
        states: list[str] = []
        while states != ["idle"] * len(NODES):
            if time.monotonic() > deadline:
                raise TimeoutError(f"nodes are {states} after {timeout_s} s, not idle\n{log_ends(self.root)}")
            time.sleep(0.1)
            command = ["sinfo", "--noheader", "--Node", "--format=%T"]
            done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=15)
            states = done.stdout.split()

    def command(self, command: list[str], env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
        whole = {**(env or {}), **self.env}
        done = subprocess.run(command, env=whole, cwd=cwd, capture_output=True, text=True, timeout=15)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}: {done.stderr}{log_ends(self.root)}")
        return done.stdout


def why_not() -> str | None:
    """The reason why a private Slurm cannot run here, None when it can."""
    absent = [program for program in PROGRAMS if not shutil.which(program, path=search_path())]
    if absent:
        return f"no {', '.join(absent)} here: make test-slurm as root installs it"
    if os.geteuid() != 0:
        return "slurmd and munged of a private Slurm have to be started by root"
    return None


@contextlib.contextmanager
def private_slurm(timeout_s: float = 20) -> Iterator[Cluster]:
    """Starts the daemons, yields the cluster with both nodes idle, stops everything and removes its directory."""
    end_leftovers()
    root = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = os.open(root, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # held while this run lives; before slurm.conf exists, see end_leftovers
    daemons: list[subprocess.Popen[bytes]] = []
    shared_memory: set[Path] = set()
    try:
        root.chmod(0o755)
        conf = write_config(root)
        env = {"PATH": search_path(), "SLURM_CONF": str(conf)}
        for command in daemon_commands(root):
            daemons.append(start(command, env, root))
            if command[0] == "munged":
                wait_for_socket(root / "munge.socket", timeout_s, root)
        cluster = Cluster(root, env, shared_memory)
        cluster.wait_until_idle(timeout_s)
        yield cluster
    finally:
        stop(daemons)
        end_processes(root / "slurm.conf")
        for left in shared_memory:
            left.unlink(missing_ok=True)
        shutil.rmtree(root, ignore_errors=True)
        os.close(lock)


def write_config(root: Path) -> Path:
    """Writes slurm.conf and munge's key, makes the state directory; returns slurm.conf's path."""
    (root / "state").mkdir()
    key = root / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    (root / "cgroup.conf").write_text("IgnoreSystemd=yes\n")  # slurmd looks for cgroups even if nothing uses them
    conf = root / "slurm.conf"
    host = socket.gethostname().split(".")[0]
    first_job = random.randrange(1_000_000, 60_000_000)  # Slurm's largest is 67 043 328
    conf.write_text(CONFIG.format(root=root, host=host, ports=reserved_ports(3), nodes=NODES, first_job=first_job))
    return conf


def daemon_commands(root: Path) -> list[list[str]]:
    """The four daemons in the order of their start, all in the foreground."""
    files = {name: f"{root}/munge.{name}" for name in ("socket", "pid", "log", "seed")}
    munged = [
        "munged", "--foreground", "--force", f"--socket={files['socket']}", f"--key-file={root}/munge.key",
        f"--pid-file={files['pid']}", f"--log-file={files['log']}", f"--seed-file={files['seed']}", "--num-threads=2",
    ]  # fmt: skip
    return [munged, ["slurmctld", "-D", "-i"], *(["slurmd", "-D", "-N", node] for node in NODES)]


def start(command: list[str], env: dict[str, str], root: Path) -> "subprocess.Popen[bytes]":
    """Starts a daemon in a session of its own; the kernel kills it when this process ends in any way."""
    libc = ctypes.CDLL(None)
    pr_set_pdeathsig = 1
    with (root / f"{command[0]}.stderr").open("ab") as log:
        return subprocess.Popen(
            command, env=env, cwd=root, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            preexec_fn=lambda: libc.prctl(pr_set_pdeathsig, signal.SIGKILL),
        )  # fmt: skip


def stop(daemons: "list[subprocess.Popen[bytes]]") -> None:
    """Terminates the daemons, the last started first; kills what has not ended after 3 s."""
    for daemon in reversed(daemons):
        daemon.terminate()
    for daemon in reversed(daemons):
        try:
            daemon.wait(3)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait(3)


def end_leftovers() -> None:
    """Ends what earlier runs left that were killed: clusters whose directory nobody has locked any more."""
    for conf in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/slurm.conf"):
        with contextlib.suppress(OSError):
            lock = os.open(conf.parent, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.geteuid():
                    end_processes(conf)
                    shutil.rmtree(conf.parent, ignore_errors=True)
            finally:
                os.close(lock)


def end_processes(conf: Path, timeout_s: float = 5) -> None:
    """Kills the processes that belong to the cluster of `conf`: daemons, steps, ranks, launchers."""
    deadline = time.monotonic() + timeout_s
    shared_memory = mapped_shared_memory(conf)
    while pids := processes_of(conf):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {pids} of {conf} are still there after {timeout_s} s")
        time.sleep(0.05)
    for left in shared_memory:
        left.unlink(missing_ok=True)


def mapped_shared_memory(conf: Path) -> set[Path]:
    """The files in /dev/shm that processes of the cluster of `conf` have mapped, as far as they still have a name."""
    found: set[str] = set()
    for pid in processes_of(conf):
        with contextlib.suppress(OSError):
            found.update(re.findall(r" (/dev/shm/\S+)$", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE))
    return {Path(name) for name in found}


def processes_of(conf: Path) -> list[int]:
    """The pids of the processes whose environment has SLURM_CONF=`conf`, without this one."""
    entry = f"SLURM_CONF={conf}".encode()
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if entry in (process / "environ").read_bytes().split(b"\0"):
                pids.append(int(process.name))
    return [pid for pid in pids if pid != os.getpid()]


def wait_for_socket(path: Path, timeout_s: float, root: Path) -> None:
    """Returns when something listens on the unix socket `path`."""
    deadline = time.monotonic() + timeout_s
    while True:
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.connect(str(path))
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing listens on {path} after {timeout_s} s\n{log_ends(root)}")
        time.sleep(0.05)


def search_path() -> str:
    """PATH with the directories of the daemons, which not every root's PATH has."""
    return f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin"


def log_ends(root: Path) -> str:
    """The last lines of every daemon's log, for an error's text."""
    logs = [*sorted(root.glob("*.log")), *sorted(root.glob("*.stderr"))]
    ends = {log.name: log.read_text(errors="replace").splitlines()[-8:] for log in logs}
    return "\n".join(f"--- {name}\n" + "\n".join(lines) for name, lines in ends.items() if lines)
