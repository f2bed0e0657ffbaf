"""All collectives of torch.distributed on backend allred, compared with gloo where it has them."""

import datetime
import functools
import gc
import inspect
import math
import operator
import os
import pickle
import sys
import time
import warnings
import weakref

import group_case_runner
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from group_case_runner import assert_same

import allred
from allred.errors import InputError, MismatchError

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]
OPS = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]
GLOO = None  # a second group of the same ranks


def gloo():
    global GLOO
    GLOO = GLOO or dist.new_group(backend="gloo")
    return GLOO


def rank_tensor(rank, *shape, dtype=torch.float32):
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape) % 7 + rank + 1
    return (numbers / 3).to(dtype) if dtype.is_floating_point or dtype.is_complex else numbers.to(dtype)


def check_against_gloo(size, call):
    """Compare call(group) of the default group and of gloo."""
    assert_same(call(None), call(gloo()), size)


def all_reduce(rank, size):
    for dtype in DTYPES:
        for op in OPS:

            def call(group, dtype=dtype, op=op):
                tensor = rank_tensor(rank, 3, 5, dtype=dtype)
                assert dist.all_reduce(tensor, op, group=group) is None
                return tensor

            if dtype in (torch.float16, torch.bfloat16) and size > 2:  # gloo rounds after each rank
                continue
            check_against_gloo(size, call)


def all_reduce_of_other_tensors(rank, size):
    views = [lambda t: t.T, lambda t: t[:, 1:3], lambda t: t[0, 0], lambda t: t[:0]]
    for view in views:
        whole, other = rank_tensor(rank, 4, 5), rank_tensor(rank, 4, 5)
        dist.all_reduce(view(whole))
        part = view(other).contiguous()
        dist.all_reduce(part, group=gloo())
        view(other).copy_(part)
        assert_same(whole, other, size)
    parameter = torch.nn.Parameter(rank_tensor(rank, 3))
    dist.all_reduce(parameter.data)
    assert_same(parameter.data, sum(rank_tensor(r, 3) for r in range(size)), size)
    for dtype in (torch.complex64, torch.complex128):
        tensor = rank_tensor(rank, 3, dtype=dtype) * (1 + 1j)
        dist.all_reduce(tensor)
        total = sum(rank_tensor(r, 3, dtype=dtype) for r in range(size)) * (1 + 1j)
        assert_same(tensor, total, 3)
        tensor = rank_tensor(rank, 3, dtype=dtype) * (1 + 1j)
        dist.reduce(tensor, size - 1)
        assert_same(tensor, total if rank == size - 1 else rank_tensor(rank, 3, dtype=dtype) * (1 + 1j), 3)
        for scatter in (
            lambda found, parts: dist.reduce_scatter(found, parts),
            lambda found, parts: dist.reduce_scatter_tensor(found, torch.cat(parts)),
        ):
            found, mine = torch.zeros(3, dtype=dtype), rank_tensor(rank, 3, dtype=dtype) * (1 + 1j)
            scatter(found, [mine * (r + 1) for r in range(size)])
            assert_same(found, total * (rank + 1), 3 * size)
    bools = torch.tensor([rank == 0, True, False])
    dist.all_reduce(bools)
    assert bools.tolist() == [True, True, False]
    dist.all_reduce(bools, dist.ReduceOp.PRODUCT)
    assert bools.tolist() == [True, True, False]
    one = torch.tensor([rank == 0, True])
    dist.all_reduce(one, dist.ReduceOp.MIN)
    assert one.tolist() == [size == 1, True]


def other_operators(rank, size):
    numbers = [torch.tensor([r + 1, 12, 255 - r]) for r in range(size)]
    for op, function in ((dist.ReduceOp.BAND, torch.bitwise_and), (dist.ReduceOp.BOR, torch.bitwise_or),
                         (dist.ReduceOp.BXOR, torch.bitwise_xor)):  # fmt: skip
        tensor, expected = numbers[rank].clone(), numbers[0]
        dist.all_reduce(tensor, op)
        for other in numbers[1:]:
            expected = function(expected, other)
        assert_same(tensor, expected, size)
    tensor = rank_tensor(rank, 5)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    assert_same(tensor, sum(rank_tensor(r, 5) for r in range(size)) / size, size)
    premul = dist._make_nccl_premul_sum(0.5)
    if hasattr(premul, "factor"):  # torch 2.5 lacks it
        dist.all_reduce(tensor := rank_tensor(rank, 5), premul)
        assert_same(tensor, sum(rank_tensor(r, 5) * 0.5 for r in range(size)), size)
    unsigned = [getattr(torch, name) for name in ("uint16", "uint32", "uint64") if hasattr(torch, name)]
    for dtype in unsigned:  # which gloo lacks
        largest = [2 ** (8 * dtype.itemsize) - 1 - r for r in range(size)]
        for op, expected in (
            (dist.ReduceOp.SUM, sum(largest) % (largest[0] + 1)),
            (dist.ReduceOp.MIN, largest[-1]),
            (dist.ReduceOp.MAX, largest[0]),
            (dist.ReduceOp.PRODUCT, math.prod(largest) % (largest[0] + 1)),
            (dist.ReduceOp.BAND, functools.reduce(operator.and_, largest)),
        ):
            tensor = torch.tensor(largest[rank : rank + 1], dtype=dtype)
            dist.all_reduce(tensor, op)
            assert tensor.tolist() == [expected], (dtype, op, tensor)
    for dtype in (torch.int8, torch.int64, torch.uint8, *unsigned):  # rounded toward zero; Lightning needs it
        signed = [-5 - r for r in range(size)] if dtype.is_signed else [5] * size
        tensor = torch.tensor([signed[rank], 4 * rank + 1], dtype=dtype)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        assert tensor.tolist() == [int(sum(signed) / size), int(sum(4 * r + 1 for r in range(size)) / size)]
    assert_fails(lambda: dist.all_reduce(torch.tensor([True]), dist.ReduceOp.AVG), "Average of bool")


