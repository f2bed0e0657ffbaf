"""A private Grid Engine of one host: sge_qmaster and sge_execd, for the time of a `with` block.

Its files are in one directory. It runs in a network namespace, where the host's name has an address that is not
loopback: Grid Engine refuses 127.0.0.0/8. The kernel ends the daemons with the tests. Every wait has a limit.
"""

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hosts import Hosts, hosts

PROGRAMS = ("sge_qmaster", "sge_execd", "qsub", "qconf", "qstat")
TOOLS = Path("/usr/lib/gridengine")
SHARED = Path("/usr/share/gridengine")
START_S = 60
PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
PORTS = {"SGE_QMASTER_PORT": "6444", "SGE_EXECD_PORT": "6445"}

BOOTSTRAP = """\
admin_user              none
default_domain          none
ignore_fqdn             false
spooling_method         classic
spooling_lib            libspoolc
spooling_params         {root}/default/common;{root}/spool
binary_path             /usr/sbin
qmaster_spool_dir       {root}/spool
security_mode           none
listener_threads        1
worker_threads          1
scheduler_threads       1
"""

QUEUE = """\
qname                 all.q
hostlist              {host}
seq_no                0
load_thresholds       NONE
suspend_thresholds    NONE
nsuspend              1
suspend_interval      00:05:00
priority              0
min_cpu_interval      00:05:00
processors            UNDEFINED
qtype                 BATCH
ckpt_list             NONE
pe_list               mpi
rerun                 TRUE
slots                 4
tmpdir                /tmp
shell                 /bin/sh
prolog                NONE
epilog                NONE
shell_start_mode      unix_behavior
starter_method        NONE
suspend_method        NONE
resume_method         NONE
terminate_method      NONE
notify                00:00:60
owner_list            NONE
user_lists            NONE
xuser_lists           NONE
subordinate_list      NONE
complex_values        NONE
projects              NONE
xprojects             NONE
calendar              NONE
initial_state         default
s_rt                  INFINITY
h_rt                  INFINITY
s_cpu                 INFINITY
h_cpu                 INFINITY
s_fsize               INFINITY
h_fsize               INFINITY
s_data                INFINITY
h_data                INFINITY
s_stack               INFINITY
h_stack               INFINITY
s_core                INFINITY
h_core                INFINITY
s_rss                 INFINITY
h_rss                 INFINITY
s_vmem                INFINITY
h_vmem                INFINITY
"""

PARALLEL = """\
pe_name            mpi
slots              99
user_lists         NONE
xuser_lists        NONE
start_proc_args    NONE
stop_proc_args     NONE
allocation_rule    $fill_up
control_slaves     TRUE
job_is_first_task  FALSE
urgency_slots      min
accounting_summary FALSE
qsort_args         NONE
"""


