"""FSDP 1 and 2, meshes of two dimensions, pipelines and distributed checkpoints. Each case runs with backend allred as
the default group, and again with gloo as the default group in the same processes; the results must be the same."""

import functools
import sys

import group_case_runner
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

WIDTH = 12


class Block(torch.nn.Module):
    """Its parameters do not divide by 2 or 3 everywhere."""

    def __init__(self, hidden=25):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, hidden), torch.nn.Linear(hidden, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def blocks(count=3, seed=1, **options):
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(Block(**options) for _ in range(count)))


def batch(rank, step=0, rows=4):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def train(model, optimizer, rank, steps=3):
    """A few steps; return the losses."""
    losses = []
    for step in range(steps):
        loss = model(batch(rank, step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def full(values):
    """Copies of the tensors in nested dicts and lists, with all shards."""
    if isinstance(values, dict):
        return [full(values[key]) for key in sorted(values, key=str)]
    if isinstance(values, (list, tuple)):
        return [full(value) for value in values]
    if isinstance(values, DTensor):
        return values.full_tensor().detach().clone()
    return values.detach().clone() if isinstance(values, torch.Tensor) else values


def parameters(model):
    return full(list(model.parameters()))


def shard(model, mesh=None, **options):
    """FSDP 2 of each block and of the whole."""
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def two_dimensions(size, *names):
    rows = 2 if size % 2 == 0 else size
    return init_device_mesh("cpu", (rows, size // rows), mesh_dim_names=names)


# FSDP 1


def fsdp_1(**options):
    options = {"device_id": torch.device("cpu"), "use_orig_params": True} | options
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=300)
    return Fsdp1(options.pop("model", None) or blocks(), auto_wrap_policy=policy, **options)


def summoned(model):
    with Fsdp1.summon_full_params(model):
        return parameters(model)


def fsdp_1_options(rank, size):
    results = []
    mixed = [
        MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16),
        MixedPrecision(reduce_dtype=torch.float16, keep_low_precision_grads=True),
    ]
    for options in (
        {"forward_prefetch": True, "limit_all_gathers": False},
        {"use_orig_params": False},
        {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        *({"mixed_precision": one} for one in mixed if size == 2),  # gloo rounds after each rank
    ):
        model = fsdp_1(**options)
        results += [*train(model, adam(model), rank), model.clip_grad_norm_(1.0), *summoned(model)]
    return results


def fsdp_1_no_sync(rank, size):
    results = []
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        model = fsdp_1(sharding_strategy=strategy)
        optimizer = adam(model)
        for step in range(2):
            with model.no_sync():
                model(batch(rank, 2 * step)).square().mean().backward()
            model(batch(rank, 2 * step + 1)).square().mean().backward()
            results.append(model.clip_grad_norm_(0.1))
            optimizer.step()
            optimizer.zero_grad()
        results += summoned(model)
    return results


def fsdp_1_from_meta(rank, size):
    """A model without memory is initialized block by block, as it is sharded."""

    def initialize(module):
        module.to_empty(device="cpu", recurse=False)
        if hasattr(module, "reset_parameters"):
            torch.manual_seed(7)
            module.reset_parameters()

    with torch.device("meta"):
        model = blocks()
    model = fsdp_1(model=model, param_init_fn=initialize)
    return [*summoned(model), *train(model, adam(model), rank), *summoned(model)]


def fsdp_1_state_dict(rank, size):
    """Each kind of state is loaded by another model. Not offload_to_cpu: on CPUs it keeps memory that is freed, also
    with gloo."""
    results = []
    kinds = [
        (StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=False), FullOptimStateDictConfig()),
        (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()),
    ]
    for kind, config, optimizer_config in kinds:
        for mesh in (None, init_device_mesh("cpu", (size,))):  # without a mesh the shards are ShardedTensors
            if mesh is not None and kind is not StateDictType.SHARDED_STATE_DICT:
                continue
            model, other = (fsdp_1(model=blocks(seed=seed), device_mesh=mesh) for seed in (1, 2))
            optimizer, its = adam(model), adam(other)
            train(model, optimizer, rank)
            train(other, its, rank, 1)
            with Fsdp1.state_dict_type(model, kind, config, optimizer_config):
                weights = model.state_dict()
                state = Fsdp1.optim_state_dict(model, optimizer)
            with Fsdp1.state_dict_type(other, kind, config, optimizer_config):
                other.load_state_dict(weights)
                its.load_state_dict(Fsdp1.optim_state_dict_to_load(other, its, state))
            if kind is StateDictType.FULL_STATE_DICT:
                results += full(weights)
            group_case_runner.assert_same(summoned(other), summoned(model), size)
            results += [*train(other, its, rank), *summoned(other)]
    return results


def fsdp_1_hybrid(rank, size):
    results = []
    mesh = two_dimensions(size, "replicate", "shard")
    for strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2):
        model = fsdp_1(sharding_strategy=strategy, device_mesh=mesh)
        results += [*train(model, adam(model), rank), *summoned(model)]
    return results


# FSDP 2


def fsdp_2_options(rank, size):
    results = []
    mixed = [
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        MixedPrecisionPolicy(reduce_dtype=torch.float16),
    ]
    for options in (
        {"reshard_after_forward": False},
        *({"mp_policy": one} for one in mixed if size == 2),  # gloo rounds after each rank
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        {"mesh": two_dimensions(size, "replicate", "shard")},
    ):
        model = shard(blocks(), **options)
        results += [*train(model, adam(model), rank), *parameters(model)]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        results.append(full(norm))
    return results


def fsdp_2_without_synchronization(rank, size):
    results = []
    for mesh in (None, two_dimensions(size, "replicate", "shard")):
        model = shard(blocks(), mesh)
        optimizer = adam(model)
        for step in range(2):
            for part in range(3):
                model.set_requires_gradient_sync(part == 2)
                if mesh is not None:
                    model.set_requires_all_reduce(part == 2)
                model.set_is_last_backward(part == 2)
                model(batch(rank, 3 * step + part)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results += parameters(model)
    return results


def fsdp_2_from_meta(rank, size):
    """A sharded model without memory gets the values of rank 0, and of a checkpoint."""
    with torch.device("meta"):
        model = shard(blocks())
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, blocks().state_dict() if rank == 0 else {}, options=options)
    optimizer = adam(model)
    results = [*parameters(model), *train(model, optimizer, rank), *parameters(model)]
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    assert bool(weights) == (rank == 0)
    results += full(weights)
    other = shard(blocks(seed=2))
    its = adam(other)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, weights, options=options)
    set_optimizer_state_dict(other, its, state, options=options)
    group_case_runner.assert_same(parameters(other), parameters(model), size)
    return [*results, *train(other, its, rank), *parameters(other)]


