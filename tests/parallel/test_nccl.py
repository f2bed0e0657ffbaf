# ruff: noqa: F811  (fixtures are imported)
"""The collectives on device arrays, with a stand-in for the GPU (standin_gpu.py): decisions, headers, dtypes, order.

The real thing: tests/gpu. Here `nccl` is what goes through NCCL's calls, `staged` what goes through the host.
"""

import gc
import itertools
import threading
import weakref

import cuda_stand_in
import ml_dtypes
import numpy as np
import pytest
import standin_gpu
import test_collectives as contract
from gpu_fixtures import are_freed, comm, connect, connected, everyone  # noqa: F401
from mpi4py import MPI
from standin_gpu import DeviceArray, host, on_gpu

import allred
from allred.comm import device_operation, process_set
from allred.errors import InputError, MismatchError
from allred.gpu.fusion_buffers import GpuFusionBuffer

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("dtype", contract.REDUCED, ids=str)
def test_allreduce(comm, dtype):
    def check():
        for shape in contract.SHAPES:
            x = on_gpu(contract.data(comm.rank, shape, dtype))
            y = comm.allreduce(x, allred.Sum).wait()
            assert (type(y), y.dtype, y.shape) == (DeviceArray, dtype, shape)
            np.testing.assert_array_equal(host(y), contract.expected(allred.Sum, comm.size, shape, dtype))
            np.testing.assert_array_equal(host(x), contract.data(comm.rank, shape, dtype))
            assert not np.shares_memory(x, y)

    contract.twice(check)


@pytest.mark.parametrize("dtype", contract.REDUCED, ids=str)
def test_every_op_in_place(comm, dtype):
    for op in (allred.Min, allred.Max, allred.Product, allred.Average):
        x = on_gpu(contract.data(comm.rank, (1009,), dtype))
        refused = {"i": "Average of", "u": "Average of", "c": f"(Min|Max|Product) of {dtype} is not"}.get(dtype.kind)
        if refused and (op is allred.Average) == (dtype.kind != "c"):
            with pytest.raises(InputError, match=refused):
                comm.allreduce(x, op, in_place=True).wait()
            with pytest.raises(InputError, match=refused):
                comm.grouped_allreduce([x, on_gpu(np.ones(3))], op, in_place=True).wait()
            with pytest.raises(InputError, match=refused):
                comm.reducescatter(x, op).wait()
            continue
        assert comm.allreduce(x, op, in_place=True).wait() is x
        np.testing.assert_array_equal(host(x), contract.expected(op, comm.size, (1009,), dtype))


def test_bool_is_any_and_all(comm):
    one = on_gpu(np.array([True, comm.rank == 0, False]))
    for op, middle in ((allred.Max, True), (allred.Min, comm.size == 1), (allred.Product, comm.size == 1)):
        np.testing.assert_array_equal(host(comm.allreduce(one, op).wait()), [True, middle, False])


@pytest.mark.parametrize("dtype", contract.FLOATS)
def test_nan_and_infinity(comm, dtype):
    last = comm.size - 1
    values = [np.nan if comm.rank == last else 1, np.nan if comm.rank == 0 else 1, np.inf, -np.inf, -0.5]
    x = on_gpu(np.array(values, dtype))
    for op in (allred.Min, allred.Max, allred.Sum, allred.Product, allred.Average):
        y = host(comm.allreduce(x, op).wait()).astype(np.float64)
        assert np.isnan(y[:2]).all(), op
        if op in (allred.Min, allred.Max):
            np.testing.assert_array_equal(y[2:], [np.inf, -np.inf, -0.5])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_16_bit_sums_are_formed_in_float32(comm, dtype):
    start = 2048 if dtype is np.float16 else 256
    x = on_gpu(np.full(3, start if comm.rank == 0 else 1, dtype))
    total = np.float32(start + comm.size - 1).astype(dtype)
    np.testing.assert_array_equal(host(comm.allreduce(x, allred.Sum).wait()), np.full(3, total))


