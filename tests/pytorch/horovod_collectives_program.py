"""Cases of the collectives of allred.torch, the interface of horovod.torch; test_horovod.py runs it on 2 and 3 ranks.

Expected values are computed from the inputs of all ranks, which each rank can make.
"""

import contextlib
import dataclasses
import json
import pathlib
import tempfile

import numpy as np
import pytest
import torch
from optimizer_case_runner import case
from torch import distributed as dist

import allred
import allred.torch as hvd
from allred import world
from allred.torch import differentiable

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
INTEGERS += tuple(getattr(torch, name) for name in ("uint16", "uint32", "uint64") if hasattr(torch, name))
MOVED = (*FLOATS, *INTEGERS, torch.bool, torch.complex64)


def value(rank, dtype=torch.float32, rows=4, seed=0):
    """The input of a rank: small whole numbers, so that sums are exact in all dtypes."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randint(0, 5, (rows, 3), generator=generator).to(dtype)


def everyone(dtype=torch.float32, **options):
    return [value(rank, dtype, **options) for rank in range(hvd.size())]


def same(found, expected):
    assert found.dtype == expected.dtype, (found.dtype, expected.dtype)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def close(found, expected):
    torch.testing.assert_close(found, expected)


@contextlib.contextmanager
def fails(*kinds, match):
    """The block raises an error of all these kinds, on this rank; the ranks can go on."""
    with pytest.raises(kinds[0], match=match) as caught:
        yield
    for kind in kinds:
        assert isinstance(caught.value, kind), (kind, type(caught.value).__mro__)
    assert hvd.allgather(torch.tensor([hvd.rank()])).tolist() == list(range(hvd.size()))


@case
def allreduce_of_every_dtype():
    for dtype in (*FLOATS, *INTEGERS):
        all_ranks = torch.stack(everyone(dtype)).double()
        for op, expected in (
            (hvd.Sum, all_ranks.sum(0)),
            (hvd.Average, all_ranks.mean(0)),
            (hvd.Min, all_ranks.amin(0)),
            (hvd.Max, all_ranks.amax(0)),
            (hvd.Product, all_ranks.prod(0)),
        ):
            wanted = expected.trunc() if dtype in INTEGERS else expected
            own = value(hvd.rank(), dtype)
            before = own.clone()
            close(hvd.allreduce(own, op=op), wanted.to(dtype))
            same(own, before)
            assert hvd.allreduce_(own, op=op) is own
            close(own, wanted.to(dtype))


@case
def complex_numbers():
    for dtype in (torch.complex64, torch.complex128):
        numbers = [value(rank, dtype) * (1 + 1j) + rank for rank in range(hvd.size())]
        own, total = numbers[hvd.rank()], torch.stack(numbers).sum(0)
        kept = own.clone()
        close(hvd.allreduce(own), total / hvd.size())
        close(hvd.allreduce(own, op=hvd.Product), torch.stack(numbers).prod(0))
        close(hvd.allreduce(own, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0), total * 2)
        close(hvd.allreduce(own.t(), op=hvd.Sum, compression=hvd.Compression.fp16), total.t())
        group = hvd.grouped_allreduce([own, torch.ones(3), torch.tensor([3])])
        for found, expected in zip(group, (total / hvd.size(), torch.ones(3), torch.tensor([3])), strict=True):
            close(found, expected)
        close(hvd.reducescatter(own), (total / hvd.size()).tensor_split(hvd.size())[hvd.rank()])
        close(hvd.reducescatter(own[:0], op=hvd.Sum), total[:0])
        same(own, kept)
        leaf = own.clone().requires_grad_()
        hvd.allreduce(leaf * 1j).abs().square().sum().backward()
        close(leaf.grad, 2 * total / hvd.size())
        spoiled = hvd.allreduce(torch.full((1,), complex(1, float("inf")), dtype=dtype), postscale_factor=2.0)
        assert (spoiled.real.item(), spoiled.imag.item()) == (2, float("inf"))
        same(hvd.allreduce_(own), hvd.allreduce(kept))
    for op in (hvd.Min, hvd.Max):
        with fails(hvd.HorovodInternalError, ValueError, match="complex numbers have no order"):
            hvd.allreduce(torch.ones(2) if hvd.rank() else torch.ones(2, dtype=torch.complex64), op=op)


@case
def averages_of_integers_round_toward_zero():
    total = -7 * hvd.size() - 1
    mine = torch.tensor([total if hvd.rank() == 0 else 0, -total if hvd.rank() == 0 else 0])
    assert hvd.allreduce(mine).tolist() == [-7, 7]


@case
def the_argument_average():
    own, total = value(hvd.rank()), sum(everyone())
    with pytest.warns(DeprecationWarning, match="average= is deprecated"):
        same(hvd.allreduce(own, average=False), total)
    with pytest.warns(DeprecationWarning, match="average= is deprecated"):
        close(hvd.allreduce(own, True), total / hvd.size())
    with pytest.raises(ValueError, match="exclude each other"):
        hvd.allreduce(own, average=True, op=hvd.Average)


@case
def scale_factors():
    for dtype in (torch.float32, torch.float16, torch.int64):
        own = value(hvd.rank(), dtype)
        scaled = [(each.double() * 0.5).trunc() if dtype is torch.int64 else each * 0.5 for each in everyone(dtype)]
        total = torch.stack([each.double() for each in scaled]).sum(0)
        same(hvd.allreduce(own, op=hvd.Sum, prescale_factor=0.5), total.to(dtype))
        after = torch.stack(everyone(dtype)).double().sum(0) * 2.5
        same(hvd.allreduce(own, op=hvd.Sum, postscale_factor=2.5), after.to(dtype))
        same(own, value(hvd.rank(), dtype))
    total = sum(rank + 1 for rank in range(hvd.size()))  # of integers, divided and scaled in one step
    expected = int(total * 2.0 / hvd.size())
    assert hvd.allreduce(torch.tensor([hvd.rank() + 1]), postscale_factor=2.0).tolist() == [expected]


@case
def groups_of_several_dtypes():
    big = [torch.full((2,), 40000.0, dtype=torch.float16), torch.ones(1, dtype=torch.int64)]  # the sum is too large
    same(hvd.grouped_allreduce(big)[0], big[0])
    last = torch.int64 if hvd.rank() else torch.float64
    for dtype, op in ((torch.int64, hvd.Sum if hvd.rank() else hvd.Average), (last, hvd.Average)):
        with fails(hvd.HorovodInternalError, match="different operations"):  # and no operation is left
            hvd.grouped_allreduce([torch.ones(2), torch.ones(2, dtype=dtype)], op=op)
    mine = [value(hvd.rank(), dtype, seed=i) for i, dtype in enumerate((torch.float32, torch.int32, torch.float16))]
    totals = [torch.stack(everyone(each.dtype, seed=i)).double().sum(0).to(each.dtype) for i, each in enumerate(mine)]
    for found, total in zip(hvd.grouped_allreduce(mine, op=hvd.Sum), totals, strict=True):
        same(found, total)
    means = hvd.synchronize(hvd.grouped_allreduce_async(mine))
    for found, total in zip(means, totals, strict=True):
        mean = total.double() / hvd.size()
        close(found, (mean.trunc() if found.dtype is torch.int32 else mean).to(found.dtype))
    assert all(one is other for one, other in zip(hvd.grouped_allreduce_(mine, op=hvd.Sum), mine, strict=True))
    for found, total in zip(mine, totals, strict=True):
        same(found, total)
    gathered = hvd.grouped_allgather([value(hvd.rank()), torch.tensor([hvd.rank()])])
    same(gathered[0], torch.cat(everyone()))
    assert gathered[1].tolist() == list(range(hvd.size()))
    parts = hvd.grouped_reducescatter([value(hvd.rank(), rows=5), value(hvd.rank(), torch.int32)], op=hvd.Sum)
    same(parts[0], torch.stack(everyone(rows=5)).sum(0).tensor_split(hvd.size())[hvd.rank()])
    total = sum(everyone(torch.int32))
    same(parts[1], total.tensor_split(hvd.size())[hvd.rank()])


@case
def layouts():
    """Tensors that are not contiguous, 0-d and empty, and parameters."""
    own = value(hvd.rank()).t()
    same(hvd.allreduce(own, op=hvd.Sum), sum(everyone()).t().contiguous())
    hvd.allreduce_(own, op=hvd.Sum)
    same(own, sum(everyone()).t())
    assert hvd.allreduce(torch.tensor(float(hvd.rank())), op=hvd.Sum).item() == sum(range(hvd.size()))
    assert hvd.allreduce(torch.zeros(0, 3)).shape == (0, 3)
    same(hvd.allgather(torch.zeros(0, 3, dtype=torch.complex64)), torch.zeros(0, 3, dtype=torch.complex64))
    parameter = torch.nn.Parameter(value(hvd.rank()))
    assert hvd.broadcast_(parameter, root_rank=1) is parameter
    same(parameter.detach(), value(1))
    assert hvd.allgather(torch.tensor(hvd.rank())).tolist() == list(range(hvd.size()))


@case
def data_movement_of_every_dtype():
    size, rank = hvd.size(), hvd.rank()
    for dtype in MOVED:
        rows = rank + 1  # other numbers of rows on other ranks
        expected = torch.cat([value(each, dtype, rows=each + 1) for each in range(size)])
        same(hvd.allgather(value(rank, dtype, rows=rows)), expected)
        own = value(rank, dtype)
        same(hvd.broadcast(own, root_rank=size - 1), value(size - 1, dtype))
        same(own, value(rank, dtype))
        hvd.broadcast_(own, root_rank=size - 1)
        same(own, value(size - 1, dtype))
        sent = [value(each, dtype, rows=2 * size) for each in range(size)]
        expected = torch.cat([each[2 * rank : 2 * rank + 2] for each in sent])
        same(hvd.alltoall(sent[rank]), expected)
    for dtype in (*FLOATS, *INTEGERS):
        own, total = value(rank, dtype), torch.stack(everyone(dtype)).double().sum(0)
        close(hvd.reducescatter(own, op=hvd.Sum), total.to(dtype).tensor_split(size)[rank])
        mean = total / size
        mean = (mean.trunc() if dtype in INTEGERS else mean).to(dtype)
        close(hvd.reducescatter(own), mean.tensor_split(size)[rank])


@case
def alltoall_with_splits():
    size, rank = hvd.size(), hvd.rank()
    splits = [to + rank for to in range(size)]  # rank r sends t + r rows to rank t
    own = torch.full((sum(splits), 2), float(rank))
    expected = torch.cat([torch.full((rank + sender, 2), float(sender)) for sender in range(size)])
    rows, received = hvd.alltoall(own, splits)
    same(rows, expected)
    same(received, torch.tensor([rank + sender for sender in range(size)], dtype=torch.int32))
    rows, received = hvd.alltoall(own, torch.tensor(splits))
    same(rows, expected)
    assert received.dtype is torch.int64
    rows, received = hvd.synchronize(hvd.alltoall_async(own, splits))
    same(rows, expected)


def gradient(call, tensor, weights):
    """The gradient of (call(tensor) * weights).sum()."""
    own = tensor.clone().requires_grad_()
    (call(own) * weights).sum().backward()
    return own.grad


@case
def gradients():
    """Horovod's: of allgather and broadcast the mean over the ranks."""
    size, rank = hvd.size(), hvd.rank()
    own, weights = value(rank), [value(each, seed=7) for each in range(size)]
    total = torch.stack(weights).sum(0)
    close(gradient(lambda t: hvd.allreduce(t, op=hvd.Sum), own, weights[rank]), total)
    close(gradient(hvd.allreduce, own, weights[rank]), total / size)
    close(gradient(lambda t: hvd.allreduce(t, op=hvd.Sum, prescale_factor=0.5), own, weights[rank]), total / 2)
    close(gradient(lambda t: hvd.grouped_allreduce([t, t], op=hvd.Sum)[1], own, weights[rank]), total)
    counts = [each + 1 for each in range(size)]
    mine = value(rank, rows=counts[rank])
    weights = [value(each, rows=sum(counts), seed=7) for each in range(size)]
    mean = torch.stack(weights).mean(0).split(counts)[rank]
    close(gradient(hvd.allgather, mine, weights[rank]), mean)
    close(gradient(lambda t: hvd.grouped_allgather([t, t])[0], mine, weights[rank]), mean)
    weights = [value(each, seed=7) for each in range(size)]
    mean = torch.stack(weights).mean(0)
    expected = mean if rank == 1 else torch.zeros_like(mean)
    close(gradient(lambda t: hvd.broadcast(t, root_rank=1), own, weights[rank]), expected)


