"""Facts of all ranks, and findings about them: verdict, topic, what was found, and a remedy.

Every rank probes all topics. Rank 0 receives the facts of all ranks, compares them and makes the findings. A probe that
fails on a rank becomes a ProbeFailure there; the other topics continue.
"""

import collections
import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

from allred import command_line
from allred.wording import named

F = TypeVar("F")

OK = "ok"  # as it should be
NOTE = "note"  # good to know; nothing has to be done
WARN = "warn"  # works, but slowly, or not as intended
FAIL = "FAIL"  # does not work, or gives wrong results
VERDICTS = (OK, NOTE, WARN, FAIL)

_TOPIC_WIDTH = 13
_SUBPROCESS_LIMIT_S = 20.0


@dataclasses.dataclass(frozen=True)
class Finding:
    """One entry of the report. `remedy` is what to type or to change; "" if nothing has to be done."""

    verdict: str
    topic: str
    found: str
    remedy: str = ""


@dataclasses.dataclass(frozen=True)
class ProbeFailure:
    """The error of a probe that raised."""

    error: str


@dataclasses.dataclass(frozen=True)
class RankFacts(Generic[F]):
    """The facts of one topic on one rank."""

    rank: int
    host: str
    facts: F


RankReport = RankFacts[Mapping[str, Any]]  # all topics of a rank: the facts of each, or a ProbeFailure


@dataclasses.dataclass(frozen=True)
class Topic(Generic[F]):
    """A topic of the report. `probe` runs on every rank; `diagnose` is a pure function of the facts of all ranks.

    remedy: for a probe that has to succeed on all ranks, a remedy if it raises; "": its failure is only a note. Facts
    that are None are left out.
    """

    name: str
    probe: Callable[[], F]
    diagnose: Callable[[list[RankFacts[F]]], list[Finding]]
    remedy: str = ""


def probe(
    topics: list[Topic[Any]], phase: Callable[[str], AbstractContextManager[None]] = lambda _: contextlib.nullcontext()
) -> dict[str, Any]:
    """The facts of every topic on this rank; a ProbeFailure for each probe that raises. phase: surrounds each probe."""
    facts: dict[str, Any] = {}
    for topic in topics:
        try:
            with phase(topic.name):
                facts[topic.name] = topic.probe()
        except Exception as error:  # the other probes continue
            facts[topic.name] = ProbeFailure(error_line(error))
    return facts


def diagnose(topics: list[Topic[Any]], reports: list[RankReport]) -> list[Finding]:
    findings: list[Finding] = []
    for topic in topics:
        ranks = [rank for rank in of_topic(reports, topic.name) if rank.facts is not None]
        failed = [rank for rank in ranks if isinstance(rank.facts, ProbeFailure)]
        probed = [rank for rank in ranks if not isinstance(rank.facts, ProbeFailure)]
        try:
            findings += topic.diagnose(probed) if probed and not (failed and topic.remedy) else []
        except Exception as error:  # the other topics continue
            findings.append(Finding(NOTE, topic.name, f"could not be examined: {error_line(error)}"))
        for text in dict.fromkeys(rank.facts.error for rank in failed):
            where = f" ({rank_names([rank for rank in failed if rank.facts.error == text])})"
            if topic.remedy:
                findings.append(Finding(FAIL, topic.name, f"{text}{where}", topic.remedy))
            else:
                where *= len(ranks) > 1
                findings.append(Finding(NOTE, topic.name, f"could not be examined: {text}{where}"))
    return findings


def of_topic(reports: list[RankReport], name: str) -> list[RankFacts[Any]]:
    """Return the facts of one topic on all ranks."""
    return [RankFacts(report.rank, report.host, report.facts[name]) for report in reports]


def rank_names(ranks: list[Any]) -> str:
    """Ranks by number, with their host if they share one.

    >>> rank_names([RankFacts(0, "a", None), RankFacts(1, "a", None)])
    'ranks 0-1 on a'
    >>> rank_names([RankFacts(3, "a", None), RankFacts(5, "b", None)])
    'ranks 3,5'
    """
    names = named("rank", {rank.rank for rank in ranks})
    hosts = {rank.host for rank in ranks}
    return f"{names} on {hosts.pop()}" if len(hosts) == 1 else names


