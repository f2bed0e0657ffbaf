"""Samples become batches as torch's default_collate makes them; torch's datasets go into allred.data.batches."""

import collections

import numpy as np
import pytest

import allred
from allred.data.columns import collate

torch = pytest.importorskip("torch")
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate  # noqa: E402

Pair = collections.namedtuple("Pair", ["x", "y"])


def as_numpy(batch):
    """The same with arrays for tensors, and tuples for lists: torch makes lists of tuples."""
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return np.asarray(batch)
    if isinstance(batch, dict):
        return {key: as_numpy(value) for key, value in batch.items()}
    return tuple(map(as_numpy, batch)) if isinstance(batch, (list, tuple)) else batch


def check_same(got, expected):
    assert type(got) is type(expected)
    if isinstance(got, np.ndarray):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)
    elif isinstance(got, dict):
        assert got.keys() == expected.keys()
        for key in got:
            check_same(got[key], expected[key])
    elif isinstance(got, tuple):
        for one, other in zip(got, expected, strict=True):
            check_same(one, other)
    else:
        assert got == expected


@pytest.mark.parametrize(
    "samples",
    [
        [1, 2, 3],
        [1.5, 2.0],
        [True, False],
        ["a", "b"],
        [b"a", b"b"],
        [np.float32(1), np.float32(2)],
        [np.int16(1), np.int16(2)],
        [np.ones((2, 3), np.float16), np.zeros((2, 3), np.float16)],
        [torch.ones(2, 3), torch.zeros(2, 3)],
        [torch.tensor(3, dtype=torch.int8), torch.tensor(4, dtype=torch.int8)],
        [(1, 2.0), (3, 4.0)],
        [[1, 2.0], [3, 4.0]],
        [(torch.ones(2), {"label": 1, "name": "x"}), (torch.zeros(2), {"label": 2, "name": "y"})],
        [Pair(1, [np.ones(2), ("a", 2)]), Pair(2, [np.zeros(2), ("b", 3)])],
    ],
)
def test_the_same_as_default_collate(samples):
    check_same(as_numpy(collate(samples)), as_numpy(default_collate(samples)))


class Squares(Dataset):
    def __len__(self):
        return 11

    def __getitem__(self, index):
        return torch.full((2,), float(index)), index**2


@pytest.mark.parametrize("workers", [None, 0, 1])
@pytest.mark.parametrize(
    "dataset",
    [
        Squares(),
        Subset(Squares(), range(10)),
        TensorDataset(torch.arange(22.0).reshape(11, 2), torch.arange(11)),
    ],
    ids=["dataset", "subset", "tensors"],
)
def test_datasets_of_torch(dataset, workers):
    """Against torch's own DataLoader, in the order of the dataset."""
    batches = allred.data.batches(dataset, batch_size=4, seed=None, rank=0, size=1)
    loader = torch.utils.data.DataLoader(dataset, batch_size=4)
    ahead = batches if workers is None else allred.data.prefetch(batches, workers=workers)
    for got, expected in zip(ahead, loader, strict=True):
        check_same(as_numpy(got), as_numpy(expected))
