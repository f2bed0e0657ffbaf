"""The state of a job: one JSON document, which `allred top`, `--web` and `--html` show.

It is a snapshot of the watcher (watch/job_status.py) with the speed of the ranks and the scalars of the session:

    kind        "job"
    job, program, mode, host, size, starts, begun
                the job, and its current start
    state       "running", "failed" (after the first failure) or "ended"
    ended       whether the job has ended, with success or not
    time        of the snapshot; all times are in seconds since the epoch
    ranks       rank, host, role, state; the sums of counters.py; steps_per_s, examples_per_s; computing, waiting,
                communicating: shares of its time; staleness_mean: mode ps. None if unknown. Over the last
                WINDOW_S seconds; of a job that has ended, over the whole start
    late        [late rank, the most ranks that have waited for it at once, sum of their seconds] while the job was
                monitored
    delays      [rank, late rank, seconds], the same by pairs; in jobs of up to MOST_PAIR_RANKS ranks
    messages    time, text: stalls, losses, the failure
    history     start, time, ranks, why: the starts by `allred run`
    summaries   directories of the session's summaries
    scalars     {name: [[step, value], ...]}, at most MOST_POINTS each; value: None if it is not finite
"""

import contextlib
import json
import math
import os
import time
from collections import deque
from collections.abc import Generator
from pathlib import Path
from typing import Any

from allred.counters import Shares, shares
from allred.errors import AllredError
from allred.monitor import open_job
from allred.watch import job_directory

State = dict[str, Any]

INTERVAL_S = 1.0
WINDOW_S = 5.0
MOST_POINTS = 400
_SUMS = ("steps", "examples", "seconds", "waiting_s", "communicating_s", "staleness")


def state_of(before: State, now: State, scalars: dict[str, list[Any]] | None = None) -> State:
    """Return the state of the job from two snapshots.

    >>> rank = {"rank": 1, "steps": 40, "examples": 0, "seconds": 4.0, "waiting_s": 1.0, "communicating_s": 0.5}
    >>> rank |= {"staleness": 0}
    >>> earlier = {**rank, "steps": 30, "seconds": 3.0, "waiting_s": 0.5}
    >>> made = state_of({"time": 0, "ranks": [earlier]}, {"time": 1, "ranks": [rank]})["ranks"][0]
    >>> made["steps_per_s"], made["computing"], made["waiting"], made["communicating"]
    (10.0, 0.5, 0.5, 0.0)
    """
    earlier = {rank["rank"]: rank for rank in before["ranks"]}
    ranks = [
        rank | _speed(earlier.get(rank["rank"], rank), rank, now["time"] - before["time"]) for rank in now["ranks"]
    ]
    return {"kind": "job", **now, "ended": False, "ranks": ranks, "scalars": scalars or {}}


def _speed(before: State, now: State, seconds: float) -> State:
    made = {key: now[key] - before[key] for key in _SUMS}
    parts = shares(made["seconds"], made["waiting_s"], made["communicating_s"])
    return {
        "steps_per_s": made["steps"] / seconds if seconds > 0 and now["steps"] else None,
        "examples_per_s": made["examples"] / seconds if seconds > 0 and now["examples"] else None,
        **(dict.fromkeys(Shares._fields) if parts is None else parts._asdict()),
        "staleness_mean": made["staleness"] / made["steps"] if made["steps"] else None,
    }


def ended_state(name: str, scalars: "Scalars") -> State:
    """Return the last state of a job that has ended. Raises AllredError."""
    now = {"late": [], **job_directory.read_ended(name)}  # an earlier version of allred wrote no `late`
    zero = {"time": now["begun"], "ranks": [{**rank, **dict.fromkeys(_SUMS, 0)} for rank in now["ranks"]]}
    state = {**state_of(zero, now, scalars.read(now["summaries"])), "ended": True}
    for rank in state["ranks"]:  # training may have begun long after the start
        for key, made in (("steps_per_s", "steps"), ("examples_per_s", "examples")):
            rank[key] = rank[made] / rank["seconds"] if rank["seconds"] and rank[made] else None
    return state


def state(name: str) -> State:
    """Return the state of a job, running or ended. Takes INTERVAL_S seconds if it runs. Raises AllredError."""
    with contextlib.closing(follow(name)) as states:
        return next(states)


def resolve(name: str) -> str:
    """Return the name of a job that runs or has ended; for "", the only job that runs. Raises AllredError."""
    running, last = job_directory.entries(job_directory.JOB), job_directory.ended()
    if name in last:
        return name
    try:
        return str(job_directory.choose(name, running, "job")["job"])
    except AllredError as error:
        raise AllredError(f"{error}; ended: {', '.join(last[-5:])}" if last else str(error)) from None


def follow(name: str) -> Generator[State, None, None]:
    """Yield the state of a job every INTERVAL_S seconds, also after its end, and of its next start, if one follows.

    Only a generator that runs is connected to the job. Raises AllredError if there is no such job.
    """
    name, last, scalars = resolve(name), None, Scalars()
    while True:
        with contextlib.suppress(AllredError), contextlib.closing(_follow_start(name)) as states:
            for last in states:
                yield last
        try:
            end = ended_state(name, scalars)
        except AllredError:
            if last is None:
                raise
            end = last
        if last is not None and end["begun"] < last["begun"]:  # the watcher was killed, so that is of an earlier start
            end = last
        yield {**end, "ended": True}
        time.sleep(INTERVAL_S)


def _follow_start(name: str) -> Generator[State, None, None]:
    """Yield the states of a job until it ends; then raise AllredError."""
    scalars, snapshots = Scalars(), deque[State]()
    with contextlib.closing(open_job(name)) as job:
        snapshots.append(job.snapshot())
        while True:
            time.sleep(INTERVAL_S)
            snapshots.append(job.snapshot())
            while snapshots[1]["time"] < snapshots[-1]["time"] - WINDOW_S:
                snapshots.popleft()
            yield state_of(snapshots[0], snapshots[-1], scalars.read(snapshots[-1]["summaries"]))


class Scalars:
    """The scalars that a session writes as JSON lines (session/summary.py)."""

    def __init__(self) -> None:
        self._files: dict[str, _Lines] = {}

    def read(self, directories: list[str]) -> dict[str, list[Any]]:
        """Return the points by name. With several directories a name begins with the part of the path that differs."""
        found, common = {}, os.path.commonpath(directories) if len(directories) > 1 else ""
        for directory in directories:
            lines = self._files.setdefault(directory, _Lines(Path(directory, "scalars.jsonl")))
            prefix = f"{os.path.relpath(directory, common)}: " if common else ""
            lines.read()
            for name, points in lines.points.items():
                stride = -(-len(points) // MOST_POINTS)
                found[prefix + name] = points[::-stride][::-1]  # with the last point
        return found


class _Lines:
    """A growing file of JSON lines. A file that was replaced, by a session that resumes, is read again."""

    def __init__(self, path: Path) -> None:
        self._path, self._file, self._offset = path, 0, 0
        self.points: dict[str, list[Any]] = {}

    def read(self) -> None:
        with contextlib.suppress(OSError), open(self._path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._file or status.st_size < self._offset:
                self._file, self._offset, self.points = status.st_ino, 0, {}
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                with contextlib.suppress(
                    ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError
                ):
                    self._add(json.loads(line))

    def _add(self, record: dict[str, Any]) -> None:
        step = record.pop("step")
        record.pop("time", None)
        for name, value in record.items():
            number = float(value)
            self.points.setdefault(name, []).append([step, number if math.isfinite(number) else None])
