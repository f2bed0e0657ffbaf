"""What the watchers make of what they hear: a state machine without clock, socket or process.

The watcher of the chief's node has the `Job`; the others send it their events. An event is a dict: `event` names it,
`rank` is whom it is about.

    joined host                  the rank is watched from now on
    known_as text                what the rank is, for a person: its role; then, after a ';', what else is worth telling
    waiting what, since_s, peers, quiet, members  it has waited in an operation for so many seconds; peers: for ranks
                                 to begin it; quiet: it is meant to take long; members: whose operation it is, if not
                                 that of all
    going                        it waits no more
    busy is_so                   whether it does something that takes as long as it takes, for which the others wait
    limit what, limit_s, servers, ranks  its wait has reached the time limit; no verdict while a rank is busy, or just
                                 was. servers: those that may delay the answer (unresponsive.py); ranks: those at fault
    holds silent                 of a server that holds answers back: {rank: seconds since its last request} of the
                                 ranks that this is for; sent again and again, as a sign of life
    failed code, words, traceback    it is about to end with that exit code, and lingers for the others
    unwound                      it has heard the verdict, its program has ended, and it lingers
    left                         it ends well, and takes part in nothing more
    died how, code, ago_s        its process has ended, by a signal or without a word
    unwatched                    its watcher is lost, so no more will be heard of it
    looked node, states          what the ranks of a node are doing, as asked for

The first failure is the job's verdict; there is one at most, and every rank hears it:

    1  a rank fails, dies, leaves the others waiting, or waits until its time limit: the verdict goes to all ranks; that
       of a failure after SAME_S, since often all ranks are about to fail of the same error by themselves
    2  they raise it, unwind, and say so; each lingers, for a launcher ends a job when the first of its ranks goes
    3  PRINT_S after the last has, or GRACE_S after the first, one of them is released: the rank that failed, if it
       can; not before those that are busy have done that
    4  it prints its traceback, so that this comes last, and aborts the job with its exit code

Without a launcher, which would end the others then, all are released in 3, and each ends with that exit code.

The failure of a spare rank is no verdict (spares.py).
"""

import dataclasses
import signal
from collections.abc import Collection
from typing import Any

from allred.watch.spares import FOLLOW_S, Loss, Spares
from allred.watch.table import ranks_text, table
from allred.watch.unresponsive import finalize_wait_since, unresponsive_ranks

GRACE_S = 2.0  # for the others to unwind
PRINT_S = 0.1  # from there for mpirun to pass on what they have printed: it takes the ranks' output in any order
ABORT_S = 8.0  # from the release to the end; then the watchers end the ranks
GONE_S = 1.0  # from the end of the one that was to abort the job, to the same
DEATH_S = 0.05  # by then the first death is known, if the launcher has caused the one in hand
FAR_S = 0.3  # the same, if it may have been on another node: Open MPI aborts a rank that has lost a connection
LEFT_S = 2.0  # how long to wait for a rank that has left before that is a failure: it may have answered just before
HOLD_S = 0.5  # between words to ranks that linger: the job is not to end yet; less than line.RELEASE_S
TELL_HOLD_S = 5.0  # then the user hears of it
AFTER_S = 2.0  # since a rank was busy: what comes of that is to be heard of before a time limit
LOOK_S = 1.0  # for the watchers of other nodes to answer
SAME_S = 0.2  # for the others to fail of the same error by themselves
TEXT_CHARS = 9000  # of a verdict; twelve bytes of JSON a character at most, and the whole less than LARGEST
LARGEST = 2**17  # bytes of a message between a rank and its watcher; Linux takes no more than 208 KiB
WARN_FACTOR = 4  # a stall is told again when it has lasted so many times as long

Event = dict[str, Any]
Death = tuple[float, int, Event]  # when, of which rank, how

_KILLED = 128 + signal.SIGKILL
_LAUNCHERS_CODES = (_KILLED, 128 + signal.SIGTERM)  # of ranks that are ended since another one has died


def _by_themselves(deaths: list[Death]) -> list[Death]:
    """Those that no launcher has caused."""
    return [death for death in deaths if death[2]["code"] not in _LAUNCHERS_CODES]


