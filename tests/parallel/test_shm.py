"""What the shm backend promises beyond the contract: every way into an operation matches every other, sums in rank
order bit for bit, nothing is left behind, and the GIL is free meanwhile."""

import contextlib
import gc
import os
import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import allred
from allred import native
from allred.comm.backends.mpi_bootstrap import MpiBootstrap
from allred.comm.communicator import Communicator
from allred.comm.create import create
from allred.comm.select import TransportFacts
from allred.config import Config
from allred.errors import AllredError, MismatchError

if not native.available:
    pytest.skip(f"C extension: {native.reason}", allow_module_level=True)

from allred.comm.backends.shm import CHUNK_BYTES, ShmBackend, segment_memory

pytestmark = pytest.mark.mpi
several = pytest.mark.skipif(MPI.COMM_WORLD.Get_size() == 1, reason="takes several ranks")


def make():
    """A communicator of all ranks on one node; of one rank too."""
    world = MPI.COMM_WORLD
    return Communicator(ShmBackend(world.Get_rank(), world.Get_size(), segment_memory(MpiBootstrap(world))), 20.0)


@pytest.fixture
def shm():
    communicator = make()
    yield communicator
    if not communicator.queue.poisoned:
        communicator.barrier().wait()
    communicator.close()


def data(rank, shape, dtype):
    """Small whole numbers: exact sums in any dtype and order."""
    return ((np.arange(np.prod(shape, dtype=int)) + 3 * rank) % 5).reshape(shape).astype(dtype)


def total(size, shape, dtype):
    return sum(data(r, shape, np.int64) for r in range(size)).astype(dtype)


# ---- ranks that take different ways match


def strided(x):
    wide = np.zeros((*x.shape, 2), x.dtype)
    wide[..., 1] = x
    return wide[..., 1]


def locked(x):
    x.flags.writeable = False
    return x


class Subclass(np.ndarray):
    pass


