"""The contract on device arrays, with a stand-in for the GPU (standin_gpu.py): decisions, headers, dtypes, order.

The real thing: tests/gpu. Here `nccl` is what goes through NCCL's calls, `staged` what goes through the host.
"""

import dataclasses
import gc
import itertools
import weakref

import cuda_stand_in
import ml_dtypes
import numpy as np
import pytest
import standin_gpu
import test_collectives as contract
from mpi4py import MPI
from standin_gpu import DeviceArray, host, on_gpu

import allred
from allred import world
from allred.comm import device_buckets, device_operation, device_reduce, process_set
from allred.comm.create import add_device, create, select_backend
from allred.errors import InputError, MismatchError
from allred.modes.match import Matcher

pytestmark = pytest.mark.mpi


def connect(transport):
    size = MPI.COMM_WORLD.Get_size()
    name, _ = select_backend("auto", [0] * size, True, [True] * size)
    communicator = create(name, MPI.COMM_WORLD.Dup(), 30.0, [0] * size)
    device = standin_gpu.Device()
    add_device(communicator, device, staged=transport == "staged")
    return communicator


@pytest.fixture(scope="module", params=["nccl", "staged"])
def connected(request):
    """One for all tests."""
    communicator = connect(request.param)
    yield communicator
    communicator.barrier().wait()
    communicator.close()


@pytest.fixture
def comm(connected, monkeypatch):
    monkeypatch.setattr(device_operation, "adopt", standin_gpu.adopt)
    monkeypatch.setattr(device_reduce, "layouts", standin_gpu.layouts)
    cuda_stand_in.gpu.ordered = cuda_stand_in.gpu.synchronized = 0
    cuda_stand_in.problems.clear()
    cuda_stand_in.gpu.stuck = connected.devices.name == "nccl"  # work ends as late as it can
    yield connected
    cuda_stand_in.gpu.stuck = False
    connected.barrier().wait()
    assert (cuda_stand_in.problems, standin_gpu.launch_problem(MPI.COMM_WORLD)) == ([], "")


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
        if op is allred.Average and dtype.kind in "iu":
            with pytest.raises(InputError, match="Average of"):
                comm.allreduce(x, op, in_place=True).wait()
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


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("op", [allred.Sum, allred.Average])
def test_a_group_travels_in_buckets(comm, in_place, op, monkeypatch):
    """Small tensors of a dtype in one, a large one alone; of other layouts; the gaps between tensors do no harm."""
    monkeypatch.setattr("allred.comm.device_buckets.BUCKET_BYTES", 4096)
    shapes = [(3,), (), (0,), (1009,), (2, 2), (5,), (7,)]
    dtypes = [np.float32, np.float64, np.float32, np.float32, ml_dtypes.bfloat16, np.float32, ml_dtypes.bfloat16]

    def check():
        group = [on_gpu(contract.data(comm.rank, s, d)) for s, d in zip(shapes, dtypes, strict=True)]
        results = comm.grouped_allreduce(group, op, in_place=in_place).wait()
        for x, y, s, d in zip(group, results, shapes, dtypes, strict=True):
            np.testing.assert_array_equal(host(y), contract.expected(op, comm.size, s, d))
            assert (x is y) == in_place
        assert comm.grouped_allreduce([], allred.Sum).wait() == []

    contract.twice(check)


class Alike:
    """Groups on the same memory, each of which differs in one thing from the one before it in this list."""

    def __init__(self):
        self.memory = on_gpu(np.zeros(4000, np.float32))
        views = [self.of(slice(0, 600), (20, 30)), self.of(slice(2000, 2007), (7,))]
        self.groups = [
            (views, allred.Sum, None),
            ([views[0].reshape(30, 20), views[1]], allred.Sum, None),
            ([views[0], self.memory[2000:2014:2]], allred.Sum, None),
            ([view.view(np.int32) for view in views], allred.Sum, None),
            ([views[0], self.of(slice(2001, 2008), (7,))], allred.Sum, None),
            (views, allred.Max, None),
            (views, allred.Sum, 1.0),
            (views, allred.Sum, 2.0),
            ([views[0][:10], views[1]], allred.Sum, None),
            (views[1:], allred.Sum, None),
            (views[1:], allred.Sum, 2.0),
        ]

    def of(self, where, shape):
        return self.memory[where].reshape(shape)


