"""The watchers' decisions, without processes: events in, messages out, with the time given."""

import json
import re

import pytest

from allred.runtime import timings
from allred.watch import stalls
from allred.watch.job_state import JobState

KILLED = "was killed by signal 9 (SIGKILL)"
SEGFAULT = {"code": 139, "how": "was killed by signal 11 (SIGSEGV)"}
EXITED = {"code": 1, "how": "ended with exit code 0"}
WORKERS = {"size": 4, "expendable": (1, 2, 3)}  # 0 is a server, which can continue without them, and so can the others


class Script:
    """A job of `size` ranks that have joined; `messages` are those since the last take, without the time."""

    def __init__(self, size=3, nodes=1, warn_s=30.0, launcher=True, expendable=()):
        self.job, self.messages = JobState(size, nodes, warn_s, expendable, launcher=launcher), []
        for rank in range(size):
            self.handle(joined(rank))
            if expendable:
                self.handle(role(rank, f"worker {rank - 1}" if rank else "parameter server 0"))

    def handle(self, event, now=0.0):
        kind, rank, rest = event
        self.job.handle({"event": kind, "rank": rank, **rest}, now)
        self.tick(now)

    def tick(self, now):
        self.messages += self.job.tick(now)

    def take(self, kind=""):
        found = [(rank, message) for rank, message in self.messages if kind in ("", message["kind"])]
        self.messages = []
        return found

    def answer(self, states, now, stacks=()):
        """The watchers answer the last query. stacks: each stack with its ranks."""
        request = next(message for _, message in self.messages if message["kind"] == "query")
        self.messages = []
        answer = {"query": request["query"], "states": {str(r): s for r, s in states.items()}, "stacks": dict(stacks)}
        self.handle(("states", None, answer), now)


def failed(rank, code=3):
    return "failed", rank, {"code": code, "words": "ValueError: boom", "traceback": "Traceback ..."}


def joined(rank):
    return "joined", rank, {"host": f"host{rank}"}


def died(rank, code=137, how=KILLED, ago_s=0.0):
    return "died", rank, {"code": code, "how": how, "ago_s": ago_s}


def left(rank):
    return "left", rank, {}


def unwound(rank):
    return "unwound", rank, {}


def waits(rank, peers=True, quiet=False, since_s=1.0, **more):
    return "waiting", rank, {"what": "barrier() #5", "since_s": since_s, "peers": peers, "quiet": quiet, **more}


def resumed(rank):
    return "resumed", rank, {}


def limit(rank, limit_s=5.0):
    return "limit", rank, {"what": "barrier() #5", "limit_s": limit_s}


def busy(rank, is_busy=True):
    return "busy", rank, {"is_busy": is_busy}


def role(rank, text):
    return "role", rank, {"text": text}


def unreachable(*ranks):
    return "unreachable", ranks[0], {"ranks": list(ranks), "how": "host b has been unreachable for 20 s"}


def unwatched(rank):
    return "unwatched", rank, {}