@case
def gradients_of_rows_that_move():
    size, rank = hvd.size(), hvd.rank()
    own = torch.ones(2 * size, 2)
    received = torch.ones(2 * size, 2)
    factors = torch.arange(1.0, size + 1).repeat_interleave(2)[:, None] * own
    close(gradient(hvd.alltoall, own, (rank + 1.0) * received), factors)
    splits = [2] * size
    close(gradient(lambda t: hvd.alltoall(t, splits)[0], own, received), own)
    part = torch.full((2, 2), rank + 1.0)
    close(gradient(hvd.reducescatter, own, part), factors)
    close(gradient(lambda t: hvd.reducescatter(t, op=hvd.Sum), own, part), size * factors)
    close(gradient(lambda t: hvd.grouped_reducescatter([t], postscale_factor=3.0)[0], own, part), 3 * factors)


COMPLEX = (torch.complex64, torch.complex128)


def numbers(seed, *shape, dtype):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype)


def model_loss(parameter, rank, reduce):
    """The loss of a rank. reduce: of values of all ranks. It has lazy conjugates and their imaginary parts."""
    rows = numbers(rank, 5, 3, dtype=parameter.dtype)
    hidden = torch.tanh(rows @ parameter)
    reduced = reduce(rank, hidden)
    product = reduced * hidden.conj() * numbers(50 + rank, *reduced.shape, dtype=parameter.dtype)
    if parameter.is_complex():
        return product.real.sum() + (reduced.conj().imag ** 2).mean() + (parameter * parameter.conj()).real.sum()
    return product.sum() + (reduced**2).mean() + (parameter**2).sum()


