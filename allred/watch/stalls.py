"""The part of `JobState` that warns of long waits and decides what a wait that has reached its time limit causes.

Both begin with a query: every watcher sends the states of the ranks on its node. The message shows them as a table.
"""

import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from allred.runtime.timings import AFTER_BUSY_S, QUERY_S, RECHECK_S, VERDICT_CHARS
from allred.watch.records import Event, ExpendableWorkers, Record, Records
from allred.wording import count, named

WARN_FACTOR = 4  # the next warning of a wait comes when it has lasted this many times as long


class Stalls:
    """The waits of a job of `size` ranks on `nodes` nodes. A wait of `warn_s` seconds causes a warning.

    fail(rank, text, code, timeout=True): ends the job. continue_without(ranks, how): counts expendable ranks as failed.
    """

    def __init__(
        self,
        records: Records,
        expendable: ExpendableWorkers,
        size: int,
        nodes: int,
        warn_s: float,
        fail: Callable[..., None],
        continue_without: Callable[[list[int], str], None],
    ) -> None:
        self._ranks, self._expendable, self._fail, self._continue_without = records, expendable, fail, continue_without
        self._stopped = False
        self._size, self._nodes, self._warn_s = size, nodes, warn_s
        self._busy_at = float("-inf")  # when a rank was busy last
        self._query: Event | None = None  # the event that caused the current query
        self._queries = 0
        self._states: list[dict[int, str]] = []
        self._stacks: dict[int, str] = {}
        self._query_until = 0.0
        self._warned: tuple[int, str] | None = None  # the rank and the operation of the last warning
        self._warn_at = float("inf")  # no warning of a wait is due before
        self._ended_warn_at = warn_s  # how long ended ranks wait before the next warning

    # Events.

    def waiting(self, rank: int, event: Event) -> None:
        record = self._ranks[rank]
        self._ranks.set_wait(rank, event["what"])
        record.since = self._ranks.now - event["since_s"]
        record.waits_for_peers, record.members = event["peers"], event.get("members")
        record.earlier = event.get("earlier", "")
        record.warn_at = float("inf") if event["quiet"] else record.since + self._warn_s
        self._warn_at = min(self._warn_at, record.warn_at)

    def resumed(self, rank: int, event: Event) -> None:
        record = self._ranks[rank]
        if self._warned == (rank, record.waits_in) and not self._stopped:
            waited = self._ranks.now - record.since
            self._ranks.print(rank, f"rank {rank} no longer waits in {record.waits_in}, after {waited:.0f} s")
            self._warned = None
        self._ranks.set_wait(rank, "")

    def busy(self, rank: int, event: Event) -> None:
        """Handle the event `busy`: a rank begins or ends work without a time limit, such as a checkpoint."""
        self._ranks.set_busy(rank, event["is_busy"])
        self._busy_at = self._ranks.now

    def limit(self, rank: int, event: Event) -> None:
        """Handle the event `limit`: a wait has reached its time limit."""
        if self._ranks.busy() or self._ranks.now < self._busy_at + AFTER_BUSY_S:
            return self._extend(rank, event["limit_s"])
        if self._stopped:
            return
        if self._query is not None and self._query["event"] == "limit":
            late, again_s = self._query["late"], 0.0
        else:
            late, again_s = list(event.get("ranks", [])), 0.0
            if servers := event.get("servers"):
                late, again_s = unresponsive_ranks(servers, event["limit_s"], self._ranks, self._ranks.now)
            if not again_s:
                self._begin_query({**event, "late": late})
        if again_s or self._can_continue_without(late):
            self._extend(rank, again_s or QUERY_S)

    def _extend(self, rank: int, again_s: float) -> None:
        """Let a wait that has reached its time limit continue for `again_s` seconds."""
        self._ranks.out.append((rank, {"kind": "extend", "again_s": again_s}))

    def _can_continue_without(self, late: list[int]) -> bool:
        """Whether the job continues without these ranks."""
        return bool(late) and self._expendable.can_continue_without(late)

    # Long waits.

    def check(self) -> None:
        """Begin a query if a wait is long enough for a warning. Called in every tick."""
        if self._query is None and self._ranks.now >= self._warn_at:
            waiting = {rank: self._ranks[rank] for rank in self._ranks.waiting}
            if due := [rank for rank, record in waiting.items() if self._ranks.now >= record.warn_at]:
                rank = min(due)
                self._begin_query({"event": "warn", "rank": rank, "what": self._ranks[rank].waits_in})
                for record in waiting.values():
                    if record.warn_at < float("inf"):
                        record.warn_at = self._ranks.now + (WARN_FACTOR - 1) * (self._ranks.now - record.since)
            self._warn_at = min((record.warn_at for record in waiting.values()), default=float("inf"))
        self._check_ended()

    def _check_ended(self) -> None:
        """Warn if ranks have ended and wait in MPI_Finalize for others. That wait has no limit, because a rank may
        compute alone after its last collective. Servers report such workers themselves."""
        if self._query is not None or self._ranks.now < self._ranks.left_at + self._ended_warn_at:
            return
        since = finalize_wait_since(self._ranks)
        if since is None or self._ranks.now < since + self._ended_warn_at:
            return
        self._ended_warn_at = WARN_FACTOR * (self._ranks.now - since)
        self._begin_query({"event": "ended", "rank": self._ranks.ended("left")[0], "what": "", "since": since})

    # Queries.

    def _begin_query(self, purpose: Event) -> None:
        self._query, self._query_until, self._states, self._stacks = purpose, self._ranks.now + QUERY_S, [], {}
        self._queries += 1
        self._ranks.out.append((None, {"kind": "query", "query": self._queries}))

    def stop(self) -> None:
        """There is a verdict: discard the current query, and print nothing more."""
        self._query, self._stopped = None, True

    def take_states(self, query: int, states: dict[int, str], stacks: Mapping[str, Sequence[int]]) -> None:
        """Take a watcher's answer: the states of the ranks on its node, and each stack with its ranks."""
        if self._query is not None and query == self._queries:  # else the answer is late
            self._states.append(states)
            self._stacks |= {rank: stack for stack, ranks in stacks.items() for rank in ranks}
            if len(self._states) == self._nodes:
                self._finish_query()

    def end_query(self) -> None:
        """Finish the current query without the missing answers if QUERY_S has passed."""
        if self._query is not None and self._ranks.now >= self._query_until:
            self._finish_query()

    def _finish_query(self) -> None:
        purpose = self._query
        assert purpose is not None
        self._query = None
        rank, what = purpose["rank"], purpose["what"]
        shown = self._table()
        if purpose["event"] == "limit":
            self._judge_limit(rank, purpose, shown)
        elif purpose["event"] == "ended":
            ended, waited = named("rank", self._ranks.ended("left")), self._ranks.now - purpose["since"]
            text = f"{ended} ended {waited:.0f} s ago, and cannot leave MPI before the other ranks end\n{shown}"
            self._ranks.announce(rank, text[:VERDICT_CHARS], opens=True)
        elif self._ranks[rank].waits_in == what:
            self._warned = (rank, what)
            waited, earlier = self._ranks.now - self._ranks[rank].since, self._ranks[rank].earlier
            self._ranks.print(rank, f"rank {rank} has waited for {waited:.0f} s in {what}{earlier}\n{shown}")

    def _table(self) -> str:
        """The states of all ranks as a table, from the answers to the query."""
        states = {rank: state for some in self._states for rank, state in some.items()}
        hosts = {rank: record.host for rank, record in self._ranks.items()}
        roles = {rank: record.role.partition(";")[0] for rank, record in self._ranks.items()}
        return status_table(self._size, hosts, roles, states, self._stacks)

    def _judge_limit(self, rank: int, purpose: Event, shown: str) -> None:
        """End the job because a wait of this rank has reached its limit, or continue without the ranks at fault."""
        late = [other for other in purpose["late"] if not self._ranks[other].end]
        if self._can_continue_without(purpose["late"]):
            how = f"has made no request for {purpose['limit_s']:g} s while others waited for it"
            self._continue_without(late, how)
            lines = "; ".join(self._ranks.line(other, how) for other in late)
            return self._ranks.print(rank, f"{lines}; the other ranks continue\n{shown}") if late else None
        who = ", ".join(map(self._ranks.name, late))
        did = "did not answer" if set(late).issubset(purpose.get("servers", [])) else "made no request"
        cause = f"; {who} {did} in this time" if who else ""
        cause += purpose.get("earlier", "")
        text = f"{purpose['what']}: not complete after {purpose['limit_s']:g} s{cause}\n{shown}"
        self._fail(rank, text, 1, timeout=True)


