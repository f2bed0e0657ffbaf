"""Device arrays through NCCL, on a real GPU: the same closed forms as the other backends (tests/parallel)."""

import cupy
import numpy as np
import pytest
import torch

import allred
from allred.errors import InputError, MismatchError

SHAPES = [(), (0,), (1,), (7,), (2, 3), (1009,), (3, 131077)]
FLOATS = ["float16", "float32", "float64"]
INTS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
RANKED = allred.Sum, allred.Min, allred.Max, allred.Product


def data(rank, shape, dtype):
    count = int(np.prod(shape, dtype=np.int64))
    return ((np.arange(count) + 3 * rank) % 5).reshape(shape).astype(dtype)


def expected(op, shape, dtype):
    ranks = np.stack([data(r, shape, np.float64) for r in range(allred.size())])
    if op is allred.Average:
        return ranks.mean(axis=0).astype(dtype)
    reduce = {allred.Sum: np.add, allred.Min: np.minimum, allred.Max: np.maximum, allred.Product: np.multiply}[op]
    return reduce.reduce(ranks, axis=0).astype(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS + INTS)
def test_allreduce(dtype, shape):
    for _ in range(2):
        x = cupy.asarray(data(allred.rank(), shape, dtype))
        y = allred.allreduce(x, allred.Sum)
        assert isinstance(y, cupy.ndarray)
        np.testing.assert_array_equal(y.get(), expected(allred.Sum, shape, dtype), strict=True)
        np.testing.assert_array_equal(x.get(), data(allred.rank(), shape, dtype))


