"""Files: .npy, MNIST's IDX, TFRecord with tf.train.Example. Errors tell the file, and the place in it."""

from allred.data.readers.idx_file import idx
from allred.data.readers.npy_file import npy
from allred.data.readers.protobuf import example, make_example
from allred.data.readers.records import TFRecord, tfrecord, write_tfrecord

__all__ = ["TFRecord", "example", "idx", "make_example", "npy", "tfrecord", "write_tfrecord"]