def sparse(rank, size):
    def call(group):
        indices = torch.tensor([[0, rank + 1, rank + 1]])
        tensor = torch.sparse_coo_tensor(indices, rank_tensor(rank, 3, 2), (6, 2), check_invariants=True)
        dist.all_reduce(tensor, group=group)
        return tensor.to_dense()

    check_against_gloo(size, call)


def coalesced(rank, size):
    def reduce(group):
        tensors = [rank_tensor(rank, 3), rank_tensor(rank, 2, 2)]
        with dist.distributed_c10d._coalescing_manager(group=group):
            for tensor in tensors:
                dist.all_reduce(tensor, group=group)
        return tensors

    check_against_gloo(size, reduce)
    tensors = [rank_tensor(rank, 3), rank_tensor(rank, 4, dtype=torch.float64)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert_same(
        tensors,
        [sum(rank_tensor(r, 3) for r in range(size)), sum(rank_tensor(r, 4, dtype=torch.float64) for r in range(size))],
        size,
    )
    whole, parts = [torch.zeros(2 * size), torch.zeros(3 * size)], [torch.zeros(1), torch.zeros(2)]
    with dist.distributed_c10d._coalescing_manager():
        for count, out in zip((2, 3), whole, strict=True):
            dist.all_gather_into_tensor(out, rank_tensor(rank, count))
    with dist.distributed_c10d._coalescing_manager():
        for count, out in zip((1, 2), parts, strict=True):
            dist.reduce_scatter_tensor(out, rank_tensor(rank, count * size))
    assert_same(whole, [torch.cat([rank_tensor(r, count) for r in range(size)]) for count in (2, 3)], size)
    sums = [sum(rank_tensor(r, count * size) for r in range(size)) for count in (1, 2)]
    assert_same(parts, [total.chunk(size)[rank] for total in sums], size)
    world, cpu = dist.group.WORLD, torch.device("cpu")
    world._start_coalescing(cpu)
    for count in (2, rank + 1, 2, 2, 2):
        world.allreduce([torch.ones(count)], dist.AllreduceOptions())
        time.sleep(0.05)  # for the headers of the other ranks
    assert_fails(world._end_coalescing(cpu).wait, "different operations")


def lists_of_tensors(rank, size):
    """The group's methods reduce over a list too; gloo does it for lists of equal tensors."""
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        for count in (2, 3):

            def call(group, op=op, count=count):
                tensors = [rank_tensor(rank, 2, 3) + each for each in range(count)]
                options = dist.AllreduceOptions()
                options.reduceOp = op
                (group or dist.group.WORLD).allreduce(tensors, options).wait()
                return tensors

            check_against_gloo(size, call)

    def sparse(group):
        tensors = [(rank_tensor(rank, 4) + each).to_sparse() for each in range(2)]
        (group or dist.group.WORLD).allreduce(tensors).wait()
        return [each.to_dense() for each in tensors]

    check_against_gloo(size, sparse)
    for index in range(2):

        def broadcast(group, index=index):
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = size - 1, index
            tensors = [rank_tensor(rank, 2, 3) + each for each in range(2)]
            (group or dist.group.WORLD).broadcast(tensors, options).wait()
            return tensors

        check_against_gloo(size, broadcast)

    def gathered(group):
        inputs = [rank_tensor(rank, 2) + each for each in range(2)]
        outputs = [[torch.zeros(2) for _ in range(2 * size)] for _ in inputs]
        (group or dist.group.WORLD).allgather(outputs, inputs).wait()
        return outputs

    check_against_gloo(size, gathered)
    short = [[torch.zeros(2)] * size for _ in range(2)]
    assert_fails(
        lambda: dist.group.WORLD.allgather(short, [torch.ones(2)] * 2), r"expected 2 \* \d tensors in each list"
    )

    def repeated(group):
        one, other = rank_tensor(rank, 3), rank_tensor(rank, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.all_reduce_coalesced([one, other, one[:]], group=group)
        return one, other

    check_against_gloo(size, repeated)
    for shapes in (((), (1,)), ((6,), (2, 3)), ((2, 3), (3, 2))):
        for call in (lambda tensor, group: dist.all_reduce(tensor, group=group),
                     lambda tensor, group: dist.broadcast(tensor, 0, group=group)):  # fmt: skip

            def other_shapes(group, call=call, shapes=shapes):
                call(tensor := rank_tensor(rank, *shapes[rank % 2]), group)
                return tensor

            check_against_gloo(size, other_shapes)


def sharded_tensors(rank, size):
    """Regression: shards on CPUs were sent to a GPU that does not exist."""
    from torch.distributed._shard import sharded_tensor

    place = sharded_tensor.ShardMetadata([2 * rank, 0], [2, 3], f"rank:{rank}/cpu")
    shard = sharded_tensor.Shard(rank_tensor(rank, 2, 3), place)
    whole = torch.empty(2 * size, 3) if rank == 0 else None
    sharded_tensor.init_from_local_shards([shard], 2 * size, 3).gather(0, whole)
    if rank == 0:
        assert_same(whole, torch.cat([rank_tensor(r, 2, 3) for r in range(size)]), size)


def reduce(rank, size):
    for root in range(size):

        def call(group, root=root):
            tensor = rank_tensor(rank, 5)
            dist.reduce(tensor, root, group=group)
            return tensor if rank == root else None

        check_against_gloo(size, call)
        tensor = rank_tensor(rank, 5)
        dist.reduce(tensor, root)
        if rank != root:
            assert_same(tensor, rank_tensor(rank, 5), size)


def broadcast(rank, size):
    for root in range(size):
        for dtype in (*DTYPES, torch.bool, torch.complex64):

            def call(group, root=root, dtype=dtype):
                tensor = rank_tensor(rank, 2, 3, dtype=dtype)
                dist.broadcast(tensor, root, group=group)
                return tensor

            assert_same(call(None), rank_tensor(root, 2, 3, dtype=dtype), size)
    for dtype in (torch.float8_e4m3fn, torch.uint16):
        tensor = rank_tensor(rank, 4).to(dtype)
        dist.broadcast(tensor, 0)
        assert_same(tensor.view(torch.uint8), rank_tensor(0, 4).to(dtype).view(torch.uint8), size)


def all_gather(rank, size):
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):

        def call(group, dtype=dtype):
            tensors = [torch.zeros(2, 3, dtype=dtype) for _ in range(size)]
            dist.all_gather(tensors, rank_tensor(rank, 2, 3, dtype=dtype), group=group)
            return tensors

        check_against_gloo(size, call)
    out = torch.zeros(2 * size, 3)
    dist.all_gather_into_tensor(out, rank_tensor(rank, 2, 3))
    assert_same(out, torch.cat([rank_tensor(r, 2, 3) for r in range(size)]), size)
    stacked = torch.zeros(size, 2, 3)
    work = dist.all_gather_into_tensor(stacked, rank_tensor(rank, 2, 3), async_op=True)
    work.wait()
    assert_same(stacked, out.reshape(size, 2, 3), size)
    columns = torch.zeros(3, 2 * size).T
    dist.all_gather_into_tensor(columns, rank_tensor(rank, 2, 3))
    assert_same(columns, out, size)
    uneven = [torch.zeros(r + 1) for r in range(size)]
    dist.all_gather(uneven, rank_tensor(rank, rank + 1))
    assert_same(uneven, [rank_tensor(r, r + 1) for r in range(size)], size)


def reduce_scatter(rank, size):
    for op in OPS:

        def call(group, op=op):
            out = torch.zeros(2, 3)
            dist.reduce_scatter(out, [rank_tensor(rank + r, 2, 3) for r in range(size)], op, group=group)
            return out

        expected = torch.stack([rank_tensor(r + rank, 2, 3) for r in range(size)])
        functions = {0: lambda t: t.sum(0), 1: lambda t: t.prod(0), 2: lambda t: t.amin(0), 3: lambda t: t.amax(0)}
        assert_same(call(None), functions[OPS.index(op)](expected), size)
    out, whole = torch.zeros(4), rank_tensor(rank, 4 * size)
    dist.reduce_scatter_tensor(out, whole, dist.ReduceOp.AVG)
    assert_same(out, (sum(rank_tensor(r, 4 * size) for r in range(size)) / size).chunk(size)[rank], size)
    assert_same(whole, rank_tensor(rank, 4 * size), size)
    integers, all_integers = torch.zeros(2, dtype=torch.int32), torch.arange(2 * size, dtype=torch.int32) + rank
    dist.reduce_scatter_tensor(integers, all_integers, dist.ReduceOp.AVG)
    assert integers.tolist() == [int(2 * rank + i + (size - 1) / 2) for i in range(2)]
    uneven = torch.zeros(rank + 1)
    dist.reduce_scatter(uneven, [rank_tensor(rank, r + 1) for r in range(size)])
    assert_same(uneven, sum(rank_tensor(r, rank + 1) for r in range(size)), size)
    columns = torch.zeros(2, 3).T if rank else torch.zeros(3, 2)  # not contiguous on some ranks
    dist.reduce_scatter_tensor(columns, rank_tensor(rank, 3 * size, 2))
    assert_same(columns, sum(rank_tensor(r, 3 * size, 2) for r in range(size)).chunk(size)[rank], size)
    bits = torch.zeros(1, dtype=torch.int64)
    dist.reduce_scatter(bits, [torch.tensor([1 << rank])] * size, dist.ReduceOp.BOR)
    assert bits.item() == 2**size - 1


def all_to_all(rank, size):
    outputs = [torch.zeros(r + 1) for r in range(size)]
    dist.all_to_all(outputs, [rank_tensor(10 * rank + r, rank + 1) for r in range(size)])
    assert_same(outputs, [rank_tensor(10 * r + rank, r + 1) for r in range(size)], size)

    def equal(group):
        out = torch.zeros(2 * size, 3)
        dist.all_to_all_single(out, rank_tensor(rank, 2 * size, 3), group=group)
        return out

    check_against_gloo(size, equal)

    def split(group):
        out = torch.zeros(sum(r + 1 for r in range(size)), 2)
        splits = [r + 1 for r in range(size)]
        dist.all_to_all_single(out, rank_tensor(rank, (rank + 1) * size, 2), splits, [rank + 1] * size, group=group)
        return out

    check_against_gloo(size, split)

    def uneven(group):
        out = torch.zeros((rank + 1) * size, 2)
        splits = [r + 1 for r in range(size)]
        dist.all_to_all_single(out, rank_tensor(rank, sum(splits), 2), [rank + 1] * size, splits, group=group)
        return out

    check_against_gloo(size, uneven)


def gather_and_scatter(rank, size):
    for root in range(size):

        def gathered(group, root=root):
            tensors = [torch.zeros(2, 3) for _ in range(size)] if rank == root else None
            dist.gather(rank_tensor(rank, 2, 3), tensors, root, group=group)
            return tensors

        def scattered(group, root=root):
            out = torch.zeros(2, 3, dtype=torch.int32)
            tensors = (
                [rank_tensor(10 * root + r, 2, 3, dtype=torch.int32) for r in range(size)] if rank == root else None
            )
            dist.scatter(out, tensors, root, group=group)
            return out

        check_against_gloo(size, gathered)
        check_against_gloo(size, scattered)


def objects(rank, size):
    for group in (None, gloo()):
        found = [None] * size
        dist.all_gather_object(found, {"rank": rank, "text": "x" * rank}, group=group)
        assert found == [{"rank": r, "text": "x" * r} for r in range(size)]
        received = [None, None]
        if rank == size - 1:
            received = [("a", 1), {2}]
        dist.broadcast_object_list(received, size - 1, group=group)
        assert received == [("a", 1), {2}]
        gathered = [None] * size if rank == 0 else None
        dist.gather_object(rank, gathered, group=group)
        assert gathered == (list(range(size)) if rank == 0 else None)
        out = [None]
        dist.scatter_object_list(out, list("abcd")[:size] if rank == 0 else None, group=group)
        assert out == ["abcd"[rank]]


def functional_collectives(rank, size):
    warnings.simplefilter("ignore", FutureWarning)  # 2.13 has renamed some; these are the names that 2.5 has
    group = dist.group.WORLD
    total = sum(rank_tensor(r, 2 * size) for r in range(size))
    assert_same(functional.all_reduce(rank_tensor(rank, 2 * size), "sum", group) + 0, total, size)
    assert_same(
        functional.all_gather_tensor(rank_tensor(rank, 2, 3), 0, group) + 0,
        torch.cat([rank_tensor(r, 2, 3) for r in range(size)]),
        size,
    )
    assert_same(
        functional.all_gather_tensor(rank_tensor(rank, 2, 3), 1, group) + 0,
        torch.cat([rank_tensor(r, 2, 3) for r in range(size)], 1),
        size,
    )
    assert_same(
        functional.reduce_scatter_tensor(rank_tensor(rank, 2 * size), "avg", 0, group) + 0,
        (total / size).chunk(size)[rank],
        size,
    )
    assert_same(functional.broadcast(rank_tensor(rank, 3), size - 1, group) + 0, rank_tensor(size - 1, 3), size)
    found = functional.all_to_all_single(rank_tensor(rank, size, 2), None, None, group) + 0
    assert_same(found, torch.stack([rank_tensor(r, size, 2)[rank] for r in range(size)]), size)
    several = functional.all_reduce_coalesced([rank_tensor(rank, 3), rank_tensor(rank, 1)], "sum", group)
    assert_same([tensor + 0 for tensor in several], [sum(rank_tensor(r, n) for r in range(size)) for n in (3, 1)], size)
    tensors = functional.all_gather_into_tensor_coalesced([rank_tensor(rank, 2), rank_tensor(rank, 1)], group)
    assert_same(
        [tensor + 0 for tensor in tensors], [torch.cat([rank_tensor(r, n) for r in range(size)]) for n in (2, 1)], size
    )
    parts = functional.reduce_scatter_tensor_coalesced([rank_tensor(rank, size)], "sum", [0], group)
    assert_same(parts[0] + 0, sum(rank_tensor(r, size) for r in range(size))[rank : rank + 1], size)


def messages(rank, size):
    after, before = (rank + 1) % size, (rank - 1) % size
    unsigned = [getattr(torch, name) for name in ("uint16", "uint64") if hasattr(torch, name)]
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64, *unsigned):
        tensor, found = rank_tensor(rank, 3, 4, dtype=dtype), torch.zeros(3, 4, dtype=dtype)
        works = [dist.isend(tensor, after, tag=3), dist.irecv(found, before, tag=3)]
        for work in works:
            work.wait()
        assert_same(found, rank_tensor(before, 3, 4, dtype=dtype), size)
    found = torch.zeros(4, 3).T  # not contiguous
    requests = [dist.P2POp(dist.isend, rank_tensor(rank, 3, 4), after), dist.P2POp(dist.irecv, found, before)]
    for work in dist.batch_isend_irecv(requests):
        work.wait()
    assert_same(found, rank_tensor(before, 3, 4), size)
    if rank == 0:
        senders = set()
        for _ in range(size - 1):
            senders.add(dist.recv(found := torch.zeros(2)))
        assert senders == set(range(1, size))
        dist.send_object_list([{"a": 1}], 1)
    else:
        dist.send(rank_tensor(rank, 2), 0)
        if rank == 1:
            objects = [None]
            dist.recv_object_list(objects, 0)
            assert objects == [{"a": 1}]


