"""The watchers' decisions, without processes: events in, messages out, with the time given."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import pytest

from allred.counters import Counters, Values
from allred.errors import RemoteRankError
from allred.runtime import channel, timings
from allred.runtime.loop import Loop
from allred.watch import process, process_state, records, stalls, start, watcher_client
from allred.watch.job_monitor import JobMonitor, delaying
from allred.watch.job_state import JobState
from allred.watch.process import Watcher
from allred.watch.process_state import Launchers

ABOUT = {"job": f"unit-{os.getpid()}", "program": "", "mode": "sync", "starts": 1, "host": "here"}


class Script:
    """A job of `size` ranks that have joined; `messages` are those since the last take, without the time."""

    def __init__(self, size=3, nodes=1, warn_s=30.0, launcher=True):
        self.job, self.messages = JobState(size, nodes, warn_s, launcher=launcher), []
        for rank in range(size):
            self.handle("joined", rank, host=f"host{rank}")

    def handle(self, event, rank=None, now=0.0, **rest):
        self.job.handle({"event": event, "rank": rank, **rest}, now)
        self.tick(now)

    def tick(self, now):
        self.messages += self.job.tick(now)

    def take(self, kind):
        found = [(rank, message) for rank, message in self.messages if message["kind"] == kind]
        self.messages = []
        return found


def fail(script, rank=1, now=0.0, code=3, words="ValueError: boom"):
    script.handle("failed", rank, now, code=code, words=words, traceback="Traceback ...")


def test_the_first_failure_is_everybodys_verdict():
    script = Script()
    fail(script, 1)
    fail(script, 2, code=4)
    assert not script.take("verdict")  # the others may be about to fail of the same
    script.tick(timings.SAME_ERROR_S)
    [(to, verdict)] = script.take("verdict")
    assert to is None
    assert [verdict[key] for key in ("rank", "host", "code", "traceback")] == [1, "host1", 3, "Traceback ..."]
    assert verdict["text"] == "rank 1 on host1 failed with exit code 3: ValueError: boom"


def test_the_one_that_failed_is_released_when_all_others_have_unwound():
    script = Script()
    fail(script, 1)
    script.handle("unwound", 0, 0.1)
    assert not script.take("release")
    script.handle("unwound", 2, 0.2)
    assert not script.take("release")  # mpirun has to pass on what rank 2 has printed
    script.tick(0.2 + timings.OUTPUT_S)
    assert script.take("release") == [(1, {"kind": "release"})]
    script.tick(0.5)
    assert not script.take("release")


def test_without_a_launcher_all_are_released_the_late_ones_too():
    script = Script(launcher=False)
    fail(script, 1)
    script.handle("unwound", 0, 0.1)
    script.tick(timings.UNWIND_S)
    assert script.take("release") == [(0, {"kind": "release"}), (1, {"kind": "release"})]
    script.handle("unwound", 2, timings.UNWIND_S + 0.1)
    assert script.take("release") == [(2, {"kind": "release"})]


def test_without_a_launcher_each_rank_prints_the_death():
    for launcher in (True, False):
        script = Script(launcher=launcher)
        script.handle("died", 1, how="was killed by signal 9 (SIGKILL)", code=137, ago_s=0.0)
        script.tick(1.0)
        told = {message["kind"]: message for _, message in script.messages}
        text = "rank 1 on host1 was killed by signal 9 (SIGKILL)"
        assert told["verdict"]["text"] == text
        assert told["verdict"]["brief"] == ("rank 1 is gone" if launcher else text)
        assert ("announce" in told) == launcher


def test_ranks_that_all_fail_get_the_verdict_before_the_release():
    script = Script(size=2)
    fail(script, 1)
    fail(script, 0, 0.01)
    script.tick(0.01 + timings.OUTPUT_S)
    kinds = [(rank, message["kind"]) for rank, message in script.messages]
    assert kinds == [(None, "verdict"), (1, "release")]


def test_an_unreachable_host_is_the_verdict_and_its_ranks_need_not_unwind():
    script = Script(size=3, nodes=2)
    script.handle("unreachable", 1, 20.0, ranks=[1, 2], how="host b (ranks 1-2) has been unreachable for 20 s")
    [(to, verdict)] = script.take("verdict")
    assert (to, verdict["rank"], verdict["host"]) == (None, 1, "host1")
    assert verdict["text"] == "host b (ranks 1-2) has been unreachable for 20 s"
    script.handle("unwound", 0, 20.1)
    assert script.take("release") == [(0, {"kind": "release"})]
    script.tick(20.1 + timings.ABORT_SOON_S)  # the launcher waits for the host
    assert script.take("kill") == [(None, {"kind": "kill"})]


def test_a_host_that_is_unreachable_after_its_ranks_have_left_ends_the_ranks_that_go_on():
    script = Script(size=2, nodes=2)
    script.handle("left", 1, 1.0)
    script.handle("unreachable", 1, 20.0, ranks=[1], how="host b (rank 1) has been unreachable for 20 s")
    assert len(script.take("verdict")) == 1
    script = Script(size=2, nodes=2)
    for rank in (0, 1):
        script.handle("left", rank, 1.0)
    script.handle("unreachable", 1, 20.0, ranks=[1], how="host b (rank 1) has been unreachable for 20 s")
    assert not script.take("verdict")


def test_kills_after_the_loss_of_a_watcher_are_the_end_of_its_host():
    script = Script(size=2, nodes=2)
    script.handle("unwatched", 1, 1.0)
    script.handle("died", 0, 1.1, how="was killed by signal 9 (SIGKILL)", code=137, ago_s=0.0)
    script.tick(2.0)
    [(_, told)] = script.take("announce")
    assert told["text"].startswith("rank 1 on host1 has ended without a report: all processes of its host were killed")


@pytest.mark.parametrize("end", ["left", "died"])
def test_a_dead_rank_need_not_unwind(end):
    script = Script()
    fail(script, 1)
    script.handle(end, 2, how="ended", code=1, ago_s=0.0)
    script.messages = []
    script.handle("unwound", 0, 0.1)
    script.tick(0.1 + timings.OUTPUT_S)
    assert script.take("release") == [(1, {"kind": "release"})]


def test_after_the_grace_it_is_released_anyway():
    script = Script()
    fail(script, 1)
    script.handle("unwound", 0, 0.1)
    script.tick(timings.UNWIND_S - 0.01)
    assert not script.take("release")
    script.tick(timings.UNWIND_S)
    assert script.take("release") == [(1, {"kind": "release"})]


def test_the_job_does_not_end_while_a_rank_is_busy():
    script = Script()
    script.handle("busy", 0, is_busy=True)
    fail(script, 1)
    script.handle("unwound", 2, 0.1)
    for now in range(1, 20):
        script.tick(float(now))
    kinds = [message["kind"] for _, message in script.messages]
    assert (kinds.count("release"), kinds.count("print")) == (0, 1)
    assert {rank for rank, message in script.messages if message["kind"] == "hold"} == {0, 1, 2}
    assert kinds.count("hold") > 30
    [(_, told)] = script.take("print")
    assert told["text"] == "rank 0 still writes; the job ends when it is done"
    script.handle("busy", 0, 20.0, is_busy=False)
    script.tick(20.0 + timings.UNWIND_S)
    assert script.take("release") == [(1, {"kind": "release"})]


@pytest.mark.parametrize(
    ("dies", "at"), [(True, 1.0 + timings.ABORT_SOON_S), (False, timings.OUTPUT_S + timings.ABORT_S)]
)
def test_ranks_that_outlive_the_abort_are_killed(dies, at):
    script = Script(size=2)
    fail(script, 1)
    script.handle("unwound", 0)
    script.tick(timings.OUTPUT_S)
    if dies:
        script.handle("died", 1, 1.0, how="ended with exit code 3", code=3, ago_s=0.0)
    script.tick(at - 0.01)
    assert not script.take("kill")
    script.tick(at)
    assert script.take("kill") == [(None, {"kind": "kill"})]
    script.tick(at + 100)
    assert not script.take("kill")


def test_a_death_is_printed_and_the_lowest_survivor_ends_the_job():
    script = Script()
    script.handle("died", 0, 1.0, how="was killed by signal 9 (SIGKILL)", code=137, ago_s=0.0)
    script.tick(1.0 + timings.FIRST_DEATH_S)
    spoken = [message for _, message in script.messages if message["kind"] == "announce"]
    assert spoken == [{"kind": "announce", "rank": 0, "text": "rank 0 on host0 was killed by signal 9 (SIGKILL)"}]
    assert script.job.verdict["code"] == 137
    script.handle("unwound", 2, 1.1)
    script.handle("unwound", 1, 1.2)
    script.tick(1.2 + timings.OUTPUT_S)
    assert script.take("release") == [(1, {"kind": "release"})]


def test_deaths_after_another_or_after_success_are_not_printed():
    script = Script()
    script.handle("left", 0)
    script.handle("died", 0, how="ended with exit code 0", code=1, ago_s=0.0)
    assert script.messages == []
    script.handle("died", 1, how="was killed by signal 11 (SIGSEGV)", code=139, ago_s=0.0)
    assert [message["rank"] for _, message in script.take("announce")] == [1]
    script.handle("died", 2, how="was killed by signal 15 (SIGTERM)", code=143, ago_s=0.0)
    assert not script.take("announce")


@pytest.mark.parametrize("its_process_ends", [False, True])
def test_a_rank_that_has_left_while_others_wait_for_it(its_process_ends):
    script = Script()
    script.handle("left", 2, 0.0)
    if its_process_ends:
        script.handle("died", 2, 0.5, how="ended with exit code 0", code=1, ago_s=0.0)
    script.handle("waiting", 0, 10.0, what="barrier() #5", since_s=1.0, peers=True, quiet=False)
    assert not script.messages
    script.handle("resumed", 0, 10.5)
    script.tick(20.0)
    assert not script.messages
    more = {"quiet": False, "earlier": "; an earlier operation failed: InputError: x"}
    script.handle("waiting", 0, 30.0, what="barrier() #6", since_s=1.0, peers=True, **more)
    script.tick(31.0)
    text = script.take("verdict")[0][1]["text"]
    assert text == (
        "rank 2 on host2 has ended, and will never call barrier() #6, in which rank 0 waits; an earlier operation "
        "failed: InputError: x"
    )


def test_a_rank_that_has_left_is_missed_only_where_it_belongs():
    script = Script()
    script.handle("left", 2, 0.0)
    for members, missed in (([0, 1], False), ([0, 2], True)):
        script.handle("waiting", 0, 10, what="it", since_s=5.0, peers=True, quiet=False, members=members)
        script.tick(20.0)
        assert bool(script.take("verdict")) == missed


def test_a_rank_that_has_just_left_is_not_missed_yet():
    script = Script()
    wait(script, 0, 10.0)
    script.handle("left", 2, 20.0)
    script.tick(20.0 + timings.LEFT_RANK_S - 0.01)
    assert not script.messages
    script.tick(20.0 + timings.LEFT_RANK_S)
    assert script.take("verdict")


def test_a_rank_that_has_left_has_called_what_others_wait_in_for_bytes_only():
    script = Script()
    wait(script, 0, 10.0, peers=False)
    script.handle("left", 2, 10.0)
    script.tick(100.0)
    assert not script.take("verdict")


def wait(script, rank, now, peers=True, quiet=False):
    script.handle("waiting", rank, now, what="barrier() #5", since_s=1.0, peers=peers, quiet=quiet)


def answer(script, states, now):
    request = next(message for _, message in script.messages if message["kind"] == "query")
    script.messages = []
    states = {str(rank): text for rank, text in states.items()}
    script.handle("states", None, now, query=request["query"], states=states)


def test_a_stall_is_printed_at_intervals_that_grow_and_so_is_its_end():
    script = Script(warn_s=10)
    script.handle("waiting", 1, 1.0, what="barrier() #5", since_s=1.0, peers=True, quiet=False)
    script.handle("waiting", 2, 1.0, what="barrier() #5", since_s=1.0, peers=True, quiet=False)
    script.tick(9.9)
    assert not script.messages
    script.tick(10.0)
    answer(script, {0: "stopped", 1: "in barrier() #5", 2: "in barrier() #5"}, 10.1)
    [(rank, message)] = script.take("print")
    assert rank == 1
    assert message["text"].splitlines()[0] == "rank 1 has waited for 10 s in barrier() #5"
    assert len(message["text"].splitlines()) == 4
    script.tick(39.9)
    assert not script.messages
    script.tick(40.1)
    answer(script, {0: "stopped"}, 40.2)
    assert "no answer" in script.take("print")[0][1]["text"]
    script.handle("resumed", 2, 50.0)
    script.handle("resumed", 1, 50.0)
    assert script.take("print") == [
        (1, {"kind": "print", "text": "rank 1 no longer waits in barrier() #5, after 50 s"})
    ]


def test_one_query_at_a_time():
    script = Script(warn_s=10)
    wait(script, 1, 1.0)
    script.tick(10.0)
    script.handle("waiting", 2, 10.3, what="barrier() #5", since_s=10.2, peers=True, quiet=False)
    assert len(script.take("query")) == 1


def test_a_stall_that_ends_before_the_watchers_answer_is_not_printed():
    script = Script(warn_s=10)
    wait(script, 1, 1.0)
    script.tick(10.0)
    script.handle("resumed", 1, 10.1)
    answer(script, {}, 10.2)
    assert not script.messages


def test_the_end_of_a_stall_is_not_printed_after_a_verdict():
    script = Script(warn_s=10)
    wait(script, 1, 1.0)
    script.tick(10.0)
    answer(script, {}, 10.1)
    fail(script, 2, 11.0)
    script.messages = []
    script.handle("resumed", 1, 11.1)
    assert not script.messages


def test_a_late_answer_does_not_count_for_the_next_query():
    script = Script(nodes=2, warn_s=10)
    wait(script, 1, 1.0)
    script.tick(10.0)
    script.tick(10.0 + timings.QUERY_S)
    script.handle("limit", 1, 12.0, what="barrier() #5", limit_s=12.0)
    first, second = [message["query"] for _, message in script.take("query")]
    script.handle("states", None, 12.1, query=first, states={"0": "old"})
    script.handle("states", None, 12.1, query=second, states={"1": "new"})
    assert not script.messages
    script.handle("states", None, 12.2, query=second, states={"0": "newer"})
    assert "newer" in script.take("verdict")[0][1]["text"]


def test_a_time_limit_comes_before_a_warning():
    script = Script(nodes=2, warn_s=10)
    wait(script, 1, 1.0)
    script.tick(10.0)
    script.handle("limit", 1, 10.1, what="barrier() #5", limit_s=10.0)
    script.tick(10.1 + timings.QUERY_S)
    assert script.take("verdict")[0][1]["timeout"]


def test_a_failure_comes_before_a_time_limit_under_examination():
    script = Script(nodes=2)
    script.handle("limit", 2, 5.0, what="barrier() #5", limit_s=5.0)
    fail(script, 1, 5.1)
    script.tick(5.0 + timings.QUERY_S)
    assert [message["rank"] for _, message in script.take("verdict")] == [1]


def test_a_time_limit_is_put_off_while_a_rank_is_busy_and_for_a_moment_after():
    script = Script()
    script.handle("busy", 0, 1.0, is_busy=True)
    script.handle("limit", 2, 5.0, what="barrier() #5", limit_s=5.0)
    script.handle("busy", 0, 9.0, is_busy=False)
    script.handle("limit", 2, 8.9 + timings.AFTER_BUSY_S, what="barrier() #5", limit_s=5.0)
    assert script.take("extend") == [(2, {"kind": "extend", "again_s": 5.0})] * 2
    script.handle("limit", 2, 9.1 + timings.AFTER_BUSY_S, what="barrier() #5", limit_s=5.0)
    assert len(script.take("query")) == 1


def test_a_quiet_wait_is_not_printed_after_that_of_another_rank():
    script = Script(warn_s=10)
    wait(script, 1, 1.0, quiet=True)
    wait(script, 2, 1.0)
    script.tick(10.0)
    answer(script, {}, 10.1)
    script.handle("resumed", 2, 11.0)
    script.messages = []
    script.tick(1000.0)
    assert not script.messages


def test_a_quiet_wait_is_not_printed():
    script = Script(warn_s=10)
    script.handle("waiting", 1, 1.0, what="barrier() #5", since_s=1.0, peers=True, quiet=True)
    script.tick(1000.0)
    assert not script.messages


def test_a_time_limit_is_everybodys_verdict_with_the_same_table():
    script = Script(nodes=2)
    script.handle("limit", 2, 5.0, what="barrier() #5", limit_s=5.0)
    script.handle("limit", 0, 5.0, what="barrier() #5", limit_s=5.0)
    queries = [message["query"] for _, message in script.take("query")]
    assert len(queries) == 1
    script.handle("states", None, 5.1, query=queries[0], states={"0": "a", "1": "b"})
    assert not script.messages
    script.handle("states", None, 5.2, query=queries[0], states={"2": "c"})
    [(to, verdict)] = script.take("verdict")
    assert to is None
    assert verdict["timeout"]
    assert verdict["rank"] == 2
    lines = [each.split() for each in verdict["text"].splitlines()]
    assert lines[0] == ["barrier()", "#5:", "not", "complete", "after", "5", "s"]
    assert lines[1:] == [["rank", str(rank), f"host{rank}", what] for rank, what in enumerate("abc")]


@pytest.mark.parametrize("state", ["in barrier() #5 since {} s", "in Python at train.py:{} (step)"])
def test_the_table_of_a_large_job_is_short(state):
    size = 2000
    script = Script(size)
    script.handle("limit", 2, 5.0, what="barrier() #5", limit_s=5.0)
    kinds = 3 if "since" in state else size
    answer(script, {rank: state.format(rank % kinds) for rank in range(size)} | {1234: "stopped"}, 5.1)
    message = script.take("verdict")[0][1]
    assert len(message["text"].splitlines()) == 1 + min(kinds + 1, stalls.TABLE_LINES)
    assert len(json.dumps(message)) < timings.EVENT_BYTES
    if kinds == 3:
        assert re.search(r"^  rank 1234 +stopped$", message["text"], re.M)


def test_a_node_that_does_not_answer_is_not_waited_for():
    script = Script(nodes=2)
    script.handle("limit", 2, 5.0, what="barrier() #5", limit_s=5.0)
    script.take("query")
    script.tick(5.0 + timings.QUERY_S)
    assert "no answer" in script.take("verdict")[0][1]["text"]


def test_a_rank_that_connects_late_gets_the_verdict():
    script = Script()
    fail(script)
    script.tick(timings.SAME_ERROR_S)
    script.messages = []
    script.handle("joined", 7, host="host7")
    assert [rank for rank, message in script.messages if message["kind"] == "verdict"] == [7]


# How a process is, and how it ended.


@pytest.mark.parametrize(
    ("end", "words", "code"),
    [
        ("os._exit(5)", "ended with exit code 5 without a report", 5),
        ("os._exit(0)", "ended with exit code 0 without a report", 1),
        ("os.kill(os.getpid(), 9)", "was killed by signal 9 (SIGKILL)", 137),
        ("os.kill(os.getpid(), 11)", "was killed by signal 11 (SIGSEGV)", 139),
        ("os.kill(os.getpid(), 40)", "was killed by signal 40 (a real-time signal)", 168),
    ],
)
@pytest.mark.parametrize("reaped", [False, True])
def test_how_a_process_ended(end, words, code, reaped):
    child = subprocess.Popen([sys.executable, "-c", f"import os, sys; sys.stdin.read(); {end}"], stdin=subprocess.PIPE)
    pidfd = os.pidfd_open(child.pid)
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    if reaped:
        child.wait()
    text, found = process_state.describe_end(pidfd, child.pid)
    child.wait()
    os.close(pidfd)
    if "does not tell" not in text or not reaped:  # where the kernel is too old
        assert text.startswith(words)
        assert found == code


def test_a_stopped_process():
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as child:
        assert process_state.halted(child.pid) == ""
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        assert process_state.halted(child.pid) == f"stopped (kill -CONT {child.pid} continues it)"
        assert next(process_state.ancestors(child.pid)) == os.getpid()
        child.kill()
    assert process_state.halted(child.pid) == ""


def test_children_without_processes_that_have_ended(monkeypatch):
    def gone(path):
        if path == f"/proc/{ended.pid}/stat":
            raise ProcessLookupError(path)  # of a process that ends between open() and read()
        return open(path)

    with subprocess.Popen(["sleep", "60"]) as child, subprocess.Popen(["sleep", "60"]) as ended:
        monkeypatch.setattr(process_state, "open", gone, raising=False)
        assert process_state.children()[os.getpid()] == [child.pid]
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert os.getpid() not in process_state.children()
        assert process_state.children(with_zombies=True)[os.getpid()] == [child.pid]
        ended.kill()


def test_where_a_program_is():
    library = '  File "/usr/lib/python3.11/threading.py", line 9 in wait\n'
    own = '  File "/home/me/train.py", line 87 in step\n  File "/home/me/train.py", line 99 in <module>\n'
    assert process_state.program_line(library + own) == "in Python at train.py:87 (step), in wait of threading.py"
    assert process_state.program_line(own) == "in Python at train.py:87 (step)"
    assert process_state.program_line(library) == "in Python at threading.py:9 (wait)"
    assert "without an answer" in process_state.program_line("")


def test_a_stack_that_arrives_in_pieces_is_read_completely(monkeypatch):
    monkeypatch.setattr(process_state, "STACK_S", 20)
    header, library = "Stack (most recent call first):\n", '  File "/usr/lib/python3.11/threading.py", line 9 in wait\n'
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    pidfd = os.pidfd_open(os.getpid())

    def write():
        for piece in (header, library, '  File "/home/me/train.py", line 8', "7 in st", "ep\n"):
            time.sleep(0.05)
            os.write(theirs, piece.encode())

    thread = threading.Thread(target=write)
    thread.start()
    assert process_state.program_lines({3: (pidfd, 0, ours)}) == {
        3: "in Python at train.py:87 (step), in wait of threading.py"
    }
    thread.join()
    for file in (ours, theirs, pidfd):
        os.close(file)


@pytest.mark.parametrize("launcher", [True, False])
def test_a_rank_that_has_just_died_does_not_keep_the_others_from_being_killed(launcher):
    """One that has left is not, where it ends by itself: without a launcher."""
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    pidfds = [os.pidfd_open(child.pid) for child in children]
    ranks = {n: types.SimpleNamespace(pidfd=pidfd, dead="", left=n == 1) for n, pidfd in enumerate(pidfds)}
    children[0].kill()
    children[0].wait()
    try:
        watcher = types.SimpleNamespace(_ranks=ranks, _settings=types.SimpleNamespace(launcher=launcher))
        Watcher._deliver(watcher, None, {"kind": "kill"})
        assert children[2].wait(timeout=5) == -signal.SIGKILL
        if launcher:
            assert children[1].wait(timeout=5) == -signal.SIGKILL
        else:
            assert children[1].poll() is None
    finally:
        for child in children[1:]:
            child.kill()
            child.wait()
        for pidfd in pidfds:
            os.close(pidfd)


# Watchers of several nodes; test_channel.py has more.


def close(watcher):
    for key in list(watcher._loop._selector.get_map().values()):
        if isinstance(key.fileobj, socket.socket):
            key.fileobj.close()
    watcher._loop.close()


@contextlib.contextmanager
def running_watcher(**settings):
    """The watcher of a chief's node, in a thread."""
    of_job = {
        "token": "secret",
        "ranks": 1,
        "size": 2,
        "nodes": 2,
        "warn_s": 30.0,
        "limit_s": 60.0,
        "expendable": (),
        "launcher": True,
        "runner": "",
        "about": ABOUT,
    }
    watcher = Watcher(records.WatcherSettings(**{"chief": True, "address": "127.0.0.1", **of_job, **settings}))
    thread = threading.Thread(target=watcher.run)
    thread.start()
    try:
        yield watcher
    finally:
        watcher._give_up_at = 0.0
        thread.join()
        close(watcher)


