"""What the tests of checkpoint files share: arrays of random bits, and one-process saves."""

import os

import numpy as np

from allred import checkpoint
from allred.checkpoint import Entry, whole

W = np.arange(10, dtype=np.float32)
M = np.arange(6, dtype=np.float32).reshape(2, 3)
E = np.zeros((2, 0), np.float32)


def bits(shape, dtype, seed=0):
    """An array of random bits: NaNs with payloads, infinities, subnormal and negative zeros among them."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 2 if dtype.kind == "b" else 256, count, dtype=np.uint8)
    return raw.view(dtype).reshape(shape)


def same(one, other):
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    assert one.tobytes() == other.tobytes()


def save(root, step, *shards, meta=None):
    """Each of `shards` is a list of entries with their arrays."""
    directory = checkpoint.begin(root, step)
    written = [checkpoint.write_shard(directory, i, len(shards), entries) for i, entries in enumerate(shards)]
    return checkpoint.commit(directory, step, written, meta)


def save_one(root, step, value=None):
    return save(root, step, [whole("w", np.full(50, step if value is None else value, np.float32))])


def piece(name, array, start, stop, slot=""):
    return Entry(name, slot, array.dtype.name, array.shape, start, stop), array.reshape(-1)[start:stop]


def names_in(directory):
    return sorted(os.listdir(directory))
