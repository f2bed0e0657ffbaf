"""The program of test_reconfigure.py: one of three processes, whose group is formed again with other ranks.

Arguments: rank, a file for the store, and the case. torch 2.14 and later: through torch.distributed. Before: the group
alone.
"""

import datetime
import os
import signal
import sys
import types

import pytest
import torch
import torch.distributed as dist

from allred.errors import CollectiveTimeout, InputError, RemoteRankError
from allred.torch.reconfigurable_group import ReconfigurableGroup

SIZE = 3
HAS_RECONFIGURE = hasattr(dist, "_reconfigure")
rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], SIZE)


def new_group():
    if HAS_RECONFIGURE:
        dist.init_process_group("allred", store=store, rank=rank, world_size=SIZE, enable_reconfigure=True)
        assert dist._supports_reconfigure()
        return dist.group.WORLD
    return ReconfigurableGroup(
        types.SimpleNamespace(store=store, group_rank=rank, group_size=SIZE, timeout=dist.constants.default_pg_timeout)
    )


group = new_group()


def exchange(title, value, ranks=range(SIZE)):
    store.set(f"{title} {rank}", value)
    return [store.get(f"{title} {each}").decode() for each in ranks]


def handles(title, ranks=range(SIZE)):
    return exchange(title, group.get_reconfigure_handle(), ranks)


def form(uuid, given, timeout=None):
    if HAS_RECONFIGURE:
        return dist._reconfigure(uuid, given, timeout=timeout).wait()
    return group.reconfigure(types.SimpleNamespace(uuid=uuid, handles=given, timeout=timeout, hints={})).wait()


def check(index, size):
    """The group has these ranks, and communicates."""
    assert (group.rank(), group.size()) == (index, size)
    total = torch.full((4,), index + 1.0)
    group.allreduce([total]).wait()
    assert total.tolist() == [size * (size + 1) / 2] * 4
    root = torch.full((2,), float(index))
    group.broadcast([root], size - 1).wait()
    assert root.tolist() == [size - 1.0] * 2
    if size > 1:
        into = torch.zeros(3)
        works = [
            group.recv([into], (index - 1) % size, 5),
            group.send([torch.full((3,), 1.0 * index)], (index + 1) % size, 5),
        ]
        for work in works:
            work.wait()
        assert into.tolist() == [(index - 1) % size] * 3
    if HAS_RECONFIGURE:
        assert (dist.get_rank(), dist.get_world_size()) == (index, size)


def all_again():
    form(1, handles("a"))
    check(rank, SIZE)
    form(2, handles("b")[::-1])  # in another order
    check(SIZE - 1 - rank, SIZE)
    form(3, set(handles("c")))
    assert sorted(map(int, exchange("ranks", str(group.rank())))) == [0, 1, 2]


def without_the_middle_one():
    form(1, handles("a"))
    check(rank, SIZE)
    found = handles("b")
    if rank != 1:
        form(2, [found[0], found[2]])
        check(rank // 2, 2)
    exchange("end", "")


def alone_and_together():
    for number in range(2):
        form(100 * number + rank, [group.get_reconfigure_handle()])
        check(0, 1)
        form(100 * number + 10, handles(f"a{number}"))
        check(rank, SIZE)


def later():
    found = handles("a")
    if rank:
        form(1, found[1:])
        check(rank - 1, 2)
    form(2, handles("b"))
    check(rank, SIZE)


def reduce_often():
    for _ in range(1000):
        group.allreduce([torch.ones(1000)]).wait()


def a_killed_process():
    form(1, handles("a"))
    check(rank, SIZE)
    exchange("ready", "")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ended = r"rank 1 \(pid \d+ on .*\) has ended; call dist._reconfigure without it"
    with pytest.raises(RemoteRankError, match=ended):
        reduce_often()
    form(2, handles("b", (0, 2)))
    check(rank // 2, 2)


def aborted():
    form(1, handles("a"))
    exchange("ready", "")
    group.abort()
    with pytest.raises(RuntimeError, match="was aborted"):
        group.allreduce([torch.ones(3)]).wait()
    form(2, handles("b"))
    check(rank, SIZE)


def wrong_calls():
    with pytest.raises(InputError, match=r"has no ranks: call dist\._reconfigure first"):
        group.allreduce([torch.ones(3)]).wait()
    mine = group.get_reconfigure_handle()
    assert mine == group.get_reconfigure_handle()
    form(rank, [mine])
    with pytest.raises(RuntimeError, match=r"uuid \d was already used"):
        form(rank, [group.get_reconfigure_handle()])
    with pytest.raises(InputError, match="the 1 handles have this process 0 times, expected once"):
        form(10, [mine])
    with pytest.raises(InputError, match="the 2 handles have this process 2 times, expected once"):
        form(10, [group.get_reconfigure_handle()] * 2)
    with pytest.raises(InputError, match="a handle is not a result of"):
        form(10, [group.get_reconfigure_handle(), "wrong"])
    if rank == 0:  # the others do not call it
        with pytest.raises(
            CollectiveTimeout, match=r"reconfigure: rank 0 has waited 1 s \(timeout\) for the other 2 processes"
        ):
            form(11, handles("a"), datetime.timedelta(seconds=1))
    else:
        handles("a")
    form(12, handles("b"))
    check(rank, SIZE)


globals()[sys.argv[3]]()
group.shutdown()
print("done")
