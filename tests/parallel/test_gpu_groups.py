# ruff: noqa: F811  (fixtures are imported)
"""Groups of arrays on the stand-in GPU: buckets, groups that come again, weights, compression."""

import weakref

import cuda_stand_in
import ml_dtypes
import numpy as np
import pytest
import standin_gpu
import test_collectives as contract
from gpu_fixtures import are_freed, comm, connected  # noqa: F401
from standin_gpu import host, on_gpu

import allred
from allred.comm import device_buckets, device_operation
from allred.errors import MismatchError

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("op", [allred.Sum, allred.Average])
def test_a_group_is_reduced_in_buckets(comm, in_place, op, monkeypatch):
    """Small tensors of a dtype in one, a large one alone; also of other layouts. Padding does not change results."""
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


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_sent_bytes_do_not_include_padding(comm, dtype):
    """Each byte is counted once. What the host moves for the GPU includes the padding."""
    group, nbytes = [on_gpu(np.ones(count, dtype)) for count in (3, 5, 9)], 17 * np.dtype(dtype).itemsize
    before, by_host = comm.sent_bytes, comm.backend.traffic.sent
    comm.grouped_allreduce(group, allred.Sum, in_place=True).wait()
    by_host = comm.backend.traffic.sent - by_host
    assert comm.sent_bytes - before == (nbytes if comm.devices.name == "nccl" else by_host)


class SimilarGroups:
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


def test_a_cached_group_is_not_validated_again(comm, monkeypatch):
    """The cache applies whichever array owns the memory. Arrays with gaps, and arrays that are reduced in place, are
    validated each time."""
    looked = []
    monkeypatch.setattr(device_operation, "adopt", lambda value: looked.append(1) or standin_gpu.adopt(value))
    similar = SimilarGroups()
    for group, op, weight in similar.groups * 2:
        for _ in range(2):
            looked.clear()
            similar.memory[...] = 7
            for array in group:
                array[...] = -1 - comm.rank
            if weight is None:
                comm.grouped_allreduce(group, op, in_place=True).wait()
            else:
                comm.gpu.start(
                    group, device_buckets.ReduceRequest(op, "", allred.Compression.none, weight=weight)
                ).wait()
            expected = -1 if op is allred.Max else -sum(range(1, comm.size + 1)) * (weight or 1)
            for array in group:
                np.testing.assert_array_equal(host(array), np.full(array.shape, expected))
            assert np.count_nonzero(host(similar.memory) == 7) == 4000 - sum(array.size for array in group)
        packed = len(group) > 1 or weight is not None
        assert (len(looked) == 0) == (packed and all(array.flags.c_contiguous for array in group))


@pytest.mark.parametrize("weight", [None, 1.0])
@pytest.mark.parametrize("differing", [False, True])
def test_arrays_without_gaps_are_reduced_in_memory_order(comm, monkeypatch, differing, weight):
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
            comm.gpu.start(
                some, device_buckets.ReduceRequest(allred.Sum, "", allred.Compression.none, weight=weight)
            ).wait()
        total = sum(range(1, comm.size + 1))
        for array, value, size in zip(group, (values, values[0, 0], values[0]), (comm.size, 1, 1), strict=True):
            np.testing.assert_allclose(host(array), value * total * size, rtol=1e-5)
        assert bool(copied) == (differing and comm.size > 1)


def test_a_cached_group_is_validated_before_the_header_exchange(comm, monkeypatch):
    """After the exchange, other ranks would not receive the error."""
    looked, wanted = [], device_buckets.ReduceRequest(allred.Sum, "", allred.Compression.none, in_place=True)
    whole = on_gpu(np.ones(1000))
    comm.grouped_allreduce([whole], allred.Sum, in_place=True).wait()
    monkeypatch.setattr(device_operation, "adopt", lambda value: looked.append(value) or standin_gpu.adopt(value))
    comm.gpu._reduction_steps([whole], wanted).close()
    assert len(looked) == 1


