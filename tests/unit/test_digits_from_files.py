"""The real digits of scikit-learn, by every way in which data can come: the same batches."""

import gzip
import pathlib
import runpy
import struct

import numpy as np
import pytest
from sklearn.datasets import load_digits

from allred.data import batches, example, idx, make_example, npy, prefetch, stream, tfrecord, write_tfrecord

QUICK = pathlib.Path(__file__).parents[1] / "quick_digits/sklearn/datasets.py"
OPTIONS = {"batch_size": 200, "rank": 1, "size": 3}


@pytest.fixture(scope="module")
def digits():
    found = load_digits()
    return found.images.astype(np.uint8), found.target.astype(np.int64)


def test_the_stand_in_of_other_tests_has_the_same_digits():
    quick = runpy.run_path(QUICK)["load_digits"]
    for found in (quick(return_X_y=True), (quick().data, quick().target)):
        for array, expected in zip(found, load_digits(return_X_y=True), strict=True):
            np.testing.assert_array_equal(array, expected, strict=True)


class Pairs:
    """A dataset."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], int(self.labels[index])


def decode(record):
    features = example(record)
    return np.frombuffer(features["image"][0], np.uint8).reshape(8, 8), features["label"][0]


def test_all_ways_are_alike(digits, tmp_path):
    images, labels = digits
    np.save(tmp_path / "images.npy", images)
    for name, array in (("images.gz", images), ("labels", labels.astype(np.uint8))):
        content = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    pairs = zip(images, labels, strict=True)
    write_tfrecord(tmp_path / "x", (make_example({"image": i.tobytes(), "label": n}) for i, n in pairs))
    ways = {
        "arrays": batches(images, labels, seed=None, **OPTIONS),
        "npy": batches(npy(tmp_path / "images.npy"), labels, seed=None, **OPTIONS),
        "idx": batches(idx(tmp_path / "images.gz"), idx(tmp_path / "labels"), seed=None, **OPTIONS),
        "dataset": batches(Pairs(images, labels), seed=None, **OPTIONS),
        "ahead": prefetch(batches(Pairs(images, labels), seed=None, **OPTIONS)),
        "tfrecord": prefetch(stream(tfrecord(tmp_path / "x"), decode=decode, **OPTIONS)),
    }
    every = {name: list(way) for name, way in ways.items()}
    assert len(every["arrays"]) == 9
    for name, found in every.items():
        for (x, y), (expected_x, expected_y) in zip(found, every["arrays"], strict=True):
            np.testing.assert_array_equal(x, expected_x, err_msg=name)
            np.testing.assert_array_equal(y, expected_y, err_msg=name)
            assert x.dtype == np.uint8