def test_a_watcher_closes_a_connection_without_a_message():
    with running_watcher() as watcher, socket.create_connection(("127.0.0.1", watcher.port), 10) as stranger:
        stranger.settimeout(60)  # it takes 5 s
        assert b"nonce" in stranger.recv(200)
        assert stranger.recv(200) == b"", "closed"


def test_a_watcher_handles_events_of_another_node():
    with running_watcher() as watcher:
        where = "127.0.0.1", watcher.port
        with pytest.raises(
            channel.HandshakeError, match="refuses this process: its secret is not the secret of this job"
        ):
            channel.connect(where, process.PURPOSE, "guess")
        found = channel.connect(where, process.PURPOSE, "secret")
        found.send({"event": "joined", "rank": 1, "host": "there"})
        found.send({"event": "failed", "rank": 1, "code": 3, "words": "E", "traceback": ""})
        verdict = found.receive_one(time.monotonic() + 60)
        assert (verdict["rank"], verdict["message"]["kind"]) == (None, "verdict")
        while found.receive_one(time.monotonic() + 60)["message"]["kind"] != "alive":
            pass
        found.close()


SILENT = """
import os, socket, sys, time
os.setuid(65534)
found = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(30)]
for each in found: each.connect(bytes.fromhex(sys.argv[1]))
print("connected", flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root, to be another user")
def test_a_watcher_does_not_wait_for_processes_of_other_users():
    hello = {"rank": 0, "host": "here", "token": "secret", "stack_signal": 60, "chief": {}}
    with contextlib.ExitStack() as stack:
        watcher = stack.enter_context(running_watcher())
        name = watcher.name.encode("latin-1")
        others = [sys.executable, "-I", "-S", "-c", SILENT, name.hex()]
        silent = stack.enter_context(subprocess.Popen(others, stdout=subprocess.PIPE))
        stack.callback(silent.kill)
        assert silent.stdout.readline() == b"connected\n"
        rank = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        rank.settimeout(30)  # less than 3 s for each of them
        rank.connect(name)
        files = [os.pidfd_open(os.getpid()), *os.pipe(), Counters().share()]
        socket.send_fds(rank, [json.dumps(hello).encode()], [*files[:2], files[3]])
        assert b"welcome" in rank.recv(1000)
        rank.send(b'{"event": "left"}')
        for file in files:
            os.close(file)


def test_own_address_is_one_of_this_host():
    with socket.create_server((start.own_address(["nowhere.invalid"]), 0)):
        pass


def test_the_launcher_kills_ranks_of_other_nodes_before_the_first_death_is_known():
    script = Script(nodes=2)
    script.handle("died", 0, 1.0, how="was killed by signal 9 (SIGKILL)", code=137, ago_s=0.0)
    script.handle("died", 2, 1.01, how="ended with exit code 0", code=1, ago_s=0.0)
    assert script.job.verdict["rank"] == 2
    script.tick(1.1 + timings.FIRST_DEATH_FAR_S)
    assert [message["rank"] for _, message in script.take("announce")] == [2]
    script = Script(nodes=2)
    script.handle("died", 0, 1.0, how="was killed by signal 9 (SIGKILL)", code=137, ago_s=0.0)
    script.handle("died", 1, 1.01, how="was killed by signal 9 (SIGKILL)", code=137, ago_s=0.02)
    script.handle("died", 2, 1.02, how="was killed by signal 9 (SIGKILL)", code=137, ago_s=0.0)
    script.tick(1.0 + timings.FIRST_DEATH_S)
    assert [message["rank"] for _, message in script.take("announce")] == [1]


@pytest.mark.parametrize("heard", [(0, 2), (2, 0)])
def test_an_abort_on_one_host_and_a_kill_on_another_are_both_printed(heard):
    """Open MPI aborts a rank that has lost its connection to one that was killed."""
    hows = {0: ("ended with exit code 14", 14), 2: ("was killed by signal 9 (SIGKILL)", 137)}
    script = Script(nodes=2)
    for number, rank in enumerate(heard):
        script.handle("died", rank, 1.0 + 0.03 * number, how=hows[rank][0], code=hows[rank][1], ago_s=0.0)
    script.tick(1.1 + timings.FIRST_DEATH_FAR_S)
    [(_, message)] = script.take("announce")
    both = "rank 0 on host0 ended with exit code 14, and at about the same time rank 2 on host2 was killed by signal 9"
    assert message["text"].startswith(both)


def test_an_abort_on_one_of_several_nodes_is_printed_after_a_delay():
    script = Script(nodes=2)
    script.handle("died", 1, 1.0, how="ended with exit code 3", code=3, ago_s=0.0)
    assert not script.take("announce")
    script.handle("died", 0, 1.1, how="was killed by signal 15 (SIGTERM)", code=143, ago_s=0.0)
    script.tick(1.0 + timings.FIRST_DEATH_FAR_S)
    [(_, message)] = script.take("announce")
    assert message["text"] == "rank 1 on host1 ended with exit code 3"


def test_a_failure_that_follows_from_a_death_is_not_taken_for_the_first():
    script = Script()
    script.handle("died", 0, 1.0, how="was killed by signal 9 (SIGKILL)", code=137, ago_s=0.0)
    fail(script, 1, 1.01)
    assert script.job.verdict["rank"] == 0


# A rank's end of the line.


VERDICT = {
    "kind": "verdict", "timeout": False, "rank": 1, "host": "h", "code": 3, "text": "rank 1 failed", "traceback": "",
    "brief": "",
}  # fmt: skip


@pytest.fixture
def rank_and_watcher():
    """A WatcherClient of rank 0, and the other end of it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")
        listener.listen()
        name, ends = listener.getsockname().decode("latin-1"), []

        def welcome():
            ends.append(listener.accept()[0])
            _, files, _, _ = socket.recv_fds(ends[0], timings.EVENT_BYTES, 3)
            for file in files:
                os.close(file)
            ends[0].send(b"welcome")

        thread = threading.Thread(target=welcome)
        thread.start()
        found = watcher_client.WatcherClient(name, {"rank": 0, "host": "here"}, -1, True, 30.0)
        thread.join()
    ends[0].settimeout(5)
    yield found, ends[0]
    found.close()
    ends[0].close()