def test_the_cache_keeps_no_arrays_alive(comm):
    group = [on_gpu(np.ones(shape, np.float32)) for shape in [(3, 4), (12,)]]
    left = [weakref.ref(array) for array in group]
    for _ in range(2):
        comm.grouped_allreduce(group, allred.Sum, in_place=True).wait()
    del group
    cuda_stand_in.gpu.stuck = False
    comm.allreduce(on_gpu(np.ones(3, np.float32)), allred.Sum).wait()  # releases what has ended before
    assert are_freed(left)


def test_cached_groups_that_differ_between_ranks_are_a_mismatch(comm):
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
    """The gradients of a rank without samples are not added, even if they are NaN; 16-bit floats are rounded once."""
    group = [np.arange(4) + 1.0, np.full(3, 1 / 3)]
    mine = [on_gpu((x if comm.rank == 0 else x * np.nan).astype(dtype)) for x in group]
    weight = float(comm.size) if comm.rank == 0 else 0.0
    comm.gpu.start(
        mine, device_buckets.ReduceRequest(allred.Average, "", allred.Compression.none, weight=weight)
    ).wait()
    for x, y in zip(group, mine, strict=True):
        np.testing.assert_array_equal(host(y), x.astype(dtype))


def test_integers_of_ranks_without_samples_are_not_added(comm):
    mine = [on_gpu(np.full(n, 7, np.int32)) for n in (3, 5)]
    comm.gpu.start(
        mine, device_buckets.ReduceRequest(allred.Sum, "", allred.Compression.none, weight=float(comm.rank == 0))
    ).wait()
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


class EnqueueLog:
    """What each kernel and each allReduce follows: the clock of its stream when it is enqueued, and its own work."""

    def __init__(self, monkeypatch):
        self.enqueued = []
        for name in ("pack", "unpack"):
            monkeypatch.setitem(standin_gpu.FUSE, name, self.wrap(name, standin_gpu.FUSE[name]))
        monkeypatch.setattr(standin_gpu.Nccl, "allReduce", self.wrap("allReduce", standin_gpu.Nccl.allReduce))

    def wrap(self, title, function):
        def noted(*arguments, **more):
            stream = cuda_stand_in.Stream.at(arguments[-1]) if title == "allReduce" else cuda_stand_in.current()
            before = dict(stream.before)
            function(*arguments, **more)
            self.enqueued.append((title, before, (stream.ptr, stream.before[stream.ptr])))

        return noted

    def follows(self, later, earlier):
        """Whether works follow others. later, earlier: title and number."""
        works = {}
        for title, before, work in self.enqueued:
            works[title, sum(1 for known in works if known[0] == title)] = before, work
        (before, _), (_, (stream, count)) = works[later], works[earlier]
        return before.get(stream, 0) >= count


@pytest.mark.parametrize("operations", [1, 4])
def test_consecutive_buckets_overlap(comm, monkeypatch, operations):
    """Of one operation, and of several that use different arrays. Only two buckets are under way at once."""
    if comm.devices.name != "nccl":
        return
    monkeypatch.setattr("allred.comm.device_buckets.BUCKET_BYTES", 4096)
    order = EnqueueLog(monkeypatch)
    arrays = [on_gpu(np.full(300, comm.rank, np.float32)) for _ in range(12)]
    each = len(arrays) // operations
    groups = [arrays[start : start + each] for start in range(0, len(arrays), each)]
    works = [
        comm.gpu.start(
            group,
            device_buckets.ReduceRequest(
                allred.Average, f"{number}", allred.Compression.none, weight=None, independent=operations > 1
            ),
        )
        for number, group in enumerate(groups)
    ]
    for work in works:
        work.wait()
    for array in arrays:
        np.testing.assert_array_equal(host(array), np.full(300, (comm.size - 1) / 2))
    for number in range(1, 4):
        assert not order.follows(("pack", number), ("allReduce", number - 1))
        assert not order.follows(("allReduce", number), ("unpack", number - 1))
        assert order.follows(("allReduce", number), ("pack", number))
        assert order.follows(("unpack", number), ("allReduce", number))
    for number in range(2, 4):
        assert order.follows(("pack", number), ("unpack", number - 2))