def serial_gradient(parameter, op):
    """The gradient of the mean of the losses of all ranks, in one process."""
    own = parameter.clone().requires_grad_()
    hidden = [torch.tanh(numbers(rank, 5, 3, dtype=own.dtype) @ own) for rank in range(hvd.size())]
    total = torch.stack(hidden).sum(0) / (hvd.size() if op is hvd.Average else 1)
    losses = [model_loss(own, rank, lambda *_: total) for rank in range(hvd.size())]
    torch.stack(losses).mean().backward()
    return own.grad


@case
def an_allreduce_in_the_forward_pass():
    """With averages of the parameter's gradients, the gradient is that of the mean of the losses."""
    for dtype in (torch.float32, torch.float64, *COMPLEX):
        for op in (hvd.Sum, hvd.Average):
            parameter = numbers(100, 3, 2, dtype=dtype)
            expected = serial_gradient(parameter, op)
            for call in (differentiable.allreduce, hvd.allreduce, lambda x, op: hvd.grouped_allreduce([x], op=op)[0]):
                own = parameter.clone().requires_grad_()
                model_loss(own, hvd.rank(), lambda _, hidden: call(hidden, op=op)).backward()  # noqa: B023
                close(hvd.allreduce(own.grad), expected)
            own = parameter.clone().requires_grad_()
            optimizer = allred.distributed(torch.optim.SGD([own], lr=0.1))
            model_loss(own, hvd.rank(), lambda _, hidden: differentiable.allreduce(hidden, op)).backward()  # noqa: B023
            close(own.grad, expected)
            optimizer.allred.detach()


