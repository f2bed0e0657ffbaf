"""Whole jobs in which a rank fails, dies, stalls or leaves: what the others hear, and how the job ends."""

import contextlib
import os
import re
import resource
import signal
import subprocess
import time

import pytest
from failures import FAILURES, STALLS, count_tracebacks
from harness import BIN, LATE_S, MPICH_BY_DEFAULT, MPIS, ULFM, full, gone, mpirun, processes, run
from hosts import hosts

PROGRAM = """
import os, signal, sys, threading, time
import numpy as np
import allred

allred.init(banner=False)
rank, size = allred.rank(), allred.size()
allred.barrier()

def culprit():
    {culprit}

def peers():
    {peers}

try:
    if rank == {who}:
        time.sleep(0.2)  # the others are where they are meant to be
        culprit()
    else:
        peers()
    {after}
except (allred.RemoteRankError, allred.CollectiveTimeout) as error:
    words = str(error).split("\\n")[0]
    print(f"rank {{rank}} heard:", getattr(error, "rank", "-"), getattr(error, "code", "-"), words, flush=True)
    raise
finally:
    print(f"finally on {{rank}}", flush=True)
print("never")
"""

COLLECTIVES = {
    "allreduce": "allred.allreduce(np.ones((512, 128), 'f4'), name='fc1.weight')",
    "allreduce_": "allred.allreduce_(np.ones(3), allred.Sum, 'w')",
    "grouped_allreduce": "allred.grouped_allreduce([np.ones(3), np.ones((2, 2), 'f4')], name='w')",
    "broadcast": "allred.broadcast(np.ones(3), root=1, name='w')",
    "allgather": "allred.allgather(np.ones(3), name='w')",
    "reducescatter": "allred.reducescatter(np.ones(3), name='w')",
    "alltoall": "allred.alltoall(np.ones(size), name='w')",
    "barrier": "allred.barrier()",
    "allgather_object": "allred.allgather_object({})",
    "broadcast_object": "allred.broadcast_object({}, root=1)",
}
LIMITS = {"ALLRED_TIMEOUT_S": "2", "ALLRED_STALL_WARNING_S": "1"}


def program(culprit, peers=COLLECTIVES["allreduce"], who=1, after="allred.barrier()"):
    return PROGRAM.format(culprit=culprit, peers=peers, who=who, after=after)


def heard(result):
    """What each rank but the culprit printed of the verdict."""
    return {int(r): words for r, words in re.findall(r"rank (\d) heard: (.*)", result.out)}


# ---- a rank that fails

BUSY = {
    "waits": COLLECTIVES["allreduce"],
    "sleeps": "time.sleep(60)",
    "loops": "while True: np.linalg.norm(np.ones((100, 100)))",
    "waits for a lock": "threading.Event().wait()",
    "one loops, one waits for a lock": (
        "while rank == 0: np.linalg.norm(np.ones((100, 100)))\n    threading.Event().wait()"
    ),
}


def check_failure(result, failure, size, culprit=1):
    _, code, words = FAILURES[failure]
    others = set(range(size)) - {culprit}
    assert result.code == code, result.text
    assert set(heard(result)) == others, result.text
    assert all(text.startswith(f"{culprit} {code} rank {culprit} on ") for text in heard(result).values()), result.text
    assert all(text.endswith(words) for text in heard(result).values()), result.text
    assert {f"finally on {rank}" for rank in range(size)} <= set(result.out.splitlines()), result.text
    assert "never" not in result.out, result.text
    tracebacks = failure in ("raise", "interrupt")
    assert count_tracebacks(result) == tracebacks, result.text
    assert result.err.count(f"allred: rank {culprit} on ") == 1, result.text
    assert f"left with exit code {code}; ending the job" in result.err, result.text
    assert result.err.count("no such file") == (failure == "exit with words"), result.text
    if tracebacks:
        last = result.err.index("Traceback (most recent call last)")
        assert "allred:" not in result.err[:last], result.text


MANY_FILES = """
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, 2 * (resource.getrlimit(resource.RLIMIT_NOFILE)[1],))
files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]  # more than select() supports
"""


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize(
    "failure",
    [
        *("raise SystemExit", "exit with words"),
        # by default in test_a_failure_interrupts, test_a_failure_just_after_a_collective, test_an_interrupt
        *(pytest.param(failure, marks=full) for failure in ("raise", "sys.exit", "interrupt")),
    ],
)
@pytest.mark.parametrize(("ranks", "culprit"), [(2, 1), (2, 0), pytest.param(3, 0, marks=full)])
def test_other_ranks_raise_the_failure_and_unwind(mpi, failure, ranks, culprit):
    result = mpirun(ranks, "-c", program(FAILURES[failure][0], who=culprit), mpi=mpi, timeout_s=40)
    check_failure(result, failure, ranks, culprit)


