"""The shm backend in whole programs: ranks that are killed, stopped, interrupted or kept apart, and several nodes."""

import os
import re

import pytest
from harness import BIN, MPICH_BY_DEFAULT, MPIS, ROOT, full, gone, mpirun, run

DIGITS = ROOT / "examples/digits_sync.py"
BY_MPI = {"ALLRED_TRANSPORT": "mpi"}  # between nodes; test_tcp.py has the other transport
NOT_OURS = ("mpich_", "sm_segment", "vader", "ucx_", "ompi", "osc_", "pmix", "sem.")  # MPI's, and other programs'

START = """
import os, signal, sys, threading, time
import numpy as np
RANK = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
{before}
import allred
from allred.comm import functions
from allred.comm.backends import segment
{patch}
allred.init()
rank, size = allred.rank(), allred.size()
"""

# Every collective once, small and large; then what serves.
CHECK = """
total = size * (size - 1) // 2
for count in (1, 600, 40_000, 300_000):
    ramp = np.arange(count) % 7
    for dtype in (np.float32, np.int64):
        assert (allred.allreduce((ramp + rank).astype(dtype), allred.Sum) == size * ramp + total).all(), count
    assert (allred.broadcast(ramp + rank, root=size - 1) == ramp + size - 1).all()
for mean in allred.grouped_allreduce([np.full(5, rank, "f4"), np.full((2, 50_000), rank, "f8"), np.zeros(0)]):
    assert (mean == total / size).all()
assert allred.allgather(np.full(rank + 1, rank)).tolist() == [r for r in range(size) for _ in range(r + 1)]
assert allred.reducescatter(np.arange(2 * size), allred.Sum).tolist() == [2 * rank * size, (2 * rank + 1) * size]
assert allred.alltoall(np.full(size, rank))[0].tolist() == list(range(size))
assert allred.allgather_object("x" * rank * 10_000) == ["x" * r * 10_000 for r in range(size)]
allred.barrier()
print(f"right by {functions.current().name}\\n", end="", flush=True)
"""


def program(after=CHECK, before="", patch=""):
    return START.format(before=before, patch=patch) + after


def assert_nothing_left(variable, before, result):
    assert gone(variable, 5), result.text  # so nobody holds the memory either: it has no name
    left = set(os.listdir("/dev/shm")) - before
    assert not [name for name in left if not name.startswith(NOT_OURS)], result.text


# ---- ranks that are killed, stopped, interrupted

KILLED = """
x = np.ones(2**22, np.float32)
allred.barrier()
assert "memfd:allred" in open("/proc/self/maps").read()
if rank in {whom}:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
print("begun", flush=True)
while True:
    allred.allreduce_(x)
"""


@pytest.mark.parametrize("whom", [(1,), pytest.param((0, 1), marks=full)], ids=["one", "all"])
@pytest.mark.parametrize("mpi", MPICH_BY_DEFAULT)
def test_nothing_is_left_of_killed_ranks(mpi, whom, mark):
    before = set(os.listdir("/dev/shm"))
    result = mpirun(2, "-c", program(KILLED.format(whom=whom)), mpi=mpi, timeout_s=40, env=mark)
    assert result.code != 0, result.text
    assert result.out.count("begun") == 2, result.text
    assert_nothing_left(mark, before, result)


# Rank 0 stops rank 1, wakes it {after} s later, and looks how much CPU time its own wait takes in the last second.
STOPPED = """
pids = allred.allgather_object(os.getpid())
spent = []
def measure():
    time.sleep({after} - 1)
    start = time.process_time()
    time.sleep(1)
    spent.append(time.process_time() - start)
    os.kill(pids[1], signal.SIGCONT)
if rank == 0:
    os.kill(pids[1], signal.SIGSTOP)
    thread = threading.Thread(target=measure, daemon=True)
    thread.start()
else:
    time.sleep(0.3)  # not ahead of being stopped, with its part of a small operation shown already
start = time.monotonic()
y = allred.allreduce(np.full({count}, rank), allred.Sum)
assert (y == size * (size - 1) // 2).all()
if rank == 0:
    assert time.monotonic() - start > {after} - 0.1
    thread.join()
    print("share of a core:", spent[0])
"""