# Which array rank r passes is LAYOUTS[(r + turn) % 5]; only the first takes the fast path.
LAYOUTS = [np.ascontiguousarray, np.asfortranarray, strided, lambda x: x[::-1].copy()[::-1], lambda x: x.view(Subclass)]
SHAPES = [(), (0, 3), (1,), (5, 7), (3, 1009), (3, CHUNK_BYTES // 8 + 5)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32", "int64"])
def test_layouts_differ_between_ranks(shm, shape, dtype):
    result = total(shm.size, shape, dtype)
    for turn in range(len(LAYOUTS)):
        layout = LAYOUTS[(shm.rank + turn) % len(LAYOUTS)] if shape else np.array
        x = layout(data(shm.rank, shape, dtype))
        for y in (
            shm.allreduce_blocking(x, False, allred.Sum, "w"),
            shm.allreduce_blocking(locked(x.copy()), False, allred.Sum, "w"),
            shm.allreduce_blocking(x, True, allred.Sum, "w"),
        ):
            assert (y.dtype, y.shape) == (dtype, shape)
            np.testing.assert_array_equal(y, result)


@pytest.mark.parametrize("in_place", [True, False])
def test_groups_whose_layouts_differ_between_ranks(shm, in_place):
    shapes = [(3, 2), (), (0, 4), (2, CHUNK_BYTES // 8), (1009, 3), (2, 2), (0,), (7, 5)]
    dtypes = ["f4", "f8", "f4", "f4", "f2", "i4", "i8", "f8"]
    for turn in range(len(LAYOUTS)):
        layout = LAYOUTS[(shm.rank + turn) % len(LAYOUTS)]
        group = [data(shm.rank, s, d) for s, d in zip(shapes, dtypes, strict=True)]
        group = [layout(x) if x.ndim > 1 else x for x in group]
        results = shm.grouped_allreduce_blocking(group, in_place, allred.Sum, "g")
        for x, y, shape, dtype in zip(group, results, shapes, dtypes, strict=True):
            np.testing.assert_array_equal(y, total(shm.size, shape, dtype))
            assert (x is y) == in_place


def test_public_functions_and_methods_match(rank, size):
    """One rank on the fast path of allred.allreduce_, its neighbour in a Work that it waits for."""
    comm = allred.comm.functions.current()
    public = [
        lambda x: allred.allreduce_(x, allred.Sum),
        lambda x: allred.allreduce(x, allred.Sum),
        lambda x: allred.grouped_allreduce_([x, x[:2].copy()], allred.Sum)[0],
        lambda x: allred.grouped_allreduce((x, x[:2]), allred.Sum)[0],
    ]
    methods = [
        lambda x: comm.allreduce(x, allred.Sum, in_place=True).wait(),
        lambda x: comm.allreduce(x, allred.Sum).wait(),
        lambda x: comm.grouped_allreduce([x, x[:2]], allred.Sum).wait()[0],
        lambda x: comm.grouped_allreduce([x, x[:2].copy()], allred.Sum, in_place=True).wait()[0],
    ]
    for length in (3, 5000):
        for turn in range(2):
            for one, other in zip(public, methods, strict=True):
                y = (one if (rank + turn) % 2 else other)(data(rank, (length,), "f4"))
                np.testing.assert_array_equal(y, total(size, (length,), "f4"))


def test_calls_after_works_that_are_not_waited_for_come_after_them(shm):
    for length in (3, CHUNK_BYTES):
        for turn in range(2):
            y = data(shm.rank, (length,), "f8")
            if (shm.rank + turn) % 2:
                works = [shm.allreduce(y, allred.Sum, in_place=True) for _ in range(3)]
            else:
                works = [shm.allreduce_blocking(y, True, allred.Sum, "") for _ in range(3)]
            z = shm.allreduce_blocking(y, False, allred.Sum, "")
            assert all(work is y or work.done() for work in works)
            np.testing.assert_array_equal(y, total(shm.size, (length,), "f8") * shm.size**2)
            np.testing.assert_array_equal(z, y * shm.size)


X = np.ones(3, np.float32)
DIFFERENT = {
    "shape": (X, np.ones((3, 1), np.float32), allred.Sum, "w"),
    "dtype": (X, np.ones(3, np.int32), allred.Sum, "w"),
    "op": (X, X, allred.Max, "w"),
    "name": (X, X, allred.Sum, "v"),
    "long": (np.ones(10**6, np.float32), np.ones(10**6 + 1, np.float32), allred.Sum, "w"),
}


@several
@pytest.mark.parametrize("odd_layout", [np.array, strided], ids=["fast path", "general path"])
@pytest.mark.parametrize("what", DIFFERENT)
def test_a_mismatch_is_the_same_error_on_all_ranks_and_the_next_call_works(shm, what, odd_layout):
    theirs, value, op, name = DIFFERENT[what]
    odd = shm.size - 1
    mine = (odd_layout(value), False, op, name) if shm.rank == odd else (theirs, False, allred.Sum, "w")
    for now in (shm.allreduce_blocking, lambda x, *rest: shm.grouped_allreduce_blocking([x, X], *rest)):
        with pytest.raises(MismatchError, match=rf" on ranks? 0.*; .* on rank {odd};") as error:
            now(*mine)
        assert len(set(allred.allgather_object(str(error.value)))) == 1
        assert now(X, False, allred.Sum, "")[0].max() == shm.size


# ---- bits


def mixed(rank, count, dtype):
    """Values of very different magnitude: another order of the sum gives other bits."""
    rng = np.random.default_rng([rank, count])
    return (rng.normal(size=count) * 10.0 ** rng.integers(-3, 4, count)).astype(dtype)


CARD, CHUNK = 2048, CHUNK_BYTES  # bytes
SIZES = [CARD - 4, CARD, CARD + 4, 16384, 2 * CARD * 5 + 12, CHUNK - 4, CHUNK, CHUNK + 4, 3 * CHUNK + 20]


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_sums_are_those_of_numpy_in_rank_order(shm, nbytes, dtype):
    ranks = [mixed(r, nbytes // np.dtype(dtype).itemsize, dtype) for r in range(shm.size)]
    wire = np.float64 if dtype is np.float64 else np.float32
    result = ranks[0].astype(wire)
    for other in ranks[1:]:
        result = result + other.astype(wire)
    for op, expected in ((allred.Sum, result), (allred.Average, result / wire(shm.size))):
        with np.errstate(over="ignore"):
            expected = expected.astype(dtype)
        for late in range(shm.size):  # whoever comes last, whichever way: the same bits
            if shm.rank == late:
                time.sleep(0.001)
            x = ranks[shm.rank].copy()
            y = shm.allreduce_blocking(x if late % 2 else strided(x), False, op, "")
            assert y.tobytes() == expected.tobytes()
    assert shm.size < 3 or nbytes < CHUNK or dtype is np.float64 or _order_matters(ranks, wire)


def _order_matters(ranks, wire):
    backwards = sum((x.astype(wire) for x in ranks[-2::-1]), ranks[-1].astype(wire))
    forwards = sum((x.astype(wire) for x in ranks[1:]), ranks[0].astype(wire))
    return backwards.tobytes() != forwards.tobytes()


# ---- communicators come and go


def footprint():
    """Descriptors, and mappings of allred's memory."""
    with open("/proc/self/maps") as maps:
        return len(os.listdir("/proc/self/fd")), maps.read().count("memfd:allred")


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def next_numbers():
    """Both MPIs number communicators, and give away again the numbers that came back: a leak moves the next ones."""
    probes = [MPI.COMM_WORLD.Dup() for _ in range(4)]
    numbers = {probe.py2f() for probe in probes}
    for probe in probes:
        probe.Free()
    return numbers


def test_two_communicators_in_turn_then_one_alone():
    fds, maps = footprint()
    one, two = make(), make()
    assert footprint() == (fds + 2, maps + 2)
    for step in range(20):
        for comm, factor in ((one, 1), (two, 2)):
            y = comm.allreduce_blocking(np.full(1 + 700 * step, factor * step), True, allred.Sum, "")
            assert (y == factor * step * comm.size).all()
    work = two.allreduce(np.ones(3), allred.Sum)
    one.barrier().wait()
    one.close()
    assert footprint() == (fds + 1, maps + 1)
    assert work.wait().tolist() == [two.size] * 3
    assert set(two.allreduce_blocking(np.ones(40_000), True, allred.Sum, "")) == {two.size}
    with pytest.raises(AllredError, match="it was shut down"):
        one.allreduce_blocking(np.ones(3), True, allred.Sum, "")
    two.barrier().wait()
    two.close()
    assert footprint() == (fds, maps)


def created():
    """As allred.init() has it made; where there is one rank that is no shm, but it comes and goes all the same."""
    return create(
        MpiBootstrap(MPI.COMM_WORLD.Dup()), [TransportFacts()] * MPI.COMM_WORLD.Get_size(), Config(backend="shm")
    )[0]


def on_nodes():
    """The same over pretended nodes, the last rank alone on its own."""
    facts = [TransportFacts()] * (MPI.COMM_WORLD.Get_size() - 1) + [TransportFacts(node=1)]
    return create(MpiBootstrap(MPI.COMM_WORLD.Dup()), facts, Config(backend="shm", transport="mpi"))[0]


# A lost descriptor, mapping or communicator shows after any number of rounds, lost memory after many: 8 kB in each.
@pytest.mark.parametrize(("make_one", "rounds"), [(make, 300), (created, 20), (on_nodes, 20)])
def test_hundreds_of_communicators_leave_nothing_behind(make_one, rounds):
    def once():
        comm = make_one()
        comm.allreduce_blocking(np.ones(300), True, allred.Sum, "")
        comm.barrier().wait()
        comm.close()

    for _ in range(10):  # what is made once and kept
        once()
    gc.collect()  # communicators of earlier tests in reference cycles must not be freed during the rounds
    before, numbers, resident = footprint(), next_numbers(), resident_bytes()
    for _ in range(rounds):
        once()
    assert (footprint(), next_numbers()) == (before, numbers)
    if make_one is make:  # the others have buffers of MPI, of which malloc keeps some
        assert resident_bytes() < resident + 2**20


# ---- threads and forks


def runs_during(call):
    """Whether a thread that is ready to run did so before `call` returned, though nobody is made to give the GIL up."""
    go, ran = threading.Event(), []
    thread = threading.Thread(target=lambda: (go.wait(), ran.append(1)))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        thread.start()
        time.sleep(0.001)  # the thread is in go.wait() now
        go.set()
        call()
        return bool(ran)
    finally:
        sys.setswitchinterval(interval)
        thread.join()


IN_C = [
    lambda shm, x: shm.allreduce_blocking(x, True, allred.Sum, ""),
    lambda shm, x: shm.allreduce(x, allred.Sum, in_place=True).wait(),
]
fast_and_general = pytest.mark.parametrize("call", IN_C, ids=["fast path", "general path"])


@several
@fast_and_general
@pytest.mark.parametrize("length", [3, 10**5])
def test_the_gil_is_free_while_a_rank_waits(shm, call, length):
    x, ran = np.zeros(length), []
    for _ in range(20):
        if shm.rank == 0:
            time.sleep(0.003)
        ran.append(runs_during(lambda: call(shm, x)))
    assert any(ran) or shm.rank == 0


@fast_and_general
def test_the_gil_is_free_while_bytes_move(shm, call):
    """With one rank there is nothing to wait for: it is the bytes alone."""
    x = np.zeros(2**22, np.float32)
    ran = [runs_during(lambda: call(shm, x)) for _ in range(10)]
    assert any(ran)


def test_runs_during_can_say_no():
    assert not any(runs_during(lambda: sum(range(10**6))) for _ in range(5))


@several
@pytest.mark.parametrize("wait_s", [0, 0.02], ids=["in C", "in the queue"])
def test_no_other_thread_while_one_is_inside(shm, wait_s):
    x, y = np.full(3, 1.0), np.full(3, 5.0)
    if shm.rank:
        thread = threading.Thread(target=shm.allreduce_blocking, args=(x, True, allred.Sum, ""))
        thread.start()
        while not shm.backend.segment.pending:
            time.sleep(0)
        time.sleep(wait_s)
        for call in (shm.allreduce_blocking, lambda *_: shm.allreduce(y, in_place=True), lambda *_: shm.barrier()):
            with pytest.raises(AllredError, match="two threads use allred at once"):
                call(y, True, allred.Sum, "")
        allred.barrier()
        thread.join()
    else:
        allred.barrier()
        shm.allreduce_blocking(x, True, allred.Sum, "")
    assert x.tolist() == [shm.size] * 3
    assert y.tolist() == [5] * 3


@pytest.mark.filterwarnings("ignore:This process")  # is multi-threaded: MPI's threads
def test_a_forked_child_gets_an_error(shm):
    calls = (
        lambda: shm.allreduce_blocking(np.ones(3), True, allred.Sum, ""),
        lambda: shm.grouped_allreduce_blocking([np.ones(3)], True, allred.Sum, ""),
        lambda: shm.barrier().wait(),
    )
    child = os.fork()
    if child == 0:
        refused = 0
        try:
            for call in calls:
                with contextlib.suppress(AllredError):
                    call()
                    continue
                refused += 1
        finally:
            os._exit(refused)
    deadline, ended = time.monotonic() + 10, 0
    while not ended and time.monotonic() < deadline:
        time.sleep(0.001)
        ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended, "the child hangs"
    assert os.waitstatus_to_exitcode(status) == len(calls)
    assert shm.allreduce_blocking(np.ones(3), True, allred.Sum, "").tolist() == [shm.size] * 3
