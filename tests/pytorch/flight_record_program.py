"""Writes flight records: after operations that match, after two that differ, and after a time-out. DIRECTORY."""

import datetime
import sys
import time

import torch
import torch.distributed as dist

from allred import MismatchError
from allred.torch.flight_recorder import write_flight_record

dist.init_process_group("allred", timeout=datetime.timedelta(seconds=3))
rank, size, directory = dist.get_rank(), dist.get_world_size(), sys.argv[1]


def all_kinds():
    """Start 21 collectives of this rank in the world, and two in the group of the first two ranks."""
    x, each = torch.ones(4, 3), [torch.zeros(4, 3) for _ in range(size)]
    dist.all_reduce(x)
    dist.broadcast(x, 1)
    dist.reduce(x, 2)
    dist.all_gather(each, x)
    dist.all_gather_into_tensor(torch.zeros(4 * size, 3), x)
    dist.reduce_scatter(x, each)
    dist.reduce_scatter_tensor(x, torch.zeros(4 * size, 3, dtype=torch.float32))
    dist.all_to_all(each, [torch.ones(4, 3) for _ in range(size)])
    sent = [rank + 1] * size  # rows to each rank: another number on each
    dist.all_to_all_single(torch.zeros(6, 2), torch.ones(sum(sent), 2), [*range(1, size + 1)], sent)
    dist.gather(x, each if rank == 0 else None, 0)
    dist.scatter(x, each if rank == 1 else None, 1)
    dist.barrier()
    for work in [dist.all_reduce(x, async_op=True) for _ in range(3)]:
        work.wait()
    with dist._coalescing_manager(async_ops=True) as works:
        for dtype in (torch.float64, torch.int32):
            dist.all_reduce(torch.ones(5, dtype=dtype))
    works.wait()
    dist.all_reduce_coalesced([torch.ones(2), torch.ones(3)])
    dist.all_gather_object([None] * size, {"rank": rank})  # two operations
    if rank < 2:
        dist.all_reduce(x, group=pair)
        dist.broadcast(x, 0, group=pair)


def messages():
    """Send six messages, some of them received in another order or from any rank."""
    x = torch.ones(3)
    if rank == 2:
        for work in dist.isend(x, 0, tag=5), dist.isend(x, 0, tag=6), dist.isend(x, 1):
            work.wait()
    elif rank == 0:
        dist.recv(x, 2, tag=6)
        dist.recv(x, 2, tag=5)
    else:
        dist.recv(x)
    peers = (rank + 1) % size, (rank - 1) % size
    operations = [dist.P2POp(dist.isend, torch.ones(2), peers[0]), dist.P2POp(dist.irecv, torch.ones(2), peers[1])]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def evaluate():
    if rank == 1:
        return time.sleep(60)
    dist.all_reduce(torch.ones(7))


pair, others = dist.new_group([0, 1], group_desc="pair"), dist.new_group(group_desc="others")
all_kinds()
messages()
write_flight_record(f"{directory}/match/rank_")
try:
    dist.broadcast(torch.ones(5), 0, group=others) if rank == 1 else dist.all_reduce(torch.ones(5), group=others)
except MismatchError:
    write_flight_record(f"{directory}/mismatch/rank_")
evaluate()
