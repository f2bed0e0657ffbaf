"""Positions in the data: nothing is left out and nothing comes twice, wherever and on however many ranks it goes on."""

import json
import random

import numpy as np
import pytest

import allred
from allred import arrays
from allred.data.loader import BEGIN, Position, Sampler, rank_slice
from allred.errors import InputError

ROWS = 37


def ranks(size, **options):
    """The batches of every rank, of the row numbers themselves."""
    options = {"batch_size": 10, "epochs": 3, "seed": 4, **options}
    return [allred.data.batches(np.arange(ROWS), rank=r, size=size, **options) for r in range(size)]


@pytest.mark.parametrize("total", [0, 1, 2, 7, 64, 100])
def test_parts_are_those_of_split_sizes(total):
    for size in (1, 2, 3, 4, 7):
        parts = [rank_slice(total, rank, size) for rank in range(size)]
        assert [p.stop - p.start for p in parts] == arrays.split_sizes(total, size)
        assert [i for p in parts for i in range(p.start, p.stop)] == list(range(total))


@pytest.mark.parametrize(("drop_last", "joins_below"), [(False, 0), (True, 0), (False, 8)])
def test_a_sampler_continues_from_each_of_its_positions(drop_last, joins_below):
    sampler = Sampler(ROWS, 10, 2, 3, drop_last, joins_below)
    every = [(position, samples.tolist()) for position, samples in sampler.batches()]
    assert len(every) == 2 * sampler.steps_per_epoch
    for k, (position, _) in enumerate(every, start=1):
        assert [(p, s.tolist()) for p, s in sampler.batches(position)] == every[k:]
    assert list(sampler.batches(Position(2, 0))) == []


def test_a_position_is_plain_numbers_at_any_time():
    (data,) = ranks(1)
    state = data.state_dict()
    assert state == {"epoch": 0, "samples": 0, "rows": ROWS, "seed": 4}
    positions = []
    for _ in data:
        state = data.state_dict()
        assert json.loads(json.dumps(state)) == state
        positions.append((state["epoch"], state["samples"]))
    assert positions == [(epoch, samples) for epoch in range(3) for samples in (10, 20, 30, 37)]
    assert data.state_dict() == state  # after the end too
    assert len(list(data)) == 12  # and a new iteration starts from the beginning
    fresh = ranks(1)[0]
    fresh.load_state_dict(state)
    assert list(fresh) == []  # but who restores the end is at the end
    assert len(list(fresh)) == 12


def test_all_ranks_have_the_same_position_and_numpy_numbers_become_python_ones():
    options = {"batch_size": np.int64(10), "seed": np.int64(4), "epochs": np.int32(3)}
    assert json.dumps(ranks(2, **options)[0].state_dict()) == json.dumps(ranks(2)[1].state_dict())
    together = [[d.state_dict() for _ in d] for d in ranks(3)]
    assert together[0] == together[1] == together[2]


@pytest.mark.parametrize("trial", range(20))
def test_interrupted_anywhere_and_resized_every_epoch_has_every_sample_once(trial):
    """Ends at random places, goes on with another number of ranks and another batch size."""
    chance = random.Random(trial)
    seen, state = {}, None
    while state is None or (state["epoch"], state["samples"]) != (2, ROWS):
        size = chance.randint(1, 4)
        loaders = ranks(size, batch_size=chance.randint(4, 15))
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
        steps = chance.randint(1, 5)
        for step, shares in enumerate(zip(*loaders, strict=True), start=1):
            state = loaders[0].state_dict()
            seen.setdefault(state["epoch"], []).extend(row for share in shares for row in share.tolist())
            if step == steps:
                break
    order = Sampler(ROWS, 1, 3, 4, False).order
    assert seen == {epoch: order(epoch).tolist() for epoch in range(3)}  # in the same global order, too


def test_a_break_starts_over_and_a_load_holds_for_one_iteration():
    (data,) = ranks(1, seed=None)
    first = next(iter(data)).tolist()
    assert next(iter(data)).tolist() == first
    data.load_state_dict({"epoch": 1, "samples": 30, "rows": ROWS, "seed": None})
    assert data.state_dict()["samples"] == 30
    assert next(iter(data)).tolist() == list(range(30, 37))
    assert next(iter(data)).tolist() == list(range(10))


def test_len_counts_all_steps_also_after_a_resume():
    (data,) = ranks(1)
    data.load_state_dict({"epoch": 2, "samples": 5, "rows": ROWS, "seed": 4})
    assert (len(data), data.steps_per_epoch) == (12, 4)
    assert [len(batch) for batch in data] == [10, 10, 10, 2]


def test_what_is_left_of_an_epoch_is_dropped_by_what_is_left():
    (data,) = ranks(1, drop_last=True, epochs=1)
    data.load_state_dict({"epoch": 0, "samples": 8, "rows": ROWS, "seed": 4})
    assert [len(batch) for batch in data] == [10, 10]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 38}, "other data: rows is 38 in the state and 37 here"),
        ({"seed": None}, "other data: seed is None in the state and 4 here"),
        ({"samples": 38}, "samples must be an integer from 0 to 37, but is 38"),
        ({"samples": 1.5}, "samples must be an integer from 0 to 37, but is 1.5"),
        ({"epoch": -1}, "epoch must be an integer >= 0, but is -1"),
        ({"epoch": "1"}, "epoch must be an integer >= 0, but is '1'"),
        ({"rows": ...}, r"expected the result of state_dict\(\), got .* without \['rows'\]"),
    ],
)
def test_states_that_cannot_be_used_change_nothing(change, message):
    (data,) = ranks(1)
    state = {name: value for name, value in {**data.state_dict(), **change}.items() if value is not ...}
    with pytest.raises(InputError, match=message):
        data.load_state_dict(state)
    assert Position(*list(data.state_dict().values())[:2]) == BEGIN