@dataclass(frozen=True)
class Cell:
    """A running private Grid Engine; `root` is its directory, `env` what its commands need."""

    root: Path
    env: dict[str, str]
    inside: list[str]

    def command(self, *words: object, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
        """Run a command on its host, and return the output."""
        done = subprocess.run(
            [*self.inside, *map(str, words)], env={**(env or {}), **self.env}, cwd=cwd, capture_output=True, text=True,
            timeout=30,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{words}: exit code {done.returncode}: {done.stdout}{done.stderr}{messages(self.root)}")
        return done.stdout

    def wait_for_end(self, job: str, timeout_s: float) -> None:
        """Wait until a job has left the queue; delete it after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while re.search(rf"^ *{job} ", shown := self.command("qstat"), re.MULTILINE):
            if time.monotonic() > deadline:
                self.command("qdel", job)
                raise TimeoutError(f"job {job} has not ended after {timeout_s} s\n{shown}\n{messages(self.root)}")
            time.sleep(0.2)


def why_not() -> str:
    """Return why a private Grid Engine cannot run here; "" if it can."""
    absent = [program for program in PROGRAMS if not shutil.which(program, path=PATH)]
    if absent:
        return f"no {', '.join(absent)} here: make test-sge as root installs it"
    return "" if os.geteuid() == 0 else "the daemons of a private Grid Engine are started by root"


@contextlib.contextmanager
def private_cell(root: Path) -> Iterator[Cell]:
    """Start the daemons in the directory `root`, which only this call uses."""
    with contextlib.ExitStack() as stack:
        machine = stack.enter_context(hosts(1, root))
        host, inside = machine.names[0], machine.inside(0)
        write_files(root, host)
        env = {"SGE_ROOT": str(root), "SGE_CELL": "default", "PATH": PATH, "LANG": "C", "SGE_ND": "1", **PORTS}
        cell = Cell(root, env, inside)
        initialize(cell)
        for name in ("sge_qmaster", "sge_execd"):
            stack.callback(end, start(cell, name), machine)
            if name == "sge_qmaster":
                wait(cell, "qconf", "-sh")
                configure(cell, host)
        wait(cell, "qstat", "-f", pattern=r"all\.q@\S+ +\w+ +0/0/4 +\d")
        yield cell


def write_files(root: Path, host: str) -> None:
    common = root / "default/common"
    common.mkdir(parents=True)
    (root / "spool").mkdir()
    (common / "bootstrap").write_text(BOOTSTRAP.format(root=root))
    (common / "act_qmaster").write_text(f"{host}\n")
    for name in ("util", "mpi"):
        (root / name).symlink_to(SHARED / name)
    for name in ("bin", "utilbin", "lib"):
        (root / name).symlink_to(Path("/var/lib/gridengine") / name)


def initialize(cell: Cell) -> None:
    """Write the first configuration, before the daemons start."""
    text = (SHARED / "default-configuration").read_text()
    for name, value in (
        ("execd_spool_dir", cell.root / "execd"), ("min_uid", 0), ("min_gid", 0), ("load_report_time", "00:00:01"),
        ("enforce_user", "none"),
    ):  # fmt: skip
        text = re.sub(rf"^{name} .*$", f"{name} {value}", text, flags=re.MULTILINE)
    (cell.root / "execd").mkdir()
    (cell.root / "configuration").write_text(text)
    resources = SHARED / "util/resources"
    cell.command(TOOLS / "spoolinit", "classic", "libspoolc", f"{cell.root}/default/common;{cell.root}/spool", "init")
    for what, source in (("configuration", cell.root / "configuration"), ("complexes", resources / "centry"),
                         ("usersets", resources / "usersets"), ("managers", "root")):  # fmt: skip
        cell.command(TOOLS / "spooldefaults", what, source)


def configure(cell: Cell, host: str) -> None:
    """Add the host, its queue and the parallel environment."""
    cell.command("qconf", "-ah", host)
    cell.command("qconf", "-as", host)
    execution = f"hostname {host}\nload_scaling NONE\ncomplex_values NONE\nuser_lists NONE\nxuser_lists NONE\n"
    execution += "projects NONE\nxprojects NONE\nusage_scaling NONE\nreport_variables NONE\n"
    scheduler = re.sub(r"(schedule_interval +)\S+", r"\g<1>0:0:1", cell.command("qconf", "-ssconf"))
    for option, text in (
        ("-Ae", execution), ("-Ap", PARALLEL), ("-Aq", QUEUE.format(host=host)), ("-Msconf", scheduler),
    ):  # fmt: skip
        file = cell.root / f"qconf{option}"
        file.write_text(text)
        cell.command("qconf", option, file)


def start(cell: Cell, name: str) -> "subprocess.Popen[bytes]":
    """Start a daemon in a session of its own, in the foreground."""
    libc, pr_set_pdeathsig = ctypes.CDLL(None), 1
    with (cell.root / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [*cell.inside, name], env=cell.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True, preexec_fn=lambda: libc.prctl(pr_set_pdeathsig, signal.SIGKILL),
        )  # fmt: skip


def end(daemon: "subprocess.Popen[bytes]", machine: Hosts) -> None:
    """End a daemon, and what is left on its host."""
    daemon.kill()
    daemon.wait()
    for pid in machine.processes(0):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait(cell: Cell, *words: str, pattern: str = "") -> None:
    """Wait until a command succeeds, and its output has the pattern."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            if re.search(pattern, shown := cell.command(*words)):
                return
        except RuntimeError as error:
            shown = str(error)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{words} after {START_S} s: {shown}\n{messages(cell.root)}")
        time.sleep(0.2)


def messages(root: Path) -> str:
    """Return the ends of the daemons' logs."""
    logs = [*root.glob("*.log"), *root.glob("spool/messages"), *root.glob("execd/*/messages")]
    return "".join(f"\n--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)