@pytest.mark.parametrize(("mpi", "count"), [("mpich", 10**6), pytest.param("openmpi", 3, marks=full)])
def test_a_stopped_rank_is_waited_for_without_burning_a_core(mpi, count, mark):
    result = mpirun(2, "-c", program(STOPPED.format(after=3, count=count) + CHECK), mpi=mpi, timeout_s=40, env=mark)
    assert (result.code, result.out.count("right by shm")) == (0, 2), result.text
    assert float(result.out.split("share of a core:")[1].split()[0]) < 0.3, result.text


INTERRUPTED = """
pids = allred.allgather_object(os.getpid())
if rank == 0:
    time.sleep(0.5)
    os.kill(pids[1], signal.SIGINT)
    time.sleep(60)
try:
    allred.allreduce_(np.ones({count}))
finally:
    if rank == 1:
        print("left by", sys.exc_info()[0].__name__, flush=True)
"""


@pytest.mark.parametrize(("mpi", "count"), [("mpich", 3), pytest.param("openmpi", 10**6, marks=full)])
def test_an_interrupt_ends_a_wait(mpi, count, mark):
    before = set(os.listdir("/dev/shm"))
    result = mpirun(2, "-c", program(INTERRUPTED.format(count=count)), mpi=mpi, timeout_s=40, env=mark)
    assert result.code != 0, result.text
    assert "left by KeyboardInterrupt" in result.out, result.text
    assert_nothing_left(mark, before, result)


@full
def test_more_ranks_than_cores():
    """Under MPICH test_examples.py has it, with the training of the next test; by default test_bench.py."""
    few = "for count in (1, 300_000): assert (allred.allreduce(np.full(count, rank), allred.Sum) == 10).all()\n"
    result = mpirun(5, "-c", program(few + "print('right\\n', end='')"), mpi="openmpi")
    assert (result.code, result.out.count("right")) == (0, 5), result.text
    assert "backend shm" in result.err, result.text
    assert "5 ranks on " in result.err, result.text


@full
@pytest.mark.limit(160)
def test_training_on_more_ranks_than_cores():
    result = mpirun(8, DIGITS, mpi="openmpi", timeout_s=150)
    assert_good_digits(result)
    assert "8 ranks on " in result.err, result.text
    assert "backend shm" in result.err, result.text


def assert_good_digits(result):
    equal, same, accuracy = result.out.strip().split("\n")[-3:]
    assert result.code == 0, result.text
    assert equal.startswith("parameters equal on all ranks: yes"), result.text
    assert same.startswith("same as one rank on the global batch: yes"), result.text
    assert float(accuracy.removeprefix("test accuracy: ")) > 0.9, result.text


# ---- memory that cannot be shared, or not in this way

REFUSE = """
def refuse(way):
    def refused(comm, fd):
        got = way(comm, fd)
        if RANK != {odd}: return got
        if got >= 0: os.close(got)
        return {instead}
    return refused
"""
NO_PROC = "segment._through_proc = refuse(segment._through_proc)\n"
NO_SOCKET = "segment.over_socket = refuse(segment.over_socket)\n"
NO_MEMFD = "def fail(*_): raise OSError(28, 'No space left on device')\nif RANK == 0: os.{function} = fail\n"
ANOTHER_USER = "segment.DESCRIPTOR_S = 0.5\nif RANK == 0: os.geteuid = lambda: 12345\n"