def send(watcher, message):
    watcher.send(message["kind"][:1].encode() + json.dumps(message).encode())
    time.sleep(0.05)  # here the handler runs


def test_a_verdict_is_raised_where_the_program_is_and_once(rank_and_watcher):
    rank, watcher = rank_and_watcher
    with pytest.raises(RemoteRankError, match="rank 1 failed") as caught:
        send(watcher, VERDICT)
    assert (caught.value.rank, caught.value.host, caught.value.code) == (1, "h", 3)
    send(watcher, VERDICT | {"rank": 2, "text": "rank 2 failed"})
    assert rank.verdict.rank == 1


@pytest.mark.parametrize("flag", ["waits", "is_exiting"])
def test_a_verdict_is_not_raised_in_a_wait_nor_at_the_end(rank_and_watcher, flag):
    rank, watcher = rank_and_watcher
    setattr(rank, flag, True)
    send(watcher, VERDICT)
    assert rank.failed_elsewhere()


@pytest.mark.parametrize("where", ["_report", "_is_done"])
def test_a_watcher_without_a_core_for_a_while_prints_a_death(where, monkeypatch):
    of_job = {
        "size": 1,
        "nodes": 1,
        "warn_s": 30.0,
        "limit_s": 60.0,
        "expendable": [],
        "launcher": True,
        "runner": "",
        "about": ABOUT,
    }
    watcher = Watcher(records.WatcherSettings(token="", ranks=1, chief=True, address="", **of_job))
    ours, theirs = socket.socketpair()
    stderr, of_launcher = os.pipe()
    launcher = subprocess.Popen(["sleep", "60"], stderr=of_launcher)
    rank = types.SimpleNamespace(number=0, pid=launcher.pid, dead="", left=False, gone=False)
    rank.send = lambda message: None
    watcher._launchers._pidfds[launcher.pid] = os.pidfd_open(launcher.pid)
    watcher._ranks[0] = rank
    watcher._report({"event": "joined", "rank": 0, "host": "h"})

    def die():
        watcher._loop.remove(ours)
        rank.dead, rank.gone = "was killed", True
        watcher._open_stderr()
        watcher._report({"event": "died", "rank": 0, "how": "was killed", "code": 137, "ago_s": 0.0})

    undisturbed = getattr(watcher, where)

    def late(*given):
        found = undisturbed(*given)
        time.sleep((timings.REPORT_DEATH_S + 0.1) * bool(rank.dead))
        return found

    monkeypatch.setattr(watcher, where, late)
    watcher._loop.on_input(ours, die)
    theirs.send(b".")
    watcher.run()
    launcher.kill()
    launcher.wait()
    os.close(of_launcher)
    assert os.read(stderr, 1000) == b"allred: rank 0 on h was killed\n"
    os.close(stderr)
    close(watcher)
    ours.close()
    theirs.close()