def test_operations_on_the_same_arrays_follow_each_other(comm):
    """Also where each uses other streams, and none is waited for."""
    x = [on_gpu(np.full(300, comm.rank + 1.0)) for _ in range(2)]
    comm.grouped_allreduce(x, allred.Sum, in_place=True)
    comm.broadcast(x[0], 0, in_place=True)
    comm.grouped_allreduce(x, allred.Average, in_place=True)
    comm.allreduce(x[1], allred.Sum, in_place=True)
    comm.grouped_allreduce(x, allred.Average, in_place=True).wait()
    total = sum(range(1, comm.size + 1))
    assert [host(array)[0] for array in x] == [total, total * comm.size]


def test_large_arrays_are_in_one_group_of_nccl(comm, monkeypatch):
    """If no kernel is needed, they are reduced in place."""
    if comm.devices.name != "nccl":
        return
    monkeypatch.setattr("allred.comm.device_buckets.BUCKET_BYTES", 4096)
    open_groups, real = [], standin_gpu.Nccl.allReduce

    def all_reduce(nccl, source, target, *rest):
        open_groups.append((standin_gpu.Nccl.open_groups, source == target))
        real(nccl, source, target, *rest)

    monkeypatch.setattr(standin_gpu.Nccl, "allReduce", all_reduce)
    group = [on_gpu(np.full(count, comm.rank, np.float32)) for count in (1000, 5, 600, 7)]
    comm.grouped_allreduce(group, allred.Sum, in_place=True).wait()
    assert open_groups == [(1, True), (1, True), (0, True)]
    for array in group:
        np.testing.assert_array_equal(host(array), np.full(array.shape, sum(range(comm.size))))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("compression", [allred.Compression.none, allred.Compression.fp16])
def test_a_large_array_is_reduced_in_slices(comm, monkeypatch, dtype, compression):
    monkeypatch.setattr("allred.comm.device_buckets.BUCKET_BYTES", 4096)
    numbers = np.arange(5003) % 50
    for weight, checks in ((None, False), (None, True), (2.0, False)):
        group = [on_gpu((numbers * (comm.rank + 1)).astype(dtype)), on_gpu(np.full(3, comm.rank, np.int32))]
        comm.gpu.start(
            group[:1], device_buckets.ReduceRequest(allred.Average, "", compression, weight=weight, checks=checks)
        ).wait()
        expected = (numbers * (comm.size + 1) / 2).astype(dtype)
        np.testing.assert_array_equal(host(group[0]), expected * dtype(weight or 1))


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_results_that_are_not_finite_are_not_written(comm, dtype, gaps):
    """The flags are those of this reduction only."""
    limits = ml_dtypes.finfo(dtype)
    wide = on_gpu(np.zeros((4, 12), dtype))
    group = [on_gpu(np.ones(7, dtype)), wide[:, ::2] if gaps else wide, on_gpu(np.ones(3, np.int64))]
    last = comm.size - 1

    def reduced():
        work = comm.gpu.start(
            group, device_buckets.ReduceRequest(allred.Sum, "", allred.Compression.none, weight=None, checks=True)
        )
        flags = work.wait().flags
        work.synchronize()
        return flags.first_position()

    for _ in range(2):
        for array in group:
            array[...] = 1
        assert reduced() == -1
        for array in group:
            array[...] = 1
        if comm.rank == last:
            group[1][2, 3] = np.inf
        assert reduced() == 1
        values = host(group[1]).astype(np.float64)
        assert values[2, 3] == (np.inf if comm.rank == last else 1)
        assert values[2, 2] == comm.size
    if comm.size > 1:
        group[0][...] = limits.max
        assert reduced() == 0
        np.testing.assert_array_equal(host(group[0]), np.full(7, limits.max))
