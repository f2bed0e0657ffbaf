"""`python -m allred doctor`: compares the ranks of a job, tries MPI and allred, and prints findings.

1. Every rank probes its process and its host (TOPICS), without MPI.
2. MPI starts.
3. Rank 0 gathers the facts of all ranks and prints the findings.
4. All ranks run the trials (trials.py). Rank 0 gathers the results and prints the findings.

Every wait for other ranks has a time limit: `gather` and `broadcast` in Python, the watchdog where a rank waits in C.
The exit code is 1 if a finding is FAIL, else 0.
"""

import argparse
import os
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import allred
from allred import command_line
from allred.cluster import launcher, processors
from allred.comm import functions
from allred.doctor import findings, host, info, mpi, trials
from allred.doctor.findings import FAIL, NOTE, WARN, Finding, RankReport, ReportPrinter, Topic, exit_code, summary
from allred.doctor.watchdog import Watchdog
from allred.errors import CollectiveTimeout
from allred.wording import count, named

TOPICS: list[Topic[Any]] = [  # in the order of the report
    Topic("software", info.probe, info.diagnose),
    Topic("MPI library", mpi.probe_library, mpi.diagnose_library),
    Topic("launcher", mpi.probe_launch, mpi.diagnose_launch),
    Topic("processors", processors.own_cores, host.diagnose_processors),
    Topic("memory", host.probe_memory, host.diagnose_memory),
    Topic("GPU", host.probe_gpus, host.diagnose_gpus),
]

_PROBE_FACTOR = 3  # limit of all probes of a rank, in units of --limit-s; slow probes have limits of their own
_ANSWER_FACTOR = 4  # limit of the wait for rank 0, in units of --limit-s; rank 0 may itself wait for others
_WATCHDOG_EXTRA_S = 10.0  # after a trial's own limit
_DELAY_S = 1.0  # by which silent ranks end later than the rank that prints
_PAUSE_S = 0.001
_SLOW = "if the machine is slow, add --limit-s 120"