@pytest.mark.parametrize("is_exiting", [False, True])
def test_a_dead_watcher_causes_one_warning_unless_the_program_ends(rank_and_watcher, is_exiting, capfd):
    rank, watcher = rank_and_watcher
    rank.is_exiting = is_exiting
    watcher.close()
    time.sleep(0.05)
    rank.read()
    rank.send("resumed")
    rank.ending()  # as at the end of the program
    assert capfd.readouterr().err.count("the watcher process on here has ended") == (not is_exiting)


def test_a_fork_sends_and_receives_nothing(rank_and_watcher):
    rank, watcher = rank_and_watcher
    if not os.fork():
        rank.send("failed", code=1, words="", traceback="")
        rank.read()
        os._exit(0)
    os.wait()
    rank.send("resumed")
    assert json.loads(watcher.recv(timings.EVENT_BYTES))["event"] == "resumed"


def test_the_death_of_the_failed_rank_is_printed_with_its_traceback():
    script = Script()
    fail(script, 1)
    script.handle("died", 2, 0.3, how="was killed by signal 9 (SIGKILL)", code=137, ago_s=0.0)
    script.handle("died", 1, 0.4, how="was killed by signal 9 (SIGKILL)", code=137, ago_s=0.0)
    peer, culprit = (message["text"] for _, message in script.take("announce"))
    assert peer == "rank 2 on host2 was killed by signal 9 (SIGKILL) while the job was ending"
    assert culprit.startswith(
        "rank 1 on host1 was killed by signal 9 (SIGKILL) while the job was ending, since rank 1 "
    )
    assert culprit.endswith("ValueError: boom\nTraceback ...")


