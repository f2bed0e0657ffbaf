"""Watchers as processes, and the end of a rank that is connected to one; their decisions: test_job_state.py."""

import contextlib
import json
import os
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
from allred.watch import process, process_state, records, start, watcher_client
from allred.watch.job_status import COUNTERS, MOST_PAIR_RANKS, STATES, STEPS, JobStatus, delaying
from allred.watch.launchers import Launchers
from allred.watch.process import Watcher
from allred.watch.rank import WatchedRank

ABOUT = {"job": f"unit-{os.getpid()}", "program": "", "mode": "sync", "starts": 1, "host": "here"}


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
    assert process_state.program_line(library + own) == "in Python at train.py:87 (step)"
    assert process_state.program_line(own) == "in Python at train.py:87 (step)"
    assert process_state.program_line(library) == "in Python at threading.py:9 (wait)"
    assert "without an answer" in process_state.program_line("")


MAIN = 'Stack (most recent call first):\n  File "/home/me/train.py", line 87 in step\n'
OTHER = 'Thread 0x00007f31 (most recent call first):\n  File "/home/me/load.py", line 8 in read\n\n'
IDLE = 'Thread 0x00007f32 (most recent call first):\n  File "/usr/lib/python3.11/threading.py", line 320 in wait\n\n'
AGAIN = 'Current thread 0x00007f30 (most recent call first):\n  File "/home/me/train.py", line 88 in step\n'


def test_the_stack_of_a_table_has_the_threads_that_execute_the_program():
    program, others = process_state.split_threads("MPI Recv\n" + MAIN + OTHER + IDLE + AGAIN, 0x7F30)
    assert process_state.program_line(program) == "in MPI Recv at train.py:87 (step)"
    stack = process_state.shown_stack(program, others)
    assert stack == "    /home/me/train.py:87 (step)\n    in another thread:\n      /home/me/load.py:8 (read)"
    program, others = process_state.split_threads(OTHER + MAIN, 0x7F31)  # a late answer; init() was in another thread
    assert process_state.shown_stack(program, others) == "    /home/me/train.py:87 (step)"
    program, others = process_state.split_threads(OTHER, 0x7F30)
    assert process_state.program_line(program) == "running, but not in Python, or without an answer"
    assert process_state.shown_stack(*process_state.split_threads("", 0x7F30)) == ""


def test_a_long_stack_and_many_threads_are_cut():
    frames = "".join(f'  File "/home/me/deep.py", line {line} in down\n' for line in range(1, 21))
    threads = [OTHER.partition("\n")[2] * 5 for _ in range(9)]
    lines = process_state.shown_stack(frames, threads).splitlines()
    main, others = process_state.MAIN_FRAMES, process_state.OTHER_FRAMES
    assert lines[:2] == ["    /home/me/deep.py:1 (down)", "    /home/me/deep.py:2 (down)"]
    assert lines[main] == f"    and {20 - main} more"
    assert lines.count("    in another thread:") == process_state.OTHER_THREADS
    assert len(lines) == main + 1 + process_state.OTHER_THREADS * (others + 2)


@pytest.mark.parametrize("asks", [False, True])
def test_a_stack_that_arrives_in_pieces_is_read_completely(monkeypatch, asks):
    monkeypatch.setattr(process_state, "STACK_S", 20)
    monkeypatch.setattr(process_state, "STACK_END_S", 0.5)
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    pidfd = os.pidfd_open(os.getpid())
    threads = []

    def write(*pieces):
        def write_each():
            for piece in pieces:
                time.sleep(0.05)
                os.write(theirs, piece.encode())

        threads.append(threading.Thread(target=write_each))
        threads[-1].start()

    more = '  File "/home/me/train.py", line 99 in <module>\n'
    write("MPI Se", "nd\n", MAIN[:50], MAIN[50:-3], MAIN[-3:] + more[:-1], "\n")
    texts = process_state.read_stacks({3: (pidfd, 0, ours)}, (lambda: write(OTHER, IDLE + AGAIN)) if asks else None)
    assert texts[3] == "MPI Send\n" + MAIN + more + (OTHER + IDLE + AGAIN) * asks
    program, _ = process_state.split_threads(texts[3], 0x7F30)
    assert process_state.program_line(program) == "in MPI Send at train.py:87 (step)"
    for thread in threads:
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