@dataclasses.dataclass
class _Rank:
    host: str
    known_as: str = ""
    waits_in: str = ""
    busy: bool = False  # with something that takes as long as it takes
    misses: bool = False  # ranks that have not begun it: one that has left may have
    members: Collection[int] | None = None  # whose operation it is; None: that of all
    since: float = 0.0
    warn_at: float = 0.0
    end: str = ""  # gone (a spare rank that lingers), unwound, left or dead
    end_at: float = 0.0
    active: float = 0.0  # when it sent its last event
    silent: dict[int, float] = dataclasses.field(default_factory=dict)  # of `holds`: rank, time of its last request


class Job:
    """The ranks of a job, `size` of them on `nodes` nodes. `warn_s`: when a wait is told of, in seconds. `spares`: the
    ranks without which the others can go on. `launcher`: whether one has started them; it ends all with the first."""

    def __init__(
        self, size: int, nodes: int, warn_s: float, spares: Collection[int] = (), launcher: bool = True
    ) -> None:
        self.verdict: Event | None = None
        self._busy_at = float("-inf")  # when a rank was busy last
        self._size = size
        self._nodes = nodes
        self._warn_s = warn_s
        self._launcher = launcher
        self._ranks: dict[int, _Rank] = {}
        self._tell_at, self._told = 0.0, False
        self._now = 0.0
        self._out: list[tuple[int | None, Event]] = []
        self._look: Event | None = None  # what the look under way is for
        self._looks = 0
        self._states: list[dict[int, str]] = []
        self._look_until = 0.0
        self._warned: tuple[int, str] | None = None  # who told of which operation
        self._spares = Spares(spares)
        self._notices: list[tuple[float, str]] = []  # when to say that the others go on
        self._ended_warn_at = warn_s  # how long the ranks that have ended wait before that is told
        self._deaths: list[Death] = []  # not judged yet
        self._lost: list[Death] = []  # deaths of spare ranks
        self._death_due = float("inf")
        self._untold: Death | None = None  # the death that is the verdict, until it is said
        self._tell_death_at = 0.0
        self._of_death = False  # the verdict: then mpirun ends the others
        self._clock: float | None = None  # when the first rank began to linger
        self._released: int | None = None
        self._released_at = 0.0
        self._hold_at, self._tell_hold_at, self._hold_told = 0.0, float("inf"), False

    def hear(self, event: Event, now: float) -> None:
        """Take an event. What follows from it comes with the next tick: thousands of ranks may speak at once."""
        self._now = now
        if event["event"] == "looked":
            self._take_states(event["look"], {int(rank): state for rank, state in event["states"].items()})
        elif event["event"] == "joined" or event["rank"] in self._ranks:
            getattr(self, f"_{event['event']}")(event["rank"], event)
            self._ranks[event["rank"]].active = now

    def tick(self, now: float) -> list[tuple[int | None, Event]]:
        """What to send by now: (rank, message) to a rank, (None, message) to all watchers."""
        self._now = now
        if self.verdict is None:
            self._check_death()
        if self.verdict is None:
            self._check_left()
            self._check_stalls()
            self._check_ended()
            self._check_spares()
        else:
            self._tell_verdict()
            self._tell_death()
            self._check_release()
        if self._look is not None and now >= self._look_until:
            self._finish_look()
        out, self._out = self._out, []
        return out

    def conclude(self, gone: Event, now: float) -> None:
        """Pass the verdict for a spare rank, of which a message said that it is gone: nobody knows any more how the
        ranks of other nodes end."""
        self._now, rank = now, gone["rank"]
        self._ranks.setdefault(rank, _Rank(gone["host"], end="dead"))
        self._pass(rank, self._line(rank, gone["how"]), gone["code"])

    # What is heard.

    def _joined(self, rank: int, event: Event) -> None:
        self._ranks[rank] = _Rank(event["host"])
        if self._told and self.verdict is not None:
            self._out.append((rank, self.verdict))
        self._out += [(rank, self._gone(lost)) for lost in self._spares.gone]

    def _known_as(self, rank: int, event: Event) -> None:
        self._ranks[rank].known_as = event["text"]

    def _waiting(self, rank: int, event: Event) -> None:
        record = self._ranks[rank]
        record.waits_in, record.since = event["what"], self._now - event["since_s"]
        record.misses, record.members = event["peers"], event.get("members")
        record.warn_at = float("inf") if event["quiet"] else record.since + self._warn_s

    def _going(self, rank: int, event: Event) -> None:
        record = self._ranks[rank]
        if self._warned == (rank, record.waits_in) and self.verdict is None:
            self._say(rank, f"rank {rank} waits no more in {record.waits_in}, after {self._now - record.since:.0f} s")
            self._warned = None
        record.waits_in = ""

    def _busy(self, rank: int, event: Event) -> None:
        self._ranks[rank].busy = event["is_so"]
        self._busy_at = self._now

    def _busy_ranks(self) -> list[int]:
        return [rank for rank, record in self._ranks.items() if record.busy and not record.end]

    def _limit(self, rank: int, event: Event) -> None:
        if self._busy_ranks() or self._now < self._busy_at + AFTER_S:
            self._out.append((rank, {"kind": "wait on", "again_s": event["limit_s"]}))
        elif self.verdict is None and (self._look is None or self._look["event"] != "limit"):
            late, again_s = list(event.get("ranks", [])), 0.0
            if servers := event.get("servers"):
                late, again_s = unresponsive_ranks(servers, event["limit_s"], self._ranks, self._now)
            if not again_s:
                self._begin_look({**event, "late": late})
            if again_s or self._can_lose(late):
                self._out.append((rank, {"kind": "wait on", "again_s": again_s or LOOK_S}))
        elif self.verdict is None and self._look is not None and self._can_lose(self._look["late"]):
            self._out.append((rank, {"kind": "wait on", "again_s": LOOK_S}))

    def _can_lose(self, late: list[int]) -> bool:
        """Whether ranks that are silent count as failed, and the others go on."""
        return bool(late) and self._spares.can_lose(late)

    def _holds(self, rank: int, event: Event) -> None:
        self._ranks[rank].silent = {int(other): self._now - for_s for other, for_s in event["silent"].items()}

    def _failed(self, rank: int, event: Event) -> None:
        if self.verdict is None and self._deaths:
            self._pass_death()
        how = f"failed with exit code {event['code']}" + (f": {event['words']}" if event["words"] else "")
        if self.verdict is None and rank in self._spares.gone:  # the others have gone on without it before
            self._end(rank, "gone")
            self._out.append((rank, {"kind": "linger"}))
            self._spares.gone[rank].traceback = event["traceback"]
            return
        if self.verdict is None and self._spares.can_lose([rank]):
            self._end(rank, "gone")
            self._out.append((rank, {"kind": "linger"}))
            self._lose(rank, Loss(how, event["code"], event["traceback"]))
            self._notices.append((self._now + SAME_S, f"{self._line(rank, how)}; the others go on"))
            return
        if self.verdict is None:
            self._pass(rank, self._line(rank, how), event["code"], SAME_S, traceback=event["traceback"])
        self._end(rank, "unwound")

    def _unwound(self, rank: int, event: Event) -> None:
        self._end(rank, "unwound")

    def _left(self, rank: int, event: Event) -> None:
        self._end(rank, "left")

    def _died(self, rank: int, event: Event) -> None:
        before = self._ranks[rank].end
        self._end(rank, "dead")
        if self.verdict is not None and not self._of_death and self._released is None and before != "left":
            self._speak(rank, f"{self._line(rank, event['how'])} while the job was ending{self._why(rank)}")
        if self.verdict is None and before != "left":
            self._take_death(rank, event)
        elif self._untold is not None:
            self._deaths.append((self._now - event["ago_s"], rank, event))

    def _take_death(self, rank: int, event: Event) -> None:
        """It is the first, or has to wait for one that may have been before it."""
        self._deaths.append((self._now - event["ago_s"], rank, event))
        by_itself, spare = event["code"] not in _LAUNCHERS_CODES, rank in self._spares.ranks
        if by_itself and not (spare and event["code"] <= 128 and self._nodes > 1):
            return self._pass_death()
        follows_s = FAR_S if spare else DEATH_S
        self._death_due = min(self._death_due, self._now + follows_s)

    def _check_death(self) -> None:
        if self._now >= self._death_due:
            self._pass_death()

    def _pass_death(self) -> None:
        new = sorted(self._deaths, key=lambda death: death[0])
        self._deaths, self._death_due = [], float("inf")
        if self._spares.can_lose([rank for _, rank, _ in new]):
            return self._lose_dead(new)
        deaths = self._just_lost() + new
        first = (_by_themselves(deaths) or deaths)[0]
        _, rank, event = first
        text = self._line(rank, event["how"])
        self._of_death = True
        brief = f"rank {rank} is gone" if self._launcher else text
        self._pass(rank, text, event["code"], brief=brief)
        if first not in self._lost and self._launcher:  # else each says it at its end, in its own terminal
            aborted_far = event["code"] <= 128 and self._nodes > 1
            self._deaths = deaths
            self._untold, self._tell_death_at = first, self._now + FAR_S * aborted_far
            self._tell_death()

    def _just_lost(self) -> list[Death]:
        return [lost for lost in self._lost if self._now <= lost[0] + FOLLOW_S]

    def _tell_death(self) -> None:
        """Say who died. Of an abort and a kill on two hosts nobody knows which was before: both are told."""
        if self._untold is None or self._now < self._tell_death_at:
            return
        (_, rank, event), self._untold = self._untold, None
        text = self._line(rank, event["how"])
        for _, other, killed in self._deaths:
            if event["code"] <= 128 and killed["code"] == _KILLED and self._ranks[other].host != self._ranks[rank].host:
                text += f", and at about the same time {self._line(other, killed['how'])}"
                break
        if len(self._ranks) < self._size:
            text += "; not all ranks had come through allred.init(), and mpirun may have ended it because of another"
        self._speak(rank, text)

    def _lose_dead(self, deaths: list[Death]) -> None:
        """A kill near another death may be the launcher's, which then ends all: one that lives on tells of it later. An
        exit is no such death if the kill of a rank of another node may have caused it; see FAR_S."""
        near = [death for death in _by_themselves(deaths) if death[2]["code"] > 128 or self._nodes == 1]
        follow = bool(self._just_lost() or near)
        told = []
        for _, rank, event in deaths:
            line, before = self._line(rank, event["how"]), self._spares.gone.get(rank)
            if before is None:
                self._lose(rank, Loss(event["how"], event["code"], ""))
            else:
                line += f" while it waited for the others to end, since it {before.how}\n{before.traceback}"
            later_s = GONE_S
            if follow and event["code"] in _LAUNCHERS_CODES:
                later_s = FOLLOW_S
                self._notices.append((self._now + later_s, line))
            else:
                told.append((rank, line))
            if before is None:
                self._notices.append((self._now + later_s, f"the others go on without {self._name(rank)}"))
        self._lost += deaths
        if told:  # in one text, for there is one outlet
            self._speak(told[0][0], "\nallred: ".join(line for _, line in told))

    def _speak(self, rank: int, text: str) -> None:
        self._out.append((None, {"kind": "speak", "rank": rank, "text": text}))

    def _why(self, rank: int) -> str:
        """Because of what, if the rank that died was to tell of it."""
        assert self.verdict is not None
        return f", since {self.verdict['text']}\n{self.verdict['traceback']}" if rank == self.verdict["rank"] else ""

    def _end(self, rank: int, how: str) -> None:
        record = self._ranks[rank]
        record.end, record.end_at, record.waits_in = how, self._now, ""
        if how == "unwound" and self._clock is None:
            self._clock = self._now
        if how == "unwound" and self._released is not None and not self._launcher:
            self._out.append((rank, {"kind": "release"}))

    # Spare ranks.

    def _lose(self, rank: int, loss: Loss) -> None:
        self._spares.gone[rank] = loss
        self._out.append((None, self._gone(rank)))

    def _gone(self, rank: int) -> Event:
        loss = self._spares.gone[rank]
        return {"kind": "gone", "rank": rank, "host": self._ranks[rank].host, "how": loss.how, "code": loss.code}

    def _check_spares(self) -> None:
        """Say that the others go on, if they do; and when all have ended, have one end the job."""
        on = [rank for rank, record in self._ranks.items() if not record.end]
        due = [text for at, text in self._notices if self._now >= at and on]
        self._notices = [notice for notice in self._notices if notice[1] not in due]
        for text in due:
            self._say(min(on), text)
        gone = self._spares.gone
        if gone and not on and not self._deaths and len(self._ranks) == self._size:
            rank = next((rank for rank in gone if self._ranks[rank].end == "gone"), next(iter(gone)))
            self._pass_loss(rank, self._line(rank, gone[rank].how))
            self._clock = self._now

    def _unwatched(self, rank: int, event: Event) -> None:
        """Nobody will tell when all have ended: then no rank is spare any more, and one that is gone is the verdict."""
        if self._ranks[rank].end in ("left", "dead"):
            return
        self._spares.ranks = frozenset()
        for lost, loss in self._spares.gone.items():
            if self.verdict is None:
                self._pass_loss(lost, self._line(lost, loss.how))

    def _pass_loss(self, rank: int, text: str) -> None:
        loss = self._spares.gone[rank]
        self._pass(rank, text, loss.code, traceback=loss.traceback)

    # Verdicts.

    def _name(self, rank: int) -> str:
        known_as = self._ranks[rank].known_as
        return f"rank {rank}" + (f" ({known_as})" if known_as else "")

    def _line(self, rank: int, how: str) -> str:
        return f"{self._name(rank)} on {self._ranks[rank].host} {how}"

    def _pass(self, rank: int, text: str, code: int, later_s: float = 0.0, **more: Any) -> None:
        """`more`: traceback, of the rank; timeout, whether all raise CollectiveTimeout; brief, instead of the text's
        first line."""
        self._look = None
        for record in self._ranks.values():
            if record.end == "gone":
                record.end = ""  # it is to say that it has unwound, now that all do
        self.verdict = {
            "kind": "verdict", "rank": rank, "host": self._ranks[rank].host, "code": code, "text": text[:TEXT_CHARS],
            "brief": text.partition("\n")[0], "traceback": "", "timeout": False, **more,
        }  # fmt: skip
        self._tell_at = self._now + later_s
        self._tell_verdict()

    def _tell_verdict(self, at_once: bool = False) -> None:
        if not self._told and (at_once or self._now >= self._tell_at) and self.verdict is not None:
            self._told = True
            self._out.append((None, self.verdict))

    def _check_left(self) -> None:
        left = {r for r, record in self._ranks.items() if record.end and self._now >= record.end_at + LEFT_S}
        for rank, record in sorted(self._ranks.items()) if left else ():
            never_come = left if record.members is None else left.intersection(record.members)
            if never_come and record.waits_in and record.misses and self._now >= record.since + LEFT_S:
                return self._pass_left(never_come, f"and will never call {record.waits_in}, in which rank {rank} waits")

    def _pass_left(self, left: Collection[int], never: str) -> None:
        if gone := [rank for rank in left if rank in self._spares.gone]:
            self._pass_loss(min(gone), self._line(min(gone), f"has failed, {never}"))
        else:
            self._pass(min(left), self._line(min(left), f"has ended, {never}"), 1)

    def _check_release(self) -> None:
        assert self.verdict is not None
        if self._released is not None:
            last = self._ranks[self._released]
            gone = last.end == "dead" and self._now >= last.end_at + GONE_S  # and the launcher lets the others be
            if gone or self._now >= self._released_at + ABORT_S:
                self._out.append((None, {"kind": "kill"}))
                self._released_at = float("inf")
                last.end_at = float("inf")
            return
        if busy := self._busy_ranks():
            return self._hold(busy)
        lingering = sorted(rank for rank, record in self._ranks.items() if record.end == "unwound")
        if not lingering:
            if self._spares.gone and self._clock is not None and self._now >= self._clock + GRACE_S:
                self._out.append((None, {"kind": "kill"}))  # MPI_Finalize, where they may be, does not return
                self._clock = float("inf")
            return
        culprit = self.verdict["rank"]
        chosen = culprit if culprit in lingering else lingering[0]
        others_unwind = any(
            not record.end or (record.end == "unwound" and rank != chosen and self._now < record.end_at + PRINT_S)
            for rank, record in self._ranks.items()
        )
        assert self._clock is not None
        if not others_unwind or self._now >= self._clock + GRACE_S:
            self._tell_verdict(at_once=True)
            self._released, self._released_at = chosen, self._now
            free = [chosen] if self._launcher else lingering
            self._out += [(rank, {"kind": "release"}) for rank in free]

    def _hold(self, busy: list[int]) -> None:
        """The job ends when they have done what must not be cut short."""
        if self._clock is not None:
            self._clock = self._now
        if self._now >= self._hold_at:
            self._hold_at = self._now + HOLD_S
            self._out += [(rank, {"kind": "hold"}) for rank, record in self._ranks.items() if record.end != "dead"]
        if self._tell_hold_at == float("inf"):
            self._tell_hold_at = self._now + TELL_HOLD_S
        elif self._now >= self._tell_hold_at and not self._hold_told:
            self._hold_told = True
            self._say(busy[0], f"rank {busy[0]} still writes; the job ends when it is done")

    # Stalls.

    def _check_stalls(self) -> None:
        waiting = [rank for rank, record in self._ranks.items() if record.waits_in]
        due = [rank for rank in waiting if self._now >= self._ranks[rank].warn_at]
        if due and self._look is None:
            rank = min(due)
            self._begin_look({"event": "warn", "rank": rank, "what": self._ranks[rank].waits_in})
            for other in waiting:
                record = self._ranks[other]
                if record.warn_at < float("inf"):
                    record.warn_at = self._now + (WARN_FACTOR - 1) * (self._now - record.since)

    def _begin_look(self, purpose: Event) -> None:
        self._look, self._look_until, self._states = purpose, self._now + LOOK_S, []
        self._looks += 1
        self._out.append((None, {"kind": "look", "look": self._looks}))

    def _take_states(self, look: int, states: dict[int, str]) -> None:
        if self._look is not None and look == self._looks:  # else it comes too late
            self._states.append(states)
            if len(self._states) == self._nodes:
                self._finish_look()

    def _finish_look(self) -> None:
        purpose = self._look
        assert purpose is not None
        states = {rank: state for some in self._states for rank, state in some.items()}
        self._look = None
        rank, what = purpose["rank"], purpose["what"]
        hosts = {rank: record.host for rank, record in self._ranks.items()}
        roles = {rank: record.known_as.partition(";")[0] for rank, record in self._ranks.items()}
        shown = table(self._size, hosts, roles, states)
        if purpose["event"] == "limit":
            self._pass_limit(rank, purpose, shown)
        elif purpose["event"] == "ended":
            ended = ranks_text([other for other, record in self._ranks.items() if record.end == "left"])
            waited = self._now - purpose["since"]
            text = f"{ended} ended {waited:.0f} s ago, and cannot leave MPI before the other ranks end\n{shown}"
            self._out.append((None, {"kind": "speak", "rank": rank, "text": text[:TEXT_CHARS], "opens": True}))
        elif self._ranks[rank].waits_in == what:
            self._warned = (rank, what)
            waited = self._now - self._ranks[rank].since
            self._say(rank, f"rank {rank} has waited for {waited:.0f} s in {what}\n{shown}")

    def _pass_limit(self, rank: int, purpose: Event, shown: str) -> None:
        """A wait of this rank has reached its time limit. Without ranks that can be lost the others go on."""
        late = [other for other in purpose["late"] if not self._ranks[other].end]
        if self._can_lose(purpose["late"]):
            how = f"has made no request for {purpose['limit_s']:g} s while others waited for it"
            for other in late:
                self._end(other, "gone")
                self._lose(other, Loss(how, 1, ""))
            lines = "; ".join(self._line(other, how) for other in late)
            return self._say(rank, f"{lines}; the others go on\n{shown}") if late else None
        who = ", ".join(map(self._name, late))
        did = "did not answer" if set(late).issubset(purpose.get("servers", [])) else "made no request"
        told = f"; {who} {did} in this time" if who else ""
        text = f"{purpose['what']}: not complete after {purpose['limit_s']:g} s{told}\n{shown}"
        self._pass(rank, text, 1, timeout=True)

    def _check_ended(self) -> None:
        """Tell of ranks that have ended and wait in MPI_Finalize for others. That wait has no limit: a rank may compute
        alone after the last collective. Servers tell of workers themselves."""
        since = finalize_wait_since(self._ranks, {rank: record.end_at for rank, record in self._ranks.items()})
        if since is None or self._look is not None or self._now < since + self._ended_warn_at:
            return
        self._ended_warn_at = WARN_FACTOR * (self._now - since)
        rank = min(rank for rank, record in self._ranks.items() if record.end == "left")
        self._begin_look({"event": "ended", "rank": rank, "what": "", "since": since})

    def _say(self, rank: int, text: str) -> None:
        self._out.append((rank, {"kind": "say", "text": text[:TEXT_CHARS]}))