@pytest.mark.parametrize("dtype", contract.INTS)
@pytest.mark.parametrize("op", [allred.Sum, allred.Product])
def test_integers_wrap_around(comm, dtype, op):
    largest = np.iinfo(dtype).max
    result, one = np.array([1 if op is allred.Product else 0], dtype), np.array([largest], dtype)
    for _ in range(comm.size):
        result = result * one if op is allred.Product else result + one
    found = comm.allreduce(on_gpu(np.full(31, largest, dtype)), op).wait()
    assert host(found).tolist() == [int(result[0])] * 31


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_any_layout(comm, which, dtype):
    x = on_gpu(np.ones((5, 7), dtype))
    y = _layouts(x)[which]
    y[...] = 1
    assert not y.flags.c_contiguous
    comm.allreduce(y, allred.Sum, in_place=True).wait()
    np.testing.assert_array_equal(host(y), np.full((5, 7), comm.size))
    z = on_gpu(np.full((3, 2), 1 + comm.rank, dtype))
    group = comm.grouped_allreduce([y, z, on_gpu(np.ones(4, np.float32))], allred.Average, in_place=True).wait()
    np.testing.assert_array_equal(host(group[0]), np.full((5, 7), comm.size))
    np.testing.assert_array_equal(host(z), np.full((3, 2), (1 + comm.size) / 2))
    made = comm.grouped_allreduce([y, z], allred.Sum).wait()
    np.testing.assert_array_equal(host(made[0]), np.full((5, 7), comm.size**2))
    assert [(each.dtype, each.shape) for each in made] == [(dtype, (5, 7)), (dtype, (3, 2))]
    y[...] = comm.rank
    comm.broadcast(y, comm.size - 1, in_place=True).wait()
    np.testing.assert_array_equal(host(y), np.full((5, 7), comm.size - 1))
    assert host(comm.allgather(y).wait()).shape == (5 * comm.size, 7)


def _layouts(x):
    wide = np.zeros((5, 14), x.dtype)
    return [x.T.copy().T, on_gpu(wide)[:, ::2], on_gpu(np.ones((5, 7), x.dtype))[::-1, ::-1]]


@pytest.mark.parametrize("dtype", contract.ALL, ids=str)
def test_broadcast_allgather_alltoall_reducescatter(comm, dtype):
    for root in range(comm.size):
        x = on_gpu(contract.data(comm.rank, (2, 3), dtype))
        np.testing.assert_array_equal(host(comm.broadcast(x, root).wait()), contract.data(root, (2, 3), dtype))
    rows = [(2 * r + 1) % 4 if r else 0 for r in range(comm.size)]
    y = comm.allgather(on_gpu(contract.data(comm.rank, (rows[comm.rank], 3), dtype))).wait()
    np.testing.assert_array_equal(
        host(y), np.concatenate([contract.data(r, (n, 3), dtype) for r, n in enumerate(rows)])
    )
    splits = [(r + comm.rank) % 3 for r in range(comm.size)]
    z, received = comm.alltoall(on_gpu(contract.data(comm.rank, (sum(splits), 2), dtype)), splits).wait()
    assert received.tolist() == [(r + comm.rank) % 3 for r in range(comm.size)]
    parts = []
    for r in range(comm.size):
        theirs = [(i + r) % 3 for i in range(comm.size)]
        whole = contract.data(r, (sum(theirs), 2), dtype)
        parts.append(whole[sum(theirs[: comm.rank]) : sum(theirs[: comm.rank + 1])])
    np.testing.assert_array_equal(host(z), np.concatenate(parts))
    if dtype != np.bool_:
        shape = (2 * comm.size + 1, 2)
        w = comm.reducescatter(on_gpu(contract.data(comm.rank, shape, dtype)), allred.Sum).wait()
        whole = np.array_split(contract.expected(allred.Sum, comm.size, shape, dtype), comm.size)
        np.testing.assert_array_equal(host(w), whole[comm.rank])


def test_host_arrays_and_others_go_on_beside(comm):
    x = np.full(3, comm.rank, np.float32)
    started = [
        comm.allreduce(on_gpu(x), allred.Sum, in_place=True),
        comm.allreduce(x, allred.Sum),
        comm.allgather_object(comm.rank),
    ]
    assert host(started[0].wait()).tolist() == started[1].wait().tolist() == [sum(range(comm.size))] * 3
    assert started[2].wait() == list(range(comm.size))
    assert comm.allreduce_blocking(on_gpu(x), False, allred.Max, "").tolist() == [comm.size - 1] * 3


