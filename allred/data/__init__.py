"""Data loading: this rank's share of each global batch, from arrays, files, datasets and streams of records."""

from allred.data.array_files import idx, npy
from allred.data.batches import Batches, batches
from allred.data.prefetching import Prefetch, prefetch
from allred.data.streaming import Shuffled, Stream, shuffled, stream
from allred.data.tf_example import example, make_example
from allred.data.tfrecord_files import TFRecord, tfrecord, write_tfrecord

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