# Rank 2 is led to a memfd of its own: of the same size, and in the worst case with the same first bytes.
WRONG = """
true_map, led = segment._map, []
def wrong(fd, nbytes, identity, offset=0):
    if RANK == 2 and not led:
        led.append(os.memfd_create("other"))
        os.ftruncate(led[0], nbytes)
        os.pwrite(led[0], {nonce}, 0)
        os.close(fd)
        fd = os.dup(led[0])
    return true_map(fd, nbytes, identity, offset)
segment._map = wrong
"""
WRONG_CHECK = """
maps = open("/proc/self/maps").read()
assert maps.count("memfd:allred") == 1 and "memfd:other" not in maps
assert rank < 2 or led
"""
WAYS = {  # what changes before init(), the backend that the ranks agree on, and what is checked after it
    "no /proc": (REFUSE.format(odd=2, instead=-1) + NO_PROC, "shm", ""),
    "no /proc for the first": (REFUSE.format(odd=0, instead=-1) + NO_PROC, "shm", ""),
    "no /proc, no socket": (REFUSE.format(odd=1, instead=-1) + NO_PROC + NO_SOCKET, "mpi", ""),
    "refused as another user's": (REFUSE.format(odd=2, instead=-1) + NO_PROC + ANOTHER_USER, "mpi", ""),
    "no memfd": (NO_MEMFD.format(function="memfd_create"), "mpi", ""),
    "no room": (NO_MEMFD.format(function="posix_fallocate"), "mpi", ""),
    "another process's file": (WRONG.format(nonce="bytes(16)"), "shm", WRONG_CHECK),
    "another process's file that looks the same": (WRONG.format(nonce="identity.nonce"), "shm", WRONG_CHECK),
}
EACH_WAY = """
saved = [(module, dict(vars(module))) for module in (segment, os)]
for patch, _, check in {ways!r}:
    exec(patch)
    allred.init()
    rank, size = allred.rank(), allred.size()
    exec(check + CHECK)
    allred.shutdown()
    for module, names in saved:
        vars(module).update(names)
"""


@pytest.mark.parametrize("mpi", MPIS)
def test_ranks_agree_on_another_way_to_share_memory_or_on_mpi(mpi, mark):
    """All ways in one job: a world each."""
    ways = list(WAYS.values())
    code = START.partition("{patch}")[0].format(before="") + f"CHECK = {CHECK!r}\n" + EACH_WAY.format(ways=ways)
    result = mpirun(3, "-c", code, mpi=mpi, timeout_s=40, env=mark)
    assert result.code == 0, result.text
    reasons = {"shm": "ranks share a node", "mpi": "no two ranks could share memory"}
    expected = [f"{backend} ({reasons[backend]}" for _, backend, _ in ways]
    assert re.findall(r"backend (\w+ \([^;)]*)", result.err) == expected, result.text
    for backend in ("shm", "mpi"):
        worlds = sum(way[1] == backend for way in ways)
        assert result.out.count(f"right by {backend}") == 3 * worlds, result.text


NAMESPACES = {
    "pid": (["--pid"], {}, "shm", "ranks share a node"),
    # MPICH's own copies between processes go by pid (CMA), and without this it reads from the wrong one [ran].
    "pid and net": (
        ["--pid", "--net"],
        {"MPIR_CVAR_CH4_CMA_ENABLE": "0"},
        "mpi",
        "no two ranks could share memory; on one node that takes /proc or a Unix socket between them",
    ),
}


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces take root")
@pytest.mark.parametrize("kinds", NAMESPACES)
def test_ranks_in_namespaces_of_their_own(kinds, mark):
    """As in a container each. With Open MPI no two such ranks can speak to each other, allred or not."""
    options, environment, backend, reason = NAMESPACES[kinds]
    unshare = ["unshare", *options, "--fork", "--kill-child", "--mount-proc"]
    if run([*unshare, "true"]).code:
        pytest.skip("unshare cannot make namespaces here")
    # Whatever the number of the first rank's descriptor, the others find one in /proc/1/fd: of their own.
    led = "if RANK: [os.ftruncate(os.memfd_create('other'), 2**26) for _ in range(100)]"
    own = "assert os.getpid() == 1 and 'memfd:other' not in open('/proc/self/maps').read()\n"
    launcher = [BIN["mpich"] / "mpirun", "-np", 2, *unshare, BIN["mpich"] / "python"]
    result = run([*launcher, "-c", program(own + CHECK, before=led)], timeout_s=40, env={**mark, **environment})
    assert (result.code, result.out.count(f"right by {backend}")) == (0, 2), result.text
    assert f"backend {backend} ({reason})" in result.err, result.text


@pytest.mark.parametrize("mpi", MPIS)
def test_without_the_extension_on_one_rank(mpi):
    before = "if RANK == 1: sys.modules['allred.native._kernels'] = None"
    result = mpirun(2, "-c", program(before=before), mpi=mpi, timeout_s=40)
    assert (result.code, result.out.count("right by mpi")) == (0, 2), result.text
    assert "backend mpi (rank 1 lacks the C extension, which shared memory needs)" in result.err, result.text


# ---- several nodes

