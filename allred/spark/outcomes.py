"""Outcomes of ranks on Spark, and the selection of the first failure.

An outcome is a dict, because it passes between processes as JSON:

    rank, host      the rank that reports
    code            its exit code, 0 after success
    result          after success: the result of the function, pickled
    text            after a failure: one line that names the rank that failed, its host, and what happened
    certainty       OWN, REPORTED or UNCERTAIN: whether the rank itself failed
    time            of the failure, by the clock of the host
    exception       such as "ValueError: x"
    traceback
"""

import contextlib
import pickle
import signal
import socket
import time
import traceback
import types
from collections.abc import Iterable
from typing import Any

from allred.errors import RemoteRankError

Outcome = dict[str, Any]

OWN = 0  # this rank raised an exception, or was killed
REPORTED = 1  # this rank was ended by the failure of the rank in `text`
UNCERTAIN = 2  # this rank has ended without an outcome, or was not started; maybe another rank is the cause

_EXCEPTION_CHARACTERS = 2_000
_TRACEBACK_CHARACTERS = 50_000
_OWN_MODULES = ("__main__", "allred.spark.rank_process")


def of_result(rank: int, result: Any) -> Outcome:
    """Return the outcome of a rank whose function has returned."""
    import cloudpickle

    return _outcome(rank, 0, "", result=cloudpickle.dumps(result))


def of_exception(rank: int, error: BaseException) -> Outcome:
    """Return the outcome of a rank whose function has raised an exception."""
    if isinstance(error, SystemExit):
        return _outcome(rank, error.code if isinstance(error.code, int) else 1, f"called sys.exit({error.code!r})")
    if isinstance(error, RemoteRankError):
        first_line = str(error).partition("\n")[0]
        reported = {"text": first_line, "exception": first_line, "certainty": REPORTED, "traceback": error.traceback}
        return {**_outcome(rank, 1, ""), **reported}
    summary = traceback.TracebackException(type(error), error, None)
    summary.__notes__ = None
    line = list(summary.format_exception_only())[-1].strip()[:_EXCEPTION_CHARACTERS]
    lines = "".join(traceback.format_exception(type(error), error, _user_traceback(error.__traceback__)))
    return _outcome(rank, 1, f"raised {line}", exception=line, traceback=lines[-_TRACEBACK_CHARACTERS:])


def _user_traceback(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return the part of a traceback that begins in the user's function."""
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_globals["__name__"] in _OWN_MODULES:
        trace = trace.tb_next
    return trace


def of_exit_code(rank: int, code: int) -> Outcome:
    """Return the outcome of a rank that has sent none. code: as of subprocess: negative for a signal."""
    if code < 0:
        name = ""
        with contextlib.suppress(ValueError):  # a real-time signal
            name = f" ({signal.Signals(-code).name})"
        return _outcome(rank, 128 - code, f"was killed by signal {-code}{name}")
    text = f"ended with exit code {code} (its last lines are in the executor's log)"
    return _outcome(rank, code or 1, text, certainty=UNCERTAIN)


def of_rank_not_started(rank: int, cause: int) -> Outcome:
    """Return the outcome of a rank that has ended because rank `cause` did not start."""
    return _outcome(rank, 1, f"was not started, because rank {cause} did not start", certainty=UNCERTAIN)


def of_lost_rank(rank: int, host: str) -> Outcome:
    """Return the outcome of a rank whose connection to the driver is lost."""
    return _outcome(rank, 1, "is lost: its executor or its supervisor has ended", host=host)


def _outcome(rank: int, code: int, predicate: str, host: str = "", **more: Any) -> Outcome:
    host = host or socket.gethostname()
    text = f"rank {rank} on {host} {predicate}"
    found = {"rank": rank, "host": host, "code": code, "text": text, "certainty": OWN, "time": time.time()}
    return found | {"exception": "", "traceback": ""} | more


def first_failure(outcomes: Iterable[Outcome]) -> Outcome | None:
    """Return the outcome of the first rank that failed by itself; None if no rank has failed."""
    failed = [each for each in outcomes if each["code"]]
    return min(failed, key=lambda each: (each["certainty"], each["time"]), default=None)


class RankFailure(RemoteRankError):  # noqa: N818  (it is not a bug of the driver)
    """A rank on Spark has failed. See RemoteRankError for its attributes. exception: such as "ValueError: x"."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome["text"], outcome["rank"], outcome["host"], outcome["code"], outcome["traceback"])
        self.exception: str = outcome["exception"]


def results(outcomes: Iterable[Outcome]) -> list[Any]:
    """Return the results by rank. Raises RankFailure with the first failure."""
    outcomes = sorted(outcomes, key=lambda each: int(each["rank"]))
    failure = first_failure(outcomes)
    if failure is not None:
        raise RankFailure(failure)
    return [pickle.loads(each["result"]) for each in outcomes]
