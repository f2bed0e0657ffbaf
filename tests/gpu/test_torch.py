"""Hooked optimizers and the backend of torch.distributed with tensors on a real GPU, against the same on the host."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import allred

GPU, STEPS = "cuda", 6


def new_model(place):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(33, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(place)


def samples(step, place):
    generator = torch.Generator().manual_seed(100 * step + allred.rank())
    return torch.randn(16, 33, generator=generator).to(place)


def train(model, optimizer, place):
    for step in range(STEPS):
        optimizer.zero_grad()
        model(samples(step, place)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def assert_close(found, expected, tolerance=1e-5):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({}, 1e-5),
        ({"clip_norm": 0.05}, 1e-5),
        ({"nonfinite": "skip"}, 1e-5),
        ({"accumulate": 2}, 1e-5),
        ({"sharded": True}, 1e-5),
        ({"compression": allred.Compression.bf16}, 1e-2),
    ],
    ids=str,
)
def test_a_hooked_optimizer_trains_as_on_the_host(options, tolerance):
    results = []
    for place in ("cpu", GPU):
        model = new_model(place)
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
        optimizer = allred.distributed(optimizer, **options)
        optimizer.allred.broadcast(model)
        results.append(train(model, optimizer, place))
    assert_close(results[1], results[0], tolerance)


def test_a_hooked_optimizer_saves_on_the_gpu_and_restores_on_the_host(tmp_path):
    directory = allred.broadcast_object(str(tmp_path))
    results = []
    for place in (GPU, "cpu"):
        model = new_model(place)
        optimizer = allred.distributed(torch.optim.Adam(model.named_parameters(), lr=0.01))
        if place == GPU:
            optimizer.allred.broadcast(model)
            train(model, optimizer, place)
            optimizer.allred.save(directory, model)
        else:
            assert optimizer.allred.restore(directory, model) == STEPS
        results.append(train(model, optimizer, place))
    assert_close(results[1], results[0], 1e-4)


@pytest.fixture(scope="module")
def process_group():
    dist.init_process_group("allred")
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_collectives_of_the_process_group():
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, total = torch.arange(6.0, device=GPU) + rank, size * (size - 1) / 2
    x = mine.clone()
    dist.all_reduce(x)
    assert torch.equal(x.cpu(), torch.arange(6.0) * size + total)
    x = mine.clone()
    work = dist.all_reduce(x, dist.ReduceOp.MAX, async_op=True)
    work.wait()
    assert torch.equal(x.cpu(), torch.arange(6.0) + size - 1)
    x = mine.clone()
    dist.broadcast(x, size - 1)
    assert torch.equal(x.cpu(), torch.arange(6.0) + size - 1)
    gathered = torch.empty(6 * size, device=GPU)
    dist.all_gather_into_tensor(gathered, mine)
    assert torch.equal(gathered.cpu(), torch.cat([torch.arange(6.0) + r for r in range(size)]))
    part = torch.empty(6, device=GPU)
    dist.reduce_scatter_tensor(part, gathered)
    assert torch.equal(part.cpu(), (torch.arange(6.0) + rank) * size)
    swapped = torch.empty(2 * size, device=GPU)
    dist.all_to_all_single(swapped, torch.arange(2.0 * size, device=GPU) + 10 * rank)
    assert swapped.tolist() == [2.0 * rank + i + 10 * r for r in range(size) for i in range(2)]
    if size > 1:
        if rank == 0:
            dist.send(mine, 1)
        elif rank == 1:
            dist.recv(part, 0)
            assert torch.equal(part.cpu(), torch.arange(6.0))
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(size)]
    dist.barrier()
    host = torch.ones(3)
    dist.all_reduce(host)  # tensors on the host use the host backend of the same group
    assert host.tolist() == [size] * 3


@pytest.mark.usefixtures("process_group")
def test_collectives_of_subgroups():
    rank, size = dist.get_rank(), dist.get_world_size()
    alone, everyone = [dist.new_group([r]) for r in range(size)][rank], dist.new_group()
    for group, members in ((alone, [rank]), (everyone, range(size))):
        for place in (GPU, "cpu"):
            x = torch.arange(6.0, device=place) + rank
            dist.all_reduce(x, group=group)
            assert torch.equal(x.cpu(), torch.arange(6.0) * len(members) + sum(members))
        dist.destroy_process_group(group)


@pytest.mark.usefixtures("process_group")
def test_coalesced_collectives():
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = [torch.arange(float(n), device=GPU) + rank for n in (6, 3, 1)]
    outputs = [torch.empty(size * len(x), device=GPU) for x in inputs]
    with dist._coalescing_manager(device=torch.device(GPU, 0), async_ops=True) as started:
        for x, output in zip(inputs, outputs, strict=True):
            dist.all_gather_into_tensor(output, x)
    started.wait()
    for n, output in zip((6, 3, 1), outputs, strict=True):
        assert torch.equal(output.cpu(), torch.cat([torch.arange(float(n)) + r for r in range(size)]))
    with dist._coalescing_manager(device=torch.device(GPU, 0)):
        for x in inputs:
            dist.all_reduce(x)
    for n, x in zip((6, 3, 1), inputs, strict=True):
        assert torch.equal(x.cpu(), torch.arange(float(n)) * size + sum(range(size)))


@pytest.mark.usefixtures("process_group")
def test_a_group_with_nccl_beside_the_default_group():
    """For batch_isend_irecv, which torch does not batch in a group written in Python."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return
    group = dist.new_group(backend="nccl")
    for n in (6, 1_000_000):
        mine, received = torch.arange(float(n), device=GPU) + rank, torch.empty(n, device=GPU)
        send = dist.P2POp(dist.isend, mine, (rank + 1) % size, group)
        receive = dist.P2POp(dist.irecv, received, (rank - 1) % size, group)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        assert torch.equal(received.cpu(), torch.arange(float(n)) + (rank - 1) % size)
    dist.destroy_process_group(group)


@pytest.mark.usefixtures("process_group")
def test_ddp_trains_as_on_the_host():
    results = []
    for place in ("cpu", GPU):
        model = new_model(place)
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
        results.append(train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9), place))
    assert_close(results[1], results[0])


@pytest.mark.usefixtures("process_group")
def test_fsdp_trains_as_on_the_host():
    results = []
    for place in ("cpu", GPU):
        model = new_model(place)
        mesh = dist.device_mesh.init_device_mesh(place, (dist.get_world_size(),))
        fully_shard(model, mesh=mesh)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), place)
        results.append([parameter.full_tensor().detach().cpu() for parameter in model.parameters()])
    assert_close(results[1], results[0])


@pytest.mark.usefixtures("process_group")
def test_a_sharded_tensor_is_saved_and_loaded(tmp_path):
    mesh = dist.device_mesh.init_device_mesh(GPU, (dist.get_world_size(),))
    saved, loaded = (distribute_tensor(x, mesh, [Shard(0)]) for x in (torch.arange(12.0), torch.zeros(12)))
    directory = allred.broadcast_object(str(tmp_path))
    checkpoint.save({"x": saved}, checkpoint_id=directory)
    checkpoint.load({"x": loaded}, checkpoint_id=directory)
    assert torch.equal(loaded.full_tensor().cpu(), torch.arange(12.0))