def test_wait_orders_the_callers_stream_and_not_the_host(comm):
    work = comm.allreduce(on_gpu(np.ones(3)))
    work.wait()
    gpu = cuda_stand_in.gpu
    assert (gpu.ordered, gpu.synchronized) == (1, 0)
    gpu.stuck = True
    assert not work.done()
    gpu.stuck = False
    assert work.done()
    work.synchronize()
    assert (gpu.ordered, gpu.synchronized) == (2, 1)


def test_one_rank_with_a_host_array_is_a_mismatch(comm):
    if comm.size == 1:
        return
    for _ in range(2):
        x = np.ones(3, np.float32)
        with pytest.raises(MismatchError, match=r"on the GPU on rank.* 0") as raised:
            comm.allreduce(x if comm.rank else on_gpu(x), allred.Sum, "w").wait()
        assert "different operations" in str(raised.value)
        np.testing.assert_array_equal(host(comm.allreduce(on_gpu(x), allred.Sum).wait()), np.full(3, comm.size))


def test_what_cannot_be_used_is_known_to_all(comm, monkeypatch):
    locked = on_gpu(np.ones(3))
    locked.flags.writeable = False
    with pytest.raises(InputError, match="read-only"):
        comm.allreduce(locked if comm.rank == 0 else on_gpu(np.ones(3)), in_place=True).wait()
    one = on_gpu(np.ones(9, np.float32))
    for other in (one, one[3:], one[::2]):
        with pytest.raises(InputError, match="arrays 0 and 1 of the group share memory"):
            comm.grouped_allreduce([one, other] if comm.rank == 0 else [one, on_gpu(other)], in_place=True).wait()
    expanded = on_gpu(np.ones((1, 3), np.float32))
    expanded = np.lib.stride_tricks.as_strided(expanded, (2, 3), (0, 4), subok=True, writeable=True)
    with pytest.raises(InputError, match="several elements in the same memory"):
        comm.allreduce(expanded if comm.rank == 0 else on_gpu(np.ones((2, 3), np.float32)), in_place=True).wait()
    with pytest.raises(InputError, match="arrays on the GPU and on the host"):
        comm.grouped_allreduce([on_gpu(np.ones(3)), np.ones(3)]).wait()
    with pytest.raises(InputError, match="cannot be reduced"):
        comm.allreduce(on_gpu(np.ones(3, np.longdouble))).wait()
    with monkeypatch.context() as patched:
        patched.setattr(cuda_stand_in.Stream, "is_capturing", lambda _: comm.rank == 0)
        with pytest.raises(InputError, match="captures a CUDA graph"):
            comm.allreduce(on_gpu(np.ones(3))).wait()
    monkeypatch.setattr(standin_gpu.Data, "device_id", 1 if comm.rank == 0 else 0)
    with pytest.raises(InputError, match=r"the array is on GPU 1, but .* has bound this rank to GPU 0"):
        comm.allreduce(on_gpu(np.ones(3))).wait()


def test_ranks_do_not_wait_in_nccl_for_one_that_cannot_create_the_communicator(monkeypatch, rank, size):
    """All raise its error; the next operation tries again."""
    monkeypatch.setattr(device_operation, "adopt", standin_gpu.adopt)
    comm, over = connect("nccl"), threading.Event()

    def create(*_):
        if rank == size - 1:
            raise MemoryError("no memory for NCCL")
        over.wait()

    with monkeypatch.context() as broken:
        broken.setattr(comm.devices.device, "communicator", create)
        with pytest.raises(allred.errors.AllredError, match=f"start: rank {size - 1}: MemoryError: no memory for NCCL"):
            comm.allreduce(on_gpu(np.ones(3))).wait(10)
    over.set()
    assert host(comm.allreduce(on_gpu(np.ones(3)), allred.Sum).wait()).tolist() == [size] * 3
    comm.close()


