"""Started operations: many under way, waited for in any order, with peers that hold the GIL, differ, or let go."""

import ctypes
import gc
import os
import pathlib
import random
import select
import struct
import threading
import time

import numpy as np
import pytest
from mpi4py import MPI

import allred
from allred.comm import functions
from allred.comm.backends.shm import ShmBackend
from allred.comm.communicator import Communicator
from allred.errors import AllredError, InputError, MismatchError

pytestmark = pytest.mark.mpi


@pytest.fixture(params=["thread", "caller"])
def who(request):
    return request.param


@pytest.fixture
def comm(comm, who):
    """Each backend, with the thread where there is one, and without."""
    if who == "thread":
        comm.backend.start_progress_thread()
        if not isinstance(comm.backend, ShmBackend):
            pytest.skip("no thread there")
    return comm


def several(comm):
    if comm.size == 1:
        pytest.skip("takes several ranks")


def data(rank, count):
    return ((np.arange(count) + 3 * rank) % 5).astype(np.float32)


def total(size, count):
    return sum(data(r, count) for r in range(size))


def start(comm, rng, number):
    """An operation of a random kind and size: the work, and what its result has to be. All ranks draw the same."""
    kind, name = rng.choice(KINDS), f"op {number}"
    count = rng.choice((0, 1, 7, 1009, 40_000, 200_000)) * (1 if kind != "alltoall" else comm.size)
    mine, size = data(comm.rank, count), comm.size
    if kind == "allreduce_":
        return comm.allreduce(mine, allred.Sum, name, in_place=True), total(size, count)
    if kind == "allreduce":
        return comm.allreduce(mine, allred.Sum, name), total(size, count)
    if kind == "group":
        return comm.grouped_allreduce([mine, mine[:3].copy()], allred.Sum, name, in_place=True), [
            total(size, count),
            total(size, count)[:3],
        ]
    if kind == "broadcast":
        root = rng.randrange(size)
        return comm.broadcast(mine, root, name), data(root, count)
    if kind == "allgather":
        return comm.allgather(mine[: count // (1 + comm.rank)], name), np.concatenate(
            [data(r, count)[: count // (1 + r)] for r in range(size)]
        )
    if kind == "reducescatter":
        return comm.reducescatter(mine, allred.Sum, name), np.array_split(total(size, count), size)[comm.rank]
    if kind == "alltoall":
        return comm.alltoall(mine, name=name), np.concatenate(
            [np.split(data(r, count), size)[comm.rank] for r in range(size)]
        )
    return comm.barrier(), None


KINDS = ["allreduce", "allreduce_", "group", "broadcast", "allgather", "reducescatter", "alltoall", "barrier"]


def check(result, expected):
    if isinstance(expected, list):
        for got, want in zip(result, expected, strict=True):
            np.testing.assert_array_equal(got, want)
    elif expected is not None:
        np.testing.assert_array_equal(result[0] if isinstance(result, tuple) else result, expected)


@pytest.mark.parametrize("seed", range(8))
def test_many_under_way_and_waited_for_in_any_order(comm, seed):
    same, own = random.Random(seed), random.Random(f"{seed} {comm.rank}")
    works = []
    for number in range(same.randint(1, 25)):
        works.append(start(comm, same, number))
        if own.random() < 0.2:
            time.sleep(own.random() / 500)
        if own.random() < 0.3:
            work, expected = works.pop(own.randrange(len(works)))
            check(work.wait(), expected)
    own.shuffle(works)
    for work, expected in works:
        while own.random() < 0.8 and not work.done():
            pass
        check(work.wait(), expected)
        check(work.wait(), expected)  # as often as one likes
    assert comm.queue.idle


def test_blocking_calls_come_behind_what_was_started(comm):
    x = np.ones(1000, np.float32)
    works = [comm.allreduce(x, allred.Sum, in_place=True) for _ in range(3)]
    assert comm.allreduce_blocking(x.copy() * 0 + 1, True, allred.Sum, "").tolist() == [comm.size] * 1000
    assert all(work.done() for work in works)
    assert set(x) == {comm.size**3}


def test_nobody_keeps_the_work(comm):
    x = np.ones(50_000)
    for _ in range(5):
        comm.allreduce(x, allred.Sum, in_place=True)
    gc.collect()
    comm.barrier().wait()
    assert set(x) == {comm.size**5}


def test_a_mistake_stands_with_its_own_work(comm):
    """What all ranks are told of one does not touch those before and behind it."""
    several(comm)
    first, third = np.ones(3), np.ones(30_000)
    works = [
        comm.allreduce(first, allred.Sum, "first", in_place=True),
        comm.allreduce(np.ones(2 + (comm.rank == 1)), allred.Sum, "second"),
        comm.allgather(third, "third"),
        comm.allreduce(np.array(["words"]) if comm.rank == 0 else first, allred.Sum, "fourth"),
        comm.allreduce(third, allred.Sum, "fifth", in_place=True),
    ]
    check(works[4].wait(), np.full(30_000, comm.size))
    assert first.tolist() == [comm.size] * 3
    with pytest.raises(MismatchError, match=r"allreduce\(Sum\) 'second' float64 \(2,\) on rank"):
        works[1].wait()
    with pytest.raises(InputError, match="rank 0: "):
        works[3].wait()
    assert works[2].wait().shape == (30_000 * comm.size,)


def test_another_order_is_told_as_such(comm, who):
    """With the thread nobody looks before it waits, and then all has been started."""
    several(comm)
    names = ["b", "a"] if comm.rank == 1 else ["a", "b"]
    works = [comm.allreduce(np.ones(3), allred.Sum, name) for name in names]
    words = (
        r"ranks started operations in different orders: rank 0 started allreduce 'a' before allreduce 'b', "
        r"rank 1 started allreduce 'b' before allreduce 'a'; all ranks must"
    )
    with pytest.raises(MismatchError, match=words if who == "thread" else "'a'"):
        works[0].wait()
    with pytest.raises(MismatchError, match="'a'"):
        works[1].wait()
    comm.barrier().wait()


@pytest.mark.parametrize(("count", "kept"), [(1, False), (1, True), (20, True)])
def test_the_next_wait_raises_the_mismatch_of_works_that_nobody_waits_for(comm, who, count, kept):
    """Else it would wait for the next operation of the rank that has raised the mismatch already."""
    several(comm)
    for odd in range(comm.size):
        if comm.rank == odd:
            with pytest.raises(MismatchError, match=f"barrier\\(\\) on rank {odd}"):
                comm.barrier().wait()
        else:
            works = [comm.allreduce(np.ones(3), allred.Sum, f"w{number}") for number in range(count)]
            works = works if kept else []
            with pytest.raises(MismatchError, match=f"barrier\\(\\) on rank {odd}") as error:
                comm.barrier().wait()
            for work in works:
                with pytest.raises(MismatchError) as again:
                    work.wait()
                assert again.value is error.value
        x = np.full(3, comm.rank + 1.0)
        assert comm.allreduce_blocking(x, False, allred.Sum, "").tolist() == [comm.size * (comm.size + 1) / 2] * 3
    comm.barrier().wait()


def test_the_place_is_where_it_was_started(size):
    several(functions.current())
    work = allred.allreduce_async(np.ones(2 + (allred.rank() == 1)), name="w")  # here
    with pytest.raises(MismatchError, match=r"called at test_asynchronous\.py:\d+ on rank") as error:
        allred.synchronize(work)
    here = test_the_place_is_where_it_was_started.__code__.co_firstlineno + 2
    assert f"test_asynchronous.py:{here} on rank" in str(error.value)


def test_public_functions(rank, size):
    x = np.full(5, rank + 1.0)
    sums = size * (size + 1) / 2
    works = [
        (allred.allreduce_async(x, allred.Sum), np.full(5, sums)),
        (allred.grouped_allreduce_async([x, x], allred.Sum), [np.full(5, sums)] * 2),
        (allred.broadcast_async(x, 0), np.ones(5)),
        (allred.allgather_async(x[:1]), np.arange(1.0, size + 1)),
        (allred.reducescatter_async(np.ones((size, 2)), allred.Sum), np.full((1, 2), size)),
        (allred.alltoall_async(np.full(size, rank + 1.0)), np.arange(1.0, size + 1)),
        (allred.barrier_async(), None),
        (allred.allreduce_async_(x.copy()), np.full(5, sums / size)),
        (allred.grouped_allreduce_async_([x.copy()], allred.Max), [np.full(5, size)]),
        (allred.broadcast_async_(x.copy(), size - 1), np.full(5, size)),
    ]
    deadline = time.monotonic() + 20
    while not allred.poll(works[-1][0]):
        assert time.monotonic() < deadline
    for work, expected in works:
        assert isinstance(work, allred.Work)
        check(allred.synchronize(work), expected)
    with pytest.raises(InputError, match="_async function returned"):
        allred.synchronize(x)


def test_compressed_and_of_a_process_set(rank, size):
    """Two sets at once, whose operations are under way beside the world's."""
    evens, odds = allred.ProcessSet(range(0, size, 2)), allred.ProcessSet(range(1, size, 2) or [0])
    mine = evens if rank % 2 == 0 else odds
    x = np.full(3, 1.0 + 2**-20 * (rank == size - 1), np.float32)
    compressed = allred.allreduce_async(x, allred.Max, compression=allred.Compression.bf16)
    of_mine = allred.allgather_async(np.array([rank]), process_set=mine)
    root = allred.broadcast_async(np.array([rank]), mine.ranks[-1], process_set=mine)
    plain = allred.allreduce_async(x, allred.Max)
    check(plain.wait(), np.full(3, 1.0 + 2**-20, np.float32))
    check(root.wait(), np.array([mine.ranks[-1]]))
    check(of_mine.wait(), np.array(mine.ranks))
    check(compressed.wait(), np.ones(3, np.float32))


def is_readable_within(seconds, file):
    """One call into C that keeps the GIL, until there is something to read from the file."""
    events = struct.pack("ihh", file, select.POLLIN, 0)
    return ctypes.PyDLL(None).poll(events, 1, int(seconds * 1000)) == 1


def test_a_peer_that_holds_the_gil_keeps_nobody(comm, tmp_path):
    """With the thread: the others are through while rank 0 is still inside its call. All but alltoall, and allgather
    without `out`."""
    several(comm)
    if not comm.queue.engine.has_progress_thread:
        pytest.skip("takes the thread")
    others = MPI.COMM_WORLD.Split(comm.rank == 0)
    if comm.rank == 0:
        os.mkfifo(tmp_path / "through")
    comm.barrier().wait()
    file = os.open(tmp_path / "through", os.O_RDWR)
    x, count = np.ones(100_000), comm.size
    comm.barrier().wait()
    works = [comm.allreduce(x, allred.Sum, in_place=True), comm.grouped_allreduce([x[:3].copy()]), comm.barrier()]
    works += [comm.broadcast(np.ones(7)), comm.reducescatter(np.ones(count))]
    works += [comm.allgather(np.full(70_000, part + 0.5), out=np.empty(70_000 * count)) for part in range(2)]
    works.append(comm.allreduce(np.ones(3), allred.Sum))
    if comm.rank == 0:
        assert is_readable_within(20, file), "the others wait for rank 0"
        works[-1].wait()
    else:
        works[-1].wait()
        others.Barrier()
        if comm.rank == 1:
            os.write(file, b"x")
    comm.barrier().wait()
    os.close(file)
    others.Free()
    assert set(x) == {count}
    assert set(works[-2].wait()) == {1.5}


def test_the_thread_starts_with_the_first_operation_that_is_not_waited_for(size):
    def alive():
        names = (pathlib.Path(f"/proc/self/task/{task}/comm") for task in os.listdir("/proc/self/task"))
        return [name.read_text().strip() for name in names if name.exists()]

    if size == 1:
        pytest.skip("takes several ranks")
    one = Communicator(ShmBackend(allred.rank(), size, _memory()), 20.0)
    try:
        before = alive().count("allred-progress")
        one.allreduce_blocking(np.ones(3), True, allred.Sum, "")
        one.allreduce(np.ones(3), allred.Sum).wait()
        assert alive().count("allred-progress") == before
        one.backend.start_progress_thread()
        one.backend.start_progress_thread()
        assert alive().count("allred-progress") == before + 1
        one.allreduce(np.ones(3), allred.Sum).wait()
        one.barrier().wait()
    finally:
        one.close()
    while alive().count("allred-progress") > before:  # joined, and the kernel puts it away
        time.sleep(0.001)


def _memory():
    from mpi4py import MPI

    from allred.comm.backends.mpi_bootstrap import MpiBootstrap
    from allred.comm.backends.shm import segment_memory

    return segment_memory(MpiBootstrap(MPI.COMM_WORLD))


@pytest.mark.parametrize("thread", [True, False])
def test_closed_with_operations_under_way(size, thread):
    """What is under way stays so; nothing is written any more, nobody hangs, and the arrays are given back."""
    if size == 1:
        pytest.skip("takes several ranks")
    one = Communicator(ShmBackend(allred.rank(), size, _memory()), 20.0)
    if thread:
        one.backend.start_progress_thread()
    arrays = [np.ones(10_000) for _ in range(3)]
    works = [one.allreduce(x, allred.Sum, in_place=True) for x in arrays] if allred.rank() else []
    threads = threading.active_count()
    one.close()
    assert threads == threading.active_count()
    for work in works:
        with pytest.raises(AllredError, match="shut down"):
            work.wait()
    assert all(set(x) == {1} for x in arrays)
    allred.barrier()


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), "1"])
def test_a_wait_of_no_time_is_refused(timeout_s):
    work = allred.allreduce_async(1.0, allred.Sum)
    with pytest.raises(InputError, match="must be a positive number of seconds"):
        work.wait(timeout_s)
    assert work.wait(60) == allred.size()


def test_patience_ends_for_a_set_that_is_new_in_it(rank, size):
    members = allred.ProcessSet({0, size - 1} | {size // 2})
    if members.included():
        before = allred.comm.functions.current().queue.timeout_s
        with allred.patience(before + 100):
            allred.barrier(process_set=members)
        assert members.communicator().queue.timeout_s == before


def test_an_error_that_no_wait_raises_is_printed_once(comm, capfd):
    several(comm)
    for waits in (False, True):
        work = comm.allreduce(np.ones(3 + comm.rank), allred.Sum)
        assert comm.allreduce(np.ones(1), allred.Sum).wait() == [comm.size]
        if waits:
            with pytest.raises(MismatchError):
                work.wait()
        del work
        printed = capfd.readouterr().err
        assert printed.count("an operation failed, and the program has not waited for it: ") == (not waits), printed