@case
def one_loss_of_all_ranks():
    """All ranks compute the same loss from a reduced value: averages give its gradient, sums N times that."""
    for dtype in (torch.float64, torch.complex128):
        start = numbers(100, 3, dtype=dtype)
        rows = [numbers(rank, 4, 3, dtype=dtype) for rank in range(hvd.size())]
        whole = start.clone().requires_grad_()
        (torch.cat(rows) @ whole).sum().abs().square().backward()
        own = start.clone().requires_grad_()
        differentiable.allreduce((rows[hvd.rank()] @ own).sum(), hvd.Sum).abs().square().backward()
        close(hvd.allreduce(own.grad), whole.grad)
        close(hvd.allreduce(own.grad, op=hvd.Sum), hvd.size() * whole.grad)
    some = allred.ProcessSet([0])
    if hvd.rank() == 0:
        assert differentiable.allreduce(torch.tensor(2.0), process_set=some) == 2
    scores = torch.tensor(1.0 + hvd.rank(), requires_grad=True)  # as in the docstring
    variance = differentiable.allreduce(scores * scores) - differentiable.allreduce(scores) ** 2
    variance.backward()
    close(scores.grad, 2 * (scores.detach() - (hvd.size() + 1) / 2))


@case
def second_derivatives_of_an_allreduce():
    for dtype in (torch.float64, torch.complex128):
        own = numbers(hvd.rank(), 3, dtype=dtype).requires_grad_()
        (first,) = torch.autograd.grad(hvd.allreduce(own, op=hvd.Sum).abs().pow(4).sum(), own, create_graph=True)
        (second,) = torch.autograd.grad(first.abs().square().sum(), own)
        wholes = [numbers(rank, 3, dtype=dtype).requires_grad_() for rank in range(hvd.size())]
        losses = hvd.size() * torch.stack(wholes).sum(0).abs().pow(4).sum()
        (first, *_) = torch.autograd.grad(losses, wholes, create_graph=True)
        norms = hvd.size() * first.abs().square().sum()
        close(second, torch.autograd.grad(norms, wholes)[hvd.rank()])


@case
def gradients_of_complex_rows():
    """The gradient of allgather is that of the mean of the losses; see collectives.py for the others."""
    size, rank = hvd.size(), hvd.rank()
    counts = [each + 1 for each in range(size)]

    def losses(gathered):
        factors = [numbers(70 + each, sum(counts), 2, dtype=gathered.dtype) for each in range(size)]
        return [(gathered.conj() * each).imag.square().sum() + gathered.real.sum() for each in factors]

    for dtype in COMPLEX:
        parts = [numbers(each, counts[each], 2, dtype=dtype).requires_grad_() for each in range(size)]
        torch.stack(losses(torch.cat(parts))).mean().backward()
        for call in (hvd.allgather, lambda x: hvd.grouped_allgather([x, x])[1]):
            own = parts[rank].detach().clone().requires_grad_()
            losses(call(own))[rank].backward()
            close(own.grad, parts[rank].grad)
        single = torch.tensor(1j, dtype=dtype, requires_grad=True)
        hvd.allgather(single).conj().imag.sum().backward()  # the gradient of the result is a lazy conjugate
        close(single.grad, torch.tensor(-1j, dtype=dtype))
        factors = [numbers(60 + each, 2, 2, dtype=dtype) for each in range(size)]
        own = numbers(1, 2 * size, 2, dtype=dtype).requires_grad_()
        (hvd.reducescatter(own).conj() * factors[rank]).real.sum().backward()
        close(own.grad, torch.cat(factors))
        own = torch.ones(2, 2, dtype=dtype, requires_grad=True)
        (hvd.broadcast(own, root_rank=0).conj() * factors[rank]).real.sum().backward()
        close(own.grad, torch.stack(factors).mean(0) if rank == 0 else torch.zeros_like(own))
        own = torch.ones(size, 2, dtype=dtype, requires_grad=True)
        (hvd.alltoall(own).conj() * (rank + 1j)).real.sum().backward()
        close(own.grad, torch.tensor([[each + 1j] * 2 for each in range(size)], dtype=dtype))