@pytest.mark.parametrize("mpi", MPICH_BY_DEFAULT)
@pytest.mark.parametrize(
    "busy",
    ["one loops, one waits for a lock", *(pytest.param(busy, marks=full) for busy in ("waits", "sleeps"))],
)
def test_a_failure_interrupts_ranks_that_wait_for_a_lock_or_loop(mpi, busy):
    check_failure(mpirun(3, "-c", program(FAILURES["raise"][0], BUSY[busy]), mpi=mpi, timeout_s=40), "raise", 3)


@pytest.mark.parametrize("mpi", MPIS)
def test_an_interrupt_inside_a_collective_of_ranks_with_many_open_files(mpi):
    """Rank 1 waits in a barrier that the others never enter."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 1500:
        pytest.skip("a process may not open 1500 files here")
    after = "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start(); allred.barrier()"
    result = mpirun(2, "-c", MANY_FILES + program(after, "time.sleep(60)"), mpi=mpi, timeout_s=40)
    check_failure(result, "interrupt", 2)


@pytest.mark.parametrize("mpi", MPIS)
def test_a_rank_that_cannot_unwind_is_ended_after_the_grace(mpi):
    code = program("raise ValueError('boom')", STALLS["holds the GIL"][0])
    result = mpirun(2, "-c", code, mpi=mpi, timeout_s=40)
    assert result.code == 1, result.text
    assert result.err.count("ValueError: boom") == 1, result.text
    assert "finally on 0" not in result.out, result.text


@pytest.mark.parametrize("mpi", MPIS)
def test_all_ranks_fail_at_once(mpi):
    code = "import allred\nallred.init(banner=False)\nraise ValueError('boom')"
    result = mpirun(2, "-c", code, mpi=mpi, timeout_s=40)
    assert result.code == 1, result.text
    assert result.err.count("ValueError: boom") == 1, result.text


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("character", ["\u00e9", pytest.param("\U0001f600", marks=full)])
def test_a_message_with_any_characters_and_of_any_length(mpi, character):
    """A surrogate, a null character, and 30 000 characters that are not ASCII."""
    code = program(f"raise ValueError({character!r} * 300 + '\\udc80\\0' + {character!r} * 30_000)")
    encoding = {"PYTHONIOENCODING": "utf-8:backslashreplace"}
    result = mpirun(2, "-c", code, mpi=mpi, timeout_s=40, env=encoding)
    assert result.code == 1, result.text
    words = f"failed with exit code 1: ValueError: {character * 300}\\udc80\0{character * 30}"
    assert words in heard(result)[0], result.text
    assert count_tracebacks(result) == 1, result.text


def test_a_rank_can_catch_the_verdict_or_raise_an_error_of_its_own():
    """Rank 0 can make no more collectives, but it ends without an error. The error of rank 2 is shown before the one
    that was first."""
    code = (
        "import time, allred\nallred.init(banner=False)\nallred.barrier()\n"
        "if allred.rank() == 1: time.sleep(0.2); raise ValueError('boom')\n"
        "try: allred.barrier()\n"
        "except allred.RemoteRankError as error:\n"
        "    first = str(error)\n"
        "    if allred.rank() == 2: raise KeyError('no such thing') from None\n"
        "try: allred.barrier()\n"
        "except allred.RemoteRankError as error: print('again', str(error) == first, flush=True)\n"
    )
    result = mpirun(3, "-c", code, timeout_s=40)
    assert result.code == 1, result.text
    assert result.out == "again True\n", result.text
    assert result.err.count("Traceback") == 2, result.text
    assert result.err.count("KeyError: 'no such thing'") == 1, result.text
    assert result.err.count("ValueError: boom") == 1, result.text
    assert result.err.index("KeyError") < result.err.index("ValueError"), result.text


# ---- a rank that is killed

KILLS = {9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("number", [9, *(pytest.param(number, marks=full) for number in (11, 15))])
def test_one_line_says_which_rank_died_by_which_signal(mpi, number, mark):
    code = program(f"os.kill(os.getpid(), {number})")
    result = mpirun(2, "-c", code, mpi=mpi, timeout_s=40, env=mark)
    assert result.code != 0, result.text
    lines = re.findall(rf"^allred: rank 1 on \S+ was killed by signal {number} \((\w+)\)", result.err, re.M)
    assert lines == [KILLS[number]], result.text
    assert result.err.count("was killed by") == 1, result.text
    assert gone(mark)


def check_survivors(result):
    for words in heard(result).values():
        assert re.fullmatch(r"1 137 rank 1 on \S+ was killed by signal 9 \(SIGKILL\).*", words), result.text


@pytest.mark.parametrize(
    "busy", ["waits", *(pytest.param(busy, marks=full) for busy in ("sleeps", "loops", "waits for a lock"))]
)
def test_survivors_raise_where_the_launcher_lets_them_live(busy, mark):
    code = program("os.kill(os.getpid(), 9)", BUSY[busy])
    result = run([*ULFM, "-np", 3, BIN["openmpi"] / "python", "-c", code], timeout_s=30, env=mark)
    check_survivors(result)
    assert set(heard(result)) == {0, 2}, result.text
    assert {"finally on 0", "finally on 2"} <= set(result.out.splitlines()), result.text
    assert gone(mark, within_s=5)


@full
def test_survivors_under_mpich(mark):
    """Its launcher kills one or both all the same in every second run, also of programs without allred [ran]."""
    code = program("os.kill(os.getpid(), 9)", BUSY["sleeps"])
    command = [BIN["mpich"] / "mpirun", "-disable-auto-cleanup", "-np", 3, BIN["mpich"] / "python", "-c", code]
    survivors = set()
    for _ in range(20):
        result = run(command, timeout_s=30, env=mark)
        check_survivors(result)
        survivors |= {rank for rank in heard(result) if f"finally on {rank}" in result.out}
        if survivors == {0, 2}:
            break
    assert survivors == {0, 2}


ORPHANS = """
import ctypes, os, pathlib, signal, sys, time
import numpy as np
import allred
from allred.watch import process_state
allred.init(banner=False)
if allred.rank() == 0:
    os.kill(process_state.launcher_ancestors(os.getpid())[-1], signal.SIGKILL)
