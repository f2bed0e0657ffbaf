"""Spark tasks that feed workers: each writes its partition to a spool file of a worker on its node, and announces it.

A file, not a stream: the rows of a task that fails or that Spark runs twice are never read, a partition is read again
in the next epoch without another copy, and neither the task nor the rank keeps it in memory.
"""

import dataclasses
import os
import pickle
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from allred.errors import AllredError, CollectiveTimeout, InputError
from allred.launch.rendezvous_client import shared_memory_domain
from allred.runtime.channel import Channel, Message, connect
from allred.runtime.timings import REMIND_ROWS_S
from allred.spark.arrow_columns import pickled_batches
from allred.spark.feed_queue import FEED_PURPOSE

_ANSWER_LIMIT_S = 60.0  # for the supervisor and the driver to answer
_POLL_S = 0.1
_STATUS_KEYS = ("writing", "unread", "received")  # compared in this order to find the least busy worker


@dataclasses.dataclass(frozen=True)
class FeedTask:
    """A feed, for its tasks. workers: of cluster_monitor.Worker, as dicts. limit_s: how long a task waits for a worker
    to read."""

    feed: int
    train: bool
    epochs: int
    limit_s: float
    workers: list[dict[str, Any]]

    def train_arrow(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """For DataFrame.mapInArrow."""
        number, rows = self._feed(batches)
        yield pa.RecordBatch.from_arrays(
            [pa.array([number], pa.int32()), pa.array([rows], pa.int64())], names=["partition", "records"]
        )

    def train_objects(self, rows: Iterator[Any]) -> list[tuple[int, int]]:
        """For RDD.mapPartitions."""
        return [self._feed(pickled_batches(rows))]

    def infer_arrow(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """For DataFrame.mapInArrow: return the results, pickled."""
        for piece in pickled_batches(self._infer(batches)):
            yield piece.rename_columns(["result"])

    def infer_objects(self, rows: Iterator[Any]) -> Iterator[Any]:
        """For RDD.mapPartitions."""
        return self._infer(pickled_batches(rows))

    def _feed(self, batches: Iterable[pa.RecordBatch]) -> tuple[int, int]:
        """Feed this partition for training. Return its number and the number of rows."""
        with _Partition(self) as partition:
            partition.write(batches)
            return partition.number, partition.rows

    def _infer(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Any]:
        with _Partition(self) as partition:
            partition.write(batches)
            yield from partition.results()


class _Partition:
    """The partition of the current Spark task."""

    def __init__(self, task: FeedTask) -> None:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        self.number, self.rows = context.partitionId(), 0
        self._results: str | None = None  # the file of the results
        self._task = task
        here = shared_memory_domain()
        self._workers = [each for each in task.workers if each["node"] == here]
        if not self._workers:
            hosts = ", ".join(sorted({each["host"] for each in task.workers}))
            raise InputError(
                f"partition {self.number} is on {socket.gethostname()}, where no worker runs (workers run on {hosts}); "
                "every executor needs a worker: set num_executors to the number of executors, and spark.executor.cores "
                "to spark.task.cpus"
            )
        # Tasks that ask at the same time find all workers idle. Each partition then takes another worker.
        first = self.number % len(self._workers)
        self._workers = self._workers[first:] + self._workers[:first]
        self._channel: Channel | None = None  # to the worker

    def __enter__(self) -> "_Partition":
        return self

    def __exit__(self, *_: object) -> None:
        if self._channel is not None:
            self._channel.connection.close()

    def write(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Write the rows for a worker; does nothing if the partition is empty or all workers have stopped reading. In
        inference, wait for the results."""
        nonempty = (batch for batch in batches if len(batch))
        first = next(nonempty, None)
        if first is None:
            return
        if (worker := self._select()) is None:
            return self._refused()
        descriptor, name = tempfile.mkstemp(".arrow", f"feed-{self._task.feed}-{self.number}-", worker["spool"])
        os.close(descriptor)
        path = Path(name)
        try:
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, first.schema) as writer:
                writer.write_batch(first)
                rows = len(first)
                for batch in nonempty:
                    writer.write_batch(batch)
                    rows += len(batch)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        answer = self._add(path, rows)  # from here on, the worker removes the file
        if not answer["accepted"]:
            return self._refused()
        self.rows, self._results = rows, answer.get("results")

    def _refused(self) -> None:
        """No worker takes the rows: training has ended early, or another task has fed this partition."""
        if not self._task.train:
            raise AllredError(
                f"partition {self.number}: the workers have stopped reading, so its rows get no results; map_fun must "
                "read until should_stop() is True"
            )

    def _add(self, path: Path, rows: int) -> Message:
        """Announce the file to the worker. Return its answer, in inference after it has the results."""
        train = self._task.train
        message = {"kind": "add", "epochs": self._task.epochs, "path": str(path), "rows": rows, "train": train}
        message["size"] = path.stat().st_size
        try:
            return self._ask(message, None if train else self._task.limit_s)
        except TimeoutError:
            raise CollectiveTimeout(
                f"partition {self.number}: no results within {self._task.limit_s:g} s (feed_timeout): map_fun has not "
                "called batch_results for all of its rows"
            ) from None

    def results(self) -> Iterator[Any]:
        """Return the results of the rows."""
        if self._results is not None:
            path = Path(self._results)
            found = pickle.loads(path.read_bytes())
            path.unlink()
            yield from found

    def _select(self) -> dict[str, Any] | None:
        """Open this partition at the least busy worker, and return it. Waits while all have too much to read."""
        begun = time.monotonic()
        remind_at = begun + REMIND_ROWS_S
        while True:
            loads = []
            for worker in self._workers:
                channel = _connect(worker, self.number)
                loads.append((self._ask({"kind": "status"}, channel=channel), channel, worker))
            free = [each for each in loads if not each[0]["stop"] and not each[0]["full"]]
            if free:
                _, self._channel, found = min(free, key=lambda each: [each[0][key] for key in _STATUS_KEYS])
            for _, channel, _ in loads:
                if channel is not self._channel:
                    channel.connection.close()
            if free:
                self._ask({"kind": "begin", "feed": self._task.feed, "number": self.number})
                return found
            waiting = [(load, worker) for load, _, worker in loads if not load["stop"]]
            if not waiting:
                return None
            load, busy = waiting[0]
            waited = time.monotonic() - begun
            text = (
                f"partition {self.number} on {socket.gethostname()} has waited {waited:.0f} s for rank {busy['rank']}, "
                f"which has {load['unread'] / 2**20:.0f} MiB to read"
            )
            if waited >= self._task.limit_s:
                raise CollectiveTimeout(f"{text} (feed_timeout)")
            if time.monotonic() >= remind_at:
                remind_at += REMIND_ROWS_S
                print(f"allred: {text}", file=sys.stderr, flush=True)
            time.sleep(_POLL_S)

    def _ask(self, message: Message, limit_s: float | None = None, channel: Channel | None = None) -> Message:
        """Send a message and return its answer. Raises TimeoutError after limit_s, if it is given."""
        channel = channel or self._channel
        assert channel is not None
        channel.send(message)
        try:
            return channel.receive_one(time.monotonic() + (limit_s or _ANSWER_LIMIT_S))
        except (OSError, ValueError) as error:
            if limit_s is not None and isinstance(error, TimeoutError):
                raise
            problem = "does not answer" if isinstance(error, TimeoutError) else "has ended"
            host = socket.gethostname()
            raise AllredError(f"partition {self.number}: its worker on {host} {problem}: {error}") from None


def _connect(worker: dict[str, Any], number: int) -> Channel:
    try:
        return connect(os.path.join(worker["directory"], "feed"), FEED_PURPOSE, "")
    except OSError as error:
        raise AllredError(
            f"partition {number}: worker rank {worker['rank']} on {worker['host']} has ended: {error.strerror or error}"
        ) from None