@pytest.mark.parametrize("op", [*RANKED, allred.Average])
@pytest.mark.parametrize("dtype", FLOATS + INTS)
def test_every_op_in_place(op, dtype):
    if op is allred.Average and dtype in INTS:
        return
    x = cupy.asarray(data(allred.rank(), (1009,), dtype))
    assert allred.allreduce_(x, op) is x
    np.testing.assert_allclose(x.get(), expected(op, (1009,), dtype), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_numbers(dtype):
    """As twice as many floats, in any layout; their products are refused."""
    rank, size = allred.rank(), allred.size()
    x = cupy.asarray((data(rank, (5, 14), "f8") + 1j * rank).astype(dtype))[:, ::2]
    group = [x, cupy.full(9, 1 + rank, dtype), cupy.ones(3, np.float32)]
    y = allred.allreduce(x, allred.Sum)
    allred.grouped_allreduce_(group, allred.Average)
    total = expected(allred.Sum, (5, 14), "f8")[:, ::2] + 1j * sum(range(size))
    np.testing.assert_array_equal(y.get(), total.astype(dtype), strict=True)
    np.testing.assert_allclose(group[0].get(), total / size, rtol=1e-6)
    np.testing.assert_array_equal(group[1].get(), np.full(9, (1 + size) / 2, dtype), strict=True)
    assert allred.broadcast(x, size - 1).get().tolist() == group[0].get().tolist()
    with pytest.raises(allred.InputError, match=f"Product of {dtype} is not available on GPUs"):
        allred.allreduce(x, allred.Product)
    param, grad = cupy.ones(7, dtype), cupy.full(7, complex(1, rank), dtype)
    allred.distributed(allred.optim.Adam(lr=0.5), clip_norm=1.0).step([param], [grad])
    there = np.ones(7, dtype)
    allred.distributed(allred.optim.Adam(lr=0.5), clip_norm=1.0).step([there], [np.full(7, complex(1, rank), dtype)])
    np.testing.assert_allclose(param.get(), there, rtol=1e-5)


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_makes_nan(dtype):
    x = cupy.asarray(np.array([np.nan if allred.rank() == 0 else 1, np.inf, -0.5], dtype))
    for op in RANKED:
        y = allred.allreduce(x, op).get()
        assert np.isnan(y[0]), op
        if op in (allred.Min, allred.Max):
            assert y[1:].tolist() == [np.inf, -0.5]


def test_bfloat16_of_torch():
    """256 + 1 has one digit more than bfloat16: the sum is formed in float32."""
    x = torch.full((1000,), 256.0 if allred.rank() == 0 else 1.0, dtype=torch.bfloat16, device="cuda")
    y = allred.allreduce(x, allred.Sum)
    assert y.dtype is torch.bfloat16
    assert y.is_cuda
    total = torch.tensor(255.0 + allred.size()).to(torch.bfloat16)
    assert (y.cpu() == total).all()
    assert allred.allreduce_(x, allred.Average) is x
    assert (x.cpu() == torch.tensor((255.0 + allred.size()) / allred.size()).to(torch.bfloat16)).all()


def test_a_torch_tensor_waits_for_torchs_stream():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.zeros(2**24, device="cuda")
        for _ in range(50):
            x += 1
        y = allred.allreduce(x, allred.Average)
        z = y * 2
    stream.synchronize()
    assert (z == 100).all()


def test_the_stream_that_waits_need_not_be_the_one_that_began():
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        x = torch.zeros(2**24, device="cuda")
        for _ in range(50):
            x += 1
        work = allred.allreduce_async(x, allred.Average)
    with torch.cuda.stream(second):
        z = work.wait() * 2
    second.synchronize()
    assert (z == 100).all()


def test_results_are_not_overwritten_while_they_are_read():
    """What reads a result may still be on its way when its memory goes back to the pool, and the next one is made."""
    for step in range(30):
        with cupy.cuda.Stream(non_blocking=True):
            x = cupy.full(2**22, step, np.float32)
            y = allred.allreduce(x, allred.Average)
            for _ in range(20):
                y = y + 1
            total = y.sum()
            del y
            allred.allreduce(x * 0, allred.Average)
            assert float(total) == (step + 20) * 2**22


class Interfaced:
    """An array that is being computed on a stream, by CUDA's array interface."""

    def __init__(self, array, stream):
        self.array, self.__cuda_array_interface__ = array, {**array.__cuda_array_interface__, "stream": stream.ptr}


def test_an_array_of_another_framework_waits_for_its_stream():
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = cupy.zeros((2**12, 2**12), np.float32)
        for _ in range(50):
            x += 1
    foreign = Interfaced(x[:, ::2], stream)
    y = allred.allreduce(foreign, allred.Average)
    assert (y == 50).all()
    assert allred.allreduce_(foreign, allred.Sum) is foreign
    with stream:
        assert (x[:, ::2] == 50 * allred.size()).all()
        assert (x[:, 1::2] == 50).all()


def test_wait_does_not_block_the_host_but_orders_the_stream():
    x = cupy.ones(2**26, np.float32)
    work = allred.allreduce_async_(x, allred.Average)
    work.wait()
    total = x.sum()  # enqueued behind
    assert float(total) == 2**26
    assert work.synchronize() is x
    assert work.done()


def test_a_group_with_layouts_and_weights():
    shapes = [(3,), (), (0,), (1009,), (200, 300)]
    group = [cupy.asarray(data(allred.rank(), s, "float32")) for s in shapes]
    group.append(cupy.asarray(data(allred.rank(), (10, 20), "float32"))[:, ::2])
    for result, shape in zip(allred.grouped_allreduce_(group, allred.Average), shapes, strict=False):
        np.testing.assert_allclose(result.get(), expected(allred.Average, shape, "float32"), rtol=1e-6)
    np.testing.assert_allclose(group[-1].get(), expected(allred.Average, (10, 20), "float32")[:, ::2], rtol=1e-6)


@pytest.mark.parametrize("framework", ["cupy", "torch"])
def test_groups_at_reused_addresses(framework):
    """Gradients of a step have the addresses of those of the step before, and other values, shapes or dtypes."""

    def new_tensor(shape, value, dtype):
        full, place = (cupy.full, {}) if framework == "cupy" else (torch.full, {"device": "cuda"})
        return full(shape, value, dtype=dtype, **place)

    dtypes = (np.float32, np.int32) if framework == "cupy" else (torch.float32, torch.int32)
    for step in range(6):
        shapes = [(100, 30), (7,), (1000,)] if step % 3 else [(30, 100), (8,), (999,)]
        group = [new_tensor(shape, allred.rank() + step, dtypes[step // 3]) for shape in shapes]
        for array in allred.grouped_allreduce_(group, allred.Sum):
            assert (array == sum(range(allred.size())) + step * allred.size()).all()


def test_the_other_collectives():
    rank, size = allred.rank(), allred.size()
    x = cupy.asarray(data(rank, (2, 3), "float32"))
    for root in range(size):
        np.testing.assert_array_equal(allred.broadcast(x, root).get(), data(root, (2, 3), "float32"))
    rows = cupy.asarray(data(rank, (rank + 1, 3), "int64"))
    everyone = np.concatenate([data(r, (r + 1, 3), "int64") for r in range(size)])
    np.testing.assert_array_equal(allred.allgather(rows).get(), everyone)
    y, received = allred.alltoall(cupy.asarray(np.repeat(np.arange(size), 2) + 10 * rank))
    assert received.tolist() == [2] * size
    assert y.get().tolist() == [rank + 10 * r for r in range(size) for _ in range(2)]
    z = allred.reducescatter(cupy.asarray(data(rank, (2 * size + 1, 2), "float32")), allred.Sum)
    np.testing.assert_array_equal(
        z.get(), np.array_split(expected(allred.Sum, (2 * size + 1, 2), "float32"), size)[rank]
    )


def test_mistakes_are_known_to_all():
    host = np.ones(3, np.float32)
    if allred.size() > 1:
        with pytest.raises(MismatchError, match="on the GPU on rank"):
            allred.allreduce(host if allred.rank() else cupy.asarray(host))
    with pytest.raises(InputError, match="arrays on the GPU and on the host"):
        allred.grouped_allreduce([host, cupy.asarray(host)])
    assert allred.allreduce(host, allred.Sum).tolist() == [allred.size()] * 3