def async_op(rank, size):
    tensors = [rank_tensor(rank, 4) for _ in range(4)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    total = sum(rank_tensor(r, 4) for r in range(size))
    futures = [work.get_future() for work in works[:2]]
    doubled = futures[0].then(lambda future: future.value()[0] * 2)
    assert_same(doubled.wait(), total * 2, size)
    assert_same(futures[1].wait(), [total], size)
    assert futures[1].done()
    works[3].wait()
    assert works[2].is_completed()
    assert works[2].is_success()
    assert_same(tensors, [total] * 4, size)
    assert_same(works[3].result(), [total], size)


def futures_in_torch(rank, size):
    """C++ code of torch waits for futures and works without calling their Python methods."""
    tensors = [rank_tensor(rank, 4) + each for each in range(3)]
    futures = [dist.all_reduce(tensor, async_op=True).get_future() for tensor in tensors]
    assert_same(torch.futures.wait_all(futures), [[tensor] for tensor in tensors], size)
    assert_same(tensors, [sum(rank_tensor(r, 4) + each for r in range(size)) for each in range(3)], size)
    future = dist.all_reduce(tensors[0], async_op=True).get_future()
    gc.collect()
    first = torch.futures.collect_all([future]).then(lambda all_: all_.value()[0].value()[0].clone())
    assert_same(torch.futures.wait_all([first]), [tensors[0]], size)

    last = torch.futures.Future()
    all_reduce_times(3, torch.ones(3), last)
    assert_same(last.wait(), torch.full((3,), float(size**3)), size)

    registered = rank_tensor(rank, 4)
    torch._C._distributed_c10d._register_work(registered, dist.all_reduce(registered, async_op=True))
    gc.collect()
    for _ in range(5):  # each looks whether earlier operations are complete
        dist.all_reduce(torch.ones(2))
    assert_same(torch.ops._c10d_functional.wait_tensor(registered), sum(rank_tensor(r, 4) for r in range(size)), size)


def all_reduce_times(count, tensor, last):
    """Callbacks start the next operation; the future `last` gets the tensor of the last one."""

    def on_complete(future):
        (tensor,) = future.value()
        last.set_result(tensor) if count == 1 else all_reduce_times(count - 1, tensor, last)

    dist.all_reduce(tensor, async_op=True).get_future().add_done_callback(on_complete)


def tools(rank, size):
    """Profilers and dispatch modes see the operations; the results are the same."""
    from torch.distributed.tensor.debug import CommDebugMode

    def call(group):
        whole, part, tensor = torch.empty(2 * size), torch.empty(2), rank_tensor(rank, 2)
        works = [
            dist.all_reduce(tensor, group=group, async_op=True),
            dist.all_gather(found := [torch.zeros(2) for _ in range(size)], rank_tensor(rank, 2), group, async_op=True),
            dist.gather(rank_tensor(rank, 2), found if rank == 0 else None, 0, group, async_op=True),
            dist.scatter(
                part, [rank_tensor(r, 2) for r in range(size)] if rank == 0 else None, 0, group, async_op=True
            ),
            dist.barrier(group, async_op=True),
        ]
        for work in works:
            work.wait()
        dist.all_gather_into_tensor(whole, tensor, group)
        dist.broadcast(tensor, 0, group)
        functional.all_reduce(tensor, "sum", group or dist.group.WORLD).wait()
        return whole, part, tensor, found

    events, counts = {}, {}
    for name, group in (("allred", None), ("gloo", gloo())):
        with CommDebugMode() as mode:
            inside = call(group)
        counts[name] = mode.get_comm_counts()
        with torch.autograd.profiler.profile() as profile:
            assert_same(call(group), inside, size)
        events[name] = {each.name.removeprefix(f"{name}:") for each in profile.function_events if ":" in each.name}
        assert_same(call(group), inside, size)
    assert counts["allred"] == counts["gloo"]
    assert {"c10d::allreduce_", "all_reduce", "all_gather", "barrier"} <= events["allred"]
    assert {each for each in events["gloo"] if "aten" not in each} <= events["allred"]
    with CommDebugMode():
        assert_fails(lambda: dist.all_gather([torch.zeros(2)], torch.ones(2)), "")


def other_signatures(rank, size):
    """Regression: groups also take a tensor in place of a list, and root, operator and time limit without options."""

    def call(group):
        reduced, several, sent, one, part = (
            rank_tensor(rank, 3),
            rank_tensor(rank, 3),
            rank_tensor(rank, 3),
            rank_tensor(rank, 3),
            torch.zeros(2),
        )
        found, gathered = ([torch.zeros(3) for _ in range(size)] for _ in range(2))
        works = [
            group.allreduce(reduced),
            group.allreduce([several], dist.ReduceOp.MAX),
            group.broadcast(sent, 1),
            group.reduce(one, 0, dist.ReduceOp.MIN),
            group.allgather(found, rank_tensor(rank, 3)),
            group.gather(gathered if rank == 1 else [], rank_tensor(rank, 3), 1),
            group.scatter(part, [rank_tensor(r, 2) for r in range(size)] if rank == 1 else [], 1),
        ]
        for work in works:
            work.wait()
        return [reduced, several, sent, found, part, *(gathered if rank == 1 else []), *([one] if rank == 0 else [])]

    assert_same(call(dist.group.WORLD), call(gloo()), size)
    limit, group = datetime.timedelta(seconds=50), dist.group.WORLD
    tensor, part = rank_tensor(rank, 3), torch.zeros(3)
    group.allreduce(tensor, op=dist.ReduceOp.MAX, timeout=limit).wait()
    assert_same(tensor, rank_tensor(size - 1, 3), size)
    group.allreduce(tensor, timeout=limit).wait()
    assert_same(tensor, rank_tensor(size - 1, 3) * size, size)
    group.reduce_scatter(part, [rank_tensor(rank, 3)] * size, dist.ReduceOp.MAX, limit).wait()
    assert_same(part, rank_tensor(size - 1, 3), size)
    group.barrier(timeout=limit).wait()


def released(rank, size):
    """Regression: the group kept the tensors of the last operation, and those of backward passes that failed."""

    def reduced(start):
        tensor = torch.zeros(4)
        start(tensor)
        return weakref.ref(tensor)

    def failing(tensor):
        def hook(gradient):
            dist.all_reduce(tensor, async_op=True).get_future()
            raise ValueError("stop")

        parameter = torch.ones(2, requires_grad=True)
        parameter.register_hook(hook)
        with pytest.raises(ValueError, match="stop"):
            parameter.sum().backward()
        dist.barrier()

    def rejected(tensor):
        work = dist.all_reduce(tensor if rank else tensor.clone()[1:], async_op=True)
        assert_fails(work.wait, "on rank 0")
        assert_fails(work.wait, "on rank 0")

    for start in (lambda tensor: dist.all_reduce(tensor, async_op=True).wait(), dist.all_reduce, failing, rejected):
        reference = reduced(start)
        gc.collect()
        assert reference() is None
    dropped = torch.ones(3)
    dist.all_reduce(dropped, async_op=True)
    dist.barrier()
    assert_same(dropped, torch.ones(3) * size, size)


def groups(rank, size):
    """Several groups, also of the same ranks, with operations under way in all of them at once."""
    pair, twice = dist.new_group([0, 1]), [dist.new_group(), dist.new_group()]
    one, two = rank_tensor(rank, 3), rank_tensor(rank, 3, dtype=torch.float64)
    works = [dist.all_reduce(one, group=twice[0], async_op=True), dist.all_reduce(two, group=twice[1], async_op=True)]
    for work in reversed(works) if rank == 0 else works:
        work.wait()
    assert_same(one, sum(rank_tensor(r, 3) for r in range(size)), size)
    if rank < 2:
        assert (dist.get_rank(pair), dist.get_world_size(pair)) == (rank, 2)
        assert pair.communicator.name == "shm"  # also if other ranks are on other nodes
        tensor = rank_tensor(rank, 3)
        dist.broadcast(tensor, 1, group=pair)
        assert_same(tensor, rank_tensor(1, 3), size)
    mine = dist.new_group([rank], use_local_synchronization=True)
    dist.all_reduce(tensor := rank_tensor(rank, 2), group=mine)
    assert_same(tensor, rank_tensor(rank, 2), size)
    last = dist.new_group([size - 1, 0])
    if rank in (0, size - 1):
        dist.broadcast(tensor := rank_tensor(rank, 3), size - 1, group=last)
        assert_same(tensor, rank_tensor(size - 1, 3), size)
        dist.destroy_process_group(last)
    assert dist.get_backend() == "allred"


def groups_in_another_order(rank, size):
    """Regression: roots and parts were those of sorted ranks."""
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:  # an older torch
        return
    ranks = list(reversed(range(size)))
    group = dist.new_group(ranks, sort_ranks=False)
    assert group.rank() == dist.get_group_rank(group, rank) == size - 1 - rank
    found = [torch.zeros(2) for _ in ranks]
    dist.all_gather(found, rank_tensor(rank, 2), group=group)
    assert_same(found, [rank_tensor(r, 2) for r in ranks], size)
    dist.broadcast(tensor := rank_tensor(rank, 2), 1, group=group)
    assert_same(tensor, rank_tensor(1, 2), size)
    part = torch.zeros(1)
    dist.reduce_scatter_tensor(part, rank_tensor(rank, size), group=group)
    assert_same(part, sum(rank_tensor(r, size) for r in ranks)[group.rank()].reshape(1), size)
    if rank < 2:
        call = dist.send if rank == 0 else dist.recv
        call(tensor := rank_tensor(rank, 2), 1 - rank, group=group)
        assert_same(tensor, rank_tensor(0, 2), size)
    dist.destroy_process_group(group)


def destroyed(rank, size):
    """Regression: the end of a group waits for its operations."""
    group = dist.new_group([0, 1])
    if rank == 0:
        work = dist.isend(rank_tensor(rank, 3), 1, group=group)
        dist.destroy_process_group(group)
        assert not work.parts
    elif rank == 1:
        time.sleep(0.3)
        dist.recv(tensor := torch.zeros(3), 0, group=group)
        assert_same(tensor, rank_tensor(0, 3), size)
        dist.destroy_process_group(group)


def device_mesh(rank, size):
    mesh = dist.init_device_mesh("cpu", (1, size), mesh_dim_names=("replicate", "shard"))
    dist.all_reduce(tensor := rank_tensor(rank, 2), group=mesh["shard"].get_group())
    assert_same(tensor, sum(rank_tensor(r, 2) for r in range(size)), size)
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    whole = torch.arange(24.0).reshape(6, 4)
    sharded = distribute_tensor(whole, mesh["shard"], [Shard(0)])
    copies = distribute_tensor(whole.T.contiguous(), mesh["shard"], [Replicate()])
    assert_same((sharded @ copies).redistribute(placements=[Replicate()]).to_local(), whole @ whole.T, 3)
    assert_same(sharded.full_tensor(), whole, size)
    assert_same(sharded.sum().full_tensor(), whole.sum(), size)


def errors(rank, size):
    """The same error on all ranks, and the group can be used afterwards."""
    assert_fails(
        lambda: dist.all_reduce(torch.ones(3 + rank)), r"float32 \(3,\) on rank 0; .*\n +called at", MismatchError
    )
    wrong = torch.ones(2).to_sparse() if rank == 1 else torch.ones(2)
    assert_fails(lambda: dist.broadcast(wrong, 0), "rank 1: expected a dense tensor, got a sparse_coo one", InputError)
    sizes_that_do_not_fit(rank, size)
    different_methods(rank, size)
    handles_that_nobody_waits_for(rank, size)
    sizes_that_differ(rank, size)
    one_of_several(rank, size)
    assert_fails(
        lambda: dist.all_reduce(torch.ones(3), async_op=True) and dist.all_reduce(torch.ones(2 + rank)), "rank 0"
    )
    if rank < 2:
        tensor = torch.zeros(2 + rank)
        call = dist.send if rank == 0 else dist.recv
        assert_fails(lambda: call(tensor, 1 - rank), "message from rank 0 to rank 1, tag 0: the array differs")
    dist.all_reduce(tensor := torch.ones(1))
    assert tensor.item() == size


def sizes_that_do_not_fit(rank, size):
    """A tensor of a wrong size on the last rank is an error on all, if that rank can know it."""
    more = rank == size - 1
    one, whole = torch.zeros(1), torch.zeros(2 * size)
    every = [torch.zeros(1 + more) for _ in range(size)]
    wrong = f"rank {size - 1}: this rank sends itself 1 elements, but the output tensor for them has 2"
    assert_fails(lambda: dist.all_gather_into_tensor(torch.zeros(size + more), one), "output tensor has")
    assert_fails(lambda: dist.all_gather(every, one), wrong)
    assert_fails(lambda: dist.all_to_all(every, [one] * size), wrong)
    assert_fails(lambda: dist.all_to_all(every, [one] * (size + more)), f"got {size + 1} inputs and {size} outputs")
    assert_fails(lambda: dist.gather(one, every if more else None, size - 1), wrong)
    assert_fails(lambda: dist.scatter(every[0], [one] * size if more else None, size - 1), wrong)
    assert_fails(lambda: dist.all_to_all_single(torch.zeros(2 * size + more), whole), f"has {2 * size + 1} rows")
    assert_fails(lambda: dist.all_to_all_single(torch.zeros(2 * size, 1 + more), whole), "have different sizes")


def different_methods(rank, size):
    """Regression: methods that run the same operation of allred, and other roots, are a mismatch."""

    tensor, several = torch.ones(3, dtype=torch.int32), [torch.ones(1) for _ in range(size)] if rank == 0 else None
    methods = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "band": lambda: dist.all_reduce(tensor, dist.ReduceOp.BAND),
        "mean": lambda: dist.all_reduce(tensor, dist.ReduceOp.AVG),
        "bor": lambda: dist.all_reduce(tensor, dist.ReduceOp.BOR),
        "reduce 0": lambda: dist.reduce(tensor, 0),
        "reduce 1": lambda: dist.reduce(tensor, 1),
        "gather": lambda: dist.gather(torch.ones(1), several),
        "scatter": lambda: dist.scatter(torch.ones(1), several),
    }
    for one, other, words in (
        ("reduce 0", "all_reduce", r"'reduce\(root=0\)' int32 \(3,\) on rank 0; allreduce"),
        ("reduce 0", "reduce 1", r"'reduce\(root=0\)' .* 'reduce\(root=1\)'"),
        ("gather", "scatter", r"'gather\(root=0\)' .* 'scatter\(root=0\)'"),
        ("mean", "all_reduce", r"'allreduce, AVG' int32 \(3,\) on rank 0; allreduce\(Sum\) int32"),
        ("band", "bor", "'allreduce, BAND' .* 'allreduce, BOR'"),
    ):
        assert_fails(methods[one if rank == 0 else other], words, MismatchError)


