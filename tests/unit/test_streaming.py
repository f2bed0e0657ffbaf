"""Streams: global batches of records, in the order of the stream, or shuffled through a buffer."""

import itertools
import json
import random

import numpy as np
import pytest

import allred
from allred.data import example, make_example, prefetch, shuffled, stream, tfrecord, write_tfrecord
from allred.errors import InputError, NotInitializedError

RECORDS = 37


def label_of(record):
    return example(record)["label"][0]


def fail_at_20(number):
    if number == 20:
        raise KeyError("twenty")
    return number


@pytest.fixture
def path(tmp_path):
    write_tfrecord(tmp_path / "x", (make_example({"label": number}) for number in range(RECORDS)))
    return tmp_path / "x"


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


def numbers(batches):
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("buffer", [None, 1, 8, 100])
def test_the_global_batches_do_not_depend_on_the_number_of_ranks(path, buffer):
    records = tfrecord(path) if buffer is None else shuffled(tfrecord(path), buffer, seed=5)
    options = {"batch_size": 10, "epochs": 2, "decode": label_of}
    alone = numbers(stream(records, **options, rank=0, size=1))
    assert [len(batch) for batch in alone] == [10, 10, 10, 7] * 2
    assert sorted(flat(alone[:4])) == list(range(RECORDS))
    assert (flat(alone[:4]) == list(range(RECORDS))) == (buffer in (None, 1))
    assert (alone[:4] == alone[4:]) == (buffer in (None, 1))
    for size in (2, 3, 9):
        shares = [numbers(stream(records, **options, rank=rank, size=size)) for rank in range(size)]
        assert [flat(parts) for parts in zip(*shares, strict=True)] == alone
        assert all(max(map(len, parts)) - min(map(len, parts)) <= 1 for parts in zip(*shares, strict=True))


def test_a_record_that_cannot_be_decoded_is_named():
    def decode(number):
        return [0][number - 6]

    with pytest.raises(IndexError) as caught:
        numbers(stream(range(8), batch_size=4, decode=decode, rank=1, size=2))
    assert caught.value.__notes__ == ["raised by decode() for record 2 of the stream (the first record is 0)"]


def test_only_this_ranks_records_are_decoded():
    decoded = []
    assert numbers(stream(range(8), batch_size=4, decode=lambda n: decoded.append(n) or n, rank=1, size=2)) == [
        [2, 3],
        [6, 7],
    ]
    assert decoded == [2, 3, 6, 7]


def test_a_rank_without_records_gets_an_empty_batch_of_the_same_kind():
    last = list(stream(range(5), batch_size=4, decode=lambda n: (np.full(3, n, np.int8), "x"), rank=3, size=4))[-1]
    assert (last[0].shape, last[0].dtype, last[1]) == ((0, 3), np.int8, [])


def test_records_as_they_are_and_the_last_batch_left_out(path):
    batches = list(stream(tfrecord(path), batch_size=10, drop_last=True, rank=0, size=1))
    assert [len(batch) for batch in batches] == [10, 10, 10]
    assert isinstance(batches[0][0], bytes)


@pytest.mark.parametrize("trial", range(12))
@pytest.mark.parametrize("ahead", [False, True])
def test_a_stream_continues_after_an_interruption_and_a_resize(path, trial, ahead):
    chance = random.Random(trial)
    seen, state = {}, None
    while state is None or (state["epoch"], state["samples"]) != (1, RECORDS):
        size, batch_size = chance.randint(1, 4), chance.randint(4, 15)
        records = shuffled(tfrecord(path), 8, seed=3)
        options = {"batch_size": batch_size, "epochs": 2, "decode": label_of, "size": size}
        loaders = [stream(records, **options, rank=rank) for rank in range(size)]
        loaders = [prefetch(loader) for loader in loaders] if ahead else loaders
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
        steps = chance.randint(1, 4)
        for step, shares in enumerate(zip(*loaders, strict=True), start=1):
            state = loaders[-1].state_dict()
            seen.setdefault(state["epoch"], []).extend(row for share in shares for row in share.tolist())
            if step == steps:
                break
    expected = [label_of(record) for record in shuffled(tfrecord(path), 8, seed=3).of_epoch(1)]
    assert seen[1] == expected
    assert sorted(seen[0]) == list(range(RECORDS))


def test_processes_decode(path):
    options = {"batch_size": 10, "decode": label_of, "rank": 0, "size": 1}
    assert numbers(prefetch(stream(tfrecord(path), **options), workers=2)) == numbers(stream(tfrecord(path), **options))


def test_errors_of_reading_and_decoding_are_raised_at_their_batch(path):
    with pytest.raises(KeyError, match="twenty"):
        list(prefetch(stream(range(30), batch_size=5, decode=fail_at_20, rank=0, size=1), depth=9))
    path.write_bytes(path.read_bytes()[:-1])
    seen = []
    with pytest.raises(allred.DataError, match="cut short"):
        seen.extend(prefetch(stream(tfrecord(path), batch_size=5, rank=0, size=1)))
    assert len(seen) == 7


def test_it_has_no_length():
    batches = stream(range(5), batch_size=2, rank=0, size=1)
    with pytest.raises(TypeError, match="len"):
        len(batches)
    with pytest.raises(TypeError, match="len"):
        len(prefetch(batches))
    assert len(list(prefetch(batches))) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [({"buffer": 9}, "buffer is 9 in the state and 8 here"), ({"seed": None}, "seed is None in the state and 3 here")],
)
def test_a_position_in_another_order_is_refused(change, message):
    batches = stream(shuffled(range(9), 8, seed=3), batch_size=2, rank=0, size=1)
    with pytest.raises(InputError, match=message):
        batches.load_state_dict({**batches.state_dict(), **change})


def test_a_position_behind_the_end_is_an_error():
    batches = stream(range(9), batch_size=2, rank=0, size=1)
    batches.load_state_dict({**batches.state_dict(), "samples": 10})
    with pytest.raises(InputError, match="after 10 records of this epoch, but the stream ended after 9"):
        list(batches)


def test_what_is_refused():
    with pytest.raises(InputError, match="generator can be iterated over only once, but epochs=2"):
        stream((n for n in range(3)), batch_size=1, epochs=2, rank=0, size=1)
    with pytest.raises(InputError, match="generator can be iterated over only once"):
        stream(shuffled((n for n in range(3)), 2), batch_size=1, epochs=2, rank=0, size=1)
    with pytest.raises(InputError, match="an iterable of records, got int"):
        stream(3, batch_size=1, rank=0, size=1)
    with pytest.raises(InputError, match="stream: batch_size=1 is less than one sample for each of the 2 ranks"):
        stream([], batch_size=1, rank=0, size=2)
    with pytest.raises(InputError, match="shuffled: buffer must be an integer >= 1, but is 0"):
        shuffled([], 0)
    with pytest.raises(InputError, match="seed must be an integer >= 0, but is None"):
        shuffled([], 1, None)
    with pytest.raises(NotInitializedError):
        stream([], batch_size=1)


def test_a_shuffle_buffer_gives_every_record_once_from_a_bounded_place():
    for buffer in (1, 2, 10, 50, 200):
        order = list(shuffled(range(100), buffer, seed=2))
        assert sorted(order) == list(range(100))
        assert order == list(shuffled(range(100), buffer, seed=2))
        assert all(place <= index + buffer for index, place in enumerate(order))
    assert list(shuffled(range(100), 10, seed=2)) != list(shuffled(range(100), 10, seed=3))
    first = [next(iter(shuffled(range(100), 10, seed=seed))) for seed in range(300)]
    assert set(first) == set(range(10))