def main(arguments: list[str]) -> int:
    """Run the doctor; the exit code."""
    parser = argparse.ArgumentParser(
        prog=command_line.program("doctor"),
        description="Finds problems of MPI, this host and allred, and suggests commands. Compares ranks under mpirun.",
        epilog="Verdicts: ok; note (good to know); warn (slow, or not as intended); FAIL (the exit code is 1).",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per line: verdict, topic, found, remedy")
    parser.add_argument(
        "--limit-s", type=command_line.seconds, default=30.0, help="longest wait for other ranks; default 30"
    )
    options = command_line.parse(parser.parse_args, arguments)
    if isinstance(options, int):
        return options
    return examine(ReportPrinter(options.json), options.limit_s)


def examine(printer: ReportPrinter, limit_s: float) -> int:
    """Probe, start MPI, diagnose, run the trials; the exit code."""
    watchdog = Watchdog(printer.enabled)
    try:
        with phase(watchdog, printer, "ranks", _PROBE_FACTOR * limit_s):
            facts = findings.probe(TOPICS)
            warnings = _warn_before_start(facts)
            printer.add(warnings)
        if warnings:  # MPI may end all ranks when the first one starts it, and the launcher drops unread output
            time.sleep(_DELAY_S if printer.enabled else 3 * _DELAY_S)
        with start_phase(watchdog, printer, facts, limit_s):
            library = _fact(facts, "MPI library", mpi.LibraryFacts)
            MPI, world = mpi.start(library.text if library else "")  # noqa: N806  (mpi4py's spelling)
            comm = MPI.COMM_WORLD.Dup() if MPI is not None else None
        printer.enabled = world.rank == 0 and (world.size > 1 or command_line.first_rank())
        report = RankReport(world.rank, world.host, {**facts, "world": world})
        code = _examine_world(watchdog, printer, comm, report, limit_s)
        if comm is not None and allred.is_initialized() and functions.current().queue.poisoned:
            comm.Abort(1)  # an operation of MPI never finishes
        with phase(watchdog, printer, "MPI's end", limit_s):
            if allred.is_initialized():
                allred.shutdown()
            if MPI is not None and not MPI.Is_finalized():  # so that the launcher gets the exit code
                MPI.Finalize()
    finally:
        watchdog.close()
    if code and not printer.enabled and world.singletons:
        time.sleep(_DELAY_S)
    return code


def _examine_world(watchdog: Watchdog, printer: ReportPrinter, comm: Any, report: RankReport, limit_s: float) -> int:
    """Diagnose all ranks and run the trials. Collective; the exit code is the same on all ranks."""
    with phase(watchdog, printer, "ranks", 2 * limit_s):
        reports = gather(comm, report, limit_s)
    printer.add(diagnose(list(reports.values())))
    _require_all(printer, comm, reports, limit_s)
    if not broadcast(comm, exit_code(printer.findings) == 0, _ANSWER_FACTOR * limit_s):
        printer.add([Finding(NOTE, "allreduce", "not tried: fix the failures above first")])
    else:
        for group in trials.topics(comm, limit_s):
            results = findings.probe(group, lambda title: phase(watchdog, printer, title, limit_s + _WATCHDOG_EXTRA_S))
            result = RankReport(report.rank, report.host, results)
            with phase(watchdog, printer, "ranks", 3 * limit_s):
                reports = gather(comm, result, 2 * limit_s)
            printer.add(findings.diagnose(group, list(reports.values())))
            _require_all(printer, comm, reports, 2 * limit_s)
    return int(broadcast(comm, printer.end(), _ANSWER_FACTOR * limit_s))


def diagnose(reports: list[RankReport]) -> list[Finding]:
    """The findings about the facts of all ranks. A pure function."""
    first = reports[0].facts
    launch, library = _fact(first, "launcher", mpi.LaunchFacts), _fact(first, "MPI library", mpi.LibraryFacts)
    found = findings.diagnose(TOPICS, reports)
    if "world" not in first:
        return found
    if launch and library and not library.error:
        found += mpi.diagnose_start(launch, library.name)
    if not (library and library.error and first["world"].error):  # the same error, which "MPI library" reports
        found += mpi.diagnose_world(findings.of_topic(reports, "world"), launch, library)
    return found


def _fact(facts: Any, topic: str, kind: type[Any]) -> Any:
    return facts[topic] if isinstance(facts[topic], kind) else None


def _require_all(printer: ReportPrinter, comm: Any, reports: dict[int, Any], limit_s: float) -> None:
    """Abort the job if rank 0 lacks a report: collective operations would hang."""
    missing = set(range(comm.Get_size())) - set(reports) if comm is not None and comm.Get_rank() == 0 else set()
    if missing:
        names = f"{named('rank', missing)} of {comm.Get_size()}"
        remedy = f"find what hangs there with top or py-spy; {_SLOW}"
        printer.add([Finding(FAIL, "ranks", f"no answer from {names} within {limit_s:g} s", remedy)])
        printer.end()
        comm.Abort(1)


def phase(watchdog: Watchdog, printer: ReportPrinter, title: str, limit_s: float) -> AbstractContextManager[None]:
    remedy = f"read the findings above; find the rank that hangs with top or py-spy; {_SLOW}"
    late = Finding(FAIL, title, f"not finished after {limit_s:g} s", remedy)
    remedy = trials.NO_CMA if title == trials.MPI_SUMS else remedy
    gone = Finding(FAIL, title, "a rank ended during this step; read its error on stderr", remedy)
    return watchdog.phase(limit_s, printer.text([late]), printer.text([gone]))


def start_phase(
    watchdog: Watchdog, printer: ReportPrinter, facts: dict[str, Any], limit_s: float
) -> AbstractContextManager[None]:
    """The phase in which MPI starts. If it fails, the watchdog prints the findings of this rank."""
    launched = launcher.launched_size(os.environ)
    launch, library = _fact(facts, "launcher", mpi.LaunchFacts), _fact(facts, "MPI library", mpi.LibraryFacts)
    command = mpi.launch_command(launched, launch, library.name if library else "")
    local = diagnose([RankReport(0, socket.gethostname(), facts)])

    def text(found: str, remedy: str) -> str:
        report = [*local, Finding(FAIL, "world", found, remedy)]
        return printer.text(report) + ("" if printer.as_json else f"\n{summary(report)}")

    late = f"MPI did not start within {limit_s:g} s: not all of {count(launched, 'rank')} arrived"
    remedy = f"find the missing rank with top or py-spy; check for a firewall between hosts; {_SLOW}"
    gone = "this process or another rank ended while MPI started; read its error on stderr"
    if launch and library and launcher.incompatible(launch.launcher, library.text):
        reason = f"{launch.launcher} cannot start ranks of {library.name}"
        late, gone, remedy = f"{late}; {reason}", f"{gone}; {reason}", command
    return watchdog.phase(limit_s, text(late, remedy), text(gone, command))


def _warn_before_start(facts: dict[str, Any]) -> list[Finding]:
    """A warning to print before MPI starts: MPICH ends ranks of Open MPI's mpirun, and later output may be lost."""
    launch, library = _fact(facts, "launcher", mpi.LaunchFacts), _fact(facts, "MPI library", mpi.LibraryFacts)
    if not launch or not library or library.error or not launch.launcher.startswith("Open MPI"):
        return []
    if not launcher.incompatible(launch.launcher, library.text):
        return []
    found = f"{launch.launcher} can start ranks of {library.name} only if MPICH was built with PMIx"
    return [Finding(WARN, "launcher", found, mpi.launch_command(launch.launched, launch, library.name))]


def gather(comm: Any, value: Any, limit_s: float) -> dict[int, Any]:
    """On rank 0: the values that arrived within limit_s, by rank. On other ranks: the own value.

    Uses point-to-point messages of mpi4py, so that rank 0 knows which ranks are missing. comm None: one process.
    Raises CollectiveTimeout if rank 0 does not receive the value of this rank.
    """
    if comm is None:
        return {0: value}
    if comm.Get_rank() == 0:
        values = {0: value}
        for _ in _polls(limit_s):
            while (message := comm.improbe()) is not None:
                from mpi4py import MPI

                status = MPI.Status()
                received = message.recv(status=status)
                values[status.Get_source()] = received
            if len(values) == comm.Get_size():
                break
        return dict(sorted(values.items()))
    request = comm.isend(value, dest=0)
    for _ in _polls(limit_s):
        if request.test()[0]:
            return {comm.Get_rank(): value}
    raise CollectiveTimeout(f"rank 0 did not receive the facts of rank {comm.Get_rank()} within {limit_s:g} s")


def broadcast(comm: Any, value: Any, limit_s: float) -> Any:
    """Rank 0's value, on all ranks. Raises CollectiveTimeout after limit_s."""
    if comm is None:
        return value
    if comm.Get_rank() == 0:
        requests = [comm.isend(value, dest=rank) for rank in range(1, comm.Get_size())]
        for _ in _polls(limit_s):
            requests = [request for request in requests if not request.test()[0]]
            if not requests:
                return value
        raise CollectiveTimeout(f"{len(requests)} ranks did not receive rank 0's answer within {limit_s:g} s")
    for _ in _polls(limit_s):
        if (message := comm.improbe(source=0)) is not None:
            return message.recv()
    raise CollectiveTimeout(f"rank 0 did not answer rank {comm.Get_rank()} within {limit_s:g} s")


def _polls(limit_s: float) -> Iterator[None]:
    """Yield at once, then every _PAUSE_S seconds until limit_s has passed."""
    until = time.monotonic() + limit_s
    yield
    while time.monotonic() < until:
        time.sleep(_PAUSE_S)
        yield
