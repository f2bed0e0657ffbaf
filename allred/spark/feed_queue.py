"""The queue of partitions of one worker, as a state machine: no files, sockets or clock.

A feed is one call of train() or inference(), with a number. A partition is a spool file that a Spark task has written:

    open     a task begins to write it to this worker
    add      it is complete, and the driver has accepted it: Spark may run a task twice, and the driver accepts one
    ask      the rank asks for a file. While the feed is open, the files are those of the first epoch
    end_feed all tasks have ended. Then the files are handed out again for each further epoch, and then the end of the
             feed. The feed is consumed when the rank asks again
"""

import collections
import dataclasses
from typing import Any

Message = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class SpoolFile:
    """A partition in a file. size: in bytes. train: whether results are not returned."""

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
        return {"path": self.path, "rows": self.rows, "number": self.number, "is_last_use": used_once}


class FeedQueue:
    """The partitions for one worker. most_unread: bytes of unread partitions, from which tasks wait."""

    def __init__(self, most_unread: int) -> None:
        self._most_unread = most_unread
        self._unread = collections.deque[SpoolFile]()
        self._fed: list[SpoolFile] = []  # the partitions of the current feed, if it has several epochs
        self._later_epochs = 0  # epochs of the current feed that have not begun
        self._received = 0  # bytes
        self._writing = collections.Counter[int]()  # numbers of the partitions that tasks write
        self._ended: int | None = None  # the feed that has ended, until it is consumed
        self._is_announced = False  # its end, to the rank
        self.is_over = False  # no further feeds: the driver has called shutdown()
        self.is_terminated = False

    # Tasks.

    def load(self) -> Message:
        """Return how busy this worker is, for a task that selects one."""
        unread = sum(each.size for each in self._unread)
        return {
            "stop": self.is_terminated, "full": unread >= self._most_unread, "unread": unread,
            "writing": self._writing.total(), "received": self._received,
        }  # fmt: skip

    def open(self, number: int) -> None:
        self._writing[number] += 1

    def close(self, number: int) -> None:
        """A task has written its partition, or has failed."""
        self._writing -= collections.Counter([number])

    def add(self, partition: SpoolFile) -> bool:
        """Add a partition. Return whether it will be read."""
        if self.is_terminated:
            return False
        self._received += partition.size
        self._unread.append(partition)
        if partition.train and partition.epochs > 1:
            self._fed.append(partition)
        return True

    # The driver.

    def end_feed(self, feed: int, epochs: int) -> None:
        """All partitions of the feed have arrived."""
        self._ended = feed
        self._later_epochs = epochs - 1 if self._fed else 0

    def shut_down(self) -> None:
        self.is_over = True

    # The rank.

    def ask(self) -> tuple[int, list[str]] | None:
        """The rank asks for a partition. Return the feed that it has consumed now, and its files to remove."""
        if not self._is_announced or self._ended is None:
            return None
        feed, self._ended, self._is_announced = self._ended, None, False
        files, self._fed = [each.path for each in self._fed], []
        return feed, files

    def answer(self) -> Message | None:
        """Return the answer to `ask`: a partition, {"feed_end": True} after the last one of a feed, or {"end": True};
        None if the rank has to wait."""
        if self.is_terminated:
            return {"end": True}
        if not self._unread and self._later_epochs:
            self._later_epochs -= 1
            self._unread.extend(self._fed)
        if self._unread:
            return self._unread.popleft().message
        if self._ended is not None:
            self._is_announced = True
            return {"feed_end": True}
        return {"end": True} if self.is_over else None

    def terminate(self) -> list[str]:
        """The rank reads no more. Return the files to remove."""
        files = {each.path for each in (*self._unread, *self._fed)}
        self._unread.clear()
        self._fed.clear()
        self.is_terminated = True
        return sorted(files)

    def describe(self) -> str:
        """Describe what the rank waits for."""
        if self._writing:
            numbers = ", ".join(map(str, sorted(self._writing)[:5]))
            return f"{self._writing.total()} Spark tasks write partitions for it ({numbers})"
        return "no Spark task writes a partition for it, and the driver has not called shutdown()"