def handles_that_nobody_waits_for(rank, size):
    """Regression: the next wait waited for the next operation of a rank that had raised the error already."""
    for count in (1, 2, 30):
        for kept in (False, True):
            works = []
            if rank == 0:
                for _ in range(count):
                    works.append(dist.all_reduce(torch.ones(3), async_op=True))
                    works = works if kept else []
                    time.sleep(0.01)  # the operation can find the mismatch
            assert_fails(dist.barrier, "barrier", MismatchError)
            for work in works:
                assert_fails(work.wait, "barrier", MismatchError)
            dist.all_reduce(tensor := torch.ones(1))
            assert tensor.item() == size


def sizes_that_differ(rank, size):
    """Regression: an error of one rank only, of numpy, or none."""
    one, two, lists = torch.ones(1), torch.ones(2), [torch.ones(2) for _ in range(size)]
    uneven, first, last = (
        [torch.zeros(3), torch.zeros(1), *lists[2:]],
        [torch.ones(3), *lists[1:]],
        [*lists[1:], torch.ones(3)],
    )
    conjugate = torch.ones(2, dtype=torch.complex64).conj()
    calls = [
        ("itself 2 elements", lambda: dist.all_gather(uneven, two)),
        ("into tensors of", lambda: dist.all_gather(last if rank == 0 else lists, two)),
        ("elements do not give 1", lambda: dist.reduce_scatter(one if rank else two, lists)),
        ("have different sizes", lambda: dist.all_to_all_single(torch.zeros(size, 3), torch.ones(size, 4))),
        ("the input tensors have", lambda: dist.scatter(two, first if rank == 1 else None, 1)),
        ("scatter", lambda: dist.scatter(two if rank else one, lists if rank == 1 else None, 1)),
        ("conjugate", lambda: dist.group.WORLD.allreduce([conjugate if rank else torch.ones(2) * 1j]).wait()),
    ]
    for words, call in calls:
        assert_fails(call, words)