@case
def sums_and_averages_of_complex_tensors():
    size, rank = hvd.size(), hvd.rank()
    for dtype in COMPLEX:
        for shape in ((), (0,), (4, 3), (3, 4)):
            every = [numbers(each, *shape, dtype=dtype) for each in range(size)]
            every = [each.t() if shape == (3, 4) else each for each in every]
            total, before = torch.stack(every).sum(0), every[rank].clone()
            close(hvd.allreduce(every[rank], op=hvd.Sum), total)
            close(hvd.allreduce(every[rank]), total / size)
            close(hvd.allreduce(every[rank], op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0), 1.5 * total)
            close(hvd.grouped_allreduce([torch.ones(2), every[rank]])[1], total / size)
            close(hvd.synchronize(hvd.allreduce_async(every[rank], op=hvd.Sum)), total)
            same(every[rank], before)
            assert hvd.allreduce_(before) is before
            close(before, total / size)
            if shape and shape[0]:
                close(hvd.reducescatter(every[rank], op=hvd.Sum), total.tensor_split(size)[rank])


@case
def allreduces_that_are_not_differentiable():
    kinds = hvd.HorovodInternalError, ValueError, allred.InputError
    with fails(*kinds, match="is not linear"):
        differentiable.allreduce(torch.ones(2), hvd.Max if hvd.rank() == 0 else hvd.Sum)
    with fails(*kinds, match="dtype torch.int64 has no gradients"):
        differentiable.allreduce(torch.arange(2) if hvd.rank() == 0 else torch.ones(2))
    with fails(hvd.HorovodInternalError, allred.MismatchError, match="complex64"):
        hvd.allreduce(torch.ones(2, 2) if hvd.rank() else torch.ones(2, dtype=torch.complex64))
    with fails(*kinds, match="lazy conjugate"):
        hvd.allreduce(torch.ones(2, dtype=torch.complex64).conj())


@case
def compressors():
    own, mean = value(hvd.rank()) + 0.1, torch.stack(everyone()).mean(0) + 0.1

    class Double:
        @staticmethod
        def compress(tensor):
            return tensor.double(), tensor.dtype

        @staticmethod
        def decompress(tensor, ctx):
            return tensor.to(ctx)

    for compression, tolerance in ((hvd.Compression.none, 1e-6), (hvd.Compression.fp16, 1e-2), (Double, 1e-6)):
        found = hvd.allreduce(own, compression=compression)
        assert found.dtype is torch.float32
        torch.testing.assert_close(found, mean, rtol=tolerance, atol=tolerance)
        (found,) = hvd.grouped_allreduce([own], compression=compression)
        torch.testing.assert_close(found, mean, rtol=tolerance, atol=tolerance)
        found = hvd.reducescatter(own, compression=compression)
        torch.testing.assert_close(found, mean.tensor_split(hvd.size())[hvd.rank()], rtol=tolerance, atol=tolerance)
    same(hvd.allreduce(torch.tensor([3]), compression=hvd.Compression.fp16), torch.tensor([3]))


@case
def handles():
    started = [hvd.allreduce_async(value(hvd.rank(), seed=i), name=f"h{i}", op=hvd.Sum) for i in range(10)]
    assert all(type(each) is int for each in started)
    assert len(set(started)) == 10
    for i, each in reversed(list(enumerate(started))):
        same(hvd.synchronize(each), sum(everyone(seed=i)))
        assert hvd.synchronize(each) is None
        with pytest.raises(ValueError, match="no such handle"):
            hvd.poll(each)
    own = value(hvd.rank())
    each = hvd.allreduce_async_(own, op=hvd.Sum)
    while not hvd.poll(each):
        pass
    assert hvd.synchronize(each) is own
    same(own, sum(everyone()))


@case
def names():
    """A name may be used again when the operation is complete; before, it is an error on the rank that uses it."""
    from mpi4py import MPI

    if hvd.rank():
        MPI.COMM_WORLD.Barrier()  # so that the first operation of rank 0 is not complete
    one = hvd.allgather_async(value(hvd.rank()), name="twice")
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match="allgather 'twice': an operation of this name is still in progress"):
            hvd.allgather_async(value(hvd.rank()), name="twice")
        MPI.COMM_WORLD.Barrier()
    other = hvd.broadcast_async(value(hvd.rank()), 0, name="twice")  # another kind of operation
    hvd.synchronize(one)
    hvd.synchronize(other)
    for _ in range(2):
        complete = hvd.allgather_async(value(hvd.rank()), name="twice")
        while not hvd.poll(complete):
            pass  # and not synchronized


@case
def a_call_of_several_operations_that_fails_leaves_none():
    rows = 2 + (hvd.rank() > 0)
    for _ in range(2):
        with pytest.raises(hvd.HorovodInternalError, match="different operations"):
            hvd.broadcast_parameters({"a": torch.ones(rows), "b": torch.ones(2)}, root_rank=0)
        odd = torch.eye(2) if hvd.rank() else torch.eye(2).to_sparse()
        with pytest.raises(hvd.HorovodInternalError, match="sparse"):
            hvd.broadcast_parameters({"a": odd, "b": torch.ones(2)}, root_rank=0)
    hvd.broadcast_parameters({"a": torch.ones(2), "b": torch.ones(2)}, root_rank=0)