# Turns of a job: the time, what happens (None: nothing; {}: the watchers answer), and the messages that follow, as
# "to:kind"; "all" are all ranks, and "gone-2" and "announce-2" name the ranks that are gone or have died. Then the rank
# and exit code of the verdict.
SCENARIOS = {
    "the rank that failed is released when all others have unwound": ({}, [
        (0.0, failed(1), ""),
        (0.1, unwound(0), ""),
        (0.2, unwound(2), "all:verdict"),  # mpirun has to pass on what rank 2 has printed
        (0.2 + timings.OUTPUT_S, None, "1:release"),
        (0.5, None, ""),
    ], (1, 3)),
    "without a launcher all are released, the late ones too": ({"launcher": False}, [
        (0.0, failed(1), ""),
        (0.1, unwound(0), ""),
        (timings.UNWIND_S, None, "all:verdict 0:release 1:release"),
        (timings.UNWIND_S + 0.1, unwound(2), "2:release"),
    ], (1, 3)),
    "ranks that all fail get the verdict before the release": ({"size": 2}, [
        (0.0, failed(1), ""),
        (0.01, failed(0), ""),
        (0.01 + timings.OUTPUT_S, None, "all:verdict 1:release"),
    ], (1, 3)),
    "a rank that has left need not unwind": ({}, [
        (0.0, [failed(1), left(2)], ""),
        (0.1, unwound(0), ""),
        (0.1 + timings.OUTPUT_S, None, "all:verdict 1:release"),
    ], (1, 3)),
    "a rank that has died need not unwind": ({}, [
        (0.0, [failed(1), died(2, **EXITED)], "all:announce-2"),
        (0.1, unwound(0), ""),
        (0.1 + timings.OUTPUT_S, None, "all:verdict 1:release"),
    ], (1, 3)),
    "after the grace it is released anyway": ({}, [
        (0.0, failed(1), ""),
        (0.1, unwound(0), ""),
        (timings.UNWIND_S - 0.01, None, "all:verdict"),
        (timings.UNWIND_S, None, "1:release"),
    ], (1, 3)),
    "ranks that outlive the abort of the rank that failed are killed": ({"size": 2}, [
        (0.0, [failed(1), unwound(0)], ""),
        (timings.OUTPUT_S, None, "all:verdict 1:release"),
        (1.0, died(1, 3, "ended with exit code 3"), ""),
        (1.0 + timings.ABORT_SOON_S - 0.01, None, ""),
        (1.0 + timings.ABORT_SOON_S, None, "all:kill"),
        (101.0 + timings.ABORT_SOON_S, None, ""),
    ], (1, 3)),
    "ranks that outlive an abort that does not come are killed": ({"size": 2}, [
        (0.0, [failed(1), unwound(0)], ""),
        (timings.OUTPUT_S, None, "all:verdict 1:release"),
        (timings.OUTPUT_S + timings.ABORT_S - 0.01, None, ""),
        (timings.OUTPUT_S + timings.ABORT_S, None, "all:kill"),
        (timings.OUTPUT_S + timings.ABORT_S + 100, None, ""),
    ], (1, 3)),
    "the lowest survivor of a death ends the job": ({}, [
        (1.0, died(0), ""),
        (1.0 + timings.FIRST_DEATH_S, None, "all:verdict all:announce-0"),
        (1.1, unwound(2), ""),
        (1.2, unwound(1), ""),
        (1.2 + timings.OUTPUT_S, None, "1:release"),
    ], (0, 137)),
    "deaths after another or after success are not printed": ({}, [
        (0.0, [left(0), died(0, **EXITED)], ""),
        (0.0, died(1, **SEGFAULT), "all:verdict all:announce-1"),
        (0.0, died(2, 143, "was killed by signal 15 (SIGTERM)"), ""),
    ], (1, 139)),
    "a failure that follows from a death is not taken for the first": ({}, [
        (1.0, died(0), ""),
        (1.01, failed(1), "all:verdict all:announce-0"),
    ], (0, 137)),
    "the launcher kills ranks of other nodes before the first death is known": ({"nodes": 2}, [
        (1.0, died(0), ""),
        (1.01, died(2, **EXITED), "all:verdict"),
        (1.1 + timings.FIRST_DEATH_FAR_S, None, "all:announce-2,0"),
    ], (2, 1)),
    "of three deaths the first is printed, which is reported later": ({"nodes": 2}, [
        (1.0, died(0), ""),
        (1.01, died(1, ago_s=0.02), ""),
        (1.02, died(2), ""),
        (1.0 + timings.FIRST_DEATH_S, None, "all:verdict all:announce-1"),
    ], (1, 137)),
    "an abort on one of several nodes is printed after a delay": ({"nodes": 2}, [
        (1.0, died(1, 3, "ended with exit code 3"), "all:verdict"),
        (1.1, died(0, 143, "was killed by signal 15 (SIGTERM)"), ""),
        (1.0 + timings.FIRST_DEATH_FAR_S, None, "all:announce-1"),
    ], (1, 3)),
    "the ranks of an unreachable host need not unwind": ({"nodes": 2}, [
        (20.0, unreachable(1, 2), "all:verdict"),
        (20.1, unwound(0), "0:release"),
        (20.1 + timings.ABORT_SOON_S, None, "all:kill"),  # the launcher waits for the host
    ], (1, 1)),
    "a host that is unreachable after its ranks have left ends the ranks that go on": ({"size": 2, "nodes": 2}, [
        (1.0, left(1), ""),
        (20.0, unreachable(1), "all:verdict"),
    ], (1, 1)),
    "a host that is unreachable after all ranks have left is no failure": ({"size": 2, "nodes": 2}, [
        (1.0, [left(0), left(1)], ""),
        (20.0, unreachable(1), ""),
    ], None),
    "a rank that has left is not missed where it does not belong": ({}, [
        (0.0, left(2), ""),
        (10.0, waits(0, since_s=5.0, members=[0, 1]), ""),
        (20.0, None, ""),
    ], None),
    "a rank that has left is missed where it belongs": ({}, [
        (0.0, left(2), ""),
        (10.0, waits(0, since_s=5.0, members=[0, 2]), "all:verdict"),
        (20.0, None, ""),
    ], (2, 1)),
    "a rank that has just left is not missed yet": ({}, [
        (10.0, waits(0), ""),
        (20.0, left(2), ""),
        (20.0 + timings.LEFT_RANK_S - 0.01, None, ""),
        (20.0 + timings.LEFT_RANK_S, None, "all:verdict"),
    ], (2, 1)),
    "a rank that has left has called what others wait in for bytes only": ({}, [
        (10.0, [waits(0, peers=False), left(2)], ""),
        (100.0, None, "all:query"),
    ], None),
    "one query at a time": ({"warn_s": 10}, [
        (1.0, waits(1), ""),
        (10.0, None, "all:query"),
        (10.3, waits(2, since_s=10.2), ""),
    ], None),
    "a stall that ends before the watchers answer is not printed": ({"warn_s": 10}, [
        (1.0, waits(1), ""),
        (10.0, None, "all:query"),
        (10.1, resumed(1), ""),
        (10.2, {}, ""),
    ], None),
    "the end of a stall is not printed after a verdict": ({"warn_s": 10}, [
        (1.0, waits(1), ""),
        (10.0, None, "all:query"),
        (10.1, {}, "1:print"),
        (11.0, failed(2), ""),
        (11.1, resumed(1), ""),
    ], (2, 3)),
    "a quiet wait is not printed": ({"warn_s": 10}, [
        (1.0, waits(1, quiet=True), ""),
        (1000.0, None, ""),
    ], None),
    "a quiet wait is not printed after that of another rank": ({"warn_s": 10}, [
        (1.0, [waits(1, quiet=True), waits(2)], ""),
        (10.0, None, "all:query"),
        (10.1, {}, "2:print"),
        (11.0, resumed(2), "2:print"),
        (1000.0, None, ""),
    ], None),
    "a time limit comes before a warning": ({"nodes": 2, "warn_s": 10}, [
        (1.0, waits(1), ""),
        (10.0, None, "all:query"),
        (10.1, limit(1, 10.0), "all:query"),
        (10.1 + timings.QUERY_S, None, "all:verdict"),
    ], (1, 1)),
    "a failure comes before a time limit under examination": ({"nodes": 2}, [
        (5.0, limit(2), "all:query"),
        (5.1, failed(1), ""),
        (5.0 + timings.QUERY_S, None, "all:verdict"),
    ], (1, 3)),
    "a time limit is put off while a rank is busy and for a moment after": ({}, [
        (1.0, busy(0), ""),
        (5.0, limit(2), "2:extend"),
        (9.0, busy(0, False), ""),
        (8.9 + timings.AFTER_BUSY_S, limit(2), "2:extend"),
        (9.1 + timings.AFTER_BUSY_S, limit(2), "all:query"),
    ], None),
    "an expendable rank that fails lingers and the others continue": (WORKERS, [
        (0.0, failed(2), "2:linger all:gone-2"),
        (timings.SAME_ERROR_S, None, "0:print"),
        (10_000.0, None, ""),
    ], None),
    "its failure is printed by a rank that continues": (WORKERS, [
        (0.0, [left(0), failed(1)], "1:linger all:gone-1"),
        (timings.SAME_ERROR_S, None, "2:print"),
    ], None),
    "when all others have ended well the expendable rank that failed ends the job": (WORKERS, [
        (0.0, failed(2), "2:linger all:gone-2"),
        (100.0, [left(0), left(1)], "1:print"),
        (200.0, None, "all:query"),
        (300.0, left(3), "all:verdict"),
        (300.1, unwound(2), "2:release"),
        (300.1 + timings.OUTPUT_S, None, ""),
        (300.5, [died(2, 3, "ended with exit code 3"), died(1)], ""),
    ], (2, 3)),
    "of several the first that failed is the last to speak": (WORKERS, [
        (0.0, failed(3), "3:linger all:gone-3"),
        (5.0, failed(2, 4), "2:linger all:gone-2 0:print"),
        (100.0, [left(0), left(1)], "1:print all:verdict"),
        (100.1, unwound(3), ""),
        (100.1 + timings.OUTPUT_S, None, ""),  # rank 2 shows its traceback first
        (100.2, unwound(2), ""),
        (100.2 + timings.OUTPUT_S, None, "3:release"),
    ], (3, 3)),
    "the last expendable rank that fails is the verdict": (WORKERS, [
        (0.0, failed(1), "1:linger all:gone-1"),
        (1.0, failed(3), "3:linger all:gone-3 0:print"),
        (2.0, died(2, **SEGFAULT), "all:verdict all:announce-2"),
        (2.0 + timings.FIRST_DEATH_FAR_S, None, ""),
    ], (2, 139)),
    "no line says that others continue if all fail": (WORKERS, [
        (0.01, failed(1), "1:linger all:gone-1"),
        (0.02, failed(2), "2:linger all:gone-2"),
        (0.03, failed(3), ""),
        (timings.SAME_ERROR_S + 1, None, "all:verdict"),
    ], (3, 3)),
    "a worker that has ended well has not failed: the servers may end well too": (WORKERS, [
        (0.0, [left(1), failed(2), failed(3)], "2:linger all:gone-2 3:linger all:gone-3"),
    ], None),
    "of a rank that is not expendable those that linger unwind first": (WORKERS, [
        (0.0, failed(2), "2:linger all:gone-2"),
        (500.0, failed(0, 5), ""),
        (500.1, [unwound(1), unwound(3)], ""),
        (500.3, unwound(2), "all:verdict"),
        (500.3 + timings.OUTPUT_S, None, "0:release"),
    ], (0, 5)),
    "without the setting no rank is expendable": ({"size": 4}, [
        (0.0, failed(2), ""),
        (timings.SAME_ERROR_S, None, "all:verdict"),
    ], (2, 3)),
    "the death of an expendable rank is printed and the others continue": (WORKERS, [
        (1.0, died(2), ""),
        (1.0 + timings.FIRST_DEATH_S, None, ""),  # mpirun may be ending them all
        (1.0 + timings.FIRST_DEATH_FAR_S, None, "all:gone-2 all:announce-2"),
        (1.0 + timings.FIRST_DEATH_FAR_S + timings.ABORT_SOON_S, None, "0:print"),
        (1000.0, None, ""),
    ], None),
    "a launcher that ends all soon is not blamed on the others": (WORKERS, [
        (1.0, died(2, **SEGFAULT), "all:gone-2 all:announce-2"),
        (1.02, [died(0), died(1), died(3)], ""),
        (1.02 + timings.FIRST_DEATH_FAR_S, None, "all:verdict"),
    ], (2, 139)),
    "a launcher that ends all later is not blamed on the others": (WORKERS, [
        (1.0, died(2, **SEGFAULT), "all:gone-2 all:announce-2"),
        (1.9, [died(0), died(1), died(3)], ""),
        (1.9 + timings.FIRST_DEATH_FAR_S, None, "all:verdict"),
    ], (2, 139)),
    # A watcher that got no core finds all at once, in any order; and a process that is killed needs one to end.
    "ranks ended by the launcher are no losses if reported first": (WORKERS, [
        (1.0, [died(3), died(2, **SEGFAULT)], "all:gone-3 all:gone-2 all:announce-2"),
        (1.0, [died(0), died(1)], ""),
        (1.0 + timings.FIRST_DEATH_S, None, "all:verdict"),
    ], (2, 139)),
    "ranks ended by the launcher are no losses if some are reported first": (WORKERS, [
        (1.0, [died(3), died(2, **SEGFAULT)], "all:gone-3 all:gone-2 all:announce-2"),
        (2.0, None, "0:print"),
        (2.0, [died(0), died(1)], ""),
        (2.0 + timings.FIRST_DEATH_S, None, "all:verdict"),
    ], (2, 139)),
    "a server that is killed later is the verdict": (WORKERS, [
        (1.0, died(2), ""),
        (2.0, None, "all:gone-2 all:announce-2"),
        (60.0, died(0), "1:print"),
        (60.0 + timings.FIRST_DEATH_S, None, "all:verdict all:announce-0"),
    ], (0, 137)),
    "after a death one that ended well ends the job with its code": (WORKERS, [
        (1.0, died(2), ""),
        (2.0, None, "all:gone-2 all:announce-2"),
        (100.0, [left(0), left(1), left(3)], "1:print all:verdict"),
        (100.1, unwound(3), "3:release"),  # as all do that linger
        (100.1 + timings.OUTPUT_S, None, ""),
    ], (2, 137)),
    "the watchers end the job if no rank can: all but one that died are in MPI_Finalize": (WORKERS, [
        (1.0, [left(0), left(1), left(3)], ""),
        (2.0, died(2), ""),
        (2.0 + timings.FIRST_DEATH_FAR_S, None, "all:gone-2 all:announce-2 all:verdict"),
        (2.0 + timings.FIRST_DEATH_FAR_S + timings.UNWIND_S, None, "all:kill"),
        (1000.0, None, ""),
    ], (2, 137)),
    # With a watcher lost, nobody would know when all have ended.
    "with a watcher lost, a rank that failed before is the verdict": ({**WORKERS, "nodes": 2}, [
        (1.0, failed(2), "2:linger all:gone-2"),
        (5.0, unwatched(3), "all:verdict"),
    ], (2, 3)),
    "with a watcher lost, a rank that fails later is the verdict": ({**WORKERS, "nodes": 2}, [
        (5.0, unwatched(3), ""),
        (6.0, failed(2), ""),
    ], (2, 3)),
    "a watcher whose ranks have ended may end": ({**WORKERS, "nodes": 2}, [
        (1.0, failed(2), "2:linger all:gone-2"),
        (2.0, left(3), "0:print"),
        (5.0, unwatched(3), ""),
    ], None),
    "a rank that connects late gets the verdict": ({}, [
        (0.0, failed(1), ""),
        (timings.SAME_ERROR_S, None, "all:verdict"),
        (timings.SAME_ERROR_S, joined(7), "7:verdict"),
    ], (1, 3)),
    "a rank that connects late gets the gone ranks": (WORKERS, [
        (0.0, failed(2), "2:linger all:gone-2"),
        (0.0, joined(3), "3:gone-2"),
    ], None),
    "several deaths at once are printed in one text, as a death has one outlet": (WORKERS, [
        (1.0, died(3), ""),
        (1.01, died(2), ""),
        (1.01 + timings.FIRST_DEATH_FAR_S, None, "all:gone-3 all:gone-2 all:announce-3,2"),
    ], None),
    "an expendable rank that others wait for in a collective": (WORKERS, [
        (0.0, failed(2), "2:linger all:gone-2"),
        (10.0, [waits(0), waits(1), left(3)], "0:print"),
        (12.0, None, "all:verdict"),
        (12.1, [unwound(0), unwound(1), unwound(2)], ""),
        (12.1 + timings.OUTPUT_S, None, "2:release"),
    ], (2, 3)),
}  # fmt: skip