def one_of_several(rank, size):
    """Regression: after an error of one tensor the operations of later tensors had no partner on the other ranks."""

    def outputs(count):
        return [torch.zeros(count), torch.zeros(count + (rank == 1)), torch.zeros(count)]

    ones, wholes = [torch.ones(1)] * 3, [torch.ones(size)] * 3
    gathered, world = [outputs(1) for _ in range(size)], dist.group.WORLD
    assert_fails(lambda: dist.all_gather_coalesced(gathered, ones), "rank 1: this rank sends itself 1 elements")
    dist.barrier()
    assert_fails(lambda: world.allgather_into_tensor_coalesced(outputs(size), ones).wait(), "rank 1: the output tensor")
    dist.barrier()
    assert_fails(lambda: world.reduce_scatter_tensor_coalesced(outputs(1), wholes).wait(), "rank 1: inputs of")
    dist.barrier()
    more = [torch.zeros(1)] * (3 + (rank == 1))
    assert_fails(lambda: world.reduce_scatter_tensor_coalesced(more, wholes).wait(), "rank 1: 4 outputs for 3 inputs")
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = [torch.ones(1), torch.ones(1 + rank)]
        assert_fails(lambda: dist.all_reduce_coalesced(tensors), "called at collectives_program.py")
        assert_fails(lambda: dist.all_reduce_coalesced([]), "got an empty list")
    assert_fails(lambda: world.allreduce([]).wait(), "got an empty list")
    two = [torch.ones(1), torch.ones(2)]
    assert_fails(
        lambda: world.allreduce(two if rank else two[:1]).wait(),
        r"must have one shape, dtype and layout; got torch.float32 \(1,\) and torch.float32 \(2,\)",
    )
    assert_fails(lambda: world.allreduce([two[0]] * 2, dist.ReduceOp.AVG).wait(), "AVG over several tensors")
    options = dist.BroadcastOptions()
    options.rootTensor = 2
    assert_fails(lambda: world.broadcast(two, options).wait(), "rootTensor is 2; expected the index of one of 2")