@case
def another_order_of_names_is_an_error_on_all_ranks():
    order = ["a", "b"] if hvd.rank() == 0 else ["b", "a"]
    started = [hvd.allreduce_async(torch.ones(2), name=name) for name in order]
    for each in started:
        with pytest.raises(hvd.HorovodInternalError, match="same order") as caught:
            hvd.synchronize(each)
        assert isinstance(caught.value, allred.MismatchError)
    started = [hvd.allreduce_async(torch.ones(2), name=name) for name in order]
    with pytest.raises(hvd.HorovodInternalError, match="same order"):
        hvd.synchronize(started[0])
    for each in [hvd.allreduce_async(torch.ones(2), name=name) for name in "ab"]:  # the program tries again
        same(hvd.synchronize(each), torch.ones(2))


@case
def tensors_that_differ():
    rank = hvd.rank()
    internal = hvd.HorovodInternalError, RuntimeError, allred.MismatchError
    with fails(*internal, match=r"float32 \(2,\) on rank 0; .* float32 \(3,\) on rank"):
        hvd.allreduce(torch.ones(2 + (rank > 0)))
    with fails(*internal, match="float64"):
        hvd.allreduce(torch.ones(2, dtype=torch.float64 if rank else torch.float32))
    with fails(*internal, match="different operations"):
        hvd.synchronize(hvd.allreduce_async(torch.ones(2), op=hvd.Sum if rank else hvd.Average))
    for call in (hvd.allreduce, hvd.reducescatter):
        with fails(*internal, match="op=hvd.Average of integers"):
            call(torch.ones(2, dtype=torch.int64), op=hvd.Sum if rank else hvd.Average)
        with fails(*internal, match="prescale_factor=0.5"):
            call(torch.ones(2), op=hvd.Sum, prescale_factor=1.0 if rank else 0.5)
        with fails(*internal, match="postscale_factor=0.5.*postscale_factor=2"):
            call(torch.ones(2), name="scaled", postscale_factor=2 if rank else 0.5)
    own = torch.ones(2 + (rank > 0))
    with fails(*internal, match="float32"):
        hvd.allreduce_(own, prescale_factor=0.5)
    same(own, torch.ones_like(own))
    with fails(*internal, match="root"):
        hvd.broadcast(torch.ones(2), root_rank=int(rank > 0))
    with fails(*internal, match="different operations"):
        hvd.allgather(torch.ones(2, 2 + (rank > 0)))
    with fails(*internal, match="different operations"):
        hvd.allgather(torch.ones(2)) if rank else hvd.allreduce(torch.ones(2))


@case
def arguments_of_one_rank_that_cannot_be_used():
    """All ranks get an error that is a ValueError and a HorovodInternalError."""
    rank = hvd.rank()
    kinds = hvd.HorovodInternalError, ValueError, allred.InputError
    with fails(*kinds, match="splits"):
        hvd.alltoall(torch.ones(2 * hvd.size()), None if rank else [1] * hvd.size())
    with fails(*kinds, match="splits"):
        hvd.alltoall(torch.ones(hvd.size()), torch.ones(hvd.size()))  # not whole numbers
    with fails(*kinds, match="do not divide"):
        hvd.alltoall(torch.ones(2 * hvd.size() + (rank == 0)))
    with fails(*kinds, match="sparse"):
        hvd.allreduce(torch.eye(2) if rank else torch.eye(2).to_sparse())
    for call in (hvd.grouped_allgather, hvd.grouped_allreduce, hvd.grouped_reducescatter):  # several operations
        with fails(*kinds, match="sparse"):
            call([torch.eye(2) if rank else torch.eye(2).to_sparse(), torch.ones(2, dtype=torch.int64), torch.ones(2)])
    with fails(*kinds, match="conjugate"):
        hvd.allreduce(torch.ones(2) if rank else torch.ones(2, dtype=torch.complex64).conj())
    with fails(*kinds, match="Sum of bool"):
        hvd.allreduce(torch.ones(2, dtype=torch.bool), op=hvd.Sum)
    with fails(*kinds, match="no first dimension"):
        hvd.reducescatter(torch.tensor(1.0))
    with fails(*kinds, match="not a rank"):
        hvd.broadcast(torch.ones(2), root_rank=hvd.size())


@case
def arguments_that_are_refused_at_once():
    with pytest.raises(ValueError, match=r"reducescatter with op=allred\.Max"):
        hvd.reducescatter(torch.ones(2), op=hvd.Max)
    for call in (hvd.allreduce, hvd.allreduce_async_, hvd.reducescatter):
        with pytest.raises(NotImplementedError, match="Adasum is not available"):
            call(torch.ones(2), op=hvd.Adasum)
    with pytest.raises(ValueError, match="op='max' is not a reduction"):
        hvd.allreduce(torch.ones(2), op="max")
    with pytest.raises(ValueError, match="prescale_factor=None must be a number"):
        hvd.allreduce(torch.ones(2), prescale_factor=None)
    with pytest.raises(ValueError, match="compression=3: expected"):
        hvd.allreduce(torch.ones(2), compression=3)
    with pytest.raises(ValueError, match="process_set=None: expected"):
        hvd.allreduce(torch.ones(2), process_set=None)