def play(options, turns):
    """The messages of each turn, and the job afterwards."""
    script, query, said = Script(**options), None, []
    script.messages = []
    for now, events, *_ in turns:
        if events == {}:
            events = ("states", None, {"query": query, "states": {}})
        if events is None:
            script.tick(now)
        for event in events if isinstance(events, list) else [events] if events else []:
            script.handle(event, now)
        said.append(script.take())
        query = next((message["query"] for _, message in said[-1] if message["kind"] == "query"), query)
    return said, script.job


def described(to, message):
    """A message as in SCENARIOS."""
    ranks = {"gone": [str(message.get("rank"))], "announce": re.findall(r"\brank (\d+)", message.get("text", ""))}
    named = "-" + ",".join(dict.fromkeys(ranks[message["kind"]])) if message["kind"] in ranks else ""
    return f"{'all' if to is None else to}:{message['kind']}{named}"


@pytest.mark.parametrize(("options", "turns", "verdict"), SCENARIOS.values(), ids=SCENARIOS)
def test_scenarios(options, turns, verdict):
    said, job = play(options, turns)
    told = [" ".join(described(to, message) for to, message in messages) for messages in said]
    assert list(zip(turns, told, strict=True)) == [(turn, turn[2]) for turn in turns]
    assert (job.verdict and (job.verdict["rank"], job.verdict["code"])) == verdict


