"""Trainings whose gradients may lie in the arena (`ALLRED_TORCH_ARENA`). Rank 0 prints a line for each case: the name,
a hash of the results of all ranks, the share of bytes in percent that was reduced in place, and the bytes that other
collectives have read in place.

Parameters are large enough for the arena. The hashes are the same with any setting of the arena.
"""

import copy
import hashlib

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import allred
from allred import world
from allred.torch.tensors import as_raw_array

STEPS = 4  # DDP makes new buckets after the first one
WIDTH = 160


def layers():
    torch.manual_seed(1)
    parts = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 4)]
    return torch.nn.Sequential(*parts)


def batch(step):
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def steps(model, optimizer, set_to_none=True, micro=1):
    for step in range(STEPS):
        for part in range(micro):
            model(batch(10 * step + part)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def ddp(**options):
    model = DistributedDataParallel(layers(), bucket_cap_mb=0.15, **options)
    steps(model, momentum(model))
    return model


def ddp_bucket_views():
    return ddp(gradient_as_bucket_view=True)


def ddp_after_backward():
    """A program that reduces the gradients itself."""
    model = layers()
    optimizer = momentum(model)
    for step in range(STEPS):
        model(batch(step)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    return model


def fsdp_1():
    model = FullyShardedDataParallel(layers(), device_id=torch.device("cpu"), use_orig_params=True)
    steps(model, torch.optim.Adam(model.parameters(), lr=0.01))
    with FullyShardedDataParallel.summon_full_params(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


def fsdp_2():
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    model = layers()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    steps(model, torch.optim.Adam(model.parameters(), lr=0.01))
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


def hooked(accumulate=1, **how):
    model = layers()
    optimizer = allred.distributed(momentum(model), accumulate=accumulate)
    steps(model, optimizer, micro=accumulate, **how)
    summary = optimizer.allred.summary()
    optimizer.allred.detach()
    if dist.get_rank() == 0:
        print("summary", summary.partition("\ngradients: ")[2].replace("\n", "; "), flush=True)
    return model


def hooked_accumulates():
    return hooked(accumulate=2)


def hooked_keeps_gradients():
    return hooked(set_to_none=False)


def copies_of_a_model():
    """A copy, a state in a file, and tensors that change their size, of memory in the arena."""
    model = hooked()
    other = copy.deepcopy(model)
    other.load_state_dict(model.state_dict())
    sizes = [WIDTH * WIDTH, 3, 2 * WIDTH * WIDTH, 0, WIDTH * WIDTH]
    grown = torch.full((WIDTH, WIDTH), 3.0)
    for size in sizes:
        grown.untyped_storage().resize_(4 * size)
        grown.resize_(size).fill_(size)
    shared = torch.ones(WIDTH, WIDTH).share_memory_()
    return [*other.parameters(), grown, shared + 1]


class _Rows(torch.utils.data.Dataset):
    """Rows of a tensor in the arena. Each row is changed when it is read."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.rows[index] += 1
        made = torch.ones(WIDTH, WIDTH)  # of a size that the arena serves, but not here
        return self.rows[index] * made[0]


def workers_of_a_loader():
    """Workers that fork see the values at the fork, and their changes stay theirs."""
    model, rows = layers(), torch.arange(WIDTH * WIDTH, dtype=torch.float32).reshape(WIDTH, WIDTH)
    loader = torch.utils.data.DataLoader(_Rows(rows), batch_size=40, num_workers=2, multiprocessing_context="fork")
    optimizer = allred.distributed(momentum(model))
    for x in loader:
        assert float(x[0, 0]) % WIDTH == 1
        model(x / (1e4 + dist.get_rank())).square().mean().backward()
        rows.fill_(-5)
        optimizer.step()
        optimizer.zero_grad()
    assert bool((rows == -5).all())
    optimizer.allred.detach()
    return model


CASES = [
    ddp, ddp_bucket_views, ddp_after_backward, fsdp_1, fsdp_2, hooked, hooked_accumulates, hooked_keeps_gradients,
    copies_of_a_model, workers_of_a_loader,
]  # fmt: skip


def traffic():
    """Bytes that this rank has contributed to allreduces, and those in place; and bytes read in place."""
    communicator = world.current().communicator
    return communicator.sent_bytes, communicator.in_place_bytes, communicator.backend.engine.read_in_place


def main():
    torch.set_num_threads(1)
    dist.init_process_group("allred")
    for case in CASES:
        before = traffic()
        found = case()
        sent, in_place, read = (now - then for now, then in zip(traffic(), before, strict=True))
        tensors = [*found.parameters()] if isinstance(found, torch.nn.Module) else found
        digest = hashlib.sha256(b"".join(as_raw_array(each.detach()).tobytes() for each in tensors)).hexdigest()
        everyone = allred.allgather_object(digest)
        share = 100 * in_place / sent if sent else 0
        if dist.get_rank() == 0:
            print("case", case.__name__, "-".join(each[:12] for each in everyone), f"{share:.0f}", read, flush=True)
    if dist.get_rank() == 0:
        print("group", dist.group.WORLD.summary())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
