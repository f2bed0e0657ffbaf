"""The queue of partitions of one worker, as a state machine: no files, sockets or clock.

A feed is one call of train() or inference(), with a number. A partition is a spool file that a Spark task has written:

    begin_write  a task begins to write it for this worker
    add          it is complete, and the driver has accepted it: Spark may run a task twice, and the driver accepts one
    on_request   the rank requests a file; next_answer has it. Until end_feed, the files are those of the first epoch
    end_feed     all tasks have ended. Then the files are handed out again for each further epoch, and then the end of
                 the feed. The feed is consumed at the next request
"""

import collections
import dataclasses

from allred.runtime.channel import Message

FEED_PURPOSE = "spark feed"  # of the channels between a supervisor, its rank and Spark tasks


@dataclasses.dataclass(frozen=True)
class SpoolFile:
    """A partition in a file. size: in bytes. train: False for inference, whose results are returned."""

    feed: int
    number: int
    path: str
    rows: int
    size: int
    train: bool
    epochs: int

    @property
    def message(self) -> Message:
        """For the rank. is_last_use: the rank removes the file after it has read it."""
        used_once = not self.train or self.epochs == 1
        return {
            "path": self.path, "rows": self.rows, "number": self.number, "train": self.train, "is_last_use": used_once,
        }  # fmt: skip


class FeedQueue:
    """The partitions for one worker. max_unread_bytes: Spark tasks wait while more bytes are unread."""

    def __init__(self, max_unread_bytes: int) -> None:
        self._max_unread_bytes = max_unread_bytes
        self.limits = True  # whether max_unread_bytes has an effect
        self._unread = collections.deque[SpoolFile]()
        self._replay: list[SpoolFile] = []  # the partitions of the current feed, if it has several epochs
        self._later_epochs = 0  # epochs of the current feed that have not begun
        self._received = 0  # bytes
        self._writing = collections.Counter[int]()  # numbers of the partitions that tasks write
        self._ended: int | None = None  # the feed that has ended, until it is consumed
        self._end_was_sent = False  # its end, to the rank
        self.is_shut_down = False  # no further feeds: the driver has called shutdown()
        self.is_terminated = False

    # Tasks.

    def status(self) -> Message:
        """Return how busy this worker is, for a task that selects one."""
        unread = sum(each.size for each in self._unread)
        return {
            "stop": self.is_terminated, "full": self.limits and unread >= self._max_unread_bytes, "unread": unread,
            "writing": self._writing.total(), "received": self._received,
        }  # fmt: skip

    def begin_write(self, number: int) -> None:
        self._writing[number] += 1

    def end_write(self, number: int) -> None:
        """A task has written its partition, or has failed."""
        self._writing -= collections.Counter([number])

    def add(self, partition: SpoolFile) -> bool:
        """Add a partition. Return whether it will be read."""
        if self.is_terminated:
            return False
        self._received += partition.size
        self._unread.append(partition)
        if partition.train and partition.epochs > 1:
            self._replay.append(partition)
        return True

    # The driver.

    def end_feed(self, feed: int, epochs: int) -> None:
        """All partitions of the feed have arrived."""
        self._ended = feed
        self._later_epochs = epochs - 1 if self._replay else 0

    # The rank.

    def on_request(self) -> tuple[int, list[str]] | None:
        """The rank requests a partition. Return the feed that it has consumed now, and its files to remove."""
        if not self._end_was_sent or self._ended is None:
            return None
        feed, self._ended, self._end_was_sent = self._ended, None, False
        files, self._replay = [each.path for each in self._replay], []
        return feed, files

    def next_answer(self) -> Message | None:
        """Return the answer to a request: a partition, {"feed_end": True} after the last one of a feed, or
        {"end": True}; None if the rank has to wait."""
        if self.is_terminated:
            return {"end": True}
        if not self._unread and self._later_epochs:
            self._later_epochs -= 1
            self._unread.extend(self._replay)
        if self._unread:
            return self._unread.popleft().message
        if self._ended is not None:
            self._end_was_sent = True
            return {"feed_end": True}
        return {"end": True} if self.is_shut_down else None

    def discard(self, path: str) -> bool:
        """Remove a partition whose task has given up. Return whether it was unread."""
        found = [each for each in self._unread if each.path == path]
        for each in found:
            self._unread.remove(each)
        return bool(found)

    def terminate(self) -> list[str]:
        """The rank has stopped reading. Return the files to remove."""
        files = {each.path for each in (*self._unread, *self._replay)}
        self._unread.clear()
        self._replay.clear()
        self.is_terminated = True
        return sorted(files)

    def describe(self) -> str:
        """Describe what the rank waits for."""
        if self._writing:
            numbers = ", ".join(map(str, sorted(self._writing)[:5]))
            return f"{self._writing.total()} Spark tasks write partitions for it ({numbers})"
        return "no Spark task writes a partition for it, and the driver has not called shutdown()"