def test_a_group_that_comes_again_is_not_looked_through_again(comm, monkeypatch):
    """It is the same if all that matters is, whoever owns the memory now. What is strided is looked at every time, and
    what travels where it lies."""
    looked = []
    monkeypatch.setattr(device_operation, "adopt", lambda value: looked.append(1) or standin_gpu.adopt(value))
    alike = Alike()
    for group, op, weight in alike.groups * 2:
        for _ in range(2):
            looked.clear()
            alike.memory[...] = 7
            for array in group:
                array[...] = -1 - comm.rank
            if weight is None:
                comm.grouped_allreduce(group, op, in_place=True).wait()
            else:
                comm.gpu.weighted_allreduce_(group, op, "", allred.Compression.none, weight).wait()
            expected = -1 if op is allred.Max else -sum(range(1, comm.size + 1)) * (weight or 1)
            for array in group:
                np.testing.assert_array_equal(host(array), np.full(array.shape, expected))
            assert np.count_nonzero(host(alike.memory) == 7) == 4000 - sum(array.size for array in group)
        packed = len(group) > 1 or weight is not None
        assert (len(looked) == 0) == (packed and all(array.flags.c_contiguous for array in group))


@pytest.mark.parametrize("weight", [None, 1.0])
@pytest.mark.parametrize("differing", [False, True])
def test_arrays_without_gaps_are_reduced_as_they_lie_in_memory(comm, monkeypatch, differing, weight):
    """In torch's format channels_last, and in columns. If a rank has another format, all reduce in C order."""
    copied = []
    monkeypatch.setattr(standin_gpu.Pointed, "flatten", lambda x, *a: copied.append(1) or np.ndarray.flatten(x, *a))
    values = np.random.default_rng(0).normal(size=(3, 4, 5, 2)).astype(np.float32)
    last = on_gpu(np.ascontiguousarray(values.transpose(0, 2, 3, 1))).transpose(0, 3, 1, 2)
    if differing and comm.rank == 0:
        last = on_gpu(values)
    group = [last, on_gpu(np.asfortranarray(values[0, 0])), on_gpu(values[0])]
    for _ in range(2):
        copied.clear()
        for array, value in zip(group, (values, values[0, 0], values[0]), strict=True):
            array[...] = value * (comm.rank + 1)
        for some in (group, group[:1]):
            comm.gpu.weighted_allreduce_(some, allred.Sum, "", allred.Compression.none, weight).wait()
        total = sum(range(1, comm.size + 1))
        for array, value, size in zip(group, (values, values[0, 0], values[0]), (comm.size, 1, 1), strict=True):
            np.testing.assert_allclose(host(array), value * total * size, rtol=1e-5)
        assert bool(copied) == (differing and comm.size > 1)


def test_a_group_that_comes_again_is_looked_at_before_the_ranks_agree(comm, monkeypatch):
    """Behind that nobody would hear of what is wrong with it."""
    looked, wanted = [], device_buckets.ReduceRequest(allred.Sum, "", allred.Compression.none, in_place=True)
    whole = on_gpu(np.ones(1000))
    comm.grouped_allreduce([whole], allred.Sum, in_place=True).wait()
    monkeypatch.setattr(device_operation, "adopt", lambda value: looked.append(value) or standin_gpu.adopt(value))
    comm.gpu._reduction_steps([whole], wanted).close()
    assert len(looked) == 1


def test_a_group_that_has_come_is_its_callers_alone(comm):
    group = [on_gpu(np.ones(shape, np.float32)) for shape in [(3, 4), (12,)]]
    left = [weakref.ref(array) for array in group]
    for _ in range(2):
        comm.grouped_allreduce(group, allred.Sum, in_place=True).wait()
    del group
    cuda_stand_in.gpu.stuck = False
    comm.allreduce(on_gpu(np.ones(3, np.float32)), allred.Sum).wait()  # releases what has ended before
    gc.collect()
    assert all(one() is None for one in left)