if allred.rank() >= int(sys.argv[2]):
    ctypes.PyDLL(None).sleep(600)  # with the GIL, so it cannot be interrupted
try:
    while True:
        allred.allreduce(np.ones(1000))
        time.sleep(0.02)
except allred.RemoteRankError as error:
    pathlib.Path(sys.argv[1], str(allred.rank())).write_text(str(error))
    raise
"""


@pytest.mark.parametrize("answering", [1, pytest.param(0, marks=full), pytest.param(2, marks=full)])
def test_no_rank_outlives_a_killed_mpirun(mark, tmp_path, answering):
    """Open MPI; the daemons of MPICH kill the ranks. One rank, two or none can be interrupted."""
    result = mpirun(3, "-c", ORPHANS, tmp_path, answering, mpi="openmpi", env=mark)
    assert result.code == -signal.SIGKILL
    assert gone(mark, LATE_S)
    texts = [path.read_text() for path in sorted(tmp_path.iterdir())]
    assert len(texts) == answering, result.text
    for text in texts:
        assert re.match(r"rank 0 on \S+ has lost its launcher: prterun \(process \d+\) has ended", text), text


# ---- a rank that leaves early


@pytest.mark.parametrize("mpi", MPIS)
def test_a_rank_that_ends_well_while_the_others_wait_for_it(mpi):
    result = mpirun(2, "-c", program("sys.exit(0)"), mpi=mpi, timeout_s=40)
    crashed = mpi == "openmpi" and result.code == -11  # prterun itself, now and then, with a rank in MPI_Finalize [ran]
    assert result.code == 1 or crashed, result.text
    assert set(heard(result)) == {0}, result.text
    assert "has ended, and will never call allreduce(Average) #" in heard(result)[0], result.text


SWALLOWED = """
import numpy as np
import allred

allred.init(banner=False)
w = np.zeros(3)
opt = allred.distributed(allred.optim.SGD(lr=1.0))
for step in range(3):
    try:
        w += allred.rank() * (step == 1)
        opt.step([w], [np.ones(3)])
    except ValueError:
        continue  # a bad sample, the program supposes
if allred.rank() == 0:
    allred.barrier()
"""


def test_a_swallowed_error_is_named_by_the_last_one():
    result = mpirun(2, "-c", SWALLOWED, env={"ALLRED_CHECK_STEPS": "1"}, timeout_s=40)
    assert result.code == 1, result.text
    words = "2 earlier operations failed, the last one: DriftError: opt.step(): the ranks have drifted apart"
    assert re.search(
        rf"rank 1 on \S+ has ended, and will never call barrier\(\) #\d+, .*; {re.escape(words)}", result.err
    )


INTERRUPTED = """
import contextlib, signal, time
import numpy as np
import allred

