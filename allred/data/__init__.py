"""Data loading: this rank's share of each global batch, from arrays, files, datasets and streams of records."""

from allred.data.batches import Batches, Shuffled, Stream, batches, shuffled, stream
from allred.data.columns import idx, npy
from allred.data.distributed_batch_sampler import DistributedBatchSampler
from allred.data.prefetching import Prefetch, prefetch
from allred.data.tfrecord_files import TFRecord, example, make_example, tfrecord, write_tfrecord

__all__ = [
    "Batches", "DistributedBatchSampler", "Prefetch", "Shuffled", "Stream", "TFRecord", "batches", "example", "idx",
    "make_example", "npy", "prefetch", "shuffled", "stream", "tfrecord", "write_tfrecord",
]  # fmt: skip