def test_groups_that_have_come_may_still_differ_between_ranks(comm):
    if comm.size == 1:
        return
    one = [on_gpu(np.ones(shape, np.float32)) for shape in [(3, 4), (12,)]]
    other = [array.reshape(12) for array in one]
    for group in (one, other):
        comm.grouped_allreduce(group, allred.Sum, in_place=True).wait()
    with pytest.raises(MismatchError, match=r"tensor 0 of 2 differs: float32 \(3, 4\) on rank 0; float32 \(12,\) on"):
        comm.grouped_allreduce(other if comm.rank else one, allred.Sum, in_place=True).wait()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_weighted_gradients(comm, dtype):
    """A rank without samples counts for nothing, NaN though it has; 16-bit floats are rounded once."""
    group = [np.arange(4) + 1.0, np.full(3, 1 / 3)]
    mine = [on_gpu((x if comm.rank == 0 else x * np.nan).astype(dtype)) for x in group]
    weight = float(comm.size) if comm.rank == 0 else 0.0
    comm.gpu.weighted_allreduce_(mine, allred.Average, "", allred.Compression.none, weight).wait()
    for x, y in zip(group, mine, strict=True):
        np.testing.assert_array_equal(host(y), x.astype(dtype))


def test_whole_numbers_of_ranks_without_samples_count_for_nothing(comm):
    mine = [on_gpu(np.full(n, 7, np.int32)) for n in (3, 5)]
    comm.gpu.weighted_allreduce_(mine, allred.Sum, "", allred.Compression.none, float(comm.rank == 0)).wait()
    for x in mine:
        np.testing.assert_array_equal(host(x), np.full(x.shape, 7))


@pytest.mark.parametrize("compression", [allred.Compression.fp16, allred.Compression.bf16])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_compression_gives_what_the_other_backends_give(comm, dtype, compression):
    """Rounded to the type that travels, as backend mpi rounds its sums."""
    half = np.float16 if compression is allred.Compression.fp16 else ml_dtypes.bfloat16
    values = np.random.default_rng(comm.rank).normal(size=1001).astype(dtype)
    there = comm.allreduce(values, allred.Average, compression=compression).wait()
    here = comm.allreduce(on_gpu(values), allred.Average, compression=compression).wait()
    assert here.dtype == dtype
    np.testing.assert_array_equal(host(here).astype(half), there.astype(half))


@pytest.mark.parametrize("which", range(3))
def test_any_layout(comm, which):
    x = on_gpu(np.ones((5, 7), np.float32))
    y = _layouts(x)[which]
    y[...] = 1
    assert not y.flags.c_contiguous
    comm.allreduce(y, allred.Sum, in_place=True).wait()
    np.testing.assert_array_equal(host(y), np.full((5, 7), comm.size))
    y[...] = comm.rank
    comm.broadcast(y, comm.size - 1, in_place=True).wait()
    np.testing.assert_array_equal(host(y), np.full((5, 7), comm.size - 1))
    assert host(comm.allgather(y).wait()).shape == (5 * comm.size, 7)


def _layouts(x):
    wide = np.zeros((5, 14), np.float32)
    return [x.T.copy().T, on_gpu(wide)[:, ::2], on_gpu(np.ones((5, 7), np.float32))[::-1, ::-1]]


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
        with pytest.raises(InputError, match="the same memory is in the group twice"):
            comm.grouped_allreduce([one, other] if comm.rank == 0 else [one, on_gpu(other)], in_place=True).wait()
    with pytest.raises(InputError, match="arrays on the GPU and on the host"):
        comm.grouped_allreduce([on_gpu(np.ones(3)), np.ones(3)]).wait()
    with pytest.raises(InputError, match="is not supported"):
        comm.allreduce(on_gpu(np.ones(3, np.complex64))).wait()
    monkeypatch.setattr(standin_gpu.Data, "device_id", 1 if comm.rank == 0 else 0)
    with pytest.raises(InputError, match=r"the array is on GPU 1, but .* has bound this rank to GPU 0"):
        comm.allreduce(on_gpu(np.ones(3))).wait()