# The text of the only message of a kind, which comes with the last turn.
TEXTS = {
    "a failure": (
        *({}, [(0.0, failed(1)), (0.0, failed(2, 4)), (timings.SAME_ERROR_S, None)], "verdict"),
        "rank 1 on host1 failed with exit code 3: ValueError: boom",
    ),
    "a host": ({"nodes": 2}, [(20.0, unreachable(1, 2))], "verdict", "host b has been unreachable for 20 s"),
    "a death": ({}, [(1.0, died(0)), (1.0 + timings.FIRST_DEATH_S, None)], "announce", f"rank 0 on host0 {KILLED}"),
    "kills after the loss of a watcher": (
        *({"size": 2, "nodes": 2}, [(1.0, unwatched(1)), (1.1, died(0)), (2.0, None)], "announce"),
        "rank 1 on host1 has ended without a report: all processes of its host were killed...",
    ),
    # Open MPI aborts a rank that has lost its connection to one that was killed.
    **{
        f"an abort on one host and a kill on another, {name}": (
            {"nodes": 2},
            [(1.0, deaths[0]), (1.03, deaths[1]), (1.1 + timings.FIRST_DEATH_FAR_S, None)],
            "announce",
            f"rank 0 on host0 ended with exit code 14, and at about the same time rank 2 on host2 {KILLED}...",
        )
        for name, deaths in {
            "which comes later": (died(0, 14, "ended with exit code 14"), died(2)),
            "which comes first": (died(2), died(0, 14, "ended with exit code 14")),
        }.items()
    },
    **{
        f"a rank that has left{name}": (
            {},
            [
                *((0.0, left(2)), *ended),
                *((10.0, waits(0)), (10.5, resumed(0)), (20.0, None)),
                (30.0, waits(0, what="barrier() #6", earlier="; an earlier operation failed: InputError: x")),
                (31.0, None),
            ],
            "verdict",
            "rank 2 on host2 has ended, and will never call barrier() #6, in which rank 0 waits; an earlier operation "
            "failed: InputError: x",
        )
        for name, ended in {"": (), " and whose process ends": ((0.5, died(2, **EXITED)),)}.items()
    },
    "the latest role": (
        {},
        [
            *((0.0, role(1, f"parameter server 1; last checkpoint {name}")) for name in "ab"),
            *((1.0, died(1)), (1.0 + timings.FIRST_DEATH_S, None)),
        ],
        "announce",
        f"rank 1 (parameter server 1; last checkpoint b) on host1 {KILLED}",
    ),
    "an expendable rank that fails": (
        *(WORKERS, [(0.0, failed(2)), (timings.SAME_ERROR_S, None)], "print"),
        "rank 2 (worker 1) on host2 failed with exit code 3: ValueError: boom; the other ranks continue",
    ),
    "the others continue": (
        WORKERS,
        [(1.0, died(2)), (2.0, None), (2.0 + timings.ABORT_SOON_S, None)],
        *("print", "the other ranks continue without rank 2 (worker 1)"),
    ),
    "several deaths": (
        *(WORKERS, [(1.0, died(3)), (1.01, died(2)), (1.01 + timings.FIRST_DEATH_FAR_S, None)], "announce"),
        f"rank 3 (worker 2) on host3 {KILLED}\nallred: rank 2 (worker 1) on host2 {KILLED}",
    ),
    "the death of a rank that lingers": (
        *(WORKERS, [(0.0, failed(2)), (10.0, died(2)), (10.0 + timings.FIRST_DEATH_FAR_S, None)], "announce"),
        f"rank 2 (worker 1) on host2 {KILLED} while it waited for the others to end, since it failed with exit code 3: "
        "ValueError: boom\nTraceback ...",
    ),
    "a collective with a rank that lingers": (
        WORKERS,
        [(0.0, failed(2)), (10.0, [waits(0), waits(1)]), (10.0, left(3)), (12.0, None)],
        "verdict",
        "rank 2 (worker 1) on host2 has failed, and will never call barrier() #5, in which rank 0 waits",
    ),
}