def test_the_first_death_is_uncertain_before_all_ranks_have_connected():
    script = Script(size=2)
    script.job._size = 3
    script.handle("died", 0, 1.0, how="was killed by signal 9 (SIGKILL)", code=137, ago_s=0.0)
    script.tick(2.0)
    assert "not all ranks had returned from allred.init()" in script.take("announce")[0][1]["text"]


# What a rank is known as.


def test_messages_name_a_rank_by_its_latest_role():
    script = Script()
    script.handle("role", 1, text="parameter server 1; last checkpoint a")
    script.handle("role", 1, text="parameter server 1; last checkpoint b")
    script.handle("died", 1, 1.0, how="was killed by signal 9 (SIGKILL)", code=137, ago_s=0.0)
    script.tick(1.0 + timings.FIRST_DEATH_S)
    [(_, message)] = script.take("announce")
    name = "rank 1 (parameter server 1; last checkpoint b) on host1"
    assert message["text"] == f"{name} was killed by signal 9 (SIGKILL)"


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


def test_the_table_of_a_job_shows_roles_only():
    script = Script(size=2)
    script.handle("role", 0, text="parameter server 0; last checkpoint ckpt/step-00000400")
    script.handle("limit", 1, 5.0, what="barrier() #5", limit_s=5.0)
    answer(script, {0: "stopped", 1: "waits"}, 5.1)
    text = script.take("verdict")[0][1]["text"]
    assert re.search(r"^  rank 0 \(parameter server 0\) host0 +stopped$", text, re.M)


