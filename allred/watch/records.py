"""The settings of a watcher. The state of each rank and the messages to send next, shared by job_state.py and
stalls.py. The end of the job (`Release`): after the verdict all ranks unwind and linger, then one is released.

The chief's watcher has a connection to `allred run`: reports of the ranks up, signals to the ranks down.

    hello size            the first message, with the number of ranks
    joined, left, failed, session, unreachable     events of job_state.py
    verdict               the failure that ends the job, once

`allred run` answers with messages to ranks: `signal` with its number, or `stop`, which ends the session of all ranks
after the current step, with the reason.
"""

import dataclasses
import os
from collections.abc import Collection
from typing import Any

from allred.runtime import timings
from allred.runtime.timings import VERDICT_CHARS

Event = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class WatcherSettings:
    """The settings of the watcher of one node, which a rank sends to it.

    token: proof of a rank. ranks: on this node. size, nodes: of the job. warn_s, limit_s: ALLRED_STALL_WARNING_S and
    ALLRED_TIMEOUT_S. chief: whether this is the chief's node. address: where the chief's watcher listens for other
    nodes; "" with one node. expendable: ranks whose end does not end the job. launcher: whether a launcher started the
    ranks. runner: the address of `allred run`, or "". about: the job, for monitors.
    """

    token: str
    ranks: int
    size: int
    nodes: int
    warn_s: float
    limit_s: float
    chief: bool
    address: str
    expendable: Collection[int]
    launcher: bool
    runner: str
    about: dict[str, Any]


@dataclasses.dataclass
class Record:
    """The state of a rank. Times are in seconds of the job's clock."""

    host: str
    role: str = ""
    waits_in: str = ""
    busy: bool = False  # with work that has no time limit
    earlier: str = ""  # errors of operations before that one, as the end of a line
    waits_for_peers: bool = False  # whether the operation cannot complete if another rank has ended
    members: Collection[int] | None = None  # the ranks of the operation; None: all
    since: float = 0.0
    warn_at: float = 0.0
    end: str = ""  # gone (an expendable rank that lingers), unwound, left or dead
    end_at: float = 0.0
    active: float = 0.0  # when it sent its last event
    silent: dict[int, float] = dataclasses.field(default_factory=dict)  # of `holds`: rank, time of its last request


