"""The part of `Job` that warns of long waits and decides what a wait that has reached its time limit causes.

Both begin with a look: every watcher sends the states of the ranks on its node. The message shows them as a table.
"""

from collections.abc import Callable

from allred.watch.records import TEXT_CHARS, Event, Records
from allred.watch.spares import Spares
from allred.watch.table import ranks_text, table
from allred.watch.unresponsive import finalize_wait_since, unresponsive_ranks

AFTER_S = 2.0  # no time limit ends the job this soon after a rank was busy: its failure may follow and comes first
LOOK_S = 1.0  # how long a look waits for the watchers of other nodes
WARN_FACTOR = 4  # the next warning of a wait comes when it has lasted this many times as long


class Stalls:
    """The waits of a job of `size` ranks on `nodes` nodes. A wait of `warn_s` seconds causes a warning.

    fail(rank, text, code, timeout=True): ends the job. lose(ranks, how): counts spare ranks as failed.
    """

    def __init__(
        self,
        records: Records,
        spares: Spares,
        size: int,
        nodes: int,
        warn_s: float,
        fail: Callable[..., None],
        lose: Callable[[list[int], str], None],
    ) -> None:
        self._ranks, self._spares, self._fail, self._lose = records, spares, fail, lose
        self._size, self._nodes, self._warn_s = size, nodes, warn_s
        self._busy_at = float("-inf")  # when a rank was busy last
        self._look: Event | None = None  # the event that caused the current look
        self._looks = 0
        self._states: list[dict[int, str]] = []
        self._look_until = 0.0
        self._warned: tuple[int, str] | None = None  # the rank and the operation of the last warning
        self._ended_warn_at = warn_s  # how long ended ranks wait before the next warning

    # Events.

    def waiting(self, rank: int, event: Event) -> None:
        """Handle the event `waiting`."""
        record = self._ranks[rank]
        record.waits_in, record.since = event["what"], self._ranks.now - event["since_s"]
        record.misses, record.members = event["peers"], event.get("members")
        record.warn_at = float("inf") if event["quiet"] else record.since + self._warn_s

    def going(self, rank: int, tells: bool) -> None:
        """Handle the event `going`. tells: whether to print that a wait is over, if a warning was printed."""
        record = self._ranks[rank]
        if self._warned == (rank, record.waits_in) and tells:
            waited = self._ranks.now - record.since
            self._ranks.say(rank, f"rank {rank} waits no more in {record.waits_in}, after {waited:.0f} s")
            self._warned = None
        record.waits_in = ""

    def busy(self, rank: int, event: Event) -> None:
        """Handle the event `busy`: a rank begins or ends work without a time limit, such as a checkpoint."""
        self._ranks[rank].busy = event["is_so"]
        self._busy_at = self._ranks.now

    def limit(self, rank: int, event: Event, judged: bool) -> None:
        """Handle the event `limit`: a wait has reached its time limit. judged: whether the job is already ending."""
        if self._ranks.busy() or self._ranks.now < self._busy_at + AFTER_S:
            return self._go_on(rank, event["limit_s"])
        if judged:
            return
        if self._look is not None and self._look["event"] == "limit":
            late, again_s = self._look["late"], 0.0
        else:
            late, again_s = list(event.get("ranks", [])), 0.0
            if servers := event.get("servers"):
                late, again_s = unresponsive_ranks(servers, event["limit_s"], self._ranks, self._ranks.now)
            if not again_s:
                self._begin_look({**event, "late": late})
        if again_s or self._can_lose(late):
            self._go_on(rank, again_s or LOOK_S)

    def _go_on(self, rank: int, again_s: float) -> None:
        self._ranks.out.append((rank, {"kind": "wait on", "again_s": again_s}))

    def _can_lose(self, late: list[int]) -> bool:
        """Whether the job continues without these ranks."""
        return bool(late) and self._spares.can_lose(late)

    # Long waits.

    def check(self) -> None:
        """Begin a look if a wait is long enough for a warning. Called in every tick."""
        waiting = [rank for rank, record in self._ranks.items() if record.waits_in]
        due = [rank for rank in waiting if self._ranks.now >= self._ranks[rank].warn_at]
        if due and self._look is None:
            rank = min(due)
            self._begin_look({"event": "warn", "rank": rank, "what": self._ranks[rank].waits_in})
            for other in waiting:
                record = self._ranks[other]
                if record.warn_at < float("inf"):
                    record.warn_at = self._ranks.now + (WARN_FACTOR - 1) * (self._ranks.now - record.since)
        self._check_ended()

    def _check_ended(self) -> None:
        """Warn if ranks have ended and wait in MPI_Finalize for others. That wait has no limit, because a rank may
        compute alone after its last collective. Servers report such workers themselves."""
        since = finalize_wait_since(self._ranks)
        if since is None or self._look is not None or self._ranks.now < since + self._ended_warn_at:
            return
        self._ended_warn_at = WARN_FACTOR * (self._ranks.now - since)
        self._begin_look({"event": "ended", "rank": self._ranks.ended("left")[0], "what": "", "since": since})

    # Looks.

    def _begin_look(self, purpose: Event) -> None:
        self._look, self._look_until, self._states = purpose, self._ranks.now + LOOK_S, []
        self._looks += 1
        self._ranks.out.append((None, {"kind": "look", "look": self._looks}))

    def forget_look(self) -> None:
        """Discard the current look."""
        self._look = None

    def take_states(self, look: int, states: dict[int, str]) -> None:
        """Take a watcher's answer: the states of the ranks on its node."""
        if self._look is not None and look == self._looks:  # else the answer is late
            self._states.append(states)
            if len(self._states) == self._nodes:
                self._finish_look()

    def end_look(self) -> None:
        """Finish the current look without the missing answers if LOOK_S has passed."""
        if self._look is not None and self._ranks.now >= self._look_until:
            self._finish_look()

    def _finish_look(self) -> None:
        purpose = self._look
        assert purpose is not None
        self._look = None
        rank, what = purpose["rank"], purpose["what"]
        shown = self._table()
        if purpose["event"] == "limit":
            self._judge_limit(rank, purpose, shown)
        elif purpose["event"] == "ended":
            ended, waited = ranks_text(self._ranks.ended("left")), self._ranks.now - purpose["since"]
            text = f"{ended} ended {waited:.0f} s ago, and cannot leave MPI before the other ranks end\n{shown}"
            self._ranks.speak(rank, text[:TEXT_CHARS], opens=True)
        elif self._ranks[rank].waits_in == what:
            self._warned = (rank, what)
            waited = self._ranks.now - self._ranks[rank].since
            self._ranks.say(rank, f"rank {rank} has waited for {waited:.0f} s in {what}\n{shown}")

    def _table(self) -> str:
        """The states of all ranks as a table, from the answers to the look."""
        states = {rank: state for some in self._states for rank, state in some.items()}
        hosts = {rank: record.host for rank, record in self._ranks.items()}
        roles = {rank: record.known_as.partition(";")[0] for rank, record in self._ranks.items()}
        return table(self._size, hosts, roles, states)

    def _judge_limit(self, rank: int, purpose: Event, shown: str) -> None:
        """End the job because a wait of this rank has reached its limit, or continue without the ranks at fault."""
        late = [other for other in purpose["late"] if not self._ranks[other].end]
        if self._can_lose(purpose["late"]):
            how = f"has made no request for {purpose['limit_s']:g} s while others waited for it"
            self._lose(late, how)
            lines = "; ".join(self._ranks.line(other, how) for other in late)
            return self._ranks.say(rank, f"{lines}; the others go on\n{shown}") if late else None
        who = ", ".join(map(self._ranks.name, late))
        did = "did not answer" if set(late).issubset(purpose.get("servers", [])) else "made no request"
        told = f"; {who} {did} in this time" if who else ""
        text = f"{purpose['what']}: not complete after {purpose['limit_s']:g} s{told}\n{shown}"
        self._fail(rank, text, 1, timeout=True)