@pytest.fixture
def everyone(rank, monkeypatch):
    """All ranks of the running world, each with a GPU of its own; its process sets are on these."""
    here, communicator = world.current(), connect("nccl")
    standin_gpu.install(monkeypatch.setattr)
    monkeypatch.setattr(standin_gpu.Data, "device_id", rank)
    communicator.devices.device.index = rank
    process_sets = dataclasses.replace(here.process_sets, everyone=communicator, made={})
    monkeypatch.setattr(here, "communicator", communicator)
    monkeypatch.setattr(here, "process_sets", process_sets)
    here.queues.add(communicator.queue)
    cuda_stand_in.problems.clear()
    yield communicator
    communicator.barrier().wait()
    assert (cuda_stand_in.problems, standin_gpu.launch_problem(MPI.COMM_WORLD)) == ([], "")
    for each in process_sets.made.values():
        each.close()
    communicator.close()


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
    cuda_stand_in.synchronize()  # an operation that fails keeps no memory
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
            assert device.stream is not everyone.devices.device.stream
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
    assert launched == [each.devices.device.stream.ptr for each in communicators]


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


class Model:
    """A few parameters of several kinds, and gradients that differ between ranks."""

    def __init__(self, place):
        self.place = place
        values = np.random.default_rng(0)
        shapes = {"w": (40, 30), "b": (30,), "scale": (), "v": (7, 3)}
        self.params = {name: place(values.normal(size=shape).astype(np.float32)) for name, shape in shapes.items()}

    def grads(self, step, rank):
        values = np.random.default_rng([step, rank])
        return {name: self.place(values.normal(size=p.shape).astype(np.float32)) for name, p in self.params.items()}


@pytest.fixture
def world_on_gpus(comm, monkeypatch):
    """The running world, with this communicator."""
    standin_gpu.install(monkeypatch.setattr)
    monkeypatch.setattr(world.current(), "communicator", comm)
    return comm


def test_parameters_and_gradients_that_come_again_are_matched_quickly(world_on_gpus, monkeypatch):
    """Wherever they lie now; what has become something else is looked at anew."""
    known, model = Matcher(), Model(on_gpu)
    params, grads = model.params, model.grads(0, 0)
    tensors = known.match(params, grads)[0]
    with monkeypatch.context() as quickly:
        quickly.setattr("allred.modes.match._match_leaves", None)
        again, leaves, values, problem, _ = known.match(params, other := model.grads(1, 0))
    assert (again, problem) == (tensors, "")
    assert again is not tensors  # mode ps takes that for arrays on the host
    assert all(value is other[tensor.name] for value, tensor in zip(values, tensors, strict=True))
    assert all(leaf is params[tensor.name] for leaf, tensor in zip(leaves, tensors, strict=True))
    wide = on_gpu(np.ones((7, 3)))
    for odd in ({"v": wide}, {"v": None}, {"v": host(grads["v"])}, {"v": grads["w"]}, {"w": grads["w"].T}):
        known.match(params, grads)
        found, fresh = (which.match(params, grads | odd) for which in (known, Matcher()))
        assert (found[0], found[3]) == (fresh[0], fresh[3])


@pytest.mark.parametrize("samples", [None, "uneven"])
def test_training_gives_what_it_gives_on_the_host(world_on_gpus, samples):
    comm = world_on_gpus
    there, here = Model(on_gpu), Model(np.array)
    count = None if samples is None else 3 + comm.rank
    optimizers = [allred.distributed(allred.optim.Adam(lr=0.1), clip_norm=3.0) for _ in range(2)]
    for model, optimizer in zip((here, there), optimizers, strict=True):
        model.params["b"] += comm.rank
        optimizer.broadcast(model.params)
        for step in range(4):
            optimizer.step(model.params, model.grads(step, comm.rank), samples=count)
    for name, value in here.params.items():
        assert type(there.params[name]) is DeviceArray
        np.testing.assert_allclose(host(there.params[name]), value, rtol=2e-5, atol=1e-6)


def test_nan_on_a_gpu_is_found_before_it_is_everyones(world_on_gpus):
    comm, model = world_on_gpus, Model(on_gpu)
    optimizer = allred.distributed(allred.optim.SGD(lr=0.1), nonfinite="raise")
    grads = model.grads(0, 0)
    if comm.rank == comm.size - 1:
        grads["b"][3] = np.nan
    with pytest.raises(allred.NonFiniteError, match=rf"'b' on rank {comm.size - 1} .*nan at \[3\]"):
        optimizer.step(model.params, grads)
    assert np.isnan(host(grads["b"])[3]) == (comm.rank == comm.size - 1)


