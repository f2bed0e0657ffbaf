"""`bench data`: records per second of the readers, of `shuffled` and of `prefetch`.

A record is an image of 784 bytes and an int label, as in MNIST, unless the line names another one. The files are in a
temporary directory and are read repeatedly from the page cache, so the time is that of the code, not of the disk. Each
line counts records for `--seconds`, after a warm-up batch, which opens files and starts threads and processes.

npy, tfrecord             batches of memory-mapped arrays in shuffled order; records as bytes, both checksums verified
idx                       the whole file into one array
example                   a serialized tf.train.Example into arrays
shuffled                  tfrecord through a buffer of 1000 records
stream                    tfrecord, example and collate to batches of 100
prefetch                  stream in a thread, and in two processes

Under mpirun all ranks read at the same time, each its own files, without barriers; rank 0 prints its own numbers.
"""

import argparse
import importlib.metadata
import itertools
import os
import pathlib
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from allred import command_line, data
from allred.bench.output import ResultWriter, rounded
from allred.data import tfrecord_files
from allred.errors import ConfigError
from allred.wording import ranges

ROWS, BATCH, BUFFER = 2000, 100, 1000
_ENDLESS = 10**9  # epochs

Counts = Iterator[int]  # number of records of each step


def run(options: argparse.Namespace, command: str) -> None:
    """Measure and print all cases. Raises ConfigError if a package is missing."""
    with tempfile.TemporaryDirectory(prefix="allred-bench-") as directory:
        try:
            cases = _cases(pathlib.Path(directory))
        except ImportError as error:
            raise ConfigError(f"bench data: {error}") from None
        conditions = {
            "crc32c": tfrecord_files.google_crc32c().implementation,
            "protobuf": importlib.metadata.version("protobuf"),
            "cores": ranges(os.sched_getaffinity(0)),
            "command": command,
        }
        writer = ResultWriter(options.json, command_line.first_rank())
        writer.text("data: google-crc32c: {crc32c}; protobuf {protobuf}; cores {cores}".format(**conditions))
        writer.text(f"{'':36} {'records/s':>12} {'us/record':>10}")
        for name, case in cases.items():
            rate = records_per_s(case(), options.seconds)
            speed = {"records_per_s": rounded(rate), "us_per_record": rounded(1e6 / rate)}
            record = {"bench": "data", "what": name, **speed, **conditions}
            writer.result(record, f"{name:36} {rate:12,.0f} {1e6 / rate:10.4g}")


def records_per_s(counts: Counts, seconds: float) -> float:
    """Records per second of wall time, over at least one step after the first.

    >>> records_per_s(itertools.repeat(10), seconds=0) > 0
    True
    """
    next(counts)
    done, start = 0, time.perf_counter()
    for count in counts:
        done += count
        elapsed = time.perf_counter() - start
        if elapsed > seconds:
            break
    return done / elapsed


def _cases(directory: pathlib.Path) -> dict[str, Callable[[], Counts]]:
    """Return the cases by name: functions that start an iteration over records."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (ROWS, 784), np.uint8), rng.integers(0, 10, ROWS)
    np.save(directory / "x.npy", images)
    np.save(directory / "y.npy", labels)
    (directory / "x.idx").write_bytes(struct.pack(">HBBII", 0, 8, 2, *images.shape) + images.tobytes())
    records = [data.make_example({"image": x.tobytes(), "label": y}) for x, y in zip(images, labels, strict=True)]
    data.write_tfrecord(directory / "records", records)
    floats = data.make_example({"x": rng.normal(size=784), "label": 7})
    small = data.make_example({f"feature_{i}": (i, i / 2, b"abc")[i % 3] for i in range(20)})
    read = data.tfrecord(directory / "records")
    one_rank: dict[str, Any] = {"batch_size": BATCH, "epochs": _ENDLESS, "rank": 0, "size": 1}

    def stream() -> data.Stream:
        return data.stream(read, decode=decode, **one_rank)

    def decoded(record: bytes) -> Callable[[], Counts]:
        return lambda: _counted(map(data.example, itertools.repeat(record)))

    return {
        "npy": lambda: _batches(data.batches(data.npy(directory / "x.npy"), data.npy(directory / "y.npy"), **one_rank)),
        "idx": lambda: (len(data.idx(directory / "x.idx")) for _ in itertools.count()),
        "tfrecord": lambda: _counted(_forever(read)),
        "shuffled(tfrecord)": lambda: _counted(_forever(data.shuffled(read, BUFFER))),
        "example: image and label": decoded(records[0]),
        "example: 784 floats and label": decoded(floats),
        "example: 20 small features": decoded(small),
        "stream": lambda: _batches(stream()),
        "prefetch(stream)": lambda: _batches(data.prefetch(stream())),
        "prefetch(stream, workers=2)": lambda: _batches(data.prefetch(stream(), workers=2)),
    }


def decode(record: bytes) -> tuple[Any, Any]:
    """Decode a record: the image, uint8 (784,), and its label, int64."""
    features = data.example(record)
    return np.frombuffer(features["image"][0], np.uint8), features["label"][0]


def _forever(records: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from records


def _counted(records: Iterator[Any]) -> Counts:
    while chunk := list(itertools.islice(records, BATCH)):
        yield len(chunk)


def _batches(batches: Iterable[tuple[Any, Any]]) -> Counts:
    for x, _ in batches:
        yield len(x)