def test_an_operation_that_fails_keeps_its_memory_until_the_gpu_has_finished(monkeypatch, rank):
    """Kernels of the buckets before may be running."""
    monkeypatch.setattr(device_operation, "adopt", standin_gpu.adopt)
    monkeypatch.setattr("allred.comm.device_buckets.BUCKET_BYTES", 4096)
    monkeypatch.setattr(cuda_stand_in.gpu, "stuck", True)
    comm, begin, begun = connect("nccl"), GpuFusionBuffer.begin, []

    def out_of_memory(buffer, *arguments):
        begun.append(buffer)
        if len(begun) == 3:
            raise MemoryError("out of memory")
        return begin(buffer, *arguments)

    monkeypatch.setattr(GpuFusionBuffer, "begin", out_of_memory)
    group = [on_gpu(np.ones(400, np.float32)) for _ in range(9)]
    one = weakref.ref(group[0])
    with pytest.raises(MemoryError):
        comm.grouped_allreduce(group).wait()
    del group
    gc.collect()
    assert one() is not None
    assert cuda_stand_in.problems == []
    cuda_stand_in.gpu.stuck = False
    comm.devices.device.release()
    assert are_freed([one])
    assert cuda_stand_in.problems == []
    MPI.COMM_WORLD.Barrier()
    comm.close()


def test_a_group_of_calls_is_ended_after_an_error(monkeypatch, rank, size):
    """Else all later calls of NCCL on this thread were in it."""
    if size == 1:
        return
    monkeypatch.setattr(device_operation, "adopt", standin_gpu.adopt)
    monkeypatch.setattr("allred.watch.exit.stuck", lambda: None)
    comm = connect("nccl")

    def broken(*_):
        raise RuntimeError("an invalid argument")

    monkeypatch.setattr(standin_gpu.Nccl, "broadcast", broken)
    with pytest.raises(allred.errors.AllredError, match="NCCL's broadcast: an invalid argument"):
        comm.allgather(on_gpu(np.ones(3 if rank else 4))).wait()
    assert standin_gpu.Nccl.open_groups == 0
    MPI.COMM_WORLD.Barrier()
    comm.close()


def test_a_process_set_has_the_gpu_that_was_chosen_in_init(everyone, rank, size):
    """And a stream of its own, with its tables."""
    members = allred.ProcessSet({max(0, size - 2), size - 1})
    if members.included():
        mean = allred.allreduce(on_gpu(np.full(3, rank, np.float32)), process_set=members)
        np.testing.assert_array_equal(host(mean), np.full(3, np.mean(members.ranks), np.float32))
        device = members.communicator().devices.device
        assert device.index == rank
        if size > 2:
            assert device.communication is not everyone.devices.device.communication
            assert device.kernels is not everyone.devices.device.kernels


def test_overlapping_communicators_launch_in_the_order_in_which_operations_were_started(
    everyone, rank, size, monkeypatch
):
    """Also where negotiations end in another order, as on rank 0: it starts first and waits for the last one first."""
    communicators = [everyone, process_set.dedicated(range(size), "the second of all ranks")]
    if size > 2:
        pairs = [allred.ProcessSet(pair) for pair in itertools.combinations(range(size), 2)]
        communicators += [pair.communicator() for pair in pairs if pair.included()]

    def start():
        return [each.allreduce(on_gpu(np.full(5, rank, np.float32)), allred.Sum) for each in communicators]

    for work, each in zip(start(), communicators, strict=True):
        np.testing.assert_array_equal(host(work.wait()), np.full(5, sum(each.ranks), np.float32))
    launched = []
    with monkeypatch.context() as recorded:
        recorded.setattr(standin_gpu.Nccl, "allReduce", lambda self, *arguments: launched.append(arguments[-1]))
        if rank:
            MPI.COMM_WORLD.Barrier()
        works = start()
        if not rank:
            MPI.COMM_WORLD.Barrier()
        MPI.COMM_WORLD.Barrier()
        for work in works[::-1] if rank == 0 else works:
            work.wait()
        MPI.COMM_WORLD.Barrier()
    assert launched == [each.devices.device.communication.ptr for each in communicators]


def test_an_operation_that_fails_gives_up_its_turn(everyone, rank, size):
    other = process_set.dedicated(range(size), "another of all ranks")
    locked = on_gpu(np.ones(3))
    locked.flags.writeable = False
    wrong = [everyone.allreduce(locked, in_place=True), everyone.allreduce(on_gpu(np.ones(3)), name=3)]
    assert host(other.allreduce(on_gpu(np.ones(3)), allred.Sum).wait()).tolist() == [size] * 3
    for work in wrong:
        with pytest.raises(InputError):
            work.wait()
    assert everyone.devices.device.launches.first() is None


