"""Promises of allred for each fault, in one table, and the check of a job against them.

Some promises require the watcher (allred.watch): `peers` and `watched` are checked only if it exists, that is, if
allred.RemoteRankError exists.
"""

import dataclasses
import itertools
import pathlib
import re

from plan import Job

import allred
from allred.config import Config
from allred.errors import InputError
from allred.testing import Result
from allred.timeline.command import match, trace_events, waits
from allred.timeline.rank_file import read_timeline

WATCHED = hasattr(allred, "RemoteRankError")
TIMEOUT_S = "3"


@dataclasses.dataclass(frozen=True)
class Promise:
    """Promised end of a job. Texts are patterns with {rank}, {code} and {seed} of the fault.

    code: exit code of mpirun, "not 0" or "any". once, some: patterns on stderr exactly once, at least once.
    peers: error that every other rank prints. watched, watched_some: once and some if there is a watcher.
    limited: the job runs with a short time limit. only_watched: there is no promise without the watcher.
    """

    code: str = "not 0"
    once: tuple[str, ...] = ()
    some: tuple[str, ...] = ()
    peers: str = ""
    watched: tuple[str, ...] = ()
    watched_some: tuple[str, ...] = ()
    limited: bool = False
    only_watched: bool = False


KILLED = "0 times on stderr: allred: rank"
SILENT = r"allred: rank {rank} on \S+ ended with exit code 0 without a report"

PROMISES = {
    "raise": Promise(
        code="1",
        once=(r"ValueError: the fault of seed {seed}\b",),
        peers="RemoteRankError of rank {rank} code 1 with its traceback",
    ),
    "sys.exit": Promise(code="{code}", peers="RemoteRankError of rank {rank} code {code}"),
    "SystemExit": Promise(code="{code}", peers="RemoteRankError of rank {rank} code {code}"),
    "interrupt": Promise(once=("KeyboardInterrupt",), peers="RemoteRankError of rank {rank}"),
    "_exit": Promise(watched=(SILENT,), peers="RemoteRankError of rank {rank}", limited=True, only_watched=True),
    "kill": Promise(watched=(r"allred: rank {rank} on \S+ was killed by signal 9 \(SIGKILL\)",)),
    "stop": Promise(
        some=("CollectiveTimeout",),
        peers="CollectiveTimeout",
        watched_some=(r"rank {rank}\b.*stopped",),
        limited=True,
    ),
}
# MPICH's launcher treats os._exit(0) as success, kills the other ranks, and exits with 0 or 9. Only the message is
# promised.
SILENT_UNDER_MPICH = Promise(code="any", watched=(SILENT,), limited=True, only_watched=True)
UNCAUGHT = Promise(code="1")  # an error of a wrong call that the program does not catch, on every rank


def promise_of(job: Job) -> Promise:
    """Promise for a job with a fault other than a wrong call."""
    if (job.fault.kind, job.mpi) == ("_exit", "mpich"):
        return SILENT_UNDER_MPICH
    return PROMISES[job.fault.kind]


def environment(job: Job) -> dict[str, str]:
    """Environment variables of a job."""
    settings = {"ALLRED_BANNER": "0", "ALLRED_BACKEND": job.backend, "ALLRED_PRETEND_NODES": job.nodes}
    if job.fault.kind in PROMISES and promise_of(job).limited:
        settings["ALLRED_TIMEOUT_S"] = TIMEOUT_S
        if hasattr(Config, "stall_warning_s"):
            settings["ALLRED_STALL_WARNING_S"] = "1"
    return settings


def broken(job: Job, result: Result) -> list[str]:
    """Descriptions of the broken promises."""
    found = [f"a process was left: {line}" for line in result.left]
    if "Wrong: " in result.err or "AssertionError" in result.err:
        found.append("a rank found a wrong result")
    if job.fault.kind == "none" or (job.fault.kind == "wrong" and job.fault.caught):
        return found + _not_successful(job, result)
    if job.fault.kind == "wrong":
        error = "InputError" if job.fault.change == "unusable" else "MismatchError"
        return found + _not_kept(job, result, UNCAUGHT) + _not_raised(range(job.ranks), error, result)
    promise = promise_of(job)
    if promise.only_watched and not WATCHED:
        return found
    found += _not_kept(job, result, promise)
    if WATCHED:
        peers = [rank for rank in range(job.ranks) if rank != job.fault.rank]
        found += _not_raised(peers, _filled(promise.peers, job), result) if promise.peers else []
    return found


def broken_timeline(job: Job, directory: pathlib.Path) -> list[str]:
    """Descriptions of errors in the timeline of a job.

    Every rank must leave a readable file. Without a fault all files must have the same operations.
    """
    if not job.recorded:
        return []
    try:
        ranks = [read_timeline(directory / f"rank-{rank}.timeline") for rank in range(job.ranks)]
    except (OSError, InputError) as error:
        return [f"the timeline cannot be read: {error}"]
    list(trace_events(ranks, waits(match(ranks), ranks)))
    if job.fault.kind != "none":
        return []
    found = [f"the timeline is incomplete: {rank.left_out}" for rank in ranks if rank.left_out]
    kinds = [[each.kind for each in rank.operations if each.members == "all ranks"] for rank in ranks]
    for number, column in enumerate(itertools.zip_longest(*kinds)):
        if len(set(column) - {"join"}) > 1:
            found.append(f"operation {number} in the timeline: {column}")
    return found


def _not_successful(job: Job, result: Result) -> list[str]:
    """Check for success: exit code 0, equal digests of all ranks, and nothing on stderr."""
    digests = dict(re.findall(r"^rank (\d+) done (\w+)$", result.out, re.MULTILINE))
    found = [f"exit code {result.code}, not 0"] if result.code else []
    if sorted(map(int, digests)) != list(range(job.ranks)):
        found.append(f"ranks {sorted(digests)} of {job.ranks} printed a digest")
    if len(set(digests.values())) > 1:
        found.append(f"results differ between ranks: {digests}")
    return found + ["stderr is not empty"] * bool(result.err)


def _not_kept(job: Job, result: Result, promise: Promise) -> list[str]:
    code = _filled(promise.code, job)
    good = {"not 0": result.code != 0, "any": True}.get(code, str(result.code) == code)
    found = [] if good else [f"exit code {result.code}, expected {code}"]
    if re.search(r"^rank \d+ done", result.out, re.MULTILINE):
        found.append("a rank completed its program")
    once, some = promise.once, promise.some
    if WATCHED:
        once, some = once + promise.watched, some + promise.watched_some
    for pattern in (*once, *some):
        count = len(re.findall(_filled(pattern, job), result.err))
        if count == 0 or (pattern in once and count > 1):
            found.append(f"{count} times on stderr: {_filled(pattern, job)}")
    return found


def _not_raised(ranks: object, error: str, result: Result) -> list[str]:
    lines = result.out.splitlines()
    missing = [rank for rank in ranks if not any(line.startswith(f"rank {rank} raised {error}") for line in lines)]
    return [f"ranks {missing} did not raise {error}"] if missing else []


def _filled(text: str, job: Job) -> str:
    for name, value in (("rank", job.fault.rank), ("code", job.fault.code), ("seed", job.seed)):
        text = text.replace(f"{{{name}}}", str(value))
    return text
