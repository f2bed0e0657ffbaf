"""`DistributedBatchSampler`: every row once, equal numbers of batches on all ranks, and any position can be resumed."""

import itertools
import json

import pytest

import allred
from allred.data import DistributedBatchSampler
from allred.errors import InputError


def joined(lists):
    return list(itertools.chain.from_iterable(lists))


def samplers(size, rows=37, **options):
    options = {"batch_size": 10, "epochs": 2, "seed": 4, **options}
    return [DistributedBatchSampler(rows, rank=rank, size=size, **options) for rank in range(size)]


def global_batches(size, state=None, **options):
    """The rows of all ranks, by batch."""
    every = samplers(size, **options)
    for sampler in every:
        if state is not None:
            sampler.load_state_dict(json.loads(json.dumps(state)))
    return [joined(shares) for shares in zip(*every, strict=True)]


@pytest.mark.parametrize("rows", [10, 37, 40, 41, 43])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_row_once_and_no_empty_share(size, rows):
    batches = global_batches(size, rows=rows)
    assert len(batches) == len(samplers(size, rows=rows)[0])
    flat = joined(batches)
    for epoch in (flat[:rows], flat[rows:]):
        assert sorted(epoch) == list(range(rows))
    assert flat[:rows] != flat[rows:]
    assert flat == joined(global_batches(1, rows=rows))
    for sampler in samplers(size, rows=rows):
        assert all(sampler)


def test_drop_last():
    assert [len(batch) for batch in global_batches(3, drop_last=True)] == [10] * 6


@pytest.mark.parametrize("size", [1, 2, 3])
def test_resumed_at_every_position(size):
    whole = joined(global_batches(2))
    sampler, used = samplers(2)[0], 0
    shares = iter(sampler)
    for number, _ in enumerate(shares):
        used += len(global_batches(2)[number])
        assert joined(global_batches(size, sampler.state_dict())) == whole[used:]


def test_epochs_one_by_one():
    sampler = DistributedBatchSampler(20, batch_size=6, rank=0, size=1)
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    assert joined(first) != joined(second)
    whole = list(DistributedBatchSampler(20, batch_size=6, epochs=2, rank=0, size=1))
    assert second == whole[len(first) :]
    sampler.set_epoch(1)
    for _ in sampler:
        break
    state = sampler.state_dict()
    again = DistributedBatchSampler(20, batch_size=6, rank=0, size=1)
    again.load_state_dict(state)
    assert again.epoch == 1
    again.set_epoch(1)  # of the loop that is resumed
    assert list(again) == second[1:]


def test_a_loader_that_fetches_ahead():
    """The position follows the batches that the program has received."""
    sampler = DistributedBatchSampler(20, batch_size=6, rank=0, size=1, seed=None)

    class LoaderOfAll:
        def __iter__(self):
            iter(sampler)  # as torch does
            return iter(list(sampler))

    loader = LoaderOfAll()
    positions = [sampler.state_dict()["samples"] for _ in sampler.follow(loader)]
    assert positions == [6, 12, 18, 20]


def test_follow_needs_a_loader_of_this_sampler():
    sampler, other = (DistributedBatchSampler(20, batch_size=6, rank=0, size=1) for _ in range(2))
    with pytest.raises(InputError, match="the loader does not use this sampler; pass it as batch_sampler"):
        next(sampler.follow(list(other)))
    assert len(list(sampler.follow(sampler))) == 4  # the sampler can be used afterwards


def test_arguments():
    with pytest.raises(InputError, match="batch_size=1 is less than one sample for each of the 2 ranks"):
        DistributedBatchSampler(10, batch_size=1, rank=0, size=2)
    with pytest.raises(InputError, match="the data has 3 rows, which is less than one for each of the 4 ranks"):
        DistributedBatchSampler(range(3), batch_size=8, rank=0, size=4)
    with pytest.raises(InputError, match="too few for 3 ranks"):
        global_batches(3, {"epoch": 0, "samples": 35, "rows": 37, "seed": 4})
    assert allred.data.DistributedBatchSampler is DistributedBatchSampler