class Records(dict[int, Record]):
    """The records of the ranks that have joined, by rank. now: the time of the current event or tick. out: the messages
    to send: (rank, message) to a rank, (None, message) to all watchers."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.out: list[tuple[int | None, Event]] = []

    def ended(self, end: str) -> list[int]:
        """The ranks that have ended in that way, in ascending order."""
        return sorted(rank for rank, record in self.items() if record.end == end)

    def busy(self) -> list[int]:
        """The ranks that are busy and have not ended."""
        return [rank for rank, record in self.items() if record.busy and not record.end]

    def name(self, rank: int) -> str:
        """The rank and its role, for messages."""
        role = self[rank].role
        return f"rank {rank}" + (f" ({role})" if role else "")

    def line(self, rank: int, how: str) -> str:
        """The rank, its host and what it did, for messages."""
        return f"{self.name(rank)} on {self[rank].host} {how}"

    def print(self, rank: int, text: str) -> None:
        """Let a rank print a line."""
        self.out.append((rank, {"kind": "print", "text": text[:VERDICT_CHARS]}))

    def announce(self, rank: int, text: str, **more: Any) -> None:
        """Let the watchers print a line about a rank that cannot print it."""
        self.out.append((None, {"kind": "announce", "rank": rank, "text": text, **more}))


@dataclasses.dataclass
class LostRank:
    """The end of an expendable rank: its description, exit code and traceback."""

    how: str
    code: int
    traceback: str


class ExpendableWorkers:
    """Ranks without which the others can continue: the workers of mode ps, with the setting worker_failure=go_on.

    1  an expendable rank fails or dies: no verdict, as long as another expendable rank has not. Every rank receives
       "gone"; the failed rank receives "linger", and waits at the end of its program
    2  a rank that ends later lingers too: with one rank gone, MPI cannot be finalized by all
    3  when all have ended, that is the verdict, and one of the lingering ranks ends the job: the failed rank, so that
       its traceback comes last; else any rank, with the exit code of the dead rank
    4  another verdict may come before. A lingering rank answers every verdict with "unwound"

    ranks: the expendable ranks. gone: those that have failed or died, in this order.
    """

    def __init__(self, ranks: Collection[int]) -> None:
        self.ranks = frozenset(ranks)
        self.gone: dict[int, LostRank] = {}

    def can_continue_without(self, ranks: Collection[int]) -> bool:
        """Return whether the others can continue without these ranks."""
        return self.ranks.issuperset(ranks) and not self.ranks.issubset({*self.gone, *ranks})


class Release:
    """The part of `JobState` that ends the job. launcher: whether a launcher started the ranks; it ends all of them
    when one ends the job. gone: expendable ranks that have failed or died."""

    def __init__(self, records: Records, gone: Collection[int], launcher: bool) -> None:
        self._ranks, self._gone, self._launcher = records, gone, launcher
        self._clock: float | None = None  # when the first rank began to linger
        self._released: int | None = None
        self._released_at = 0.0
        self._abort_s, self._has_lost_launcher = timings.ABORT_S, False
        self._hold_at, self._print_hold_at, self._hold_printed = 0.0, float("inf"), False

    @property
    def begun(self) -> bool:
        return self._released is not None

    def lose_host(self) -> None:
        """A host is unreachable: kill the ranks soon after the release."""
        self._abort_s = timings.ABORT_SOON_S

    def lose_launcher(self) -> None:
        """A launcher has ended: kill ranks that do not unwind."""
        self._has_lost_launcher = True

    def start_clock(self) -> None:
        """Let the other ranks unwind for UNWIND_S from now."""
        self._clock = self._ranks.now

    def unwound(self, rank: int) -> None:
        """Handle the event `unwound`. Without a launcher the rank is released if another one was."""
        if self._clock is None:
            self.start_clock()
        if self.begun and not self._launcher:
            self._ranks.out.append((rank, {"kind": "release"}))

    def check(self, culprit: int) -> list[int]:
        """Return the ranks to release now: the culprit, else another lingering rank; without a launcher all of them."""
        if self._released is not None:
            self._kill_if_late(self._released)
            return []
        if busy := self._ranks.busy():
            self._hold(busy)
            return []
        late = self._clock is not None and self._ranks.now >= self._clock + timings.UNWIND_S
        lingering = self._ranks.ended("unwound")
        if not lingering:
            if (self._gone or self._has_lost_launcher) and late:
                self._ranks.out.append((None, {"kind": "kill"}))  # they may be in MPI_Finalize, which does not return
                self._clock = float("inf")
            return []
        chosen = culprit if culprit in lingering else lingering[0]
        others_unwind = any(
            not record.end
            or (record.end == "unwound" and rank != chosen and self._ranks.now < record.end_at + timings.OUTPUT_S)
            for rank, record in self._ranks.items()
        )
        if others_unwind and not late:
            return []
        self._released, self._released_at = chosen, self._ranks.now
        return [chosen] if self._launcher else lingering

    def _kill_if_late(self, released: int) -> None:
        record = self._ranks[released]
        is_dead = record.end == "dead" and self._ranks.now >= record.end_at + timings.ABORT_SOON_S
        if is_dead or self._ranks.now >= self._released_at + self._abort_s:
            self._ranks.out.append((None, {"kind": "kill"}))
            self._released_at = record.end_at = float("inf")

    def _hold(self, busy: list[int]) -> None:
        """Delay the end of the job until these ranks have finished work that must not be interrupted."""
        now = self._ranks.now
        if self._clock is not None:
            self._clock = now
        if now >= self._hold_at:
            self._hold_at = now + timings.HOLD_PERIOD_S
            living = [rank for rank, record in self._ranks.items() if record.end != "dead"]
            self._ranks.out += [(rank, {"kind": "hold"}) for rank in living]
        if self._print_hold_at == float("inf"):
            self._print_hold_at = now + timings.PRINT_HOLD_S
        elif now >= self._print_hold_at and not self._hold_printed:
            self._hold_printed = True
            self._ranks.print(busy[0], f"rank {busy[0]} still writes; the job ends when it is done")


# The connection to `allred run`.

RUNNER_PURPOSE = "runner"
RUNNER_VARIABLE = "ALLRED_RUNNER"
RESTART = "restart of the job"  # the reason of a stop request, if the number of ranks changes
REPORTED_TO_RUNNER = ("joined", "left", "failed", "session", "unreachable")

_address: str | None = None  # before the first call of `runner_address`


def runner_address() -> str:
    """Return where `allred run` listens: address, port and secret; "" if this rank was started in another way.

    Removes the variable from the environment: programs that this one starts are not ranks of the job."""
    global _address
    if _address is None:
        _address = os.environ.pop(RUNNER_VARIABLE, "")
    return _address
