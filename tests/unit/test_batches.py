"""Shares of global batches, for ranks that the test makes up."""

import numpy as np
import pytest
import worlds

import allred
from allred.cluster import topology
from allred.data import share
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


def test_columns_stay_together_and_one_column_comes_alone():
    x, y = np.arange(20.0).reshape(10, 2), np.arange(10) * 2
    for a, b in allred.data.batches(x, y, batch_size=4, rank=0, size=2):
        assert (a[:, 0] == b).all()
    assert isinstance(next(iter(allred.data.batches(x, batch_size=4, rank=0, size=2))), np.ndarray)


def test_len_and_iterating_again():
    batches = allred.data.batches(ROWS, batch_size=10, epochs=2, rank=0, size=1)
    assert len(batches) == len(list(batches)) == len(list(batches)) == 8


@pytest.fixture(autouse=True)
def no_memory_of_other_tests(monkeypatch):
    monkeypatch.setattr(share, "_without_world", share.Iterations())


def running(batch_size, size=1, rows=ROWS):
    return iter(allred.data.batches(rows, batch_size=batch_size, rank=0, size=size))


def test_a_step_takes_the_share_of_the_batch_before_it():
    assert share.claim() is None
    assert [(share.claim(), len(batch)) for batch in running(10, size=3)] == [(4, 4), (4, 4), (4, 4), (3, 3)]
    assert share.claim() is None


def test_evaluation_inside_training_and_two_steps_for_a_batch():
    training = running(10, size=3)
    next(training)
    for _ in running(20):
        pass
    assert (share.claim(), share.claim()) == (4, 4)
    next(training)
    assert share.claim() == 4


def test_batches_fetched_ahead_are_fine_while_they_are_alike_and_an_error_where_they_are_not():
    training = running(10, size=3)
    next(training)
    for _ in range(2):
        next(training)  # one ahead of the step, as a prefetcher
        assert share.claim() == 4
    next(training)  # the last one, of 7: is the step for it, or still for the one of 10?
    with pytest.raises(InputError, match=r"not known how many samples this step is for; say so with step"):
        share.claim()
    assert share.claim(samples=3) == 3


def test_two_sources_at_once():
    alike = zip(running(10), running(10), strict=True)
    next(alike)
    assert share.claim() == 10
    even = zip(running(12, size=3), running(6, size=3), strict=False)
    next(even)
    assert share.claim() == 2  # sizes differ, but in both all ranks have equally many
    uneven = zip(running(10, size=3), running(20, size=3), strict=False)
    next(uneven)
    with pytest.raises(InputError, match="not known"):
        share.claim()


def test_a_validation_of_this_rank_alone_does_not_count_beside_shared_batches():
    training, validation = running(10, size=3), running(7)
    for _ in range(2):
        next(training), next(validation)
        assert share.claim() == 4
    next(validation), next(training)
    assert share.claim() == 4


def test_given_samples_settle_it():
    list(running(10, size=3))
    held = running(20, size=3)
    next(held)
    assert share.claim(samples=5) == 5
    held.close()
    assert share.claim() is None


def test_a_list_of_batches_is_an_error_where_their_shares_are_uneven():
    list(allred.data.batches(ROWS[:36], batch_size=12, rank=0, size=3))
    assert share.claim() is None  # all ranks have equally many: no weights are needed
    list(allred.data.batches(ROWS, batch_size=12, rank=0, size=3))
    with pytest.raises(InputError, match="not known"):
        share.claim()


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ((), {"batch_size": 2}, "at least one array"),
        ((ROWS, ROWS[:5]), {"batch_size": 2}, r"equal, non-zero length, got lengths \[37, 5\]"),
        ((ROWS[:0],), {"batch_size": 2}, "non-zero length"),
        ((ROWS,), {"batch_size": 2}, r"batch_size=2 must be a whole number of at least 3 \(batch_size counts"),
        ((ROWS,), {"batch_size": 2.5}, "batch_size=2.5 must be"),
        ((ROWS,), {"batch_size": 38, "drop_last": True}, "37 rows do not fill one batch of 38"),
        ((ROWS,), {"batch_size": 3, "seed": -1}, "seed=-1 must be a whole number"),
        ((ROWS,), {"batch_size": 3, "seed": "a"}, "seed='a' must be"),
        ((ROWS,), {"batch_size": 3, "rank": "0"}, "rank='0' must be a whole number"),
        ((ROWS,), {"batch_size": 3, "epochs": -1}, "epochs=-1 must be"),
        ((ROWS,), {"batch_size": 3, "rank": 3}, "rank=3 is not one of 3 ranks"),
    ],
)
def test_bad_input_is_named(columns, options, message):
    with pytest.raises(InputError, match=message):
        allred.data.batches(*columns, **{"rank": 0, "size": 3, **options})


@pytest.fixture
def server():
    with worlds.installed(topology.number([0, 0, 0], rank=0, servers=1)):
        yield


def test_a_server_may_pass_the_line_and_gets_nothing(server):
    assert allred.rank() == allred.size() == 2
    for loader in (allred.data.batches(ROWS, batch_size=10), allred.data.stream(ROWS, batch_size=10)):
        assert [len(batch) for batch in loader] == [0, 0, 0, 0]
    with pytest.raises(InputError, match="rank=2 is not one of 2 ranks"):
        allred.data.batches(ROWS, batch_size=2, rank=2)


def test_before_init_it_needs_rank_and_size():
    with pytest.raises(NotInitializedError):
        allred.data.batches(ROWS, batch_size=2)