def test_ranks_that_have_joined_are_left_out(everyone, rank, size):
    if size == 1:
        return
    if rank == 0:
        while everyone.join(0).wait() is None:
            pass
        return
    x = everyone.allreduce(on_gpu(np.full(3, rank, np.float32)), allred.Average).wait()
    np.testing.assert_array_equal(host(x), np.full(3, sum(range(1, size)) / (size - 1), np.float32))
    assert everyone.active.ranks == tuple(range(1, size))
    assert everyone.active.devices.device is everyone.devices.device, "its operations are those of all ranks"
    for operation in (everyone.alltoall, everyone.reducescatter):
        with pytest.raises(InputError, match="some rows are for rank 0, which joined before"):
            operation(on_gpu(np.ones(size, np.float32))).wait()
    everyone.join(1).wait()


def test_functions_of_nccl(everyone, rank, size):
    """Parts of the same size by one function of NCCL, others in a group of calls. The sums are those of the host."""
    for dtype in (np.float32, ml_dtypes.bfloat16, np.int16):
        for rows in (2 * size, 2 * size + 1):
            values = [contract.data(r, (rows, 3), dtype) for r in range(size)]
            found = host(everyone.reducescatter(on_gpu(values[rank]), allred.Sum).wait())
            whole = np.sum([value.astype(np.float64) for value in values], axis=0).astype(dtype)
            np.testing.assert_array_equal(found, np.array_split(whole, size)[rank])
            calls = everyone.devices._nccl.calls
            if dtype != ml_dtypes.bfloat16:
                uneven = rows % size
                assert calls == (["reduce"] * size if uneven else ["reduceScatter"])
            calls.clear()
    everyone.allgather(on_gpu(np.ones(3))).wait()
    assert calls == ["allGather"]
    calls.clear()


def test_averages_of_reducescatter(everyone, rank, size):
    for dtype in (np.float32, np.float16):
        mean = everyone.reducescatter(on_gpu(np.full(2 * size, rank + 1, dtype)), allred.Average).wait()
        np.testing.assert_array_equal(host(mean), np.full(2, (size + 1) / 2, dtype))


def test_16_bit_floats_by_nccl(monkeypatch, rank, size):
    """With ALLRED_NCCL_16BIT=native. An average of large numbers is finite, because NCCL divides first."""
    monkeypatch.setattr(device_operation, "adopt", standin_gpu.adopt)
    comm = connect("nccl", native_halves=True)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        for op, expected in (
            (allred.Sum, sum(range(1, size + 1))),
            (allred.Product, float(np.prod(range(1, size + 1)))),
        ):
            found = comm.allreduce(on_gpu(np.full(1003, rank + 1, dtype)), op).wait()
            np.testing.assert_array_equal(host(found), np.full(1003, expected, dtype))
        group = [on_gpu(np.full(count, rank + 1, dtype)) for count in (7, 5)]
        comm.grouped_allreduce(group, allred.Average, in_place=True).wait()
        for array in group:
            np.testing.assert_array_equal(host(array), np.full(array.shape, (size + 1) / 2, dtype))
    assert set(comm.devices._nccl.calls) == {"allReduce"}
    assert {call[3:] for call in standin_gpu.Nccl.launches} >= {(9, 0), (9, 1), (9, 4), (6, 4)}
    comm.barrier().wait()
    comm.close()
    assert standin_gpu.launch_problem(MPI.COMM_WORLD) == ""


def test_16_bit_floats_in_slices(comm, monkeypatch):
    """A slice has a part for each rank, whose memory is aligned; the last slice and the last parts are smaller."""
    monkeypatch.setattr("allred.comm.backends.nccl._SLICE_ELEMENTS", 64)
    for count in (1, 63, 64, 65, 200):
        for op in (allred.Sum, allred.Average, allred.Product):
            x = contract.data(comm.rank, (count,), np.float16)
            there = comm.allreduce(x, op).wait()
            here = on_gpu(x)
            assert comm.allreduce(here, op, in_place=True).wait() is here
            np.testing.assert_array_equal(host(here), there)
            np.testing.assert_array_equal(host(comm.allreduce(on_gpu(x), op).wait()), there)
        if comm.devices.name == "nccl" and count == 200:
            comm.devices._nccl.calls.clear()
            comm.allreduce(on_gpu(np.ones(192, np.float16)), allred.Sum).wait()
            assert comm.devices._nccl.calls.count("allGather") == 3
            assert "broadcast" not in comm.devices._nccl.calls