NUMBERS = (
    "print(rank, allred.local_rank(), allred.local_size(), allred.cross_rank(), allred.cross_size(), flush=True)\n"
)
NODES = {
    "2,1": ["0 0 2 0 2", "1 1 2 0 1", "2 0 1 1 2"],
    "1,1,1": ["0 0 1 0 3", "1 0 1 1 3", "2 0 1 2 3"],
    "2,2": ["0 0 2 0 2", "1 1 2 0 2", "2 0 2 1 2", "3 1 2 1 2"],
    "3,1": ["0 0 3 0 2", "1 1 3 0 1", "2 2 3 0 1", "3 0 1 1 2"],
}
EACH_NODES = """
def init(sizes):
    os.environ["ALLRED_PRETEND_NODES"] = sizes
    allred.init()

for sizes in {wrong}:
    try: init(sizes)
    except allred.ConfigError as error: print(f"{{error}}\\n", end="", flush=True)
for sizes in {right}:
    init(sizes)
    rank, size = allred.rank(), allred.size()
    exec(CHECK)
    for number in range(size):
        allred.barrier()
        if number == rank: exec(NUMBERS)
    allred.shutdown()
"""


@pytest.mark.parametrize("right", [("2,1", "1,1,1"), pytest.param(("2,2", "3,1"), marks=full)])
@pytest.mark.parametrize("mpi", MPIS)
def test_pretended_nodes_and_those_that_make_no_sense(mpi, right):
    """A world for each in one job."""
    wrong, ranks = ["2,2,2", "3,0", "3,x", "-1,4", "", "9" * 20 + ",1"], len(NODES[right[0]])
    code = START.partition("{patch}")[0].format(before="") + f"CHECK, NUMBERS = {CHECK!r}, {NUMBERS!r}\n"
    result = mpirun(ranks, "-c", code + EACH_NODES.format(wrong=wrong, right=right), mpi=mpi, timeout_s=40, env=BY_MPI)
    assert result.code == 0, result.text
    for sizes in wrong:
        words = f"pretend_nodes={sizes!r} must be numbers of ranks, such as 2,2, that add up to {ranks}"
        assert result.out.count(words) == ranks, result.text
    lines = result.out.split("\n")
    expected = [line for sizes in right for line in NODES[sizes]]
    assert sorted(line for line in lines if line[:1].isdecimal()) == sorted(expected), result.text
    banners = [line for line in result.err.split("\n") if line.startswith("allred: 0.")]
    assert len(banners) == len(right), result.text
    for sizes, banner in zip(right, banners, strict=True):
        assert f"{ranks} ranks on {len(sizes.split(','))} nodes, chief on " in banner, result.text
        alone = set(sizes.split(",")) == {"1"}
        reason = "mpi (every rank is on a node of its own; " if alone else "shm_mpi (ranks share a node; "
        assert f"backend {reason}" in banner, result.text
    alone = sum(set(sizes.split(",")) == {"1"} for sizes in right)
    assert lines.count("right by mpi") == ranks * alone, result.text
    assert lines.count("right by shm_mpi") == ranks * (len(right) - alone), result.text


def on_hosts(hosts, *arguments):
    launcher = [BIN["mpich"] / "mpiexec", "-launcher", "fork", "-hosts", hosts, "-n", 3, BIN["mpich"] / "python"]
    return run([*launcher, *arguments], timeout_s=40, env=BY_MPI)


@full  # by default on pretended nodes, above
def test_ranks_on_two_hosts():
    result = on_hosts("nodea:2,nodeb:1", "-c", program(CHECK + f"time.sleep(0.1 * rank)\n{NUMBERS}"))
    assert (result.code, result.out.count("right by shm_mpi")) == (0, 3), result.text
    lines = result.out.split("\n")
    assert sorted(line for line in lines if line[:1].isdecimal()) == NODES["2,1"], result.text
    assert "3 ranks on 2 nodes" in result.err, result.text
    assert "backend shm_mpi (" in result.err, result.text


@full
def test_training_on_two_hosts_gives_the_result_of_one():
    two, one = on_hosts("nodea:2,nodeb:1", DIGITS), mpirun(3, DIGITS)
    assert_good_digits(two)
    assert "backend shm_mpi (" in two.err, two.text
    assert two.out.strip().split("\n")[-1] == one.out.strip().split("\n")[-1], two.text