def test_a_gradient_that_a_rank_lacks_counts_as_zeros(world_on_gpus):
    comm, model = world_on_gpus, Model(on_gpu)
    grads = model.grads(0, 0)
    before = host(model.params["b"]).copy()
    if comm.rank:
        grads["b"] = None
    allred.distributed(allred.optim.SGD(lr=1.0)).step(model.params, grads)
    expected = before - host(model.grads(0, 0)["b"]) / comm.size
    np.testing.assert_allclose(host(model.params["b"]), expected, rtol=1e-6, atol=1e-7)


class Descent:
    """An optimizer that is the user's own, for arrays of one kind."""

    def step(self, params, grads):
        for name, grad in grads.items():
            if grad is not None:
                assert type(grad) is type(params[name])
                host(params[name])[...] -= host(grad).astype(np.float32)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("place", [on_gpu, standin_gpu.Tensor])
@pytest.mark.parametrize(
    "options",
    [{"accumulate": 3}, {"clip_norm": 0.5}, {"scaler": 1024.0}, {"accumulate": 2, "clip_norm": 0.5, "scaler": 8}],
)
def test_what_is_done_with_gradients_is_done_where_they_are(world_on_gpus, place, dtype, options):
    """Of any framework's arrays, and to the numbers that it gives on the host."""
    comm, params, norms = world_on_gpus, {}, {}
    shapes = {"w": (40, 30), "b": (30,), "s": (), "e": (0,)}
    for kind in (place, np.array):
        scaler = allred.GradScaler(init_scale=options["scaler"]) if "scaler" in options else None
        opt = allred.distributed(Descent(), **{**options, "scaler": scaler})
        params[kind] = {name: kind(np.zeros(shape, dtype)) for name, shape in shapes.items()}
        for step in range(4):
            rng = np.random.default_rng([step, comm.rank])
            grads = {name: kind(rng.normal(size=shape).astype(dtype)) for name, shape in shapes.items()}
            before = {name: host(grad).copy() for name, grad in grads.items()}
            opt.step(params[kind], grads, samples=1 + (step + comm.rank) % 2)
            if "accumulate" in options:
                assert all((host(grads[name]) == before[name]).all() for name in grads)
        norms[kind] = opt.grad_norm
    if "clip_norm" in options:
        assert norms[place] == pytest.approx(norms[np.array], rel=1e-2 if dtype != np.float32 else 1e-6)
    for name, value in params[np.array].items():
        there = host(params[place][name])
        assert there.dtype == dtype
        assert there.any() == (name != "e")
        np.testing.assert_allclose(
            there.astype(np.float64), value.astype(np.float64), rtol=1e-5, atol=1e-6 if dtype == np.float32 else 2e-2
        )


CHECKED = 3  # steps, which communicate in step() (modes/detect)


def early(place, names, steps, change=lambda step, grads: grads, samples=None):
    """The parameters after so many steps, those gradients given as they are ready; and the optimizer."""
    params, rank = {name: place(np.zeros(shape, np.float32)) for name, shape in SHAPES.items()}, allred.rank()
    opt = allred.distributed(Descent(), bucket_bytes=4096)
    for step in range(steps):
        rng = np.random.default_rng([step, rank])
        grads = {name: place(rng.normal(size=shape).astype(np.float32)) for name, shape in SHAPES.items()}
        grads = change(step, grads)
        for name in names:
            opt.reduce(name, grads[name], samples)
        opt.step(params, grads, samples)
    return {name: host(param) for name, param in params.items()}, opt


SHAPES = {"w": (40, 30), "b": (30,), "s": (), "v": (7, 3), "x": (500,), "e": (0,)}


def on_both(value):
    """The larger ones on the GPU."""
    return on_gpu(value) if value.size > 10 else value


class Caller:
    """A stream that gradients are computed on."""

    def __init__(self, ptr):
        self.ptr, self.behind = ptr, []

    def record(self):
        return self.ptr

    def wait_event(self, event):
        self.behind.append(event)


