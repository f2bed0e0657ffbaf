"""What batches takes besides arrays in memory: mapped files, datasets; and how samples become batches."""

import collections
import pickle

import numpy as np
import pytest

import allred
from allred.data.columns import as_column, collate
from allred.errors import InputError

Pair = collections.namedtuple("Pair", ["x", "y"])


class Squares:
    """A dataset as torch has them."""

    def __init__(self, length=10):
        self.length, self.asked = length, []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        assert type(index) is int
        assert 0 <= index < self.length
        self.asked.append(index)
        return np.full((2, 3), index, np.float32), {"square": index**2, "name": str(index)}


def one(*columns, **options):
    return allred.data.batches(*columns, **{"batch_size": 4, "rank": 0, "size": 1, "seed": 1, **options})


def test_a_dataset_is_the_same_as_its_arrays():
    rows = list(one(np.arange(10)))
    for (x, more), mine in zip(one(Squares()), rows, strict=True):
        assert x.shape == (len(mine), 2, 3)
        assert x.dtype == np.float32
        assert (x[:, 0, 0] == mine).all()
        assert more["square"].tolist() == (mine**2).tolist()
        assert more["name"] == [str(row) for row in mine]


def test_a_rank_without_samples_gets_empty_batches_of_the_same_kind():
    x, more = list(one(Squares(5), rank=3, size=4))[-1]
    assert (x.shape, x.dtype) == ((0, 2, 3), np.float32)
    assert (more["square"].shape, more["name"]) == ((0,), [])


def test_only_this_ranks_samples_are_fetched():
    dataset = Squares(8)
    list(one(dataset, rank=1, size=2, seed=None))
    assert dataset.asked == [2, 3, 6, 7]


def test_datasets_and_arrays_side_by_side_and_many_at_once():
    class Many(Squares):
        def __getitems__(self, indices):
            return [index * 10 for index in indices]

    for mine, tens in one(np.arange(10), Many()):
        assert tens.tolist() == (mine * 10).tolist()
    with pytest.raises(InputError, match=r"equal, non-zero length, got lengths \[9, 10\]"):
        one(np.arange(9), Squares())


@pytest.fixture
def mapped(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.arange(60, dtype=np.int32).reshape(10, 6))
    return np.load(path, mmap_mode="r")


def test_a_mapped_file_stays_where_it_is(mapped):
    rows = np.array([3, 1])
    picked = as_column(mapped).pick(rows)
    assert type(picked) is np.ndarray
    assert picked.tolist() == mapped[rows].tolist()
    assert as_column(mapped)._array is mapped


@pytest.mark.parametrize("view", [np.s_[:], np.s_[2:], np.s_[::-1, 1::2], np.s_[1:9:3, 2]])
def test_a_mapped_file_is_mapped_again_in_another_process(mapped, view):
    sent = pickle.dumps(as_column(mapped[view]))
    assert len(sent) < 1000
    again = pickle.loads(sent)
    assert again.pick(np.arange(len(again))).tolist() == mapped[view].tolist()
    of_memory = as_column(np.arange(5))
    assert pickle.loads(pickle.dumps(of_memory)).pick(np.array([4, 0])).tolist() == [4, 0]


def test_private_changes_to_a_mapped_file_are_sent(mapped):
    private = np.memmap(mapped.filename, np.int32, "c", mapped.offset, (10, 6))
    private[0] = -1
    assert (pickle.loads(pickle.dumps(as_column(private))).pick(np.array([0])) == -1).all()


@pytest.mark.parametrize(
    ("samples", "batch"),
    [
        ([1, 2], np.array([1, 2])),
        ([1.5, 2.0], np.array([1.5, 2.0])),
        ([True, False], np.array([True, False])),
        ([np.float16(1), np.float16(2)], np.array([1, 2], np.float16)),
        ([np.ones((2, 2), np.uint8)] * 3, np.ones((3, 2, 2), np.uint8)),
        (["a", "b"], ["a", "b"]),
        ([b"a"], [b"a"]),
    ],
)
def test_leaves(samples, batch):
    got = collate(samples)
    assert type(got) is type(batch)
    np.testing.assert_array_equal(got, batch)
    assert getattr(got, "dtype", None) == getattr(batch, "dtype", None)


def test_structures():
    got = collate([Pair(1, [2.0, {"a": 3}]), Pair(4, [5.0, {"a": 6}])])
    assert type(got) is Pair
    assert got.x.tolist() == [1, 4]
    assert got.y[0].tolist() == [2.0, 5.0]
    assert got.y[1]["a"].tolist() == [3, 6]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([None, None], "a sample is a NoneType; expected a number, an array"),
        ([1, None], "a sample is a NoneType; expected"),
        ([(1, object())], r"a sample\[1\] is a object; expected"),
        ([(1, 2), (1,)], "a sample has length 2 in one sample and 1 in another"),
        (
            [{"a": np.ones(2)}, {"a": np.ones(3)}],
            r"a sample\['a'\] has shape \(2,\) in one sample and \(3,\) in another",
        ),
        ([{"a": 1}, {"b": 1}], r"a sample has keys \['a'\] in one sample and \['b'\]"),
        ([(1,), 2], "a sample is a tuple in one sample and a int in another"),
        ([10**30], "a sample is a int; expected"),
    ],
)
def test_samples_that_make_no_batch(samples, message):
    with pytest.raises(InputError, match=message):
        collate(samples)


def test_what_is_no_source():
    class Endless:
        def __iter__(self):
            return iter([])

    class NoLength:
        def __getitem__(self, index):
            return index

    with pytest.raises(InputError, match=r"Endless can only be iterated over; .* allred\.data\.stream"):
        one(Endless())
    with pytest.raises(InputError, match="NoLength has no __len__"):
        one(NoLength())
    with pytest.raises(InputError, match="expected an array or a number, got dict"):
        one({"a": 1})


def test_a_sparse_matrix_of_scipy_is_refused():
    sparse = pytest.importorskip("scipy.sparse")
    for kind in (sparse.csr_matrix, sparse.coo_array):
        with pytest.raises(InputError, match=rf"{kind.__name__} is a sparse matrix of scipy; .* pass x.toarray\(\)"):
            one(kind(np.eye(3)))