def unresponsive_ranks(
    servers: Sequence[int], limit_s: float, ranks: Mapping[int, Record], now: float
) -> tuple[list[int], float]:
    """Return the ranks that cause a wait to reach its time limit: those silent for `limit_s` seconds; and if there are
    none, the seconds until the next check.

    A worker of mode ps waits for a server, which holds its answer back until other workers have made their requests.
    The event `holds` names these workers and the seconds since the last request of each. The time limit of the wait
    counts from these requests, so a slow worker that still trains never causes an error.

    If a server sends no events, only this server is returned: its last event is out of date. A worker that waits itself
    is not returned: its own wait has a time limit.
    """
    lost = [server for server in servers if server in ranks and now >= ranks[server].active + limit_s]
    if lost:
        return lost, 0.0
    due = {
        rank: since + limit_s
        for server in servers
        if server in ranks
        for rank, since in ranks[server].silent.items()
        if rank in ranks and not ranks[rank].end and not ranks[rank].waits_in
    }
    late = sorted(rank for rank, at in due.items() if now >= at)
    answers = (ranks[server].active + limit_s for server in servers if server in ranks)
    return late, 0.0 if late else max(RECHECK_S, min([*due.values(), *answers], default=math.inf) - now)


def finalize_wait_since(ranks: Mapping[int, Record]) -> float | None:
    """Return the time since which ended ranks wait in MPI_Finalize for ranks that send no events. None if no rank has
    ended or all have, or if a rank that has not ended waits itself or holds answers back."""
    left = [seen.end_at for seen in ranks.values() if seen.end == "left"]
    others = [seen for seen in ranks.values() if not seen.end]
    if not left or not others or any(seen.waits_in or seen.silent for seen in others):
        return None
    return max(min(left), *(seen.active for seen in others))