def assert_fails(call, words, kind=(InputError, MismatchError)):
    with pytest.raises(kind, match=words) as caught:
        call()
    assert isinstance(caught.value, dist.DistBackendError)  # a RuntimeError: programs catch these
    copy = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(copy, kind)
    assert str(copy) == str(caught.value)


def destroy_and_reinitialize(rank, size):
    """Destroy everything, and begin again; allred stays initialized."""
    global GLOO
    dist.destroy_process_group()
    GLOO = None
    assert not dist.is_initialized()
    assert allred.allreduce(1.0, allred.Sum) == size
    with pytest.raises(
        InputError, match=f"this is rank {size - 1 - rank} of 7 for torch, but rank {rank} of {size} for"
    ):
        dist.init_process_group("allred", rank=size - 1 - rank, world_size=7)
    dist.init_process_group("allred", timeout=datetime.timedelta(seconds=60))
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    found = [int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    assert found == [rank, size, allred.local_rank()]
    group = dist.new_group()
    dist.all_reduce(tensor := torch.ones(1), group=group)
    assert tensor.item() == size


CASES = [
    all_reduce,
    all_reduce_of_other_tensors,
    lists_of_tensors,
    sharded_tensors,
    other_operators,
    sparse,
    coalesced,
    reduce,
    broadcast,
    all_gather,
    reduce_scatter,
    all_to_all,
    gather_and_scatter,
    objects,
    functional_collectives,
    messages,
    async_op,
    futures_in_torch,
    tools,
    other_signatures,
    released,
    groups,
    groups_in_another_order,
    destroyed,
    device_mesh,
    errors,
    destroy_and_reinitialize,
]

if __name__ == "__main__":
    group_case_runner.run(CASES, sys.argv[1:])