@pytest.mark.parametrize(("options", "turns", "kind", "text"), TEXTS.values(), ids=TEXTS)
def test_texts(options, turns, kind, text):
    said, _ = play(options, turns)
    *before, last = [[message["text"] for _, message in messages if message["kind"] == kind] for messages in said]
    assert not any(before)
    assert [found.startswith(text[:-3]) if text.endswith("...") else found for found in last] == [
        True if text.endswith("...") else text
    ]


def test_the_first_failure_is_everybodys_verdict():
    script = Script()
    script.handle(failed(1))
    script.handle(failed(2, 4))
    script.tick(timings.SAME_ERROR_S)
    [(to, verdict)] = script.take("verdict")
    assert to is None
    assert [verdict[key] for key in ("rank", "host", "code", "traceback")] == [1, "host1", 3, "Traceback ..."]


@pytest.mark.parametrize("launcher", [True, False])
def test_without_a_launcher_each_rank_prints_the_death(launcher):
    script = Script(launcher=launcher)
    script.handle(died(1))
    script.tick(1.0)
    told = {message["kind"]: message for _, message in script.messages}
    text = f"rank 1 on host1 {KILLED}"
    assert told["verdict"]["text"] == text
    assert told["verdict"]["brief"] == ("rank 1 is gone" if launcher else text)
    assert ("announce" in told) == launcher


