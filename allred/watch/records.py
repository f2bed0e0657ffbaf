"""The settings of a watcher. The state of each rank and the messages to send next, shared by job_state.py, stalls.py
and release.py."""

import dataclasses
from collections.abc import Collection
from typing import Any

from allred.runtime.timings import VERDICT_CHARS

Event = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class WatcherSettings:
    """The settings of the watcher of one node, which a rank sends to it.

    token: proof of a rank. ranks: on this node. size, nodes: of the job. warn_s, limit_s: ALLRED_STALL_WARNING_S and
    ALLRED_TIMEOUT_S. chief: whether this is the chief's node. address: where the chief's watcher listens for other
    nodes; "" with one node. expendable: ranks whose end does not end the job. launcher: whether a launcher started the
    ranks. runner: the address of `allred run`, or "". about: the job, for monitors. stacks: ALLRED_STACKS. elastic:
    whether the ranks that survive another go on, so that no end of a rank ends the job.
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
    stacks: bool = False
    elastic: bool = False


@dataclasses.dataclass
class Record:
    """The state of a rank. Times are in seconds of the job's clock."""

    host: str
    role: str = ""
    waits_in: str = ""
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
    to send: (rank, message) to a rank, (None, message) to all watchers.

    running: the ranks that have not ended. waiting: those that wait in an operation. left_at: when the first rank left.
    A tick comes after each event, so it must not look at all records while nothing happens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.out: list[tuple[int | None, Event]] = []
        self.running, self.waiting, self._busy = set[int](), set[int](), set[int]()
        self.left_at = float("inf")

    def join(self, rank: int, host: str) -> None:
        """A rank is watched from now on."""
        self[rank] = Record(host)
        self.running.add(rank)
        self.waiting.discard(rank)
        self._busy.discard(rank)

    def end(self, rank: int, how: str) -> None:
        """A rank has ended, as in `Record.end`; "": it runs again."""
        record = self[rank]
        record.end, record.end_at = how, self.now
        self.set_wait(rank, "")
        (self.running.discard if how else self.running.add)(rank)
        if how == "left":
            self.left_at = min(self.left_at, self.now)

    def set_wait(self, rank: int, what: str) -> None:
        """A rank waits in this operation; "": it no longer waits."""
        self[rank].waits_in = what
        (self.waiting.add if what else self.waiting.discard)(rank)

    def set_busy(self, rank: int, is_busy: bool) -> None:
        """Whether a rank does work that has no time limit."""
        (self._busy.add if is_busy else self._busy.discard)(rank)

    def ended(self, end: str) -> list[int]:
        """The ranks that have ended in that way, in ascending order."""
        return sorted(rank for rank, record in self.items() if record.end == end)

    def busy(self) -> list[int]:
        """The ranks that are busy and have not ended."""
        return sorted(self._busy & self.running)

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
