"""Unresponsive ranks at a time limit, and the reaction of the job. Rank 0 is a server, the others are workers."""

import types

import pytest

from allred.runtime import timings
from allred.watch.job_state import JobState
from allred.watch.stalls import finalize_wait_since, unresponsive_ranks

STEP = {"what": "step 4", "limit_s": 6.0, "servers": [0], "ranks": []}


def seen(active=0.0, silent=None, end="", waits_in=""):
    return types.SimpleNamespace(active=active, silent=silent or {}, end=end, end_at=5.0, waits_in=waits_in)


@pytest.mark.parametrize(
    ("ranks", "late", "again_s"),
    [
        ({0: seen(10.0, {2: 4.0}), 2: seen()}, [2], 0.0),
        ({0: seen(10.0, {2: 7.0}), 2: seen()}, [], 3.0),  # it made a request 3 s ago
        ({0: seen(10.0, {2: 4.1}), 2: seen()}, [], timings.RECHECK_S),
        ({0: seen(10.0, {2: 4.0, 3: 9.0}), 2: seen(), 3: seen()}, [2], 0.0),
        ({0: seen(10.0, {2: 1.0}), 2: seen(waits_in="barrier() #3")}, [], 6.0),  # that wait has its own limit
        ({0: seen(10.0, {2: 1.0}), 2: seen(end="gone")}, [], 6.0),
        ({0: seen(4.0, {2: 1.0}), 2: seen()}, [0], 0.0),  # the server does not answer: its last event is out of date
        ({0: seen(7.0)}, [], 3.0),
    ],
)
def test_unresponsive_ranks(ranks, late, again_s):
    assert unresponsive_ranks([0], 6.0, ranks, 10.0) == (late, pytest.approx(again_s))


@pytest.mark.parametrize(
    ("ranks", "since"),
    [
        ([seen(end="left"), seen(2.0)], 5.0),
        ([seen(end="left"), seen(7.0)], 7.0),
        ([seen(end="left"), seen(end="dead")], None),
        ([seen(), seen()], None),
        ([seen(end="left"), seen(waits_in="barrier() #3"), seen()], None),
        ([seen(end="left"), seen(silent={2: 1.0}), seen()], None),  # a server tells of it
    ],
)
def test_since_when_ranks_that_have_ended_wait(ranks, since):
    assert finalize_wait_since(dict(enumerate(ranks))) == since


class Script:
    """A server and three workers; `messages` are those since the last `take`."""

    def __init__(self, expendable=()):
        self.job, self.messages = JobState(4, 1, 30.0, expendable), []
        for rank in range(4):
            self.handle("joined", rank, 0.0, host="here")
            self.handle("role", rank, 0.0, text=f"worker {rank - 1}" if rank else "parameter server 0")

    def handle(self, event, rank, now, **rest):
        self.job.handle({"event": event, "rank": rank, **rest}, now)
        self.messages += self.job.tick(now)

    def answer(self, now):
        """The watcher answers a query."""
        states = {str(rank): "in Python at train.py:7 (step)" for rank in range(4)}
        self.handle("states", None, now, node=0, query=self.job._stalls._queries, states=states)

    def take(self, kind):
        found = [(rank, message) for rank, message in self.messages if message["kind"] == kind]
        self.messages = []
        return found


def test_a_wait_continues_while_the_awaited_worker_makes_requests():
    script = Script()
    for now in (4.0, 8.0, 12.0):
        script.handle("holds", 0, now, silent={"2": 1.0})
    script.handle("limit", 1, 12.0, **STEP)
    assert script.take("extend") == [(1, {"kind": "extend", "again_s": 5.0})]
    assert script.job.verdict is None


def test_a_worker_that_made_no_request_is_named_with_the_table():
    script = Script()
    script.handle("holds", 0, 8.0, silent={"2": 7.0})
    script.handle("limit", 1, 8.0, **STEP)
    assert not script.take("extend")
    script.answer(8.1)
    first, *shown = script.job.verdict["text"].splitlines()
    assert first == "step 4: not complete after 6 s; rank 2 (worker 1) made no request in this time"
    assert shown == ["  ranks 0-3  here         in Python at train.py:7 (step)"]
    assert (script.job.verdict["timeout"], script.job.verdict["code"]) == (True, 1)


def test_a_server_that_does_not_answer_is_named():
    script = Script()
    script.handle("holds", 0, 1.0, silent={"2": 7.0})
    script.handle("limit", 1, 8.0, **STEP)
    script.answer(8.1)
    assert "rank 0 (parameter server 0) did not answer in this time\n" in script.job.verdict["text"]


def test_an_expendable_worker_that_made_no_request_counts_as_failed():
    script = Script(expendable=(1, 2, 3))
    script.handle("holds", 0, 8.0, silent={"2": 7.0})
    script.handle("limit", 1, 8.0, **STEP)
    assert script.take("extend") == [(1, {"kind": "extend", "again_s": timings.QUERY_S})]
    script.handle("limit", 3, 8.05, **STEP)  # which asks for the same worker
    assert script.take("extend") == [(3, {"kind": "extend", "again_s": timings.QUERY_S})]
    script.answer(8.1)
    how = "has made no request for 6 s while others waited for it"
    messages, script.messages = script.messages, []
    assert (None, {"kind": "gone", "rank": 2, "host": "here", "how": how, "code": 1}) in messages
    [text] = [message["text"] for _, message in messages if message["kind"] == "print"]
    assert text.startswith(f"rank 2 (worker 1) on here {how}; the other ranks continue\n  ranks 0-3")
    assert script.job.verdict is None
    script.handle("failed", 2, 9.0, code=1, words="CollectiveTimeout: ...", traceback="Traceback ...")
    assert script.take("linger") == [(2, {"kind": "linger"})]
    for rank in (0, 1, 3):
        script.handle("left", rank, 20.0)
    assert (script.job.verdict["rank"], script.job.verdict["code"]) == (2, 1)
    assert (script.job.verdict["text"], script.job.verdict["traceback"]) == (
        f"rank 2 (worker 1) on here {how}", "Traceback ...",
    )  # fmt: skip


def test_the_last_worker_that_is_left_is_not_expendable():
    script = Script(expendable=(1, 2, 3))
    for rank in (1, 3):
        script.handle("failed", rank, 1.0, code=3, words="", traceback="")
    script.handle("limit", 0, 8.0, what="a request of worker 1", limit_s=6.0, servers=[], ranks=[2])
    script.answer(8.1)
    assert "; rank 2 (worker 1) made no request in this time" in script.job.verdict["text"]


def test_ended_ranks_that_wait_cause_repeated_warnings():
    script = Script()
    for rank in (0, 1, 3):
        script.handle("left", rank, 5.0)
    for now in (34.9, 35.0):
        script.messages += script.job.tick(now)
    assert [message["kind"] for _, message in script.messages] == ["query"]
    script.answer(35.1)
    [(_, told)] = script.take("announce")
    assert told["text"].startswith("ranks 0-1,3 ended 30 s ago, and cannot leave MPI before the other ranks end\n")
    script.messages += script.job.tick(124.0)
    assert not script.take("query")
    script.messages += script.job.tick(125.5)
    assert script.take("query")
    assert script.job.verdict is None