def test_the_job_does_not_end_while_a_rank_is_busy():
    script = Script()
    script.handle(busy(0))
    script.handle(failed(1))
    script.handle(unwound(2), 0.1)
    for now in range(1, 20):
        script.tick(float(now))
    kinds = [message["kind"] for _, message in script.messages]
    assert (kinds.count("release"), kinds.count("print")) == (0, 1)
    assert {rank for rank, message in script.messages if message["kind"] == "hold"} == {0, 1, 2}
    assert kinds.count("hold") > 30
    [(_, told)] = script.take("print")
    assert told["text"] == "rank 0 still writes; the job ends when it is done"
    script.handle(busy(0, False), 20.0)
    script.tick(20.0 + timings.UNWIND_S)
    assert script.take("release") == [(1, {"kind": "release"})]


def test_a_stall_is_printed_at_intervals_that_grow_and_so_is_its_end():
    script = Script(warn_s=10)
    script.handle(waits(1), 1.0)
    script.handle(waits(2), 1.0)
    script.tick(9.9)
    assert not script.messages
    script.tick(10.0)
    script.answer({0: "stopped", 1: "in barrier() #5", 2: "in barrier() #5"}, 10.1)
    [(rank, message)] = script.take("print")
    assert rank == 1
    assert message["text"].splitlines()[0] == "rank 1 has waited for 10 s in barrier() #5"
    assert len(message["text"].splitlines()) == 4
    script.tick(39.9)
    assert not script.messages
    script.tick(40.1)
    script.answer({0: "stopped"}, 40.2)
    assert "no answer" in script.take("print")[0][1]["text"]
    script.handle(resumed(2), 50.0)
    script.handle(resumed(1), 50.0)
    text = "rank 1 no longer waits in barrier() #5, after 50 s"
    assert script.take("print") == [(1, {"kind": "print", "text": text})]