def raise_it(*_):
    raise KeyError("in the step")

allred.init(banner=False)
rank, params = allred.rank(), [np.ones(100, np.float32)]
opt = allred.distributed(allred.optim.SGD(lr=0.1))
signal.signal(signal.SIGALRM, raise_it)
with contextlib.suppress(KeyError):
    for step in range(9):
        if step == 6:  # like the steps before it: one operation, in which the samples need a second round
            signal.alarm(1 if rank == 0 else 0)
            time.sleep(2 * rank)
        opt.step(params, [np.ones(100, np.float32)], samples=1 + rank)
"""


def test_a_rank_that_was_interrupted_in_a_step_and_ends():
    result = mpirun(2, "-c", INTERRUPTED, timeout_s=40)
    assert result.code == 1, result.text
    assert re.search(
        r"rank 0 on \S+ has ended, and will never call opt\.step\(\) #\d+, in which rank 1 waits", result.err
    )


@pytest.mark.parametrize("mpi", MPIS)
def test_a_rank_that_ends_well_while_others_finish_what_it_has_done(mpi):
    """Rank 2 is slow to pass on to rank 3 what ranks 0 and 1 have already."""
    code = (
        "import time\nimport numpy as np\nimport allred\nfrom allred.comm.backends.mpi import MpiBackend\n"
        "allred.init(banner=False)\nbroadcast = MpiBackend.broadcast\n"
        "def slow(*arguments):\n"
        "    time.sleep(5)\n"
        "    yield from broadcast(*arguments)\n"
        "if allred.rank() == 2: MpiBackend.broadcast = slow\n"
        "print(allred.broadcast(np.ones(4), 0)[0], flush=True)\n"
    )
    result = mpirun(4, "-c", code, mpi=mpi, timeout_s=30, env={"ALLRED_BACKEND": "mpi"})
    assert (result.code, result.out.split(), result.err) == (0, 4 * ["1.0"], ""), result.text


# ---- a rank that stalls


def check_stall(result, collective, words, size=3):
    name = {"allreduce_": "allreduce"}.get(collective, collective)
    assert result.code == 1, result.text
    told = re.findall(r"allred: rank (\d) has waited for \d+ s in (.*)\n((?:  rank.*\n)+)", result.err)
    assert len(told) == 1, result.text
    assert told[0][1].startswith(f"{name}("), result.text
    assert re.search(words, told[0][2]), result.text
    pattern = r"- - \w+\(.* #\d+.*: not complete after 2 s"
    ends = [text for text in heard(result).values() if re.fullmatch(pattern, text)]
    assert len(ends) >= size - 1, result.text  # all but, perhaps, the culprit
    assert result.err.count("CollectiveTimeout: ") == 1, result.text
    assert re.search(words, result.err[result.err.index("CollectiveTimeout: ") :]), result.text


@pytest.mark.parametrize("mpi", MPICH_BY_DEFAULT)
@pytest.mark.parametrize(
    ("stall", "ranks"),
    [
        *(pytest.param(*each, marks=full) for each in [("sleeps", 2), ("loops", 3)]),
        ("holds the GIL", 2),
        ("is stopped", 3),
    ],
)
def test_a_stalled_rank_is_reported_once_and_ends_the_job(mpi, stall, ranks, mark):
    does, words = STALLS[stall]
    result = mpirun(ranks, "-c", program(does), mpi=mpi, timeout_s=30, env=LIMITS | mark)
    check_stall(result, "allreduce", words, ranks)
    operation = r"in allreduce\(Average\) #\d+ 'fc1.weight' float32 \(512, 128\) for \d s"
    assert re.search(operation, result.err), result.text
    assert gone(mark)


# Rank 1 is late for one collective after another, each time until the watcher has reported that.
LATE = """
import os, sys, time
import numpy as np
import allred
for backend, calls in {calls!r}.items():
    path = {path!r} + backend
    sys.stderr.flush(); os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)  # also of the watcher
    allred.init(banner=False, backend=backend)
    rank, size = allred.rank(), allred.size()
    for name, call in calls.items():
        while rank == 1 and f" s in {{name}}(" not in open(path).read(): time.sleep(0.02)
        eval(call)
    allred.shutdown()