def mesh_of_two_dimensions(rank, size):
    """Tensor parallel in one dimension of the mesh, FSDP 2 in the other; the blocks without a sequence dimension."""
    mesh = two_dimensions(size, "data", "tensor")
    model = blocks(hidden=24)
    for block in model:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    shard(model, mesh["data"])
    optimizer = adam(model)
    data = mesh["data"].get_local_rank()
    results = [*train(model, optimizer, data), *parameters(model)]
    results.append(full(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
    weights, state = get_state_dict(model, optimizer)
    return [*results, *full(weights), *full(state["state"])]


def sequence_and_loss_parallel(rank, size):
    """The activations are sharded between the layers, and the classes in the loss."""
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(1)
    model = torch.nn.Sequential(Block(hidden=6 * size), torch.nn.Linear(WIDTH, 4 * size))
    plan = {
        "0.norm": SequenceParallel(sequence_dim=0),
        "0.up": ColwiseParallel(input_layouts=Shard(0)),
        "0.down": RowwiseParallel(output_layouts=Shard(0)),
        "1": ColwiseParallel(input_layouts=Shard(0), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    optimizer, results = adam(model), []
    for step in range(3):
        x, labels = batch(rank, step, rows=2), torch.arange(2 * size) % (4 * size)
        with loss_parallel():
            loss = torch.nn.functional.cross_entropy(model(x), labels)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(full(loss))
    return [*results, *parameters(model)]


# Pipelines


def pipelines(rank, size):
    """Each schedule gives the gradients and losses of one process."""
    micro_batches = 2 * size
    x, target = batch(9, rows=2 * micro_batches), batch(10, rows=2 * micro_batches)

    def loss_function(output, target):
        return (output - target).square().mean()

    schedules = [
        (ScheduleGPipe, 1),
        (Schedule1F1B, 1),
        (ScheduleLoopedBFS, 2),
        (ScheduleInterleaved1F1B, 2),
        (ScheduleInterleavedZeroBubble, 2),
    ]
    results = []
    for schedule, each in schedules:
        model, reference = (blocks(each * size) for _ in range(2))
        indices = range(rank, each * size, size)
        stages = [PipelineStage(model[index], index, each * size, torch.device("cpu")) for index in indices]
        runner = schedule(stages if each > 1 else stages[0], micro_batches, loss_fn=loss_function)
        for _ in range(2):
            losses = []
            output = runner.step(
                *([x] if rank == 0 else []), **({"target": target, "losses": losses} if rank == size - 1 else {})
            )
            loss_function(reference(x), target).backward()
            if rank == size - 1:
                group_case_runner.assert_same(output, reference(x), 3)
                results += [output.detach(), *(loss.detach() for loss in losses)]
            for index in indices:
                found = [parameter.grad for parameter in model[index].parameters()]
                group_case_runner.assert_same(found, [parameter.grad for parameter in reference[index].parameters()], 3)
                results += [gradient.clone() for gradient in found]
            model.zero_grad()
            reference.zero_grad()
        forward = ScheduleGPipe(stages[0], micro_batches) if each == 1 else None
        if forward:
            with torch.no_grad():
                output = forward.step(*([x] if rank == 0 else []))
            results += [output] if rank == size - 1 else []
    return results


def pipeline_of_sharded_stages(rank, size):
    """Pipeline in one dimension of a mesh, FSDP 2 in the other."""
    mesh = two_dimensions(size, "pipeline", "data")
    stage_index, data = mesh.get_coordinate()
    count, micro_batches = mesh.size(0), mesh.size(0)
    model = blocks(count)
    fully_shard(model[stage_index], mesh=mesh["data"], reshard_after_forward=False)
    stage = PipelineStage(model[stage_index], stage_index, count, torch.device("cpu"), group=mesh.get_group("pipeline"))
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=lambda output, target: (output - target).square().mean())
    optimizer = adam(model[stage_index])
    results = []
    for step in range(2):
        x, losses = batch(data, step, rows=micro_batches), []
        if count == 1 or stage_index == 0:
            schedule.step(x, **({"target": x, "losses": losses} if count == 1 else {}))
        elif stage_index == count - 1:
            schedule.step(target=x, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        results += [loss.detach() for loss in losses]
    return [*results, *parameters(model[stage_index])]


# Distributed checkpoints


def saved_by_fewer_ranks(rank, size):
    """Saved by two ranks, loaded by all and by one; and the other way round."""
    where, pair = group_case_runner.shared_directory(), dist.new_group([0, 1])
    everyone = init_device_mesh("cpu", (size,))
    for ranks, group in ((2, pair), (size, dist.group.WORLD)):
        if rank < ranks:
            model = shard(blocks(seed=3), everyone if ranks == size else DeviceMesh.from_group(pair, "cpu"))
            optimizer = adam(model)
            train(model, optimizer, rank)
            weights, state = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{where}/{ranks}", process_group=group)
        dist.barrier()
    results = []
    for ranks in (2, size):
        model = shard(blocks(seed=4), everyone)
        results += load(model, f"{where}/{ranks}")
        if rank < 2:
            model = shard(blocks(seed=5), DeviceMesh.from_group(pair, "cpu"))
            results += load(model, f"{where}/{ranks}", process_group=pair)
        alone = blocks(seed=6)
        results += load(alone, f"{where}/{ranks}", no_dist=True)
        group_case_runner.assert_same(parameters(alone), parameters(shard(alone, everyone)), size)
        train(model, adam(model), rank if rank < 2 else 0) if rank < 2 else None
    return results


def load(model, where, **options):
    optimizer = adam(model)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=where, **options)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    state = get_optimizer_state_dict(model, optimizer)
    return [*parameters(model), *full(state["state"])]


def saved_in_the_background(rank, size):
    """Saved by a thread and by another process, while training goes on."""
    results = []
    for kind in dcp.state_dict_saver.AsyncCheckpointerType:
        where, group = group_case_runner.shared_directory(), dist.new_group()
        model = shard(blocks(), two_dimensions(size, "replicate", "shard"))
        optimizer = adam(model)
        for step in range(2):
            train(model, optimizer, rank, 1)
            expected = parameters(model)
            weights, state = get_state_dict(model, optimizer)
            pending = dcp.async_save(
                {"model": weights, "optimizer": state},
                checkpoint_id=f"{where}/{step}",
                process_group=group,
                async_checkpointer_type=kind,
            )
            train(model, optimizer, rank, 2)
            pending.result()
            dist.barrier()
            other = shard(blocks(seed=2))
            results += load(other, f"{where}/{step}")
            group_case_runner.assert_same(parameters(other), expected, 2)
    return results


def fsdp_1_checkpoint(rank, size):
    """FSDP 1's sharded state, loaded by FSDP 2."""
    where = group_case_runner.shared_directory()
    model = fsdp_1(device_mesh=init_device_mesh("cpu", (size,)))
    train(model, adam(model), rank)
    with Fsdp1.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        dcp.save({"model": model.state_dict()}, checkpoint_id=where)
    other = shard(blocks(seed=2))
    weights = get_model_state_dict(other)
    dcp.load({"model": weights}, checkpoint_id=where)
    set_model_state_dict(other, weights)
    group_case_runner.assert_same(parameters(other), summoned(model), size)
    return parameters(other)


CASES = [
    fsdp_1_options,
    fsdp_1_no_sync,
    fsdp_1_from_meta,
    fsdp_1_state_dict,
    fsdp_1_hybrid,
    fsdp_2_options,
    fsdp_2_without_synchronization,
    fsdp_2_from_meta,
    mesh_of_two_dimensions,
    sequence_and_loss_parallel,
    pipelines,
    pipeline_of_sharded_stages,
    saved_by_fewer_ranks,
    saved_in_the_background,
    fsdp_1_checkpoint,
]

if __name__ == "__main__":
    group_case_runner.run_with_gloo(CASES, sys.argv[1:])
