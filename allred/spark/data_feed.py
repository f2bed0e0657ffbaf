"""The data feed of a rank: reads the spool files that its supervisor names."""

import collections
import contextlib
import os
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from allred import world
from allred.comm.functions import join
from allred.errors import DataError, InputError
from allred.runtime.channel import Message, connect
from allred.spark.arrow_columns import to_rows
from allred.spark.feed_queue import FEED_PURPOSE
from allred.validators import integer

_PROGRESS_S = 1.0  # interval of the messages that rows are read


class DataFeed:
    """The rows for this worker; made by `ctx.get_data_feed()`.

        while not feed.should_stop():
            batch = feed.next_batch(64)

    Workers may get different numbers of rows. In mode sync, at the end of each train() of the driver, a worker that has
    read all its rows calls `allred.join` until the others have too; then all have the same parameters.

    address: the Unix socket of the supervisor. task: the name of this task.
    """

    def __init__(self, address: str, task: str, train: bool, input_mapping: Mapping[str, str] | None) -> None:
        self._task, self._train = task, train
        self._mapping = None if input_mapping is None else dict(input_mapping)
        self._channel = connect(address, FEED_PURPOSE, "")
        self._channel.send({"kind": "rank"})
        self._pieces = collections.deque[pa.RecordBatch]()  # not returned yet
        self._rows = 0  # in them
        self._batches: Iterator[pa.RecordBatch] | None = None  # of the current partition
        self._is_over = self._is_at_feed_end = False
        self._progress_at = 0.0  # when the supervisor was last told that rows are read
        self._unanswered: Message | None = None  # inference: the partition whose results are not complete
        self._results: list[Any] = []

    def should_stop(self) -> bool:
        """Return whether there are no more rows. Waits until rows arrive, or the driver calls shutdown()."""
        while not self._rows and (self._is_at_feed_end or not self._is_over):
            self._fill(1)
            if self._is_at_feed_end and not self._rows:
                self._is_at_feed_end = False
                self._join()
        return not self._rows

    def next_batch(self, batch_size: int) -> Any:
        """Return the next rows; fewer than batch_size only at the end of a train() of the driver, or of a partition in
        inference.

        Of a DataFrame: a dict of arrays by column, or by the names of input_mapping; a column of lists of one length
        becomes a two-dimensional array. Of an RDD: a list of its elements, or of their fields in input_mapping. After
        the last row: an empty list.
        """
        integer("next_batch: batch_size", batch_size, 1)
        if self.should_stop():
            return []
        self._fill(batch_size)
        if (now := time.monotonic()) >= self._progress_at + _PROGRESS_S:
            self._progress_at = now
            self._channel.send({"kind": "progress"})
        pieces = []
        missing = batch_size
        while missing and self._pieces:
            piece = self._pieces.popleft()
            if len(piece) > missing:
                self._pieces.appendleft(piece.slice(missing))
                piece = piece.slice(0, missing)
            pieces.append(piece)
            missing -= len(piece)
        self._rows -= batch_size - missing
        return to_rows(pieces, self._mapping)

    def batches(self, batch_size: int) -> Iterator[Any]:
        """Iterate over the results of `next_batch` until `should_stop`, for example in `session.steps(...)`."""
        while not self.should_stop():
            yield self.next_batch(batch_size)

    def batch_results(self, results: Sequence[Any] | Mapping[str, Any]) -> None:
        """Return results for the rows of the last batches to `inference()`, one for each row, in order.

        results: a sequence; or a dict of arrays, which becomes a dict for each row. Raises InputError for more results
        than rows, and in training.
        """
        if self._train:
            raise InputError("batch_results: this feed is for training; use get_data_feed(train=False)")
        if isinstance(results, Mapping):
            results = [dict(zip(results, row, strict=True)) for row in zip(*results.values(), strict=True)]
        elif isinstance(results, np.ndarray):
            results = list(results)
        self._results += results
        rows = 0 if self._unanswered is None else self._unanswered["rows"]
        if len(self._results) > rows:
            raise InputError(f"batch_results: {len(self._results)} results for a partition of {rows} rows")
        if self._unanswered is not None and len(self._results) == rows:
            path = f"{self._unanswered['path']}.results"
            Path(path).write_bytes(pickle.dumps(self._results))
            self._channel.send({"kind": "results", "of": self._unanswered["path"], "path": path})
            self._unanswered, self._results = None, []

    def terminate(self) -> None:
        """Read no more rows. Then should_stop() joins the other workers, as at the end of a feed, and is True; the
        driver's train() returns when all workers have stopped or have read their rows."""
        self._channel.send({"kind": "terminate"})
        self._pieces.clear()
        self._rows, self._batches, self._is_over, self._is_at_feed_end = 0, None, True, self._train

    def _fill(self, rows: int) -> None:
        """Read until `rows` rows are there, or there are no more; in inference until the end of the partition."""
        while self._rows < rows and not self._is_over and not self._is_at_feed_end:
            if self._batches is None:
                if self._rows and not self._train:
                    return
                self._open()
                continue
            piece = next(self._batches, None)
            if piece is None:
                self._batches = None
            else:
                self._pieces.append(piece)
                self._rows += len(piece)

    def _join(self) -> None:
        """At the end of a feed: take part in the steps of the other workers, until all have read their rows."""
        here = world.current_or_none()
        if here is not None and here.config.mode != "ps" and here.topology.size > 1:
            join()

    def _open(self) -> None:
        """Open the next partition."""
        if self._unanswered is not None:
            raise InputError(
                f"{self._task}: map_fun asked for more rows after {len(self._results)} of the "
                f"{self._unanswered['rows']} results of partition {self._unanswered['number']}; call batch_results "
                "with a result for each row first"
            )
        self._channel.send({"kind": "next"})
        self._channel.connection.settimeout(None)
        try:
            while not (messages := self._channel.receive()):
                pass
        except (OSError, ValueError) as error:
            raise DataError(f"{self._task}: the supervisor of its data feed has ended: {error}") from None
        [message] = messages
        if "end" in message:
            self._is_over = True
        elif "feed_end" in message:
            self._is_at_feed_end = self._train
        elif message["train"] is not self._train:
            called, wanted = ("train", "True") if message["train"] else ("inference", "False")
            raise InputError(
                f"{self._task}: the driver has called {called}(), which needs ctx.get_data_feed(train={wanted})"
            )
        else:
            self._batches = self._read(message)
            self._unanswered = None if self._train else message

    def _read(self, partition: Message) -> Iterator[pa.RecordBatch]:
        try:
            with pa.OSFile(partition["path"]) as file, pa.ipc.open_stream(file) as batches:
                yield from batches
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{self._task}: spool file {partition['path']} cannot be read: {error}") from None
        if partition["is_last_use"]:
            with contextlib.suppress(OSError):
                os.unlink(partition["path"])
