"""The state machine of the watchers: events of ranks in, messages out. It has no clock, socket or process.

The watcher of the chief's node has the `JobState`; the other watchers send their events to it. An event is a dict with
`event`, its name, and `rank`, the rank that it is about:

    joined host                  the rank is watched from now on
    role text                the rank's role for messages; after a ';', more for messages about its failure
    waiting what, since_s, peers, quiet, members, earlier
                                 it has waited in an operation for since_s seconds. peers: it waits for ranks to begin
                                 it; quiet: a long wait is intended; members: its ranks; None: all; earlier: errors of
                                 operations before it, as the end of a line
    resumed                      its wait is over
    busy is_busy                 whether it does work without a time limit, for which the others wait
    limit what, limit_s, servers, ranks, earlier
                                 its wait has reached the time limit. No verdict if a rank is or just was busy.
                                 servers: those that may delay the answer (stalls.py); ranks: those that cause the wait
    holds silent                 a server holds answers back: {rank: seconds since its last request} of the ranks that
                                 it waits for; sent repeatedly
    session is_open, step        its session begins or ends at this step
    summaries directory          rank 0 writes scalars for monitors there (session/summary.py)
    failed code, words, traceback    it is about to end with that exit code, and lingers for the others
    unwound                      it has received the verdict, its program has ended, and it lingers
    left                         it has ended without an error
    died how, code, ago_s        its process has ended, by a signal or without a message
    unwatched                    its watcher is lost, so there will be no more events of it
    orphaned how                 the launcher of its host has ended, but this rank has not
    unreachable ranks, how       its host, with these ranks, has been unreachable until the time limit
    counters number, steps, ranks
                                 the steps and counters of the ranks of a node; the answer to the message `collect`
    states query, states, stacks the states of the ranks of a node; the answer to the message `query`. stacks: with
                                 ALLRED_STACKS, each stack, as text, with its ranks

The first failure is the verdict of the job. There is at most one, and every rank receives it:

    1  a rank fails, dies, ends while others wait for it, or waits until its time limit: the verdict goes to all ranks.
       After a failure this takes SAME_ERROR_S, because often all ranks are about to raise the same error
    2  the ranks raise it, unwind, and report that. Each lingers, because a launcher ends a job with its first rank
    3  OUTPUT_S after the last rank has unwound, or UNWIND_S after the first, one rank is released: the failed one if
       possible; not before the busy ranks have finished
    4  the released rank prints its traceback, so that this comes last, and aborts the job with its exit code

Without a launcher, which would end the others then, step 3 releases all ranks, and each ends with that exit code.

The failure of an expendable worker is no verdict (records.py). In an elastic job no end of a rank is one; if a wait
reaches its time limit, the ranks that do not wait are killed, and the others go on.
"""

import signal
from collections.abc import Callable, Collection
from typing import Any

from allred.runtime import timings
from allred.watch.records import Event, ExpendableWorkers, LostRank, Records
from allred.watch.release import Release
from allred.watch.stalls import Stalls
from allred.wording import named

Death = tuple[float, int, Event]  # (time, rank, event)

_KILLED = 128 + signal.SIGKILL
_LAUNCHER_KILL_CODES = (_KILLED, 128 + signal.SIGTERM)  # of ranks that are ended since another one has died


def _not_by_launcher(deaths: list[Death]) -> list[Death]:
    """Return the deaths that no launcher caused."""
    return [death for death in deaths if death[2]["code"] not in _LAUNCHER_KILL_CODES]