def test_gradients_of_a_step_may_come_on_several_streams(world_on_gpus, monkeypatch):
    """A bucket goes out in the last one's call, or in the step."""
    _, opt = early(on_gpu, list(SHAPES), CHECKED + 1)
    for _ in range(2):
        grads = {name: on_gpu(np.ones(shape, np.float32)) for name, shape in SHAPES.items()}
        callers = [Caller(ptr) for ptr in range(len(grads) + 1)]
        for (name, grad), caller in zip(grads.items(), callers, strict=False):
            monkeypatch.setattr("allred.gpu.device_arrays.current_stream", lambda _, caller=caller: caller)
            opt.reduce(name, grad)
        monkeypatch.setattr("allred.gpu.device_arrays.current_stream", lambda _, last=callers[-1]: last)
        opt.step({name: on_gpu(np.zeros(shape, np.float32)) for name, shape in SHAPES.items()}, grads)
        assert [caller.behind for caller in callers] == [[], *[[ptr] for ptr in range(len(grads))]]


@pytest.mark.parametrize("place", [on_gpu, standin_gpu.Tensor, on_both])
@pytest.mark.parametrize("samples", [None, "uneven"])
def test_gradients_that_come_early_give_what_they_give_in_the_step(world_on_gpus, place, samples):
    """Also where the last rank lacks one, and another is nobody's for a while."""
    last = world_on_gpus.rank == world_on_gpus.size - 1
    samples = None if samples is None else 3 + world_on_gpus.rank

    def change(step, grads):
        return grads | {"b": None if last else grads["b"], "x": None if step < 5 else grads["x"]}

    def given(names):
        return early(place, names, CHECKED + 4, change, samples)[0]

    expected = given([])
    for names in (["w", "v"], ["v", "e", "s", "w"]):
        for name, value in given(names).items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6)


def test_gradients_on_a_gpu_go_out_before_the_step(world_on_gpus):
    """The host waits for none of them."""
    _, opt = early(on_gpu, list(SHAPES), CHECKED + 1)
    grads = {name: on_gpu(np.full(shape, 1.0 + allred.rank(), np.float32)) for name, shape in SHAPES.items()}
    cuda_stand_in.gpu.synchronized = 0
    for name, grad in grads.items():
        opt.reduce(name, grad)
    opt._get_mode()._overlap._opening.wait()
    opt._get_mode()._overlap._advance()
    running = [work for work, _ in opt._get_mode()._overlap._sent]
    assert len(running) == len(opt._get_mode()._overlap._buckets) > 1
    while not all(work.end is not None for work in running):
        opt._get_mode()._overlap._advance()
    assert cuda_stand_in.gpu.synchronized == 0
    opt.step({name: on_gpu(np.zeros(shape, np.float32)) for name, shape in SHAPES.items()}, grads)
    assert cuda_stand_in.gpu.synchronized == 1
    np.testing.assert_allclose(host(grads["w"]), (1 + allred.size()) / 2)


ODD = {  # what becomes of gradients, and the words for it
    "elsewhere": (lambda grads: {"w": host(grads["w"])}, "'w' is on the host, and was on a GPU when"),
    "elsewhere in step": (lambda grads: {"v": host(grads["v"])}, "'v' is on the host, and was on a GPU when"),
    "shape": (lambda grads: {"w": grads["w"][:3]}, r"the gradient of 'w' float32 \(40, 30\) has shape \(3, 30\)"),
    "one memory": (lambda grads: {"v": grads["w"].reshape(-1)[:21].reshape(7, 3)}, "'v' and 'w' share memory"),
    "nan": (lambda grads: {"w": grads["w"] * np.float32(np.nan)}, "'w' on rank 0 .*is nan"),
}


@pytest.mark.parametrize("what", ODD)
def test_what_is_wrong_with_gradients_that_come_early_is_known_to_all_in_step(world_on_gpus, what):
    mistake, words = ODD[what]

    def change(step, grads):
        return grads | mistake(grads) if step == CHECKED + 1 and world_on_gpus.rank == 0 else grads

    with pytest.raises((InputError, allred.NonFiniteError), match=words) as error:
        early(on_gpu, ["w", "b"], CHECKED + 2, change)
    assert len(set(allred.allgather_object(str(error.value)))) == 1
    early(on_gpu, ["w", "b"], CHECKED + 2)