"""


def test_a_stall_in_every_collective_is_reported(tmp_path):
    """Half of the collectives on each backend. Costs 2 s."""
    halves = {"shm": list(COLLECTIVES)[::2], "mpi": list(COLLECTIVES)[1::2]}
    calls = {backend: {name.rstrip("_"): COLLECTIVES[name] for name in names} for backend, names in halves.items()}
    code = LATE.format(path=f"{tmp_path}/stderr-", calls=calls)
    result = mpirun(2, "-c", code, env={"ALLRED_STALL_WARNING_S": "0.3"})
    for backend, names in calls.items():
        err = (tmp_path / f"stderr-{backend}").read_text()
        assert result.code == 0, result.text + err
        report = r"allred: rank 0 has waited for \d+ s in (\w+)\(.*\n  rank 0 .*\n  rank 1 .*in Python at"
        assert re.findall(report, err) == list(names), err


@full
@pytest.mark.parametrize("backend", ["shm", "mpi"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_in_every_collective(backend, collective):
    does, words = list(STALLS.values())[list(COLLECTIVES).index(collective) % len(STALLS)]
    code = program(does, COLLECTIVES[collective])
    result = mpirun(3, "-c", code, timeout_s=30, env=LIMITS | {"ALLRED_BACKEND": backend})
    check_stall(result, collective, words)


@full  # by default in test_stacks.py
@pytest.mark.parametrize("mpi", MPIS)
def test_a_stopped_rank_on_another_node(mpi):
    environment = LIMITS | {"ALLRED_PRETEND_NODES": "1,1"}
    result = mpirun(2, "-c", program(STALLS["is stopped"][0]), mpi=mpi, timeout_s=30, env=environment)
    check_stall(result, "allreduce", STALLS["is stopped"][1], 2)


def test_patience():
    code = (
        "import time, allred\nallred.init(banner=False)\n"
        "for value in (0, -1, 'x', None):\n"
        "    try:\n"
        "        with allred.patience(value): pass\n"
        "    except allred.AllredError as error: print(f'{error}\\n', end='', flush=True)\n"
        "if allred.rank(): time.sleep(3)\n"
        "with allred.patience(30): allred.barrier()\n"
        "print('there', flush=True)\n"
        "if allred.rank(): time.sleep(60)\n"
        "with allred.patience(1.5): allred.barrier()\n"
    )
    result = mpirun(2, "-c", code, timeout_s=30, env=LIMITS)
    assert result.code == 1, result.text
    assert result.out.count("must be a positive number of seconds") == 8, result.text
    assert result.out.count("there") == 2, result.text
    assert not re.search("has waited .* in barrier", result.err), result.text
    assert "not complete after 1.5 s" in result.err, result.text


# ---- the watcher itself

KILL_IT = """
import os, signal, time
import numpy as np
import allred
allred.init(banner=False)
allred.barrier()
if allred.rank() == 0:
    print("ready", flush=True)
    input()