@case
def sparse_tensors():
    rank, size = hvd.rank(), hvd.size()
    mine = torch.sparse_coo_tensor([[rank, size]], [[1.0, 2.0], [3.0, 4.0]], (size + 1, 2))
    total = torch.stack([torch.tensor([[1.0, 2.0]] * size + [[3.0 * size, 4.0 * size]])])[0]
    for op, expected in ((hvd.Sum, total), (hvd.Average, total / size)):
        found = hvd.sparse_allreduce_async(mine, name=f"sparse {op}", op=op)()
        assert found.is_sparse
        close(found.to_dense(), expected)
    with pytest.raises(ValueError, match="sparse COO tensor"):
        hvd.sparse_allreduce_async(torch.ones(2), name="dense", op=hvd.Sum)


@case
def objects():
    assert hvd.broadcast_object({"rank": hvd.rank()}, root_rank=1, name="o") == {"rank": 1}
    with fails(hvd.HorovodInternalError, ValueError, match="generator cannot be pickled"):
        hvd.allgather_object((i for i in "ab") if hvd.rank() else 1)
    square = hvd.broadcast_object((lambda x: x * x) if hvd.rank() == 0 else None)
    assert square(7) == 49
    assert hvd.allgather_object([hvd.rank()] * hvd.rank()) == [[rank] * rank for rank in range(hvd.size())]


@case
def process_sets():
    rank, size = hvd.rank(), hvd.size()
    assert (hvd.global_process_set.process_set_id, hvd.global_process_set.size()) == (0, size)
    last, evens = hvd.ProcessSet([size - 1]), list(range(0, size, 2))
    assert (last.process_set_id, last.size(), last.rank()) == (None, None, None)
    with pytest.raises(ValueError, match="expected a registered"):
        hvd.allreduce(torch.ones(2), process_set=last)
    with fails(hvd.HorovodInternalError, allred.MismatchError, match=r"different sets, \(0,\), \(1,\)"):
        hvd.add_process_set([int(rank > 0)])
    hvd.add_process_set(last)
    assert last.included() == (rank == size - 1)
    with pytest.raises(ValueError, match="a process set with these ranks already"):
        hvd.add_process_set([size - 1])
    with pytest.raises(ValueError, match="a process set with these ranks already"):
        hvd.add_process_set(range(size))
    kinds = hvd.HorovodInternalError, ValueError
    with fails(*kinds, match="rank 0: .* expected different ranks"):
        hvd.add_process_set([0, size] if rank == 0 else [0])
    if last.included():
        assert last.rank() == 0
        same(hvd.allreduce(value(rank), process_set=last), value(rank))
    else:
        with pytest.raises(ValueError, match="is not in ProcessSet"):
            hvd.allreduce(value(rank), process_set=last)
    assert hvd.remove_process_set(last)
    assert not hvd.remove_process_set(last)
    assert not hvd.remove_process_set(hvd.global_process_set)
    if size > 2:
        both = hvd.add_process_set(hvd.ProcessSet(evens))
        if both.included():
            same(hvd.allreduce(value(rank), op=hvd.Sum, process_set=both), value(0) + value(2))
            same(hvd.broadcast(value(rank), root_rank=2, process_set=both), value(2))
            mean = (value(0, seed=7) + value(2, seed=7)) / 2
            expected = mean if rank == 2 else torch.zeros_like(mean)
            found = gradient(lambda t: hvd.broadcast(t, 2, process_set=both), value(rank), value(rank, seed=7))
            close(found, expected)
            hvd.barrier(process_set=both)
        hvd.remove_process_set(both)


@case
def a_world_of_communicators():
    """init again, with process sets; a process set from an MPI communicator."""
    from mpi4py import MPI

    first = hvd.ProcessSet([0])
    hvd.init(process_sets=[first])
    number = first.process_set_id
    assert number is not None
    hvd.init()  # as libraries do
    hvd.init(process_sets=[first])
    assert first.process_set_id == number
    assert hvd.remove_process_set(first)
    half = MPI.COMM_WORLD.Split(hvd.rank() % 2)
    own = hvd.ProcessSet(half)
    assert own.ranks is None
    hvd.add_process_set(own)
    assert own.ranks == list(range(hvd.rank() % 2, hvd.size(), 2))
    assert hvd.allgather_object(own.process_set_id)[:2] == [own.process_set_id - hvd.rank() % 2 + i for i in (0, 1)]
    same(hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=own), torch.full((2,), float(half.size)))
    assert hvd.remove_process_set(own)
    half.Free()
    hvd.shutdown()  # the ranks have removed different sets
    hvd.init()
    with pytest.raises(ValueError, match="these ranks already"):
        hvd.init(process_sets=[first, hvd.ProcessSet([0])])
    hvd.init(process_sets="dynamic")
    with pytest.raises(ValueError, match=r"expected a list of hvd\.ProcessSet"):
        hvd.init(process_sets=[[0]])


