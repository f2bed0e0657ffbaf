"""The queue of the files of a worker on Spark: epochs, ends of feeds, back-pressure, early stop."""

import pytest

from allred.spark.feed_queue import FeedQueue, SpoolFile


def spool(number, feed=1, size=10, epochs=1, train=True):
    return SpoolFile(feed, number, f"file-{number}", 5, size, train, epochs)


def read(queue):
    """Return the paths up to the next end, and the end; "wait" if the rank has to wait."""
    found = []
    while True:
        consumed = queue.on_request()
        answer = queue.next_answer()
        if consumed is not None:
            found.append(consumed)
        if answer is None or "path" not in answer:
            return [*found, "wait" if answer is None else next(iter(answer))]
        found.append(answer["path"])


def test_files_are_read_once_per_epoch_then_the_feed_ends():
    queue = FeedQueue(100)
    assert queue.add(spool(0, epochs=3))
    assert read(queue) == ["file-0", "wait"]
    assert queue.add(spool(1, epochs=3))
    queue.end_feed(1, 3)
    assert read(queue) == ["file-1", "file-0", "file-1", "file-0", "file-1", "feed_end"]
    assert read(queue) == [(1, ["file-0", "file-1"]), "wait"]  # consumed, and the files to remove
    queue.is_shut_down = True
    assert read(queue) == ["end"]


def test_a_second_feed_and_one_without_files():
    """The driver begins a feed after all ranks have consumed the one before."""
    queue = FeedQueue(100)
    for feed in (1, 2):
        queue.add(spool(feed, feed))
        queue.end_feed(feed, 1)
        assert read(queue) == [f"file-{feed}", "feed_end"]
        assert read(queue) == [(feed, []), "wait"]
    queue.end_feed(3, 5)
    assert read(queue) == ["feed_end"]
    assert read(queue) == [(3, []), "wait"]


@pytest.mark.parametrize(("epochs", "is_last_use"), [(1, True), (2, False)])
def test_the_rank_removes_files_of_one_epoch(epochs, is_last_use):
    queue = FeedQueue(100)
    queue.add(spool(0, epochs=epochs))
    assert queue.next_answer() == {
        "path": "file-0", "rows": 5, "number": 0, "train": True, "is_last_use": is_last_use,
    }  # fmt: skip


def test_tasks_wait_while_much_is_unread():
    queue = FeedQueue(20)
    for number in range(2):
        assert not queue.status()["full"]
        queue.add(spool(number))
    assert queue.status() == {"stop": False, "full": True, "unread": 20, "writing": 0, "received": 20}
    queue.limits = False  # another worker waits for rows
    assert not queue.status()["full"]
    queue.limits = True
    queue.next_answer()
    assert not queue.status()["full"]


def test_a_task_gives_up_before_its_results():
    queue = FeedQueue(20)
    for number in range(2):
        queue.add(spool(number, train=False))
    assert queue.next_answer()["path"] == "file-0"
    assert not queue.discard("file-0")  # the rank reads it
    assert queue.discard("file-1")
    assert queue.next_answer() is None


def test_the_rank_stops_early():
    queue = FeedQueue(20)
    for number in range(3):
        queue.add(spool(number, epochs=2))
    queue.next_answer()
    assert queue.terminate() == ["file-0", "file-1", "file-2"]
    assert not queue.add(spool(3))
    assert queue.status()["stop"]
    assert queue.next_answer() == {"end": True}


def test_a_rank_that_waits_names_who_it_waits_for():
    queue = FeedQueue(20)
    assert queue.describe() == "no Spark task writes a partition for it, and the driver has not called shutdown()"
    queue.begin_write(4)
    queue.begin_write(4)  # a speculative copy
    queue.begin_write(2)
    assert queue.describe() == "3 Spark tasks write partitions for it (2, 4)"
    for number in (4, 4, 2):
        queue.end_write(number)
    assert "no Spark task" in queue.describe()