class JobState:
    """The state of a job of `size` ranks on `nodes` nodes.

    warn_s: a wait of this length, in seconds, causes a warning. expendable: the expendable ranks. launcher: whether a
    launcher started the ranks; it ends all of them with the first. elastic: as in WatcherSettings.
    """

    def __init__(
        self, size: int, nodes: int, warn_s: float, expendable: Collection[int] = (), launcher: bool = True,
        elastic: bool = False,
    ) -> None:  # fmt: skip
        self.verdict: Event | None = None
        self._size, self._nodes, self._launcher = size, nodes, launcher
        self._ranks = Records()
        self._expendable = ExpendableWorkers(expendable)
        self._elastic, self._killed = elastic, set[int]()  # ranks, by `_kill_late`
        fail = self._kill_late if elastic else self._set_verdict
        self._stalls = Stalls(self._ranks, self._expendable, size, nodes, warn_s, fail, self._continue_without_silent)
        self._release = Release(self._ranks, self._expendable.gone, launcher)
        self._send_verdict_at, self._verdict_sent = 0.0, False
        self._notices: list[tuple[float, str]] = []  # when to print that the others continue
        self._deaths: list[Death] = []  # that may be the verdict
        self._lost_deaths: list[Death] = []  # of expendable ranks
        self._death_due = float("inf")
        self._lost_watcher: set[int] = set()  # ranks that had not ended when their watcher was lost
        self._unprinted_death: Death | None = None  # the death that is the verdict, until it is printed
        self._print_death_at = 0.0
        self._verdict_is_death = False  # then mpirun ends the others
        self._handlers: dict[str, Callable[[int, Event], None]] = {
            "joined": self._joined, "role": self._role, "waiting": self._stalls.waiting,
            "resumed": self._stalls.resumed, "busy": self._stalls.busy, "limit": self._stalls.limit,
            "holds": self._holds, "failed": self._failed,
            "unwound": lambda rank, _: self._end(rank, "unwound"), "left": lambda rank, _: self._end(rank, "left"),
            "died": self._died, "unwatched": self._unwatched, "unreachable": self._unreachable,
            "orphaned": self._orphaned,
            "session": lambda rank, _: None,  # for `allred run` only
        }  # fmt: skip
        if elastic:
            ends = "failed", "left", "died", "unwatched", "unreachable", "orphaned"
            self._handlers |= dict.fromkeys(ends, lambda rank, _: self._end(rank, "dead"))

    def handle(self, event: Event, now: float) -> None:
        """Handle an event. Messages are sent at the next tick, because thousands of ranks may send events at once."""
        self._ranks.now = now
        if event["event"] == "states":
            states = {int(rank): state for rank, state in event["states"].items()}
            self._stalls.take_states(event["query"], states, event.get("stacks", {}))
        elif event["event"] == "joined" or event["rank"] in self._ranks:
            self._handlers[event["event"]](event["rank"], event)
            self._ranks[event["rank"]].active = now

    def tick(self, now: float) -> list[tuple[int | None, Event]]:
        """Return the messages to send now: (rank, message) to a rank, (None, message) to all watchers."""
        self._ranks.now = now
        if self.verdict is None and now >= self._death_due:
            self._set_verdict_of_death()
        if self.verdict is None:
            if not self._elastic:
                self._check_left()
            self._stalls.check()
            self._check_expendable()
        else:
            self._send_verdict()
            self._print_death()
            if free := self._release.check(self.verdict["rank"]):
                self._send_verdict(at_once=True)
                self._ranks.out += [(rank, {"kind": "release"}) for rank in free]
        self._stalls.end_query()
        out, self._ranks.out = self._ranks.out, []
        return out

    def conclude(self, gone: Event, now: float) -> None:
        """Pass the verdict for an expendable rank that is gone, according to a message: the ends of the ranks of other
        nodes are no longer known."""
        self._ranks.now, rank = now, gone["rank"]
        if rank not in self._ranks:
            self._ranks.join(rank, gone["host"])
            self._ranks.end(rank, "dead")
        self._set_verdict(rank, self._ranks.line(rank, gone["how"]), gone["code"])

    # Events.

    def _joined(self, rank: int, event: Event) -> None:
        self._ranks.join(rank, event["host"])
        if self._verdict_sent and self.verdict is not None:
            self._ranks.out.append((rank, self.verdict))
        self._ranks.out += [(rank, self._gone(lost)) for lost in self._expendable.gone]

    def _role(self, rank: int, event: Event) -> None:
        self._ranks[rank].role = event["text"]

    def _holds(self, rank: int, event: Event) -> None:
        self._ranks[rank].silent = {int(other): self._ranks.now - for_s for other, for_s in event["silent"].items()}

    def _failed(self, rank: int, event: Event) -> None:
        if self.verdict is None and self._deaths:
            self._set_verdict_of_death()
        how = f"failed with exit code {event['code']}" + (f": {event['words']}" if event["words"] else "")
        gone = self._expendable.gone.get(rank)  # the others continue without it already
        if self.verdict is None and (gone or self._expendable.can_continue_without([rank])):
            self._end(rank, "gone")
            self._ranks.out.append((rank, {"kind": "linger"}))
            if gone:
                gone.traceback = event["traceback"]
            else:
                self._continue_without(rank, LostRank(how, event["code"], event["traceback"]))
                text = f"{self._ranks.line(rank, how)}; the other ranks continue"
                self._notices.append((self._ranks.now + timings.SAME_ERROR_S, text))
            return
        if self.verdict is None:
            line, end = self._ranks.line(rank, how), event["traceback"]
            self._set_verdict(rank, line, event["code"], timings.SAME_ERROR_S, traceback=end)
        self._end(rank, "unwound")

    def _died(self, rank: int, event: Event) -> None:
        before = self._ranks[rank].end
        self._end(rank, "dead")
        if self.verdict is not None and not self._verdict_is_death and not self._release.begun and before != "left":
            text = f"{self._ranks.line(rank, event['how'])} while the job was ending"
            if rank == self.verdict["rank"]:  # it was to print the verdict
                text += f", since {self.verdict['text']}\n{self.verdict['traceback']}"
            self._ranks.announce(rank, text)
        if self.verdict is None and before != "left":
            self._take_death(rank, event)
        elif self._unprinted_death is not None:
            self._deaths.append((self._ranks.now - event["ago_s"], rank, event))

    def _take_death(self, rank: int, event: Event) -> None:
        """Set the verdict now, or wait for an earlier death that may be reported later."""
        self._deaths.append((self._ranks.now - event["ago_s"], rank, event))
        by_itself, expendable = event["code"] not in _LAUNCHER_KILL_CODES, rank in self._expendable.ranks
        if by_itself and not (expendable and event["code"] <= 128 and self._nodes > 1):
            return self._set_verdict_of_death()
        later_s = timings.FIRST_DEATH_FAR_S if expendable else timings.FIRST_DEATH_S
        self._death_due = min(self._death_due, self._ranks.now + later_s)

    def _set_verdict_of_death(self) -> None:
        new = sorted(self._deaths, key=lambda death: death[0])
        self._deaths, self._death_due = [], float("inf")
        if self._expendable.can_continue_without([rank for _, rank, _ in new]):
            return self._continue_without_dead(new)
        deaths = self._recent_losses() + new
        first = (_not_by_launcher(deaths) or deaths)[0]
        if self._lost_watcher and not _not_by_launcher(deaths):
            how = "has ended without a report: all processes of its host were killed, or the host has failed"
            first = first[0], min(self._lost_watcher), {"how": how, "code": _KILLED}
        _, rank, event = first
        text = self._ranks.line(rank, event["how"])
        self._verdict_is_death = True
        brief = f"rank {rank} is gone" if self._launcher else text
        self._set_verdict(rank, text, event["code"], brief=brief)
        if self._launcher and first not in self._lost_deaths:  # else each rank prints it, in its own terminal
            aborted_far = event["code"] <= 128 and self._nodes > 1
            self._deaths = deaths
            self._unprinted_death = first
            self._print_death_at = self._ranks.now + timings.FIRST_DEATH_FAR_S * aborted_far
            self._print_death()

    def _recent_losses(self) -> list[Death]:
        return [lost for lost in self._lost_deaths if self._ranks.now <= lost[0] + timings.LAUNCHER_ENDS_RANKS_S]

    def _print_death(self) -> None:
        """Print which rank died. The order of an abort and a kill on two hosts is unknown: print both."""
        if self._unprinted_death is None or self._ranks.now < self._print_death_at:
            return
        (_, rank, event), self._unprinted_death = self._unprinted_death, None
        text = self._ranks.line(rank, event["how"])
        for _, other, killed in self._deaths:
            if event["code"] <= 128 and killed["code"] == _KILLED and self._ranks[other].host != self._ranks[rank].host:
                text += f", and at about the same time {self._ranks.line(other, killed['how'])}"
                break
        if len(self._ranks) < self._size:
            text += "; not all ranks had returned from allred.init(), and mpirun may have ended it because of another"
        self._ranks.announce(rank, text)

    def _continue_without_dead(self, deaths: list[Death]) -> None:
        """Count dead expendable ranks as gone. A kill near another death may come from the launcher, which ends all
        ranks: a living rank prints it later. An exit does not count if the kill of a rank on another node may have
        caused it; see FIRST_DEATH_FAR_S."""
        near = [death for death in _not_by_launcher(deaths) if death[2]["code"] > 128 or self._nodes == 1]
        follow = bool(self._recent_losses() or near)
        printed = []
        for _, rank, event in deaths:
            line, before = self._ranks.line(rank, event["how"]), self._expendable.gone.get(rank)
            if before is None:
                self._continue_without(rank, LostRank(event["how"], event["code"], ""))
            else:
                line += f" while it waited for the others to end, since it {before.how}\n{before.traceback}"
            later_s = timings.ABORT_SOON_S
            if follow and event["code"] in _LAUNCHER_KILL_CODES:
                later_s = timings.LAUNCHER_ENDS_RANKS_S
                self._notices.append((self._ranks.now + later_s, line))
            else:
                printed.append((rank, line))
            if before is None:
                text = f"the other ranks continue without {self._ranks.name(rank)}"
                self._notices.append((self._ranks.now + later_s, text))
        self._lost_deaths += deaths
        if printed:  # in one text, because the watchers open stderr for one text
            self._ranks.announce(printed[0][0], "\nallred: ".join(line for _, line in printed))

    def _end(self, rank: int, how: str) -> None:
        self._ranks.end(rank, how)
        if how == "unwound":
            self._release.unwound(rank)

    # Expendable ranks.

    def _continue_without(self, rank: int, lost: LostRank) -> None:
        self._expendable.gone[rank] = lost
        self._ranks.out.append((None, self._gone(rank)))

    def _continue_without_silent(self, ranks: list[int], how: str) -> None:
        for rank in ranks:
            self._end(rank, "gone")
            self._continue_without(rank, LostRank(how, 1, ""))

    def _gone(self, rank: int) -> Event:
        lost = self._expendable.gone[rank]
        return {"kind": "gone", "rank": rank, "host": self._ranks[rank].host, "how": lost.how, "code": lost.code}

    def _check_expendable(self) -> None:
        """Print that the others continue. When all ranks have ended, let one of them end the job."""
        running = self._ranks.running
        due = [text for at, text in self._notices if self._ranks.now >= at and running]
        self._notices = [notice for notice in self._notices if notice[1] not in due]
        for text in due:
            self._ranks.print(min(running), text)
        gone = self._expendable.gone
        if gone and not running and not self._deaths and len(self._ranks) == self._size:
            rank = next((rank for rank in gone if self._ranks[rank].end == "gone"), next(iter(gone)))
            self._set_verdict_of_lost_rank(rank, self._ranks.line(rank, gone[rank].how))
            self._release.start_clock()

    def _unwatched(self, rank: int, event: Event) -> None:
        """The ends of ranks are no longer known: no rank is expendable now, and a gone rank is the verdict."""
        if self._ranks[rank].end in ("left", "dead"):
            return
        self._lost_watcher.add(rank)
        self._expendable.ranks = frozenset()
        for rank, lost in self._expendable.gone.items():
            if self.verdict is None:
                self._set_verdict_of_lost_rank(rank, self._ranks.line(rank, lost.how))

    def _unreachable(self, rank: int, event: Event) -> None:
        known = [each for each in event["ranks"] if each in self._ranks]
        lost = [each for each in known if self._ranks[each].end not in ("left", "dead")]
        for each in lost:
            self._end(each, "dead")
        self._release.lose_host()
        if self.verdict is None and lost and self._expendable.can_continue_without(lost):
            for each in lost:
                self._continue_without(each, LostRank(event["how"], 1, ""))
            self._notices.append((self._ranks.now, f"{event['how']}; the other ranks continue"))
        elif self.verdict is None and self._ranks.running:
            self._set_verdict(rank, event["how"], 1)

    def _orphaned(self, rank: int, event: Event) -> None:
        """The launcher of a host has ended, but its ranks have not: nobody else would end them."""
        self._release.lose_launcher()
        if self.verdict is None:
            self._set_verdict(rank, self._ranks.line(rank, event["how"]), 1)
            self._release.start_clock()

    def _set_verdict_of_lost_rank(self, rank: int, text: str) -> None:
        lost = self._expendable.gone[rank]
        self._set_verdict(rank, text, lost.code, traceback=lost.traceback)

    # Verdicts.

    def _set_verdict(self, rank: int, text: str, code: int, later_s: float = 0.0, **more: Any) -> None:
        """Set the verdict. more: traceback of the rank; timeout: whether all raise CollectiveTimeout; brief: replaces
        the first line of the text."""
        self._stalls.stop()
        for gone in self._ranks.ended("gone"):
            self._ranks.end(gone, "")  # it reports that it has unwound, as all ranks do now
        self.verdict = {
            "kind": "verdict", "rank": rank, "host": self._ranks[rank].host, "code": code, "traceback": "",
            "text": text[:timings.VERDICT_CHARS], "brief": text.partition("\n")[0], "timeout": False, **more,
        }  # fmt: skip
        self._send_verdict_at = self._ranks.now + later_s
        self._send_verdict()

    def _kill_late(self, rank: int, text: str, code: int, timeout: bool) -> None:
        """A wait of this rank has reached its limit, in an elastic job: kill the ranks that do not wait. If all wait,
        for different operations, that is the verdict."""
        late = sorted(self._ranks.running - self._ranks.waiting)
        if not (late or self._killed):
            return self._set_verdict(rank, text, code, timeout=timeout)
        for other in sorted(self._ranks.waiting):
            self._ranks.out.append((other, {"kind": "extend", "again_s": timings.LIMIT_VERDICT_S}))
        if new := [each for each in late if each not in self._killed]:
            self._killed.update(new)
            self._ranks.out += [(None, {"kind": "kill", "rank": each}) for each in new]
            self._ranks.print(rank, f"{named('rank', new)} is killed, because it does not take part. {text}")

    def _send_verdict(self, at_once: bool = False) -> None:
        is_due = at_once or self._ranks.now >= self._send_verdict_at
        if self.verdict is not None and is_due and not self._verdict_sent:
            self._verdict_sent = True
            self._ranks.out.append((None, self.verdict))

    def _check_left(self) -> None:
        before, ranks = self._ranks.now - timings.LEFT_RANK_S, self._ranks
        if not ranks.waiting or len(ranks.running) == len(ranks):
            return
        waiting = sorted(rank for rank in ranks.waiting if ranks[rank].waits_for_peers and before >= ranks[rank].since)
        left = {rank for rank, record in ranks.items() if record.end and before >= record.end_at} if waiting else set()
        for rank in waiting if left else ():
            record = ranks[rank]
            if never_come := left if record.members is None else left.intersection(record.members):
                never = f"and will never call {record.waits_in}, in which rank {rank} waits{record.earlier}"
                return self._set_verdict_of_left(never_come, never)

    def _set_verdict_of_left(self, left: Collection[int], never: str) -> None:
        if gone := [rank for rank in left if rank in self._expendable.gone]:
            self._set_verdict_of_lost_rank(min(gone), self._ranks.line(min(gone), f"has failed, {never}"))
        else:
            self._set_verdict(min(left), self._ranks.line(min(left), f"has ended, {never}"), 1)