@case
def joined_ranks():
    """Rank 0 joins first. Averages count it; other operations are errors; a barrier does not wait for it."""
    size, rank = hvd.size(), hvd.rank()
    if rank:
        others = torch.stack(everyone()[1:])
        same(hvd.allreduce(value(rank), op=hvd.Sum), others.sum(0))
        close(hvd.allreduce(value(rank)), others.sum(0) / size)
        mean = hvd.synchronize(hvd.grouped_allreduce_async([value(rank), value(rank, torch.int64)]))
        close(mean[0], others.sum(0) / size)
        same(mean[1], torch.div(others.sum(0).long(), size, rounding_mode="trunc"))
        hvd.barrier()
        for call in (
            hvd.allgather,
            lambda t: hvd.broadcast(t, root_rank=1),
            lambda t: hvd.alltoall(torch.zeros(size)),
            hvd.reducescatter,
            hvd.broadcast_object,
            hvd.allgather_object,
        ):
            with pytest.raises(hvd.HorovodInternalError, match="join"):
                call(value(rank))
    last = hvd.join()
    assert last != 0
    assert hvd.allgather_object(last) == [last] * size
    same(hvd.allreduce(value(rank), op=hvd.Sum), sum(everyone()))


@case
def numbers_and_queries():
    assert hvd.is_initialized()
    assert (hvd.rank(), hvd.size()) == (allred.rank(), allred.size())
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_homogeneous()
    assert (hvd.mpi_built(), hvd.mpi_enabled()) == (True, True)
    assert isinstance(hvd.mpi_threads_supported(), bool)
    assert type(hvd.nccl_built()) is int
    for no in (hvd.gloo_built, hvd.gloo_enabled, hvd.ddl_built, hvd.ccl_built, hvd.rocm_built):
        assert no() is False


@case
def a_timeline_at_run_time():
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "trace.json"
        for name in ("first", "second"):
            hvd.start_timeline(str(path), mark_cycles=True)
            hvd.allreduce(torch.ones(2), name=name)
            hvd.stop_timeline()
            hvd.allreduce(torch.ones(2), name="between")
            assert path.exists() == (hvd.rank() == 0)
            if hvd.rank() == 0:
                found = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
                assert {each for each in found if each.startswith("allreduce ")} == {f"allreduce {name}"}, found
                assert [file.name for file in path.parent.iterdir()] == ["trace.json"]
        hvd.stop_timeline()
        with pytest.raises(ValueError, match="choose another path") if hvd.rank() == 0 else contextlib.nullcontext():
            hvd.start_timeline(f"{directory}/missing/trace.json")


@case
def a_list_of_many_small_tensors():
    mine = [torch.full((16,), float(hvd.rank() + i)) for i in range(1000)]
    expected = np.mean(range(hvd.size()))
    for i, found in enumerate(hvd.grouped_allreduce(mine)):
        assert float(found[0]) == i + expected
    for i, each in enumerate([hvd.allreduce_async(tensor, name=f"t{i}") for i, tensor in enumerate(mine)]):
        assert float(hvd.synchronize(each)[15]) == i + expected


@case
def shutdown_and_init():
    some = hvd.add_process_set([1])
    hvd.shutdown()
    assert some.process_set_id is None
    hvd.shutdown()
    assert not hvd.is_initialized()
    for call in (hvd.rank, hvd.size, hvd.local_rank, hvd.barrier, hvd.stop_timeline, hvd.join):
        with pytest.raises(ValueError, match=r"hvd\.init\(\)") as caught:
            call()
        assert not isinstance(caught.value, RuntimeError)
    with pytest.raises(ValueError, match=r"hvd\.init\(\)"):
        hvd.allreduce(torch.ones(2))
    hvd.init()
    same(hvd.allreduce(value(hvd.rank()), op=hvd.Sum), sum(everyone()))
    before = world.current().config
    world.current().config = dataclasses.replace(before, mode="ps")
    with pytest.raises(ValueError, match="train in mode sync"):
        hvd.init()
    world.current().config = before


@case
def a_world_that_another_function_has_made():
    """allred.init() or init_process_group(), and hvd.init() later or never; allred.shutdown()."""
    for door in ("allred", "torch", "allred, then hvd"):
        stale = hvd.add_process_set([0])
        left = hvd.allreduce_async(torch.ones(2), name="left")
        hvd.synchronize(left)
        allred.shutdown()
        assert hvd.global_process_set.ranks == []
        assert stale.process_set_id is None
        if door == "torch":
            dist.init_process_group("allred")
        else:
            allred.init(banner=False)
        if "hvd" in door:
            hvd.init()
        assert hvd.global_process_set.ranks == list(range(hvd.size()))
        assert hvd.global_process_set.size() == hvd.size()
        assert hvd.global_process_set.included()
        weight = torch.nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])
        (weight * (hvd.rank() + 1.0)).sum().backward()
        optimizer.step()
        mean = sum(range(1, hvd.size() + 1)) / hvd.size()
        assert weight.tolist() == [-mean, -mean]
        same(hvd.allreduce(value(hvd.rank()), op=hvd.Sum), sum(everyone()))
        hvd.remove_process_set(hvd.add_process_set([0]))
        if door == "torch":
            dist.destroy_process_group()
    before = world.current().config
    world.current().config = dataclasses.replace(before, mode="ps")
    with pytest.raises(ValueError, match="train in mode sync"):
        hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    world.current().config = before
