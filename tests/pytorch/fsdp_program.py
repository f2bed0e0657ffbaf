"""FSDP 1 and 2, distributed checkpoints and torch.compile on backend allred, compared with gloo or a single process."""

import shutil
import sys
import tempfile

import group_case_runner
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ddp_program import Net, batches, check_against_gloo
from group_case_runner import assert_same
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.5
    from torch.distributed._composable.fsdp import fully_shard


def layers():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 31), torch.nn.Tanh(), torch.nn.Linear(31, 30), torch.nn.Linear(30, 4))


def steps(rank, model, optimizer, count=3):
    for x in batches(rank, count):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def train_in_one_process(size, count=3):
    """The parameters after training in one process on the batches of all ranks."""
    model = layers()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for several in zip(*(batches(r, count) for r in range(size)), strict=True):
        sum(model(x).square().mean() / size for x in several).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def fsdp_1(rank, size):
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):

        def run(group, strategy=strategy):
            model = FullyShardedDataParallel(
                layers(), group or dist.group.WORLD, sharding_strategy=strategy, device_id=torch.device("cpu")
            )
            steps(rank, model, torch.optim.Adam(model.parameters(), lr=0.01))
            model.clip_grad_norm_(1.0)
            with FullyShardedDataParallel.summon_full_params(model):
                return [p.detach().clone() for p in model.parameters()]

        check_against_gloo(size, run)


def fsdp_2(rank, size):
    def run(group):
        mesh = DeviceMesh.from_group(group or dist.group.WORLD, "cpu")
        model = layers()
        for layer in model:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        steps(rank, model, optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return [p.full_tensor().detach() for p in model.parameters()]

    check_against_gloo(size, run)
    for one, other in zip(run(None), train_in_one_process(size), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def checkpoints(rank, size):
    """Save a sharded model and restore it in another; synchronously and in the background."""
    directory = [tempfile.mkdtemp(prefix="allred-dcp-") if rank == 0 else ""]
    dist.broadcast_object_list(directory)
    try:
        save_and_restore(rank, size, directory[0])
        dist.barrier()
    finally:
        if rank == 0:
            shutil.rmtree(directory[0])


def save_and_restore(rank, size, directory):

    def make(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 4))
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (size,)))
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    model, optimizer = make(1)
    steps(rank, model, optimizer)
    for name in ("sync", "async"):
        weights, state = get_state_dict(model, optimizer)
        values, where = {"model": weights, "optimizer": state}, f"{directory}/{name}"
        if name == "sync":
            dcp.save(values, checkpoint_id=where)
        else:
            pending = dcp.async_save(values, checkpoint_id=where, process_group=dist.new_group(backend="cpu:allred"))
            dist.all_reduce(torch.ones(3))  # meanwhile
            pending.result()
        other, its = make(2)
        weights, state = get_state_dict(other, its)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=where)
        set_state_dict(other, its, model_state_dict=weights, optim_state_dict=state)
        assert_same([p.full_tensor() for p in other.parameters()], [p.full_tensor() for p in model.parameters()], size)


def compiled(rank, size):
    """Functional collectives in a graph, collectives of a graph break, and compiled DDP. The backend of the compiler is
    aot_eager, which needs no C++ compiler."""

    def step(x):
        y = x * 2
        dist.all_reduce(y)
        return y + 1

    x = torch.full((4,), float(rank))
    expected = torch.full((4,), 2.0 * sum(range(size)) + 1)
    assert_same(torch.compile(step, backend="aot_eager")(x.clone()), expected, size)

    def broken(x):
        work = dist.all_reduce(x, async_op=True)
        torch._dynamo.graph_break()
        work.wait()
        if rank == 0:
            dist.send(x + 1, 1)
        elif rank == 1:
            dist.recv(x, 0)
            return x
        return x + 1

    assert_same(torch.compile(broken, backend="aot_eager")(x * 2), expected, size)

    def run(compiled):
        torch._dynamo.reset()
        net = Net()
        model = DistributedDataParallel(net)
        call = torch.compile(model, backend="aot_eager") if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps(rank, call, optimizer)
        return [p.detach() for p in net.parameters()]

    assert_same(run(True), run(False), 3)


CASES = [
    fsdp_1,
    fsdp_2,
    checkpoints,
    compiled,
]

if __name__ == "__main__":
    group_case_runner.run(CASES, sys.argv[1:])
