"""Outcomes of the ranks of horovod.run: a file for each rank and start of the job, with a result or an error."""

import dataclasses
import os
import pickle
import socket
import time
import traceback
from pathlib import Path
from typing import Any

from allred.client.call import pack, unpack
from allred.errors import InputError, RemoteRankError


@dataclasses.dataclass(frozen=True)
class RankOutcome:
    """The result or the error of a rank, which it writes at its end.

    parts: the result, or the exception, as a message of allred.client.call; [] if it cannot be sent. error: None after
    success, else the exception in one line. is_of_another: whether another rank has caused the error.
    """

    rank: int
    parts: list[bytes]
    error: str | None = None
    traceback: str = ""
    is_of_another: bool = False
    host: str = dataclasses.field(default_factory=socket.gethostname)
    time: float = dataclasses.field(default_factory=time.time)

    def exception(self, code: int) -> BaseException:
        """Return the exception for the caller of horovod.run. code: the exit code of the job."""
        try:
            error = unpack(self.parts) if self.parts else None
        except Exception:  # unpickling runs code of the user
            error = None
        if error is None:
            if self.is_of_another:
                return RemoteRankError(str(self.error), self.rank, self.host, code)
            text = f"rank {self.rank} on {self.host} raised {self.error}"
            return RemoteRankError(text, self.rank, self.host, code, self.traceback)
        error.add_note(f"on rank {self.rank} ({self.host}):\n{self.traceback}")
        return error  # type: ignore[no-any-return]


def of_result(rank: int, result: Any) -> RankOutcome:
    """Return the outcome of a rank whose function has returned. Raises InputError if the result cannot be sent."""
    return RankOutcome(rank, _pack(result, f"the result of rank {rank}"))


def of_error(rank: int, error: BaseException) -> RankOutcome:
    """Return the outcome of a rank whose function has raised an exception."""
    is_of_another = isinstance(error, RemoteRankError)
    parts: list[bytes] = []
    if isinstance(error, Exception) and not is_of_another:  # no SystemExit for the caller
        try:
            parts = _pack(error, "the error")
        except InputError:
            parts = []
    line = str(error) if is_of_another else traceback.format_exception_only(error)[0].strip()
    trace = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without function_rank.py
    return RankOutcome(rank, parts, line, "".join(traceback.format_exception(type(error), error, trace)), is_of_another)


def _pack(value: Any, what: str) -> list[bytes]:
    return [bytes(part) for part in pack(value, f"horovod.run: {what}")]


def write(directory: str, outcome: RankOutcome) -> None:
    """Write the outcome of this rank. Other starts of the job have other files."""
    path = Path(directory, f"outcome-{os.environ.get('ALLRED_STARTS', '1')}-{outcome.rank}")
    path.with_suffix(".new").write_bytes(pickle.dumps(outcome))
    path.with_suffix(".new").rename(path)


def read(directory: str) -> list[RankOutcome]:
    """Return the outcomes of the last start, by rank."""
    found: dict[int, list[RankOutcome]] = {}
    for path in Path(directory).glob("outcome-*[0-9]"):
        found.setdefault(int(path.name.split("-")[1]), []).append(pickle.loads(path.read_bytes()))
    return sorted(found[max(found)], key=lambda outcome: outcome.rank) if found else []