def test_a_late_answer_does_not_count_for_the_next_query():
    script = Script(nodes=2, warn_s=10)
    script.handle(waits(1), 1.0)
    script.tick(10.0)
    script.tick(10.0 + timings.QUERY_S)
    script.handle(limit(1, 12.0), 12.0)
    first, second = [message["query"] for _, message in script.take("query")]
    for now, query, states in (
        (12.1, first, {"0": "old"}),
        (12.1, second, {"1": "new"}),
        (12.2, second, {"0": "newer"}),
    ):
        assert not script.messages
        script.handle(("states", None, {"query": query, "states": states}), now)
    assert "newer" in script.take("verdict")[0][1]["text"]


def test_a_time_limit_is_everybodys_verdict_with_the_same_table():
    script = Script(nodes=2)
    script.handle(limit(2), 5.0)
    script.handle(limit(0), 5.0)
    [query] = [message["query"] for _, message in script.take("query")]
    script.handle(("states", None, {"query": query, "states": {"0": "a", "1": "b"}}), 5.1)
    assert not script.messages
    script.handle(("states", None, {"query": query, "states": {"2": "c"}}), 5.2)
    [(to, verdict)] = script.take("verdict")
    assert (to, verdict["timeout"], verdict["rank"]) == (None, True, 2)
    lines = [each.split() for each in verdict["text"].splitlines()]
    assert lines[0] == ["barrier()", "#5:", "not", "complete", "after", "5", "s"]
    assert lines[1:] == [["rank", str(rank), f"host{rank}", what] for rank, what in enumerate("abc")]


@pytest.mark.parametrize("state", ["in barrier() #5 for {} s", "in Python at train.py:{} (step)"])
def test_the_table_of_a_large_job_is_short(state):
    size = 2000
    script = Script(size)
    script.handle(limit(2), 5.0)
    kinds = 3 if "barrier" in state else size
    script.answer({rank: state.format(rank % kinds) for rank in range(size)} | {1234: "stopped"}, 5.1)
    message = script.take("verdict")[0][1]
    assert len(message["text"].splitlines()) == 1 + (2 if kinds == 3 else stalls.TABLE_LINES)
    assert len(json.dumps(message)) < timings.EVENT_BYTES
    if kinds == 3:
        assert re.search(r"^  rank 1234 +host1234 +stopped$", message["text"], re.M)
    else:
        assert message["text"].splitlines()[-1].strip().startswith("and 1961 ranks in 1961 other states; likely ")
    assert message["text"].splitlines()[1].split() == ["rank", "1234", "host1234", "stopped"]


def test_the_table_of_many_hosts_has_counts_of_hosts_and_likely_causes_first():
    size = 1024
    states = {rank: f"in allreduce(Average) #5 for {30 + rank % 3} s" for rank in range(size)}
    states |= dict.fromkeys(range(1, size, 2), "in Python at train.py:9 (load)")
    states |= {
        40: "stopped (kill -CONT 1 continues it), in allreduce(Average) #5 for 30 s",
        600: "in MPI Recv at a:1",
    }
    del states[700]
    hosts = {rank: f"host{rank // 16}" for rank in range(size)}
    lines = stalls.status_table(size, hosts, {}, states).splitlines()
    assert [re.sub(" +", " ", line).strip() for line in lines] == [
        "rank 40 host2 stopped (kill -CONT 1 continues it), in allreduce(Average) #5 for 30 s",
        "rank 700 host43 no answer",
        "rank 600 host37 in MPI Recv at a:1",
        "ranks 1,3,5,7,9,11,13,15 and 504 more ranks 64 hosts in Python at train.py:9 (load)",
        "ranks 0,2,4,6,8,10,12,14 and 501 more ranks 64 hosts in allreduce(Average) #5 for 30-32 s",
    ]


def test_a_node_that_does_not_answer_is_not_waited_for():
    script = Script(nodes=2)
    script.handle(limit(2), 5.0)
    script.tick(5.0 + timings.QUERY_S)
    [(_, verdict)] = script.take("verdict")
    assert verdict["timeout"]
    assert "no answer" in verdict["text"]


def test_the_death_of_the_failed_rank_is_printed_with_its_traceback():
    script = Script()
    script.handle(failed(1))
    script.handle(died(2), 0.3)
    script.handle(died(1), 0.4)
    peer, culprit = (message["text"] for _, message in script.take("announce"))
    assert peer == f"rank 2 on host2 {KILLED} while the job was ending"
    assert culprit.startswith(f"rank 1 on host1 {KILLED} while the job was ending, since rank 1 ")
    assert culprit.endswith("ValueError: boom\nTraceback ...")


def test_the_first_death_is_uncertain_before_all_ranks_have_connected():
    script = Script(size=2)
    script.job._size = 3
    script.handle(died(0), 1.0)
    script.tick(2.0)
    assert "not all ranks had returned from allred.init()" in script.take("announce")[0][1]["text"]