TABLE_LINES, TABLE_CHARS = 40, 200  # most lines of a table; most characters of a line
NAME_CHARS = 40  # longest name in the first column to which the others are aligned
NAME_RANGES, NAME_HOSTS = 8, 3  # most ranges of ranks, and most names of hosts, in a line
STACK_CHARS = VERDICT_CHARS * 2 // 3  # of all stacks of a table
_WAITS = re.compile(r"^((?:.*, )?in .*) for (\d+) s$")
_RUNS = "in Python ", "in MPI ", "running"  # beginnings of the states of a rank that runs, and does not wait in allred
_CANNOT_RUN = "stopped", "in a system call"


class _Row(NamedTuple):
    """A line of the table: ranks with the same state. stack: the lines below it."""

    ranks: list[int]
    host: str
    state: str
    stack: str


def status_table(
    size: int,
    hosts: Mapping[int, str],
    roles: Mapping[int, str],
    states: Mapping[int, str],
    stacks: Mapping[int, str] = types.MappingProxyType({}),
) -> str:
    """Return the states of all ranks as a table. Ranks of one host with the same state share a line. If these are more
    than TABLE_LINES lines, ranks of all hosts do, with the shortest and longest time of their waits; then the likely
    causes come first: ranks that are stopped, dead or do not answer, then ranks that run, then waits; small groups
    first.

    hosts, roles, states: by rank, if known. A line of a single rank shows its role. stacks: lines to show below the
    line of a rank; ranks with different stacks have different lines. If there is no room for all, the smallest groups
    of ranks have theirs.
    """
    by_host: dict[tuple[str, str, str], list[int]] = {}
    for rank in range(size):
        key = hosts.get(rank, "?"), states.get(rank, "no answer"), stacks.get(rank, "")
        by_host.setdefault(key, []).append(rank)
    rows, rest = [_Row(ranks, *key) for key, ranks in by_host.items()], []
    if len(rows) > TABLE_LINES:
        rows = sorted(_merged(rows), key=lambda row: (_suspicion(row.state), len(row.ranks)))
        if len(rows) > TABLE_LINES:
            rows, rest = rows[: TABLE_LINES - 1], rows[TABLE_LINES - 1 :]
    names = [_name(row.ranks, roles) for row in rows]
    width = max([10, *(len(name) for name in names if len(name) <= NAME_CHARS)])
    shown, room = set[int](), STACK_CHARS
    for row in sorted(rows, key=lambda row: len(row.ranks)):
        if (room := room - len(row.stack)) >= 0:
            shown.add(row.ranks[0])
    lines = []
    for name, row in zip(names, rows, strict=True):
        lines.append(f"  {name:<{width}} {row.host:<12} {row.state}")
        lines += row.stack.splitlines() if row.ranks[0] in shown else []
    if rest:
        ranks = sum(len(row.ranks) for row in rest)
        lines.append(f"  and {count(ranks, 'rank')} in {count(len(rest), 'other state')}; likely causes come first")
    return "\n".join(line[:TABLE_CHARS] for line in lines)


def _merged(rows: list[_Row]) -> list[_Row]:
    """Return the rows of all hosts, with one row for each state and stack."""
    groups: dict[tuple[str, str], list[_Row]] = {}
    for row in rows:
        groups.setdefault((_WAITS.sub(r"\1", row.state), row.stack), []).append(row)
    merged = []
    for (state, stack), same in groups.items():
        ranks, hosts = sorted(rank for row in same for rank in row.ranks), list(dict.fromkeys(row.host for row in same))
        host = ",".join(hosts) if len(hosts) <= NAME_HOSTS else count(len(hosts), "host")
        waits = sorted({int(found[2]) for row in same if (found := _WAITS.search(row.state))})
        waited = f" for {'-'.join(map(str, dict.fromkeys((waits[0], waits[-1]))))} s" if waits else ""
        merged.append(_Row(ranks, host, state + waited, stack))
    return merged


def _suspicion(state: str) -> int:
    """Return how likely a rank in this state causes the waits of others: 0 is most likely."""
    if state.startswith(_RUNS):
        return 1
    return 2 if state.startswith("in ") and not state.startswith(_CANNOT_RUN) else 0


def _name(ranks: list[int], roles: Mapping[int, str]) -> str:
    role = roles.get(ranks[0], "") if len(ranks) == 1 else ""
    return named("rank", ranks, NAME_RANGES) + (f" ({role})" if role else "")
