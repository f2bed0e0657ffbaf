"""Shares of global batches, for ranks that the test makes up."""

import numpy as np
import pytest
import worlds

import allred
from allred import numbering
from allred.data import loader
from allred.errors import InputError, NotInitializedError

ROWS = np.arange(37)


def whole(size, **options):
    """The global batches, put together from the shares of all ranks."""
    shares = [list(allred.data.batches(ROWS, rank=r, size=size, **options)) for r in range(size)]
    return [np.concatenate(parts) for parts in zip(*shares, strict=True)]


@pytest.mark.parametrize("seed", [None, 0, 5])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_global_order_does_not_depend_on_the_number_of_ranks(seed, drop_last):
    options = {"batch_size": 10, "epochs": 3, "seed": seed, "drop_last": drop_last}
    alone = [batch.tolist() for batch in whole(1, **options)]
    for size in (2, 3, 4, 10):
        assert [batch.tolist() for batch in whole(size, **options)] == alone
    assert len(alone) == 3 * (3 if drop_last else 4)


def test_every_epoch_has_every_row_once_and_its_own_order():
    batches = whole(3, batch_size=10, epochs=2, seed=1)
    epochs = [np.concatenate(batches[:4]), np.concatenate(batches[4:])]
    assert all(sorted(epoch) == ROWS.tolist() for epoch in epochs)
    assert epochs[0].tolist() != epochs[1].tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_shares_are_within_one_sample(size):
    for step in range(4):
        lengths = [len(list(allred.data.batches(ROWS, batch_size=10, rank=r, size=size))[step]) for r in range(size)]
        assert max(lengths) - min(lengths) <= 1


def test_several_columns_give_a_tuple_and_one_column_gives_an_array():
    x, y = np.arange(20.0).reshape(10, 2), np.arange(10) * 2
    for a, b in allred.data.batches(x, y, batch_size=4, rank=0, size=2):
        assert (a[:, 0] == b).all()
    assert isinstance(next(iter(allred.data.batches(x, batch_size=4, rank=0, size=2))), np.ndarray)


def test_len_and_iterating_again():
    batches = allred.data.batches(ROWS, batch_size=10, epochs=2, rank=0, size=1)
    assert len(batches) == len(list(batches)) == len(list(batches)) == 8


@pytest.fixture(autouse=True)
def no_memory_of_other_tests(monkeypatch):
    monkeypatch.setattr(loader, "_without_world", loader.Iterations())


def running(batch_size, size=1, rows=ROWS):
    return iter(allred.data.batches(rows, batch_size=batch_size, rank=0, size=size))


def test_a_step_takes_the_share_of_the_batch_before_it():
    assert loader.claim_samples() is None
    assert [(loader.claim_samples(), len(batch)) for batch in running(10, size=3)] == [
        (4, 4),
        (4, 4),
        (4, 4),
        (3, 3),
    ]
    assert loader.claim_samples() is None


def test_evaluation_inside_training_and_two_steps_for_a_batch():
    training = running(10, size=3)
    next(training)
    for _ in running(20):
        pass
    assert (loader.claim_samples(), loader.claim_samples()) == (4, 4)
    next(training)
    assert loader.claim_samples() == 4


def test_batches_fetched_ahead_are_fine_while_they_are_alike_and_an_error_where_they_are_not():
    training = running(10, size=3)
    next(training)
    for _ in range(2):
        next(training)  # one ahead of the step, as a prefetcher
        assert loader.claim_samples() == 4
    next(training)  # the last one, of 7: is the step for it, or still for the one of 10?
    with pytest.raises(InputError, match=r"samples of this step is not known: .*; for a torch optimizer set"):
        loader.claim_samples()
    assert loader.claim_samples(samples=3) == 3


def test_two_sources_at_once():
    alike = zip(running(10), running(10), strict=True)
    next(alike)
    assert loader.claim_samples() == 10
    even = zip(running(12, size=3), running(6, size=3), strict=False)
    next(even)
    assert loader.claim_samples() == 2  # sizes differ, but in both all ranks have equally many
    uneven = zip(running(10, size=3), running(20, size=3), strict=False)
    next(uneven)
    with pytest.raises(InputError, match="not known"):
        loader.claim_samples()


def test_a_validation_of_this_rank_alone_does_not_count_beside_shared_batches():
    training, validation = running(10, size=3), running(7)
    for _ in range(2):
        next(training), next(validation)
        assert loader.claim_samples() == 4
    next(validation), next(training)
    assert loader.claim_samples() == 4


def test_given_samples_settle_it():
    list(running(10, size=3))
    held = running(20, size=3)
    next(held)
    assert loader.claim_samples(samples=5) == 5
    held.close()
    assert loader.claim_samples() is None


def test_a_list_of_batches_is_an_error_where_their_shares_are_uneven():
    list(allred.data.batches(ROWS[:36], batch_size=12, rank=0, size=3))
    assert loader.claim_samples() is None  # all ranks have equally many: no weights are needed
    list(allred.data.batches(ROWS, batch_size=12, rank=0, size=3))
    with pytest.raises(InputError, match="not known"):
        loader.claim_samples()


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ((), {"batch_size": 2}, "at least one array"),
        ((ROWS, ROWS[:5]), {"batch_size": 2}, r"equal, non-zero length, got lengths \[37, 5\]"),
        ((ROWS[:0],), {"batch_size": 2}, "non-zero length"),
        (
            (ROWS,),
            {"batch_size": 2},
            "batch_size=2 is less than one sample for each of the 3 ranks; it counts",
        ),
        ((ROWS,), {"batch_size": 2.5}, "batch_size must be an integer >= 1, but is 2.5"),
        ((ROWS,), {"batch_size": 38, "drop_last": True}, "37 rows do not fill one of 38"),
        ((ROWS,), {"batch_size": 8, "drop_last": "no"}, "drop_last must be True or False, but is 'no'"),
        ((ROWS,), {"batch_size": 3, "seed": -1}, "batches: seed must be an integer >= 0, but is -1; pass None"),
        ((ROWS,), {"batch_size": 3, "seed": "a"}, "seed must be an integer >= 0, but is 'a'"),
        ((ROWS,), {"batch_size": 3, "rank": "0"}, "rank must be an integer >= 0, but is '0'"),
        ((ROWS,), {"batch_size": 3, "epochs": -1}, "epochs must be an integer >= 0, but is -1"),
        ((ROWS,), {"batch_size": 3, "rank": 3}, "batches: rank must be less than size=3, but is 3"),
    ],
)
def test_bad_input_is_named(columns, options, message):
    with pytest.raises(InputError, match=message):
        allred.data.batches(*columns, **{"rank": 0, "size": 3, **options})


@pytest.fixture
def server():
    with worlds.installed(numbering.number([0, 0, 0], rank=0, servers=1)):
        yield


def test_a_server_may_pass_the_line_and_gets_nothing(server):
    assert allred.rank() == allred.size() == 2
    for source in (allred.data.batches(ROWS, batch_size=10), allred.data.stream(ROWS, batch_size=10)):
        assert [len(batch) for batch in source] == [0, 0, 0, 0]
    with pytest.raises(InputError, match="rank must be less than size=2, but is 2"):
        allred.data.batches(ROWS, batch_size=2, rank=2)


def test_before_init_it_needs_rank_and_size():
    with pytest.raises(NotInitializedError):
        allred.data.batches(ROWS, batch_size=2)