allred.barrier()
for step in range(100):
    assert allred.allreduce(step, allred.Sum) == step * allred.size()
{end}
print("done", flush=True)
"""


@contextlib.contextmanager
def started(code, mark, ranks=2, env=None):
    """A job whose stdin and output are pipes; it is killed at the end."""
    command = [BIN["mpich"] / "mpirun", "-np", str(ranks), BIN["mpich"] / "python", "-c", code]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ALLRED_", "PMI", "OMPI_COMM", "MAKE"))}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**environment, **mark, **(env or {})}, start_new_session=True,
    ) as job:  # fmt: skip
        try:
            yield job
        finally:
            job.kill()


def with_watcher(action, mark, end="", nodes="2", which=0):
    """Run the program; once it is ready do something to one of its watchers. (exit code, stdout, stderr)"""
    sizes = nodes.split(",")
    code = KILL_IT.format(end=end)
    with started(code, mark, sum(map(int, sizes)), {"ALLRED_PRETEND_NODES": nodes}) as job:
        assert job.stdout.readline() == "ready\n"
        watchers = processes(mark, "allred.watch")
        assert len(watchers) == len(sizes)
        os.kill(watchers[which], action)
        time.sleep(0.3)
        job.stdin.write("go\n")
        job.stdin.flush()
        job.wait(LATE_S)
        if action == signal.SIGSTOP:  # the watcher holds the stderr of mpirun
            os.kill(watchers[which], signal.SIGCONT)
        out, err = job.communicate(timeout=LATE_S)
    return job.returncode, out, err


FAILS = "print('trained', flush=True)\nif allred.rank() == 1: raise ValueError('boom')\nallred.barrier()"


def test_a_watcher_that_is_killed_is_reported_once_and_a_rank_that_fails_later_still_ends_the_job(mark):
    code, out, err = with_watcher(signal.SIGKILL, mark, FAILS)
    assert code == 1, err
    assert (out.count("trained"), out.count("done")) == (2, 0)
    assert err.count("the watcher process on") == 1, err
    assert err.count("ValueError: boom") == 1, err


@pytest.mark.parametrize("which", [0, pytest.param(1, marks=full)])
@pytest.mark.parametrize("end", ["", pytest.param(FAILS, marks=full)], ids=["", "a rank fails"])
def test_the_watcher_of_another_node_goes_on_without_it(mark, which, end):
    """Whichever of the two is killed, each that notices tells of it once."""
    code, out, err = with_watcher(signal.SIGKILL, mark, end, nodes="1,1", which=which)
    assert code == bool(end), err
    assert out.count("done") == (0 if end else 2), err
    assert 1 <= err.count("allred: the watcher ") <= 2, err
    assert err.count("ValueError: boom") == bool(end), err
    assert gone(mark)


def test_a_watcher_that_is_stopped_delays_no_rank(mark):
    code, out, err = with_watcher(signal.SIGSTOP, mark)
    assert code == 0, err
    assert out.count("done") == 2
    assert err == ""


def test_watchers_end_after_shutdown_and_with_their_ranks(mark):
    """Three worlds are shut down. Another thread makes the last one; its watcher looks at a rank that has finished."""
    code = (
        "import os, threading, allred\nfrom allred import world\n"
        + 3 * "allred.init(banner=False); rank = allred.rank(); allred.shutdown()\n"
        + "print('ready', flush=True)\n"
        "if rank == 0: input()\n"
        "thread = threading.Thread(target=allred.init); thread.start(); thread.join()\n"
        "stack = world.watcher()._stack\n"
        "class Late:\n"
        "    def __del__(self, kill=os.kill, pid=os.getpid()): kill(pid, stack)\n"
        "late = Late()\n"
    )
    with started(code, mark, env={"ALLRED_BANNER": "0"}) as job:
        assert [job.stdout.readline() for _ in range(2)] == 2 * ["ready\n"]
        assert gone(mark, 5, "allred.watch")
        _, err = job.communicate("go\n", timeout=LATE_S)
    assert (job.returncode, err) == (0, ""), err
    assert gone(mark, within_s=1.0)


@pytest.mark.parametrize("mpi", MPIS)
def test_without_watchers_a_time_limit_ends_the_job(mpi):
    """The rank at the limit fails by an error, like any other that fails."""
    environment = LIMITS | {"ALLRED_WATCHER": "0"}
    result = mpirun(2, "-c", program("time.sleep(60)"), mpi=mpi, timeout_s=40, env=environment)
    assert result.code == 1, result.text
    assert "not complete after 2 s; a rank is late, stopped or gone" in result.err, result.text
    assert result.err.count("CollectiveTimeout: ") == 1, result.text


@full  # by default in test_watchers_end_after_shutdown_and_with_their_ranks
def test_init_in_another_thread_than_the_main_one():
    code = (
        "import threading, allred\nthread = threading.Thread(target=allred.init); thread.start(); thread.join()\n"
        "assert allred.allreduce(1.0, allred.Sum) == 2\n"
        "if allred.rank() == 1: raise ValueError('boom')\nallred.barrier()\n"
    )
    result = mpirun(2, "-c", code, timeout_s=40)
    assert result.code == 1, result.text
    assert result.err.count("ValueError: boom") == 1, result.text


# ---- forks


@pytest.mark.parametrize("mpi", MPICH_BY_DEFAULT)
def test_a_pool_of_forked_workers(mpi):
    """As a DataLoader has them: they compute while the ranks train, and end as they like."""
    code = (
        "import multiprocessing, os, time\nimport numpy as np\nimport allred\nallred.init(banner=False)\n"
        "def load(number):\n"
        "    try: allred.allreduce(1.0)\n"
        "    except allred.AllredError as error: assert 'forked from a rank' in str(error), error\n"
        "    else: raise AssertionError\n"
        "    return np.full(1000, number)\n"
        "context = multiprocessing.get_context('fork')\n"
        "for epoch in range(2):\n"
        "    with context.Pool(2) as pool:\n"
        "        for batch in pool.imap(load, range(20)):\n"
        "            assert allred.allreduce(batch, allred.Sum)[0] == batch[0] * allred.size()\n"
        "child = context.Process(target=os._exit, args=(7,)); child.start(); child.join()\n"
        "allred.barrier()\nprint('done', flush=True)\n"
    )
    result = mpirun(2, "-c", code, mpi=mpi, timeout_s=40)
    assert (result.code, result.out.count("done"), result.err) == (0, 2, ""), result.text


# ---- several hosts


LISTENS = """
import os, pathlib

