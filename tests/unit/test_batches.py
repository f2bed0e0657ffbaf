"""Shares of global batches, for ranks that the test makes up."""

import numpy as np
import pytest

import allred
from allred.data.batches import current_share
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


def test_the_share_is_known_while_a_batch_is_out_and_restored_after():
    outer = iter(allred.data.batches(ROWS, batch_size=10, rank=0, size=3))
    next(outer)
    assert current_share() == 4
    for _ in allred.data.batches(ROWS, batch_size=20, rank=0, size=1):
        pass
    assert current_share() == 4  # evaluation inside training
    outer.close()
    assert current_share() is None


def test_shares_of_iterators_that_end_in_any_order():
    first, second = (iter(allred.data.batches(ROWS, batch_size=b, rank=0, size=1)) for b in (10, 20))
    next(first), next(second)
    assert current_share() == 20
    next(first)
    assert current_share() == 10  # the batch that came last
    first.close()
    assert current_share() == 20
    second.close()
    assert current_share() is None


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ((), {"batch_size": 2}, "at least one array"),
        ((ROWS, ROWS[:5]), {"batch_size": 2}, r"equal, non-zero length, got lengths \[37, 5\]"),
        ((ROWS[:0],), {"batch_size": 2}, "non-zero length"),
        ((ROWS,), {"batch_size": 2}, r"batch_size=2 must be a whole number of at least 3 \(batch_size counts"),
        ((ROWS,), {"batch_size": 2.5}, "batch_size=2.5 must be"),
        ((ROWS,), {"batch_size": 38, "drop_last": True}, "37 rows do not fill one batch of 38"),
        ((ROWS,), {"batch_size": 3, "epochs": -1}, "epochs=-1 must be"),
        ((ROWS,), {"batch_size": 3, "rank": 3}, "rank=3 is not one of 3 ranks"),
    ],
)
def test_bad_input_is_named(columns, options, message):
    with pytest.raises(InputError, match=message):
        allred.data.batches(*columns, **{"rank": 0, "size": 3, **options})


def test_before_init_it_needs_rank_and_size():
    with pytest.raises(NotInitializedError):
        allred.data.batches(ROWS, batch_size=2)