def test_the_table_has_the_role_of_a_rank_that_has_a_line_of_its_own():
    hosts, roles = dict.fromkeys(range(4), "node7"), {0: "parameter server 0", 1: "worker 0", 2: "worker 1"}
    lines = stalls.status_table(
        4, hosts, roles, {0: "stopped", 1: "at its end", 2: "at its end", 3: "dead"}
    ).splitlines()
    assert lines == [
        "  rank 0 (parameter server 0) node7        stopped",
        "  ranks 1-2                   node7        at its end",
        "  rank 3                      node7        dead",
    ]


def test_the_table_has_the_stacks_below_the_lines_of_their_ranks():
    script = Script(size=4)
    script.handle(limit(1), 5.0)
    states = {0: "in barrier() #5", 1: "in barrier() #5", 2: "in barrier() #5", 3: "stopped"}
    script.answer(states, 5.1, {"    train.py:9 (step)\n    train.py:20 (main)": [0, 1], "    train.py:8 (step)": [2]})
    text = script.take("verdict")[0][1]["text"]
    shown = [re.sub(r" +host\d +", " ", line) for line in text.splitlines()[1:]]
    frames = ["    train.py:9 (step)", "    train.py:20 (main)"]
    assert shown == [
        *("  rank 0 in barrier() #5", *frames),
        *("  rank 1 in barrier() #5", *frames),
        *("  rank 2 in barrier() #5", "    train.py:8 (step)"),
        "  rank 3 stopped",
    ]


def test_the_smallest_groups_of_ranks_have_their_stacks_if_there_is_no_room():
    hosts, states = dict.fromkeys(range(100), "node7"), dict.fromkeys(range(100), "in barrier() #5")
    long = "\n".join(f"    /home/me/model.py:{line} (forward)" for line in range(100))
    stacks = dict.fromkeys(range(99), long) | {99: long + "\n    and more"}
    lines = stalls.status_table(100, hosts, {}, states, stacks).splitlines()
    assert [line.split("node7")[0].strip() for line in lines if "node7" in line] == ["ranks 0-98", "rank 99"]
    assert "rank 99" in lines[1], "the stack of the others has no room"
    assert lines[-1] == "    and more"
    everything = sum(map(len, lines)) + len(lines)
    assert everything < timings.VERDICT_CHARS


def test_the_table_of_a_job_shows_roles_only():
    script = Script(size=2)
    script.handle(role(0, "parameter server 0; last checkpoint ckpt/step-00000400"))
    script.handle(limit(1), 5.0)
    script.answer({0: "stopped", 1: "waits"}, 5.1)
    text = script.take("verdict")[0][1]["text"]
    assert re.search(r"^  rank 0 \(parameter server 0\) host0 +stopped$", text, re.M)


@pytest.mark.parametrize(
    ("event", "how", "code"), [(failed(2), "failed with exit code 3: ValueError: boom", 3), (died(2), KILLED, 137)]
)
def test_what_the_others_are_told_of_an_expendable_rank(event, how, code):
    script = Script(**WORKERS)
    script.handle(event)
    script.tick(timings.FIRST_DEATH_FAR_S)
    gone = {"kind": "gone", "rank": 2, "host": "host2", "how": how, "code": code}
    assert script.take("gone") == [(None, gone)]


def test_a_second_kill_is_printed_if_no_launcher_caused_it():
    script = Script(**WORKERS)
    script.handle(died(2, **SEGFAULT), 1.0)
    script.handle(died(3), 1.5)
    script.tick(1.5 + timings.FIRST_DEATH_FAR_S)
    assert [(to, m["rank"]) for to, m in script.messages if m["kind"] == "gone"] == [(None, 2), (None, 3)]
    assert [m["rank"] for _, m in script.take("announce")] == [2]
    script.tick(1.5 + timings.FIRST_DEATH_FAR_S + timings.LAUNCHER_ENDS_RANKS_S)
    assert [(to, m["text"]) for to, m in script.take("print")] == [
        (0, "the other ranks continue without rank 2 (worker 1)"),
        (0, f"rank 3 (worker 2) on host3 {KILLED}"),
        (0, "the other ranks continue without rank 3 (worker 2)"),
    ]
    assert script.job.verdict is None


def test_a_watcher_that_continues_alone_makes_a_loss_the_verdict():
    alone = Script(2, 1)
    alone.job.conclude({"kind": "gone", "rank": 3, "host": "host3", "how": KILLED, "code": 137}, 5.0)
    alone.tick(5.0)
    [(to, verdict)] = alone.take("verdict")
    assert (to, verdict["text"]) == (None, f"rank 3 on host3 {KILLED}")
    alone.handle(unwound(1), 5.1)
    alone.handle(unwound(0), 5.2)
    alone.tick(5.2 + timings.OUTPUT_S)
    assert alone.take("release") == [(0, {"kind": "release"})]
