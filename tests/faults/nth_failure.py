"""The n-th failure: one call of the C library fails in one process of a job, for n = 1, 2, 3 ... until a run does not
reach the call. failing_calls.c makes it fail.

    python tests/faults/nth_failure.py                              all cases: about an hour on two cores
    python tests/faults/nth_failure.py --later                      the same; all later calls fail too
    python tests/faults/nth_failure.py --sample                     some runs: 15 s
    python tests/faults/nth_failure.py --only sync/rank0/mmap       cases whose name contains this text
    python tests/faults/nth_failure.py --only sync/rank0/mmap --number 3      one run, with its output

A case is a program of programs.py, the process in which the call fails (rank0, rank1, watcher, or runner: `allred
run`), and the call. Each run must end within the limit, either with success and right results, or with one clear error.
No process and, as root, no file in /dev/shm may be left, and every checkpoint must be complete. A case of many calls
(such as malloc) is sampled. With --later there is no case malloc: an interpreter without any memory can neither report
an error nor end.

outcomes.tsv lists program, process, call ("mmap+" with --later), the function of allred that makes the call, and an
outcome. An outcome that is not in the file is an error; with --write, it is added to the file. Lines of the chosen
cases that no run had are printed, and are no error: time decides which process makes some of the calls.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import errno
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/integration")]

from harness import BIN, LATE_S, environment  # noqa: E402

from allred import testing  # noqa: E402
from allred.checkpoint.directory import list_committed, list_unfinished  # noqa: E402
from allred.checkpoint.restore import verify  # noqa: E402

TABLE = HERE / "outcomes.tsv"
TIMEOUT_S = 12  # the limit of a wait in the job
ERRORS = {
    "malloc": errno.ENOMEM,
    "mmap": errno.ENOMEM,
    "ftruncate": errno.ENOSPC,
    "memfd_create": errno.EMFILE,
    "open": errno.EMFILE,
    "read": errno.EIO,
    "write": errno.ENOSPC,
    "fsync": errno.EIO,
    "rename": errno.EIO,
    "socket": errno.EMFILE,
    "connect": errno.ECONNRESET,
    "accept": errno.EMFILE,
    "send": errno.ECONNRESET,
    "recv": errno.ECONNRESET,
    "fork": errno.ENOMEM,
    "pidfd_open": errno.EMFILE,
    "thread": errno.EAGAIN,
}
MOST_RUNS = {"malloc": 8, "mmap": 20, "read": 8, "open": 20, "recv": 16, "send": 16}  # most runs of a case
HOSTS = {"ALLRED_TRANSPORT": "tcp", "ALLRED_PRETEND_NODES": "1,1"}
PROGRAMS = {  # the program, and its settings
    "init": ("init", {}),
    "shutdown": ("shutdown", {}),
    "sync": ("sync", {}),
    "ps": ("ps", {}),
    "local": ("local", {}),
    "checkpoint": ("checkpoint", {}),
    "checkpoint_ps": ("checkpoint_ps", {}),
    "restore": ("restore", {}),
    "hosts_init": ("init", HOSTS),
    "hosts_sync": ("sync", HOSTS),
    "run": ("session", {}),
    "spark": ("spark", {}),
}
PROCESSES = {"rank0": "", "rank1": "", "watcher": "allred.watch.process", "runner": "allred run"}
STOPPED = threading.Event()
ALLRED_RUN = "run"  # this program is started by `allred run --restarts 1`
SPARK = "spark"  # this one is not started by mpirun; a run takes 10 s, and several times as long on a busy machine

SAMPLE = {  # a case: n. Runs that have found defects, and one of each kind
    "hosts_init/rank0/thread": 2,
    "hosts_init/rank0/mmap": 1,
    "hosts_init/rank0/connect": 1,
    "init/watcher/accept": 1,
    "ps/rank1/mmap": 3,
    "checkpoint/rank0/fsync": 1,
    "restore/rank1/read": 3,
    "hosts_sync/rank1/send": 1,
    "run/runner/fork": 1,
    "run/rank1/send+": 3,
}

CRASH = re.compile(r"SIG(SEGV|ABRT|BUS|ILL|FPE)\b|\(signal ([4678]|11)\)|Segmentation fault|Fatal Python error")

# Errors of Python that no program should get: a mistake in allred, not the failed call, is their cause.
UNEXPECTED = re.compile(
    r"^(AttributeError|TypeError|KeyError|IndexError|AssertionError|UnboundLocalError|NameError|ValueError|RuntimeError"
    r"|SystemError|EOFError|StopIteration|struct\.error|json\.\S+|BufferError"
    r"|_?pickle\.\S+|UnicodeDecodeError|ZeroDivisionError)(:.*)?$",
    re.MULTILINE,
)
IGNORED = re.compile(r"^(Exception ignored .*|.*\(ignored\).*|\S*ResourceWarning.*)$", re.MULTILINE)
ERROR_LINE = re.compile(r"^(?:\w+\.)*\w*(?:Error|Timeout|Interrupt)\b.*", re.MULTILINE)
OWN_LINE = re.compile(r"^(?:python -m )?allred\b.*: ", re.MULTILINE)
FAILED = re.compile(r"^failed: (\S+) number (\d+) in process (\d+), called by (.*)$", re.MULTILINE)
FRAME = re.compile(r'^  File "([^"]*)", line (\d+) in (.*)$', re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Case:
    program: str
    process: str
    call: str
    later: bool = False  # all later calls fail too

    def __str__(self) -> str:
        return f"{self.program}/{self.process}/{self.call}{'+' * self.later}"


@dataclasses.dataclass
class Run:
    """The n-th call failed. is_reached: whether there was one. where: the function of allred that called; if no call
    failed, the calls that were made. broken: the promises that the run broke."""

    case: Case
    number: int
    is_reached: bool
    outcome: str
    where: str
    broken: list[str]
    text: str


def build(directory: pathlib.Path) -> pathlib.Path:
    """Compile the library."""
    library = directory / "failing_calls.so"
    words = ["cc", "-O1", "-Wall", "-Wextra", "-D_LARGEFILE64_SOURCE", "-shared", "-fPIC"]
    subprocess.run([*words, "-o", library, HERE / "failing_calls.c", "-ldl"], check=True)
    return library


def has_own_shm() -> bool:
    words = ["unshare", "-m", "sh", "-c", "mount -t tmpfs tmpfs /dev/shm"]
    return subprocess.run(words, capture_output=True).returncode == 0


# Runs a command with a /dev/shm of its own, and writes the names of the files that are left there after 10 s.
_IN_OWN_SHM = """
mount -t tmpfs tmpfs /dev/shm || exit 99
"$@"
code=$?
for i in $(seq 20); do [ -z "$(ls -A /dev/shm)" ] && break; sleep 0.5; done
ls -A /dev/shm > "$SHM_LEFT"
exit $code
"""


def run_one(case: Case, number: int, library: pathlib.Path, templates: pathlib.Path, own_shm: bool) -> Run:
    """Run the program once."""
    program, settings = PROGRAMS[case.program]
    directory = pathlib.Path(tempfile.mkdtemp(prefix="nth-", dir=templates))
    target, report, left = directory / "checkpoints", directory / "report", directory / "left"
    if program == "restore":
        shutil.copytree(templates / "restore", target)
    env = {
        **settings, "LD_PRELOAD": str(library), "NTH_CALL": case.call, "NTH_NUMBER": str(number),
        "NTH_ERRNO": str(ERRORS.get(case.call, 0)), "NTH_LATER": str(int(case.later)), "NTH_REPORT": str(report),
        "NTH_RANK": case.process[4:] if case.process.startswith("rank") else "", "NTH_PROCESS": PROCESSES[case.process],
        "SHM_LEFT": str(left), "ALLRED_TIMEOUT_S": str(TIMEOUT_S), "ALLRED_BANNER": "0",
        "TMPDIR": str(directory),
    }  # fmt: skip
    python, mpirun = str(BIN["mpich"] / "python"), str(BIN["mpich"] / "mpirun")
    words = [python, str(HERE / "programs.py"), program, str(target)]
    if case.program == ALLRED_RUN:
        words = [python, "-m", "allred", "run", "--restarts", "1", "-np", "2", *words[1:]]
    elif case.program != SPARK:
        words = [mpirun, "-np", "2", *words]
    if own_shm:
        words = ["unshare", "-m", "sh", "-c", _IN_OWN_SHM, "sh", *words]
    broken, limit_s = [], LATE_S * (3 if case.program == SPARK else 1)
    try:
        result = testing.run(words, limit_s, environment(env), cwd=directory)
    except TimeoutError as error:
        result, broken = testing.Result(-1, "", str(error), limit_s), ["no end within the limit"]
    written = report.read_text() if report.exists() else ""
    reached = FAILED.search(written)
    broken += [f"a process was left: {line}" for line in result.left]
    names = left.read_text().split() if own_shm and left.exists() else []
    if program == "init":  # files of MPICH may stay if a rank fails in init(): docs/assumptions.md
        names = [name for name in names if not name.startswith(("mpich_shm_", "ucx_shm_posix_"))]
    if names:
        broken.append(f"files were left in /dev/shm: {' '.join(names)}")
    broken += _bad_checkpoints(program, target, case, result.code)
    outcome, more = _outcome(case, result)
    broken += more
    where = _where(written) if reached else " ".join(re.findall("^made: (.*)$", written, re.MULTILINE))
    text = f"{case} number {number}\n{written}\n{result.text}"
    shutil.rmtree(directory, ignore_errors=True)
    if not reached and outcome != "success" and not broken:
        broken.append(f"no call has failed, but the outcome is {outcome}")
    return Run(case, number, bool(reached), outcome, where, broken, text)


def _where(written: str) -> str:
    """Return the innermost function of allred in the stack; of a collective only "comm", because time decides which of
    its functions sends."""
    for path, _, function in FRAME.findall(written):
        name = path.rpartition("/allred/")[2]
        if re.match(r"comm/\w+\.py", name):
            return "comm"
        if name != path:
            return f"{name}:{function}"
    return FAILED.findall(written)[0][3].rpartition("/")[2]


def _outcome(case: Case, result: testing.Result) -> tuple[str, list[str]]:
    """Return a name of the outcome, and what must not be."""
    broken = []
    done = set(re.findall(r"^rank (\d) (?:done|raised SystemExit: 0)$", result.out, re.MULTILINE))
    raised = dict(re.findall(r"^rank (\d) raised (?!SystemExit: 0$)(\w+)", result.out, re.MULTILINE))
    if re.search(r"^rank \d wrong", result.out, re.MULTILINE) or "WrongResult" in result.err:
        broken.append("a wrong result")
    if found := CRASH.search(result.out + result.err):
        broken.append(f"a crash: {found[0]}")
    if case.call == "malloc":  # numpy and Python raise many kinds of errors then
        pass
    elif found := UNEXPECTED.search(result.err):
        broken.append(f"an unexpected error: {found[0]}")
    elif found := IGNORED.search(result.err):
        broken.append(f"an ignored error: {found[0]}")
    if result.code == 0:
        if done != {"0", "1"}:
            broken.append(f"exit code 0, but only ranks {sorted(done)} are done")
        lines = [line for line in result.err.splitlines() if line.startswith("allred")]
        lines = [line for line in lines if "restart 1 of 1" not in line and "ended with exit code 3" not in line]
        warned = any(re.search("no watcher|cannot|failed|lost|has ended", line) for line in lines)
        return "success" + " with a warning" * warned, broken
    kinds = {kind for rank, kind in raised.items() if rank not in done}  # a rank may be done after a restart
    if case.program == ALLRED_RUN:
        kinds.discard("SystemExit")  # the planned end of its first start
    errors = "+".join(sorted(kinds - {"RemoteRankError"} or kinds)) or "no rank raised"
    if "CollectiveTimeout" in result.err:
        broken.append("a wait reached its limit")
    if not ERROR_LINE.search(result.err) and not OWN_LINE.search(result.err):
        broken.append("no error is printed")
    chained = len(re.findall(r"^(?:During handling|The above exception)", result.err, re.MULTILINE))
    starts = 2 if case.program in (ALLRED_RUN, SPARK) else 1  # the call fails in both; the ranks of Spark have two logs
    if result.err.count("Traceback (most recent call last)") > starts + chained and not case.later:
        broken.append("more than one traceback")
    if case.process == "runner" and case.call in ("fork", "socket") and "Traceback" in result.err:
        broken.append("a traceback of allred run")
    unaware = {"0", "1"} - done - raised.keys()
    return f"error: {errors}" + " (a rank was ended by mpirun)" * bool(unaware), broken


def _bad_checkpoints(program: str, target: pathlib.Path, case: Case, code: int) -> list[str]:
    if program not in ("checkpoint", "checkpoint_ps", "restore", "session"):
        return []
    steps = list_committed(target) if target.exists() else {}
    last = {"checkpoint": 2, "checkpoint_ps": 2, "session": 4}.get(program, 1)
    found = [f"exit code 0, but no checkpoint of step {last}"] if code == 0 and last not in steps else []
    for path in steps.values():
        found += [f"a torn checkpoint: {problem}" for problem in verify(path)]
    first_may_fail = program == "session" or str(case).startswith("checkpoint_ps/rank0/")
    if not first_may_fail and 1 not in steps:
        found.append("the checkpoint of step 1 is lost")
    if target.exists() and not (case.call == "rename" and case.later):  # allred renames files before it deletes them
        found += [f"unfinished files are left: {path}" for path in list_unfinished(target)]
    return found


def numbers(case: Case) -> list[int]:
    """Return which calls fail: all, or the first ones and then with increasing steps."""
    if case.program == SPARK:
        return [1, 2, 6]
    call, most = case.call, MOST_RUNS.get(case.call, 200)
    if call == "malloc":
        found = [1, 2]
        while len(found) < most:
            found.append(found[-1] + found[-2] if len(found) < 14 else found[-1] * 2)
        return found
    exact = most // 2 if call in MOST_RUNS else most
    found = list(range(1, exact + 1))
    while len(found) < most:
        found.append(found[-1] + max(1, found[-1] // 8))
    return found


def run_case(
    case: Case,
    library: pathlib.Path,
    templates: pathlib.Path,
    own_shm: bool,
    only: int | None,
    log: pathlib.Path | None,
) -> list[Run]:
    """Run a case until a run does not reach the call."""
    runs: list[Run] = []
    for number in [only] if only else numbers(case):
        if STOPPED.is_set():
            break
        run = run_one(case, number, library, templates, own_shm)
        if only and not run.is_reached:
            run.broken.append("no call has failed: there are fewer")
        if run.is_reached or run.broken:
            runs.append(run)
        if run.is_reached and run.outcome.startswith("error"):
            lines = ERROR_LINE.findall(run.text) or run.text.rstrip().splitlines()
            print(f"  {case} number {number} in {run.where}: {lines[-1][:300]}", flush=True)
        if run.broken:
            print(f"BROKEN {case} number {number} in {run.where}: {'; '.join(run.broken)}", flush=True)
            if log is not None:
                with log.open("a") as file:
                    file.write(f"##### {run.broken} {run.outcome}\n{run.text}\n")
        if not run.is_reached:
            break
        if len(runs) >= 3 and all("limit" in " ".join(each.broken) for each in runs[-3:]):
            break  # three in succession: the rest would be the same
    return runs


def run_cases(
    cases: list[Case],
    library: pathlib.Path,
    templates: pathlib.Path,
    own_shm: bool,
    only: int | None,
    log: pathlib.Path | None,
    done: Callable[[list[Run]], object],
) -> None:
    """Run the cases of one program and one process, and call `done` with the runs of each."""
    made = list(ERRORS)
    if only is None:
        probe = run_one(dataclasses.replace(cases[0], call="all"), 1, library, templates, own_shm)
        made = probe.where.split()
        if not made:
            probe.broken.append("no call was made")
        if probe.broken and not STOPPED.is_set():
            print(f"BROKEN {probe.case}: {'; '.join(probe.broken)}", flush=True)
            done([probe])
    for case in cases:
        if case.call in made:
            done(run_case(case, library, templates, own_shm, SAMPLE[str(case)] if only == 0 else only, log))


def all_cases(later: bool) -> list[Case]:
    """Return all cases."""
    found = []
    for program in PROGRAMS:
        for process in PROCESSES:
            if process == "runner" and program != ALLRED_RUN:
                continue
            if process == "watcher" and program not in ("init", "sync", "hosts_init", "checkpoint", ALLRED_RUN):
                continue
            found += [Case(program, process, call, later) for call in ERRORS if not (later and call == "malloc")]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="cases whose name contains one of these texts")
    parser.add_argument(
        "--without", action="append", default=[], help="no cases whose name contains one of these texts"
    )
    parser.add_argument("--number", type=int, help="one run of each case: this call")
    parser.add_argument("--later", action="store_true", help="all later calls fail too")
    parser.add_argument("--sample", action="store_true", help="only the runs in SAMPLE")
    parser.add_argument("--write", action="store_true", help="add new outcomes to the table")
    parser.add_argument("--jobs", type=int, default=2, help="jobs at the same time")
    parser.add_argument("--log", type=pathlib.Path, help="a file for the output of all runs with broken promises")
    options = parser.parse_args()
    chosen = all_cases(later=False) + all_cases(later=True) if options.sample else all_cases(options.later)
    if options.only:
        chosen = [case for case in chosen if any(each in str(case) for each in options.only)]
    if options.sample:
        chosen = [case for case in chosen if str(case) in SAMPLE]
    chosen = [case for case in chosen if not any(each in str(case) for each in options.without)]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    own_shm = has_own_shm()
    if not own_shm:
        print("files in /dev/shm are not checked: this needs root", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="nth-") as name,
        concurrent.futures.ThreadPoolExecutor(options.jobs) as pool,
    ):
        templates = pathlib.Path(name)
        library = build(templates)
        _make_template(templates / "restore")
        runs: list[Run] = []

        def done(found: list[Run]) -> None:
            runs.extend(found)
            if found:
                kinds = collections.Counter(run.outcome for run in found)
                print(f"{found[0].case}: {len(found)} runs: {dict(kinds)}", flush=True)
            if options.number and found:
                print(found[0].outcome, found[0].broken, found[0].text)
            if options.write:
                TABLE.write_text("".join(f"{line}\n" for line in sorted(known() | table_lines(runs))))

        groups: dict[tuple[str, str], list[Case]] = {}
        for case in chosen:
            groups.setdefault((case.program, case.process), []).append(case)
        only = 0 if options.sample else options.number
        given = library, templates, own_shm, only, options.log, done
        try:
            for future in [pool.submit(run_cases, group, *given) for group in groups.values()]:
                future.result()
        except BaseException:
            STOPPED.set()  # after the runs in progress
            pool.shutdown(cancel_futures=True)
            raise
    return report(runs, chosen if only is None else [])


def _make_template(target: pathlib.Path) -> None:
    """Write the checkpoint of step 1 that program `restore` restores."""
    words = [str(HERE / "programs.py"), "checkpoint", str(target)]
    mpirun = BIN["mpich"] / "mpirun"
    result = testing.mpirun(2, *words, env=environment({}), mpirun=mpirun, python=BIN["mpich"] / "python")
    assert result.code == 0, result.text
    shutil.rmtree(target / "step-00000002")


def known() -> set[str]:
    """Return the lines of the table."""
    return set(TABLE.read_text().splitlines()) if TABLE.exists() else set()


def table_lines(runs: list[Run]) -> set[str]:
    """Return the lines of the table for these runs. Time decides whether mpirun ends a rank before it has raised."""
    return {
        "\t".join((*str(run.case).split("/"), run.where, run.outcome.partition(" (")[0]))
        for run in runs
        if run.is_reached and not run.broken and run.case.call != "malloc"  # which allocation is the n-th changes
    }


def report(runs: list[Run], complete: list[Case]) -> int:
    """Compare with the table. Return the exit code. complete: the cases of which all runs were made."""
    new, broken = sorted(table_lines(runs) - known()), sum(bool(run.broken) for run in runs)
    for line in new:
        print(f"NEW {line}")
    names = {str(case) for case in complete}
    for line in sorted(known() - table_lines(runs)):
        if "/".join(line.split("\t")[:3]) in names:
            print(f"not seen: {line}")
    print(f"{len(runs)} runs; {broken} broke a promise; {len(new)} outcomes are not in {TABLE.name}")
    return 1 if broken or new else 0


if __name__ == "__main__":
    sys.exit(main())