def test_the_role_of_a_rank_is_one_line_and_does_not_end_its_wait(rank_and_watcher):
    rank, watcher = rank_and_watcher
    rank.set_role("server 0;\n last checkpoint " + "x" * 1000)
    event = json.loads(watcher.recv(timings.EVENT_BYTES))
    assert event["event"] == "role"
    assert event["text"].startswith("server 0; last checkpoint xxx")
    assert len(event["text"]) == 200


# Expendable ranks: 0 is a server; 1, 2 and 3 are workers, and the others can continue without them.


def expendable_script(nodes=1, expendable=(1, 2, 3)):
    script = Script(4, nodes)
    script.job = JobState(4, nodes, 30.0, expendable)
    for rank in range(4):
        script.handle("joined", rank, host=f"host{rank}")
        script.handle("role", rank, text=f"worker {rank - 1}" if rank else "parameter server 0")
    return script


def die(script, rank, now, code=137, how="was killed by signal 9 (SIGKILL)"):
    script.handle("died", rank, now, how=how, code=code, ago_s=0.0)


def kinds(script):
    found = [(rank, message["kind"]) for rank, message in script.messages]
    script.messages = []
    return found


def test_an_expendable_rank_that_fails_lingers_and_the_others_continue():
    script = expendable_script()
    fail(script, 2)
    gone = {"kind": "gone", "rank": 2, "host": "host2", "how": "failed with exit code 3: ValueError: boom", "code": 3}
    assert script.messages == [(2, {"kind": "linger"}), (None, gone)]
    script.messages = []
    script.tick(timings.SAME_ERROR_S)
    text = "rank 2 (worker 1) on host2 failed with exit code 3: ValueError: boom; the other ranks continue"
    assert script.messages == [(0, {"kind": "print", "text": text})]
    script.messages = []
    script.tick(10_000.0)
    assert script.job.verdict is None
    assert not script.messages


def test_the_failure_is_printed_by_a_rank_that_continues():
    script = expendable_script()
    script.handle("left", 0)
    fail(script, 1)
    script.messages = []
    script.tick(timings.SAME_ERROR_S)
    assert kinds(script) == [(2, "print")]


def test_when_all_others_have_ended_well_the_expendable_rank_that_failed_ends_the_job():
    script = expendable_script()
    fail(script, 2)
    for rank in (0, 1):
        script.handle("left", rank, 100.0)
    script.tick(200.0)
    assert script.job.verdict is None
    script.messages = []
    script.handle("left", 3, 300.0)
    assert [(to, m["kind"]) for to, m in script.messages] == [(None, "verdict")]
    assert [script.job.verdict[key] for key in ("rank", "code", "traceback")] == [2, 3, "Traceback ..."]
    script.messages = []
    script.handle("unwound", 2, 300.1)
    script.tick(300.1 + timings.OUTPUT_S)
    assert kinds(script) == [(2, "release")]
    die(script, 2, 300.5, 3, "ended with exit code 3")
    die(script, 1, 300.5)
    assert kinds(script) == []


def test_of_several_the_first_that_failed_is_the_last_to_speak():
    script = expendable_script()
    fail(script, 3)
    fail(script, 2, 5.0, code=4)
    for rank in (0, 1):
        script.handle("left", rank, 100.0)
    script.messages = []
    script.handle("unwound", 3, 100.1)
    script.tick(100.1 + timings.OUTPUT_S)
    assert kinds(script) == []  # rank 2 shows its traceback first
    script.handle("unwound", 2, 100.2)
    script.tick(100.2 + timings.OUTPUT_S)
    assert kinds(script) == [(3, "release")]
    assert script.job.verdict["code"] == 3


def test_the_last_expendable_rank_that_fails_is_the_verdict():
    script = expendable_script()
    fail(script, 1)
    fail(script, 3, 1.0)
    die(script, 2, 2.0, 139, "was killed by signal 11 (SIGSEGV)")
    script.tick(2.0 + timings.FIRST_DEATH_FAR_S)
    assert script.job.verdict["rank"] == 2
    assert {1, 3} == set(script.job._expendable.gone)


def test_no_line_says_that_others_continue_if_all_fail():
    script = expendable_script()
    for rank in (1, 2, 3):
        fail(script, rank, 0.01 * rank)
    script.messages = []
    script.tick(timings.SAME_ERROR_S + 1)
    assert "print" not in [kind for _, kind in kinds(script)]
    assert script.job.verdict["rank"] == 3


def test_a_worker_that_has_ended_well_has_not_failed():
    """The servers may then end well too, with what it has trained."""
    script = expendable_script()
    script.handle("left", 1)
    fail(script, 2)
    fail(script, 3)
    assert script.job.verdict is None


def test_a_rank_that_is_not_expendable_is_the_verdict_and_those_that_linger_unwind_first():
    script = expendable_script()
    fail(script, 2)
    script.messages = []
    fail(script, 0, 500.0, code=5)
    for rank in (1, 3):
        script.handle("unwound", rank, 500.1)
    assert "release" not in [kind for _, kind in kinds(script)]
    script.handle("unwound", 2, 500.3)
    script.tick(500.3 + timings.OUTPUT_S)
    assert (0, "release") in kinds(script)
    assert script.job.verdict["code"] == 5


def test_without_the_setting_no_rank_is_expendable():
    script = expendable_script(expendable=())
    fail(script, 2)
    script.tick(timings.SAME_ERROR_S)
    assert kinds(script) == [(None, "verdict")]


def test_the_death_of_an_expendable_rank_is_printed_and_the_others_continue():
    script = expendable_script()
    die(script, 2, 1.0)
    script.tick(1.0 + timings.FIRST_DEATH_S)
    assert kinds(script) == []  # mpirun may be ending them all
    script.tick(1.0 + timings.FIRST_DEATH_FAR_S)
    spoken = {
        "kind": "announce",
        "rank": 2,
        "text": "rank 2 (worker 1) on host2 was killed by signal 9 (SIGKILL)",
    }
    gone = {"kind": "gone", "rank": 2, "host": "host2", "how": "was killed by signal 9 (SIGKILL)", "code": 137}
    assert script.messages == [(None, gone), (None, spoken)]
    script.messages = []
    script.tick(1.0 + timings.FIRST_DEATH_FAR_S + timings.ABORT_SOON_S)
    assert script.messages == [(0, {"kind": "print", "text": "the other ranks continue without rank 2 (worker 1)"})]
    script.tick(1000.0)
    assert script.job.verdict is None