def test_a_watcher_closes_a_connection_without_a_message(monkeypatch):
    monkeypatch.setattr(timings, "AUTHENTICATE_S", 0.3)
    with running_watcher() as watcher, socket.create_connection(("127.0.0.1", watcher.port), 10) as stranger:
        stranger.settimeout(60)
        assert b"nonce" in stranger.recv(200)
        assert stranger.recv(200) == b"", "closed"


def test_a_rank_that_cannot_be_told_that_it_is_accepted_is_not_watched(monkeypatch):
    """It continues without a watcher, and its end would be one without a report."""
    monkeypatch.setattr(process.WatchedRank, "send", lambda rank, message: False)
    with running_watcher() as watcher, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rank:
        rank.settimeout(60)
        rank.connect(watcher.name.encode("latin-1"))
        hello = {"rank": 0, "host": "h", "stack_signal": 0, "main_thread": 0, "token": "secret", "chief": {}}
        files = os.pidfd_open(os.getpid()), os.open(os.devnull, os.O_RDONLY)
        socket.send_fds(rank, [json.dumps(hello).encode()], files)
        assert rank.recv(200) == b"", "closed"
        assert not watcher._ranks
    for file in files:
        os.close(file)


def test_a_rank_that_has_closed_its_connection_and_lives_on_counts_as_neither_busy_nor_waiting(monkeypatch):
    """Its events are missing. As busy, it would delay the end of the job without a limit."""
    monkeypatch.setattr(timings, "RELEASE_S", 0.1)
    hello = {"rank": 0, "host": "h", "stack_signal": 0, "main_thread": 0, "token": "secret", "chief": {}}
    waiting = {"event": "waiting", "what": "barrier()", "since_s": 1.0, "peers": True, "quiet": False}
    reading, writing = os.pipe()
    with running_watcher() as watcher:
        if not (child := os.fork()):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rank:
                rank.connect(watcher.name.encode("latin-1"))
                files = os.pidfd_open(os.getpid()), os.open(os.devnull, os.O_RDONLY)
                socket.send_fds(rank, [json.dumps(hello).encode()], files)
                for event in ({"event": "busy", "is_busy": True}, waiting):
                    rank.send(json.dumps(event).encode())
                os.read(reading, 1)
            time.sleep(60)
            os._exit(0)
        while not (watcher._job and watcher._job._ranks.busy() and watcher._job._ranks.waiting):
            time.sleep(0.01)
        os.write(writing, b"x")  # the child closes its connection
        known, until = watcher._job._ranks, time.monotonic() + 50
        while (known.busy() or known.waiting) and time.monotonic() < until:
            time.sleep(0.01)
        lives = os.waitpid(child, os.WNOHANG) == (0, 0)
        found = known.busy(), known.waiting, lives
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert found == ([], set(), True)
    os.close(reading)
    os.close(writing)


def test_a_watcher_without_ranks_ends_after_the_process_that_started_it():
    with running_watcher() as watcher:
        assert not watcher.is_done(time.monotonic())
        starter = subprocess.Popen(["true"])
        starter.wait()
        watcher._starter, now = starter.pid, time.monotonic()
        assert not watcher.is_done(now)  # another rank may still connect
        assert watcher.is_done(now + timings.REPORT_DEATH_S + 0.1)


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
    hello = {"rank": 0, "host": "here", "token": "secret", "stack_signal": 60, "main_thread": 1, "chief": {}}
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