def compare(ranks: list[RankFacts[F]], text: Callable[[F], Hashable]) -> str:
    """`text` of the facts: once if all ranks agree, else with the ranks that differ from the most frequent text.

    >>> compare([RankFacts(0, "a", 1), RankFacts(1, "a", 1), RankFacts(2, "b", 16)], lambda n: f"{n} threads")
    'rank 2 on b: 16 threads; other ranks: 1 threads'
    """
    groups: dict[str, list[RankFacts[F]]] = {}
    for rank in ranks:
        groups.setdefault(str(text(rank.facts)), []).append(rank)
    most = max(groups, key=lambda group: len(groups[group]))
    if len(groups) == 1:
        return most
    unique = len(groups[most]) == 1
    texts = [f"{rank_names(group)}: {own}" for own, group in groups.items() if unique or own != most]
    return "; ".join(texts if unique else [*texts, f"other ranks: {most}"])


def by_host(ranks: list[RankFacts[F]]) -> dict[str, list[RankFacts[F]]]:
    hosts: dict[str, list[RankFacts[F]]] = {}
    for rank in ranks:
        hosts.setdefault(rank.host, []).append(rank)
    return hosts


def summarize_hosts(findings: list[Finding], hosts: int, topic: str, good: str) -> list[Finding]:
    """The findings of several hosts: those that are not ok, or one finding if all are ok. One host: unchanged."""
    if hosts == 1:
        return findings
    return [one for one in findings if one.verdict != OK] or [Finding(OK, topic, f"{good} each of the {hosts} hosts")]


def probe_in_subprocess(code: str) -> tuple[dict[str, Any], str]:
    """Run Python code in a new process, which may crash; the JSON object that it prints, and "" or the error."""
    command = [sys.executable, "-c", code]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=_SUBPROCESS_LIMIT_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return {}, f"loading took longer than {_SUBPROCESS_LIMIT_S:g} s"
    if process.returncode:
        return {}, last_error(process.stderr, process.returncode)
    return json.loads(process.stdout.splitlines()[-1]), ""


def last_error(stderr: str, code: int) -> str:
    """The exception of a traceback in one line, or how the process ended.

    >>> last_error("Traceback ...\\n  File x\\nRuntimeError: cannot load MPI library\\nlibmpi.so: not found\\n", 1)
    'RuntimeError: cannot load MPI library; libmpi.so: not found'
    >>> last_error("", -11)
    'the process that loaded it was killed by signal 11'
    """
    lines = [line.rstrip() for line in stderr.splitlines() if line.strip()]
    starts = [i for i, line in enumerate(lines) if line[0] not in " \t" and not line.startswith("Traceback")]
    if code < 0:
        return f"the process that loaded it was killed by signal {-code}"
    if not starts:
        return f"the process that loaded it ended with exit code {code}"
    return "; ".join(lines[starts[0] :][:3])


def error_line(error: BaseException) -> str:
    """An exception in one line.

    >>> error_line(OSError(2, "No such file"))
    'FileNotFoundError: [Errno 2] No such file'
    """
    return f"{type(error).__name__}: {error}".strip().strip(":").replace("\n", "; ")


def exit_code(findings: list[Finding]) -> int:
    return int(any(one.verdict == FAIL for one in findings))


def summary(findings: list[Finding]) -> str:
    """The last line of the report: the number of findings of each verdict.

    >>> summary([Finding("ok", "a", ""), Finding("warn", "b", ""), Finding("warn", "c", "")])
    '1 ok, 0 note, 2 warn, 0 FAIL'
    """
    counts = collections.Counter(one.verdict for one in findings)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)


class ReportPrinter:
    """Prints findings on one rank, as lines for people or as JSON objects, and keeps them for the summary.

    >>> printer = ReportPrinter(as_json=False)
    >>> print(printer.text([Finding("warn", "BLAS", "4 threads", "export OMP_NUM_THREADS=1")]))
    warn  BLAS          4 threads
                        -> export OMP_NUM_THREADS=1
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.enabled = command_line.first_rank()
        self.findings: list[Finding] = []

    def text(self, findings: list[Finding]) -> str:
        return "\n".join(map(self._text, findings))

    def _text(self, finding: Finding) -> str:
        if self.as_json:
            return json.dumps(dataclasses.asdict(finding))
        text = f"{finding.verdict:<5} {finding.topic:<{_TOPIC_WIDTH}} {finding.found}"
        return text + (f"\n{'':{_TOPIC_WIDTH + 6}} -> {finding.remedy}" if finding.remedy else "")

    def add(self, findings: list[Finding]) -> None:
        self.findings += findings
        if self.enabled and findings:
            print(self.text(findings), flush=True)

    def end(self) -> int:
        """Print the summary, unless the output is JSON; return the exit code."""
        if self.enabled and not self.as_json:
            print(summary(self.findings), flush=True)
        return exit_code(self.findings)