def test_several_deaths_at_once_are_printed_in_one_text():
    """A death has one outlet."""
    script = expendable_script()
    die(script, 3, 1.0)
    die(script, 2, 1.01)
    script.tick(1.01 + timings.FIRST_DEATH_FAR_S)
    [(_, message)] = script.take("announce")
    assert message["text"].splitlines() == [
        "rank 3 (worker 2) on host3 was killed by signal 9 (SIGKILL)",
        "allred: rank 2 (worker 1) on host2 was killed by signal 9 (SIGKILL)",
    ]


@pytest.mark.parametrize("at", [1.02, 1.9])
def test_a_launcher_that_ends_all_because_of_a_expendable_rank_is_not_blamed_on_the_others(at):
    script = expendable_script()
    die(script, 2, 1.0, 139, "was killed by signal 11 (SIGSEGV)")
    for rank in (0, 1, 3):
        die(script, rank, at)
    script.tick(at + timings.FIRST_DEATH_FAR_S)
    assert [m["text"] for _, m in script.take("announce")] == [
        "rank 2 (worker 1) on host2 was killed by signal 11 (SIGSEGV)"
    ]
    assert script.job.verdict["rank"] == 2


@pytest.mark.parametrize("apart_s", [0.0, 1.0])
def test_ranks_ended_by_the_launcher_are_no_losses_if_reported_first(apart_s):
    """A watcher that got no core finds all at once, in any order; and a process that is killed needs one to end."""
    script = expendable_script()
    die(script, 3, 1.0)
    die(script, 2, 1.0, 139, "was killed by signal 11 (SIGSEGV)")
    script.tick(1.0)
    script.tick(1.0 + apart_s)
    for rank in (0, 1):
        die(script, rank, 1.0 + apart_s)
    script.tick(1.0 + apart_s + timings.FIRST_DEATH_S)
    assert [m["text"] for _, m in script.take("announce")] == [
        "rank 2 (worker 1) on host2 was killed by signal 11 (SIGSEGV)"
    ]
    assert script.job.verdict["rank"] == 2


def test_a_second_kill_is_printed_if_no_launcher_caused_it():
    script = expendable_script()
    die(script, 2, 1.0, 139, "was killed by signal 11 (SIGSEGV)")
    die(script, 3, 1.5)
    script.tick(1.5 + timings.FIRST_DEATH_FAR_S)
    assert [(to, m["rank"]) for to, m in script.messages if m["kind"] == "gone"] == [(None, 2), (None, 3)]
    assert [m["rank"] for _, m in script.take("announce")] == [2]
    script.tick(1.5 + timings.FIRST_DEATH_FAR_S + timings.LAUNCHER_ENDS_RANKS_S)
    assert [(to, m["text"]) for to, m in script.take("print")] == [
        (0, "the other ranks continue without rank 2 (worker 1)"),
        (0, "rank 3 (worker 2) on host3 was killed by signal 9 (SIGKILL)"),
        (0, "the other ranks continue without rank 3 (worker 2)"),
    ]
    assert script.job.verdict is None


def test_a_server_that_is_killed_later_is_the_verdict():
    script = expendable_script()
    die(script, 2, 1.0)
    script.tick(2.0)
    script.messages = []
    die(script, 0, 60.0)
    script.tick(60.0 + timings.FIRST_DEATH_S)
    assert [message["rank"] for _, message in script.take("announce")] == [0]
    assert script.job.verdict["rank"] == 0


def test_after_a_death_one_that_ended_well_ends_the_job_with_its_code():
    script = expendable_script()
    die(script, 2, 1.0)
    script.tick(2.0)
    for rank in (0, 1, 3):
        script.handle("left", rank, 100.0)
    assert script.job.verdict["code"] == 137
    script.messages = []
    script.handle("unwound", 3, 100.1)  # as all do that linger
    script.tick(100.1 + timings.OUTPUT_S)
    assert kinds(script) == [(3, "release")]


def test_the_watchers_end_the_job_if_no_rank_can():
    """All but one that died are in MPI_Finalize."""
    script = expendable_script()
    for rank in (0, 1, 3):
        script.handle("left", rank, 1.0)
    die(script, 2, 2.0)
    script.tick(2.0 + timings.FIRST_DEATH_FAR_S)
    script.messages = []
    script.tick(2.0 + timings.FIRST_DEATH_FAR_S + timings.UNWIND_S)
    assert kinds(script) == [(None, "kill")]
    script.tick(1000.0)
    assert kinds(script) == []


def test_the_death_of_a_lingering_rank_is_printed_with_its_traceback():
    script = expendable_script()
    fail(script, 2)
    die(script, 2, 10.0)
    script.tick(10.0 + timings.FIRST_DEATH_FAR_S)
    [(_, message)] = script.take("announce")
    assert message["text"] == (
        "rank 2 (worker 1) on host2 was killed by signal 9 (SIGKILL) while it waited for the others to end, since it "
        "failed with exit code 3: ValueError: boom\nTraceback ..."
    )
    for rank in (0, 1, 3):
        script.handle("left", rank, 100.0)
    assert script.job.verdict["code"] == 3


def test_a_expendable_rank_that_others_wait_for_in_a_collective():
    script = expendable_script()
    fail(script, 2, 0.0)
    wait(script, 0, 10.0)
    wait(script, 1, 10.0)
    script.handle("left", 3, 10.0)
    script.tick(12.0)
    text = script.take("verdict")[0][1]["text"]
    words = "has failed, and will never call barrier() #5, in which rank 0 waits"
    assert text == f"rank 2 (worker 1) on host2 {words}"
    assert script.job.verdict["code"] == 3
    for rank in (0, 1, 2):
        script.handle("unwound", rank, 12.1)
    script.tick(12.1 + timings.OUTPUT_S)
    assert (2, "release") in kinds(script)


def test_a_rank_that_connects_late_gets_the_gone_ranks():
    script = expendable_script()
    fail(script, 2)
    script.messages = []
    script.handle("joined", 3, host="host3")
    assert kinds(script) == [(3, "gone")]


@pytest.mark.parametrize("before", [True, False])
def test_with_a_watcher_lost_no_rank_is_spare(before):
    """Nobody would know when all have ended."""
    script = expendable_script(nodes=2)
    if before:
        fail(script, 2, 1.0)
    script.handle("unwatched", 3, 5.0)
    if not before:
        fail(script, 2, 6.0)
    assert script.job.verdict["rank"] == 2
    assert script.job.verdict["code"] == 3


def test_a_watcher_whose_ranks_have_ended_may_end():
    script = expendable_script(nodes=2)
    fail(script, 2, 1.0)
    script.handle("left", 3, 2.0)
    script.handle("unwatched", 3, 5.0)
    assert script.job.verdict is None