def test_a_watcher_never_waits_for_a_message_of_a_rank_nor_until_it_reads():
    hello = {"rank": 0, "host": "here", "stack_signal": 60, "main_thread": 1}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # a child may hold it after a death
    ours.settimeout(timings.HELLO_S)  # as after `accept`
    with ours, theirs, contextlib.closing(Loop()) as loop:
        rank = WatchedRank(ours, hello, os.pidfd_open(os.getpid()), os.pipe()[0])
        assert ours.gettimeout() == 0.0, "Python waits before a call with MSG_DONTWAIT, too"
        assert rank.receive() is None
        for _ in range(1000):
            rank.send({"kind": "print", "text": "x" * 1000})
        rank.close(loop)


def test_own_address_is_one_of_this_host():
    with socket.create_server((start.own_address(["nowhere.invalid"]), 0)):
        pass


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


@pytest.mark.parametrize("where", ["_report", "is_done"])
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
    rank = types.SimpleNamespace(number=0, pid=launcher.pid, dead="", left=False, gone=False, steps=lambda: (0, 0))
    rank.send, rank.monitored, rank.state = lambda message: None, lambda: monitored(Values()), lambda: rank.dead
    rank.close = lambda loop: None
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
    monkeypatch.setattr("allred.watch.launchers.FAILED_LAUNCHER_S", 0.2)
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


def test_events_are_kept_while_the_watcher_does_not_read(rank_and_watcher):
    rank, watcher = rank_and_watcher
    for number in range(timings.UNSENT_COUNT):  # more than fit into the socket
        rank.send("role", text=str(number))
    received = []
    while len(received) < timings.UNSENT_COUNT:
        received.append(int(json.loads(watcher.recv(timings.EVENT_BYTES))["text"]))
        rank.read()
    assert received == [*range(timings.UNSENT_COUNT)]


def test_a_fork_sends_and_receives_nothing(rank_and_watcher):
    rank, watcher = rank_and_watcher
    if not os.fork():
        rank.send("failed", code=1, words="", traceback="")
        rank.read()
        os._exit(0)
    os.wait()
    rank.send("resumed")
    assert json.loads(watcher.recv(timings.EVENT_BYTES))["event"] == "resumed"


def test_the_role_of_a_rank_is_one_line_and_does_not_end_its_wait(rank_and_watcher):
    rank, watcher = rank_and_watcher
    rank.set_role("server 0;\n last checkpoint " + "x" * 1000)
    event = json.loads(watcher.recv(timings.EVENT_BYTES))
    assert event["event"] == "role"
    assert event["text"].startswith("server 0; last checkpoint xxx")
    assert len(event["text"]) == 200


def test_gone_ranks_are_recorded_and_raise_no_error(rank_and_watcher):
    rank, watcher = rank_and_watcher
    for number, code in ((3, 5), (2, 137)):
        send(watcher, {"kind": "gone", "rank": number, "host": "h", "how": f"ended {code}", "code": code})
    assert rank.gone == {3: "ended 5", 2: "ended 137"}
    assert rank.gone_code == 5
    assert rank.verdict is None


@pytest.mark.parametrize("end", ["release", "verdict", "no watcher"])
def test_a_rank_that_lingers_does_so_until_there_is_an_end(rank_and_watcher, end, monkeypatch):
    monkeypatch.setattr(timings, "RELEASE_S", 1.0)
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


def test_a_death_is_printed_on_the_stderr_of_a_launcher_that_has_ended(tmp_path):
    """A shell named mpirun. On a busy machine it may end before the watcher learns of the death."""
    (tmp_path / "mpirun").symlink_to("/bin/sh")
    start = [tmp_path / "mpirun", "-c", "sleep 60 2>/dev/null & echo $!; wait"]
    with subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as mpirun:
        rank = int(mpirun.stdout.readline())
        launchers = Launchers()
        launchers.record(rank)
        mpirun.kill()
        mpirun.wait()
        os.kill(rank, signal.SIGKILL)
        with open(launchers.open_stderr([rank]), "w") as stderr:
            stderr.write("rank 0 was killed\n")
        assert mpirun.stderr.readline() == "rank 0 was killed\n"