def sockets(process):  # of processes that end meanwhile there are none
    try: files = list((process / "fd").iterdir())
    except OSError: files = []
    for file in files:
        try: yield os.readlink(file)
        except OSError: pass

def is_watcher(process):
    try: return (process / "cmdline").read_bytes().endswith(b"allred.watch.process\\0")
    except OSError: return False

if allred.rank() == 0:
    held = {name for p in pathlib.Path("/proc").glob("[0-9]*") if is_watcher(p) for name in sockets(p)}
    for line in [*open("/proc/net/tcp"), *open("/proc/net/tcp6")]:
        _, local, _, state, *_, inode = line.split()[:10]
        if state == "0A" and f"socket:[{inode}]" in held:
            print("listens at", ".".join(map(str, reversed(bytes.fromhex(local.partition(":")[0])))), flush=True)
allred.barrier()
"""


def failing_program_that_prints_addresses(busy, culprit):
    """Its rank 0 prints the addresses at which watchers listen; then the culprit raises an error."""
    before, definition, after = program(FAILURES["raise"][0], BUSY[busy], culprit).partition("\ndef culprit")
    return before + LISTENS + definition + after


@pytest.mark.parametrize("mpi", MPICH_BY_DEFAULT)
@pytest.mark.parametrize(("nodes", "busy"), [
    ("1,1,1", "waits"), pytest.param("2,2", "waits", marks=full), pytest.param("1,3", "sleeps", marks=full),
])  # fmt: skip
def test_a_failure_on_another_pretended_node_whose_watchers_listen_at_loopback(mpi, nodes, busy):
    own_network = ["unshare", "--net"]  # without the watchers of other jobs
    if os.geteuid() != 0 or subprocess.run([*own_network, "true"], capture_output=True).returncode:
        pytest.skip("no network namespaces here")
    ranks = sum(map(int, nodes.split(",")))
    code = failing_program_that_prints_addresses(busy, ranks - 1)
    command = [*own_network, "sh", "-c", 'ip link set lo up; exec "$@"', "sh"]
    command += [BIN[mpi] / "mpirun", "-np", ranks, BIN[mpi] / "python", "-c", code]
    result = run(command, env={"ALLRED_PRETEND_NODES": nodes})
    check_failure(result, "raise", ranks, culprit=ranks - 1)
    assert re.findall("listens at (.*)", result.out) == 2 * ["127.0.0.1"], result.text  # for watchers, for monitors


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory):
    if os.geteuid() != 0:
        pytest.skip("namespaces take root")
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(hosts(2, tmp_path_factory.mktemp("hosts")))
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield made


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize(
    ("ranks", "busy"), [([1, 1], "waits"), *(pytest.param([2, 1], busy, marks=full) for busy in ("waits", "sleeps"))]
)
def test_a_failure_on_another_host_whose_watcher_listens_at_its_address_and_loopback(two_hosts, mpi, ranks, busy):
    code = failing_program_that_prints_addresses(busy, sum(ranks) - 1)
    result = two_hosts.run(mpi, ranks, "-c", code, timeout_s=60)
    check_failure(result, "raise", sum(ranks), culprit=sum(ranks) - 1)
    for_monitors = "127.0.0.1"
    assert sorted(re.findall("listens at (.*)", result.out)) == ["10.99.0.1", for_monitors], result.text


@full  # test_a_stopped_rank_on_another_node, on two hosts
@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("stall", ["is stopped", "holds the GIL"])
def test_a_stall_on_another_host(two_hosts, mpi, stall):
    does, words = STALLS[stall]
    result = two_hosts.run(mpi, [1, 2], "-c", program(does, who=2), timeout_s=30, env=LIMITS)
    check_stall(result, "allreduce", words)
    assert re.search(rf"rank 2 +{two_hosts.names[1]} +", result.err), result.text


@pytest.mark.parametrize("mpi", MPIS)
def test_a_death_on_another_host(two_hosts, mpi):
    result = two_hosts.run(mpi, [1, 1], "-c", program("os.kill(os.getpid(), 9)"), timeout_s=30)
    assert result.code != 0, result.text
    assert re.search(rf"allred: .*rank 1 on {two_hosts.names[1]} was killed by signal 9 ", result.err), result.text


# ---- ranks that differ


@pytest.mark.parametrize(
    "checks",
    [{"mpi": "basic", "shm": "full"}, pytest.param({"mpi": "full", "shm": "basic"}, marks=full)],
    ids=["on shm", "on mpi"],
)
def test_a_mismatch_says_where_each_rank_called_and_check_full_compares_the_lines(checks):
    code = (
        "import os\nimport numpy as np, allred\n"
        "def one(): return allred.allreduce(np.ones(4), name='g')\n"
        "def two(): return allred.allreduce(np.ones(4), name='g')\n"
        f"for backend, check in {checks}.items():\n"
        "    os.environ.update(ALLRED_BACKEND=backend, ALLRED_CHECK=check); allred.init(banner=False)\n"
        "    rank, texts = allred.rank(), []\n"
        "    for calls in [(one, allred.barrier), (one, two), (one, one)]:\n"
        "        try: calls[rank > 0]()\n"
        "        except allred.MismatchError as error: texts.append(str(error))\n"
        "        else: texts.append('agreed')\n"
        "    assert len(set(allred.allgather_object(tuple(texts)))) == 1\n"
        "    if rank == 0: print('\\n'.join(texts), flush=True)\n"
        "    allred.shutdown()\n"
    )
    result = mpirun(3, "-c", code, timeout_s=40)
    assert result.code == 0, result.text
    lines = [line for line in result.out.splitlines() if "an earlier operation failed" not in line]
    for check in checks.values():
        expected = [
            "ranks called different operations: allreduce(Average) 'g' float64 (4,) on rank 0;",
            "  called at <string>:3 on rank 0; <string>:9 on ranks 1-2",
        ]
        if check == "full":
            expected += [
                "allreduce(Average) 'g' float64 (4,): ranks call it at different lines",
                "  called at <string>:3 on rank 0; <string>:4 on ranks 1-2",
            ]
        else:
            expected += ["agreed"]
        expected += ["agreed"]
        assert all(line.startswith(words) for line, words in zip(lines, expected, strict=False)), result.text
        lines = lines[len(expected) :]
    assert lines == [], result.text


# ---- at bad moments


@pytest.mark.cover(0)
@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("repetition", range(5))
def test_a_failure_just_after_a_collective_is_heard_of_too(mpi, repetition):
    """When it comes the others are at the end of their wait, where the handler leaves it to the loop."""
    code = (
        "import sys, time, allred\nallred.init(banner=False)\n"
        "for _ in range(20): allred.allgather_object(1)\n"
        "allred.barrier()\n"
        "if allred.rank() == 1: sys.exit(3)\n"
        "try: time.sleep(20)\n"
        "finally: print('finally on', allred.rank(), flush=True)\n"
    )
    result = mpirun(3, "-c", code, mpi=mpi, timeout_s=40)
    assert result.code == 3, result.text
    assert {"finally on 0", "finally on 2"} <= set(result.out.splitlines()), result.text


@pytest.mark.parametrize("mpi", MPIS)
def test_it_is_spawned_before_mpi_starts(mpi, mark):
    code = (
        "import subprocess, sys, allred\n"
        "class Noted(subprocess.Popen):\n"
        "    def __init__(self, *arguments, **options):\n"
        "        print('MPI' if 'mpi4py.MPI' in sys.modules else 'before MPI', flush=True)\n"
        "        super().__init__(*arguments, **options)\n"
        "subprocess.Popen = Noted\n"
        "allred.init(banner=False)\n"
    )
    result = mpirun(2, "-c", code, mpi=mpi, env=mark)
    assert (result.code, result.out) == (0, "before MPI\n"), result.text
    assert gone(mark, within_s=5)


@pytest.mark.parametrize("mpi", MPIS)
def test_killed_in_init_it_leaves_no_watcher(mpi, mark):
    code = (
        "import os, allred\nfrom allred.watch.watcher_client import WatcherClient\n"
        "rank = os.environ.get('PMI_RANK') or os.environ['OMPI_COMM_WORLD_RANK']\n"
        "original = WatcherClient.__init__\n"
        "def dies(*args, **kwargs):\n"
        "    if rank == '1': os.kill(os.getpid(), 9)\n"
        "    original(*args, **kwargs)\n"
        "WatcherClient.__init__ = dies\nallred.init(banner=False)\n"
    )
    result = mpirun(2, "-c", code, mpi=mpi, timeout_s=40, env=mark)
    assert result.code != 0, result.text
    assert gone(mark, within_s=5)