def test_a_watcher_that_continues_alone_makes_a_loss_the_verdict():
    alone = Script(2, 1)
    gone = {"kind": "gone", "rank": 3, "host": "host3", "how": "was killed by signal 9 (SIGKILL)", "code": 137}
    alone.job.conclude(gone, 5.0)
    alone.tick(5.0)
    [(to, verdict)] = alone.take("verdict")
    assert (to, verdict["text"]) == (None, "rank 3 on host3 was killed by signal 9 (SIGKILL)")
    alone.handle("unwound", 1, 5.1)
    alone.handle("unwound", 0, 5.2)
    alone.tick(5.2 + timings.OUTPUT_S)
    assert alone.take("release") == [(0, {"kind": "release"})]


def test_gone_ranks_are_recorded_and_raise_no_error(rank_and_watcher):
    rank, watcher = rank_and_watcher
    for number, code in ((3, 5), (2, 137)):
        send(watcher, {"kind": "gone", "rank": number, "host": "h", "how": f"ended {code}", "code": code})
    assert rank.gone == {3: "ended 5", 2: "ended 137"}
    assert rank.gone_code == 5
    assert rank.verdict is None


@pytest.mark.parametrize("end", ["release", "verdict", "no watcher"])
def test_a_rank_that_lingers_does_so_until_there_is_an_end(rank_and_watcher, end):
    rank, watcher = rank_and_watcher
    heard = []

    def play():
        heard.append(json.loads(watcher.recv(timings.EVENT_BYTES))["event"])
        watcher.send(b'l{"kind": "linger"}')
        time.sleep(timings.RELEASE_S + 0.5)
        heard.append(rank.released)
        if end == "verdict":
            watcher.send(b"v" + json.dumps(VERDICT | {"rank": 0}).encode())
            heard.append(json.loads(watcher.recv(timings.EVENT_BYTES))["event"])
        if end == "no watcher":
            watcher.shutdown(socket.SHUT_RDWR)
        else:
            watcher.send(b'r{"kind": "release"}')

    thread = threading.Thread(target=play)
    thread.start()
    rank.fail(3, "ValueError: boom", "Traceback ...")
    thread.join()
    assert rank.released
    assert heard == ["failed", False] + ["unwound"] * (end == "verdict")


def test_the_launcher_above_a_rank_is_ended_and_no_other(tmp_path):
    """A shell named mpirun, which ignores SIGTERM, takes the place of the launcher."""
    (tmp_path / "mpirun").symlink_to("/bin/sh")
    start = [tmp_path / "mpirun", "-c", "trap '' TERM; sleep 60 & echo $!; wait; sleep 60"]
    with contextlib.ExitStack() as stack:
        outer, other = (subprocess.Popen(start, stdout=subprocess.PIPE, text=True) for _ in range(2))
        for each in (outer, other):
            stack.enter_context(each)
            stack.callback(each.kill)
        ranks = [int(each.stdout.readline()) for each in (outer, other)]
        for rank in ranks:
            stack.callback(os.kill, rank, signal.SIGKILL)
        assert process_state.launcher_ancestors(ranks[0]) == [outer.pid]
        launchers = Launchers()
        launchers.record(ranks[0])
        launchers.end()
        assert outer.wait(timeout=10) == -signal.SIGKILL
        assert other.poll() is None


@pytest.mark.parametrize("has_child", [False, True])
def test_after_a_failed_job_only_a_launcher_without_children_is_ended(has_child, tmp_path, monkeypatch):
    """A Python named mpirun, which goes on after its rank."""
    monkeypatch.setattr("allred.watch.process_state.FAILED_LAUNCHER_S", 0.2)
    (tmp_path / "mpirun").symlink_to(sys.executable)
    body = (
        "import subprocess, time; rank = subprocess.Popen(['sleep', '60']); print(rank.pid, flush=True); rank.wait()\n"
    )
    body += "subprocess.run(['sleep', '60'])" if has_child else "time.sleep(60)"
    start = [tmp_path / "mpirun", "-c", body]
    with subprocess.Popen(start, stdout=subprocess.PIPE, text=True, start_new_session=True) as mpirun:
        try:
            rank = int(mpirun.stdout.readline())
            launchers = Launchers()
            launchers.record(rank)
            os.kill(rank, signal.SIGKILL)
            launchers.end_childless()
            assert (mpirun.poll() is None) == has_child
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(mpirun.pid, signal.SIGKILL)


def monitored(values, state=None):
    entry = {"host": "here", "role": "", "counters": list(values)}
    return entry if state is None else {**entry, "state": state}


class Client:
    """A monitor without a connection."""

    def __init__(self):
        self.received = []

    def send(self, message):
        self.received.append(message)


def test_a_snapshot_has_the_ranks_of_all_nodes_and_the_delays():
    with contextlib.closing(Loop()) as loop:
        monitor, client = JobMonitor(loop, ABOUT, size=2, nodes=2), Client()
        assert monitor.tick(0.0) == []  # nobody asks
        monitor._clients.append(client)
        for turn in (1, 2):
            if turn == 2:
                monitor._requests.append((client, True))
            [(rank, message)] = monitor.tick(float(turn))
            assert (rank, message) == (None, {"kind": "collect", "number": turn, "states": turn == 2})
            assert monitor.tick(turn + 0.1) == []  # the answers are not here yet
            for number, values in enumerate((Values(steps=5, in_step=1), Values(steps=5))):
                ranks = {str(number): monitored(values, f"state {number}" if turn == 2 else None)}
                monitor.take({"event": "counters", "number": turn, "ranks": ranks}, turn + 0.2)
        monitor.close()
    [snapshot] = client.received
    assert [(rank["rank"], rank["state"]) for rank in snapshot["ranks"]] == [(0, "state 0"), (1, "state 1")]
    assert [delay[:2] for delay in snapshot["delays"]] == [[0, 1]]
    assert "token" not in snapshot


def test_a_monitor_is_answered_although_a_watcher_does_not_answer():
    with contextlib.closing(Loop()) as loop:
        monitor, client = JobMonitor(loop, ABOUT, size=2, nodes=2), Client()
        monitor._clients.append(client)
        monitor._requests.append((client, True))
        monitor.tick(1.0)
        monitor.take({"event": "counters", "number": 1, "ranks": {"0": monitored(Values(), "runs")}}, 1.1)
        monitor.tick(1.0 + timings.QUERY_S + 0.1)
        monitor.close()
    [snapshot] = client.received
    assert [rank["state"] for rank in snapshot["ranks"]] == ["runs"]


def test_a_rank_delays_those_that_wait_at_the_same_step():
    values = {0: Values(steps=7, in_step=1), 1: Values(steps=7), 2: Values(steps=8), 3: Values(steps=7, in_step=1)}
    assert delaying(values) == [1]
    assert delaying({0: Values(steps=7), 1: Values(steps=7)}) == []


def test_a_watcher_looks_seldom_without_events(monkeypatch):
    with running_watcher() as watcher:
        limits, turn = [], watcher._loop.turn
        monkeypatch.setattr(watcher._loop, "turn", lambda limit_s: [limits.append(limit_s), turn(limit_s)][1])
        while len(limits) < 2:
            time.sleep(0.01)
        watcher._report({"event": "joined", "rank": 0, "host": "here"})
        while len(limits) < 4:
            time.sleep(0.01)
    assert (limits[0], limits[-1]) == (timings.IDLE_TICK_S, timings.WATCHER_TICK_S)