@pytest.mark.parametrize("has_child", [False, True])
def test_after_a_failed_job_only_a_launcher_without_children_is_ended(has_child, tmp_path, monkeypatch):
    """A Python named mpirun, which goes on after its rank."""
    monkeypatch.setattr("allred.watch.launchers.FAILED_LAUNCHER_S", 0.2)
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


def counters(number, values, ranks):
    """The answer of a watcher. values: by rank."""
    steps = [[rank, each.steps, each.in_step] for rank, each in values.items()]
    return {"event": "counters", "number": number, "steps": steps, "ranks": ranks}


class Client:
    """A monitor without a connection."""

    def __init__(self):
        self.received = []

    def send(self, message):
        self.received.append(message)

    def close(self):
        """There is nothing to close."""


def test_a_snapshot_has_the_ranks_of_all_nodes_and_the_delays():
    with contextlib.closing(Loop()) as loop:
        monitor, client = JobStatus(loop, ABOUT, size=2, nodes=2), Client()
        assert monitor.tick(0.0) == []  # nobody asks
        monitor._clients.append(client)
        for turn, what in ((1, STEPS), (2, STATES)):
            if turn == 2:
                monitor._requests.append((client, True))
            [(rank, message)] = monitor.tick(float(turn))
            assert (rank, message) == (None, {"kind": "collect", "number": turn, "what": what})
            assert monitor.tick(turn + 0.1) == []  # the answers are not here yet
            for number, values in enumerate((Values(steps=5, in_step=1), Values(steps=5))):
                ranks = {str(number): monitored(values, f"state {number}")} if what == STATES else {}
                monitor.take(counters(turn, {number: values}, ranks), turn + 0.2)
        monitor.close()
    [snapshot] = client.received
    assert [(rank["rank"], rank["state"]) for rank in snapshot["ranks"]] == [(0, "state 0"), (1, "state 1")]
    assert [delay[:2] for delay in snapshot["delays"]] == [[0, 1]]
    assert [delay[:2] for delay in snapshot["late"]] == [[1, 1]]
    assert "token" not in snapshot


def test_in_a_large_job_delays_are_kept_by_rank_not_by_pair():
    size = MOST_PAIR_RANKS + 2
    values = {rank: Values(steps=5, in_step=rank > 1) for rank in range(size)}
    with contextlib.closing(Loop()) as loop:
        monitor, client = JobStatus(loop, ABOUT, size, nodes=1), Client()
        monitor._clients.append(client)
        for turn, what in ((1, STEPS), (2, STEPS), (3, COUNTERS)):
            if what == COUNTERS:
                monitor._requests.append((client, False))
            assert monitor.tick(float(turn))[0][1]["what"] == what
            full = {str(rank): monitored(each) for rank, each in values.items()} if what == COUNTERS else {}
            monitor.take(counters(turn, values, full), float(turn))
        monitor.close()
    [snapshot] = client.received
    assert len(snapshot["ranks"]) == size
    assert snapshot["delays"] == []
    assert snapshot["late"] == [
        [0, MOST_PAIR_RANKS, 2.0 * MOST_PAIR_RANKS],
        [1, MOST_PAIR_RANKS, 2.0 * MOST_PAIR_RANKS],
    ]


def test_a_monitor_is_answered_although_a_watcher_does_not_answer():
    with contextlib.closing(Loop()) as loop:
        monitor, client = JobStatus(loop, ABOUT, size=2, nodes=2), Client()
        monitor._clients.append(client)
        monitor._requests.append((client, True))
        monitor.tick(1.0)
        monitor.take(counters(1, {0: Values()}, {"0": monitored(Values(), "runs")}), 1.1)
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
