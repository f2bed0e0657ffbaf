"""Data for every rank: its share of each global batch, from arrays, files, datasets and streams of records."""

from allred.data.batches import Batches, batches
from allred.data.prefetching import Prefetch, prefetch
from allred.data.readers import TFRecord, example, idx, make_example, npy, tfrecord, write_tfrecord
from allred.data.shuffle import Shuffled, shuffled
from allred.data.streaming import Stream, stream

__all__ = [
    "Batches",
    "Prefetch",
    "Shuffled",
    "Stream",
    "TFRecord",
    "batches",
    "example",
    "idx",
    "make_example",
    "npy",
    "prefetch",
    "shuffled",
    "stream",
    "tfrecord",
    "write_tfrecord",
]
