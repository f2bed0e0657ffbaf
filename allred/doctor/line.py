"""The lines of a report: a verdict, a topic, what was found and, where it is not good, a remedy that can be typed."""

import collections
import dataclasses
import json

OK = "ok"  # as it should be
NOTE = "note"  # good to know; nothing has to be done
WARN = "warn"  # it runs, but slowly or not for long, or it is not what was meant
FAIL = "FAIL"  # it cannot run, or gives wrong results
VERDICTS = (OK, NOTE, WARN, FAIL)

_TOPIC_WIDTH = 13


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of the report. `remedy` is what to type or to change; "" where nothing has to be done."""

    verdict: str
    topic: str
    found: str
    remedy: str = ""


def unseen(topic: str, error: str) -> Line:
    """The line of something that could not be looked at."""
    return Line(NOTE, topic, f"could not be looked at: {error}")


def words(error: BaseException) -> str:
    """An exception in one line.

    >>> words(OSError(2, "No such file"))
    'FileNotFoundError: [Errno 2] No such file'
    """
    return f"{type(error).__name__}: {error}".strip().strip(":").replace("\n", "; ")


def rendered(line: Line, as_json: bool) -> str:
    """The line as it is printed, for a program or for a person.

    >>> print(rendered(Line("warn", "BLAS", "4 threads each", "export OMP_NUM_THREADS=1"), as_json=False))
    warn  BLAS          4 threads each
                        -> export OMP_NUM_THREADS=1
    """
    if as_json:
        return json.dumps(dataclasses.asdict(line))
    text = f"{line.verdict:<5} {line.topic:<{_TOPIC_WIDTH}} {line.found}"
    return text + (f"\n{'':{_TOPIC_WIDTH + 6}} -> {line.remedy}" if line.remedy else "")


def summary(lines: list[Line]) -> str:
    """The last line for a person.

    >>> summary([Line("ok", "a", ""), Line("warn", "b", ""), Line("warn", "c", "")])
    '1 ok, 0 note, 2 warn, 0 FAIL'
    """
    counts = collections.Counter(line.verdict for line in lines)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)


def exit_code(lines: list[Line]) -> int:
    """1 if anything fails, else 0."""
    return int(any(line.verdict == FAIL for line in lines))
