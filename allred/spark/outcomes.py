"""How a rank on Spark ended, and which of several failures was the first.

An outcome is a dict: rank, host, code (0 after success), text; after success `result`, pickled. After an exception:
time, exception (such as "ValueError: x"), traceback, and `cause`, the rank that failed before, if this one was ended by
a failure elsewhere.
"""

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

_TRACEBACK_CHARACTERS = 50_000
_OWN = ("__main__", "allred.spark.rank_program")


def returned(rank: int, result: Any) -> Outcome:
    """Return the outcome of a rank whose function has returned."""
    import cloudpickle

    return _outcome(rank, 0, "", result=cloudpickle.dumps(result))


def raised(rank: int, error: BaseException) -> Outcome:
    """Return the outcome of a rank whose function has raised an exception."""
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        return _outcome(rank, code, f"called sys.exit({error.code!r})")
    if isinstance(error, RemoteRankError):
        text = str(error).partition("\n")[0]
        return _outcome(rank, 1, text, exception=text, traceback=error.traceback, cause=error.rank)
    words = traceback.format_exception_only(error)[-1].strip()
    lines = "".join(traceback.format_exception(type(error), error, _without_own(error.__traceback__)))
    return _outcome(rank, 1, f"raised {words}", exception=words, traceback=lines[-_TRACEBACK_CHARACTERS:])


def _without_own(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return the part of a traceback that begins in the user's function."""
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_globals["__name__"] in _OWN:
        trace = trace.tb_next
    return trace


def ended(rank: int, code: int) -> Outcome:
    """Return the outcome of a rank that has ended without one. code: as of subprocess: negative for a signal."""
    if code < 0:
        return _outcome(rank, 128 - code, f"was killed by signal {-code} ({signal.Signals(-code).name})")
    return _outcome(rank, code or 1, f"ended with exit code {code} (the executor's log has its last lines)", cause=-1)


def lost(rank: int, host: str, text: str) -> Outcome:
    """Return the outcome of a rank whose executor or supervisor is lost."""
    return {**_outcome(rank, 1, text), "host": host}


def _outcome(rank: int, code: int, text: str, **more: Any) -> Outcome:
    found = {"rank": rank, "host": socket.gethostname(), "code": code, "text": text, "time": time.time()}
    return found | {"exception": "", "traceback": "", "cause": None} | more


def first_failure(outcomes: Iterable[Outcome]) -> Outcome | None:
    """Return the outcome of the first rank that failed by itself; None if no rank has failed."""
    failed = [each for each in outcomes if each["code"]]
    if not failed:
        return None
    return min(failed, key=lambda each: (each["cause"] is not None, each["cause"] == -1, each["time"]))


class RankFailure(RemoteRankError):  # noqa: N818  (it is not a bug of the driver)
    """A rank on Spark has failed. See RemoteRankError for its attributes. exception: such as "ValueError: x"."""

    def __init__(self, outcome: Outcome) -> None:
        rank, host = outcome["rank"], outcome["host"]
        text = outcome["text"] if outcome["cause"] is not None else f"rank {rank} on {host} {outcome['text']}"
        super().__init__(text, rank, host, outcome["code"], outcome["traceback"])
        self.exception: str = outcome["exception"]


def results(outcomes: Iterable[Outcome]) -> list[Any]:
    """Return the results by rank. Raises RankFailure with the first failure."""
    outcomes = sorted(outcomes, key=lambda each: int(each["rank"]))
    failure = first_failure(outcomes)
    if failure is not None:
        raise RankFailure(failure)
    return [pickle.loads(each["result"]) for each in outcomes]
