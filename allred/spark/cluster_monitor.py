"""The driver's connections to the supervisors of all ranks: claims of partitions, progress, and outcomes."""

import dataclasses
import json
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from allred.errors import CollectiveTimeout
from allred.runtime.channel import Channel, Listener, Message, open_listener
from allred.runtime.loop import Loop
from allred.runtime.timings import OUTCOMES_S
from allred.spark import outcomes
from allred.spark.outcomes import Outcome, RankFailure
from allred.spark.supervisor import PURPOSE

_TICK_S = 0.1


@dataclasses.dataclass(eq=False)
class Worker:
    """A rank, as its supervisor has described it. about: rank, host, node, directory and spool."""

    channel: Channel
    about: dict[str, Any]
    consumed: int = 0  # the last feed that it has read
    last_progress: float = dataclasses.field(default_factory=time.monotonic)
    is_terminated: bool = False
    has_read_all: bool = False  # of the current feed
    waits: bool = False  # for rows

    @property
    def name(self) -> str:
        return f"rank {self.about['rank']} on {self.about['host']}"


class ClusterMonitor:
    """Listens at `host` in a thread of its own. bind: the address to bind. num_ps: the number of parameter servers,
    which have the lowest ranks. cancel_feed: called in that thread after a failure, and when no worker reads rows."""

    def __init__(self, size: int, num_ps: int, host: str, bind: str, cancel_feed: Callable[[], None]) -> None:
        self._size, self._num_ps, self._cancel_feed = size, num_ps, cancel_feed
        self._secret = secrets.token_hex(32)
        listening = open_listener(bind)
        self.address = (host, listening.getsockname()[1], self._secret)
        self._loop = Loop()
        self._listener = Listener(self._loop, listening, PURPOSE, self._secret, self._admit)
        self._changed = threading.Condition(threading.RLock())  # guards all that follows
        self._workers: dict[int, Worker] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._claims: set[tuple[int, int]] = set()
        self._failed_at = float("inf")
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="allred-spark-monitor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_closed:
            self._loop.turn()
        for worker in self._workers.values():
            worker.channel.close()
        self._listener.close()

    # Messages.

    def _admit(self, channel: Channel, messages: list[Message]) -> None:
        worker = Worker(channel, messages[0])
        with self._changed:
            self._workers[worker.about["rank"]] = worker
            self._changed.notify_all()
        lost = outcomes.of_lost_rank(worker.about["rank"], worker.about["host"])
        channel.serve(
            self._loop, lambda messages: self._handle(worker, messages), lambda error: self._record_outcome(lost)
        )
        self._handle(worker, messages[1:])

    def _handle(self, worker: Worker, messages: list[Message]) -> None:
        for message in messages:
            kind = message.pop("kind")
            if kind == "outcome":
                self._record_outcome(message)
                continue
            with self._changed:
                worker.last_progress = time.monotonic()
                if kind == "claim":
                    worker.has_read_all = False
                    claim = (message["feed"], message["number"])
                    accepted = claim not in self._claims
                    self._claims.add(claim)
                    worker.channel.send({**message, "kind": "claim", "accepted": accepted})
                elif kind == "consumed":
                    worker.consumed = message["feed"]
                elif kind == "read_all":
                    worker.has_read_all = True
                elif kind == "waits":
                    self._set_waits(worker, message["value"])
                elif kind == "terminated":
                    worker.is_terminated = True
                self._changed.notify_all()
            if kind == "terminated" and self.all_terminated():
                self._cancel_feed()

    def _set_waits(self, worker: Worker, waits: bool) -> None:
        """Note whether a worker waits for rows; then the others accept any number of bytes."""
        before = any(each.waits for each in self._workers.values())
        worker.waits = waits
        if before != (now := any(each.waits for each in self._workers.values())):
            self.send({"kind": "limits", "value": not now})

    def _record_outcome(self, outcome: Outcome) -> None:
        with self._changed:
            known = self._outcomes.setdefault(outcome["rank"], outcome)
            fails = bool(known["code"]) and self._failed_at == float("inf") and not self._is_closed
            if fails:
                self._failed_at = time.monotonic()
            self._changed.notify_all()
        if fails:
            self._cancel_feed()

    # The driver's calls.

    def send(self, message: Message) -> None:
        """Send a message to all supervisors."""
        with self._changed:
            for worker in self._workers.values():
                worker.channel.send_line(json.dumps(message))

    def workers(self) -> list[Worker]:
        """Return the workers, without the parameter servers."""
        with self._changed:
            return [worker for rank, worker in sorted(self._workers.items()) if rank >= self._num_ps]

    def all_terminated(self) -> bool:
        """Return whether no worker reads rows any more."""
        return all(worker.is_terminated for worker in self.workers())

    def all_connected(self) -> bool:
        with self._changed:
            return len(self._workers) == self._size

    def all_ended(self) -> bool:
        with self._changed:
            return len(self._outcomes) == self._size

    def wait(self, is_done: Callable[[], bool]) -> None:
        """Wait until `is_done`. Raises RankFailure if a rank has failed."""
        while True:
            self.raise_failure()
            with self._changed:
                if is_done():
                    return
                self._changed.wait(_TICK_S)

    def raise_failure(self) -> None:
        """Raise RankFailure if a rank has failed, after the outcomes of the others have arrived."""
        if self._failed_at == float("inf"):
            return
        with self._changed:
            self._changed.wait_for(self.all_ended, max(0.0, self._failed_at + OUTCOMES_S - time.monotonic()))
            failure = outcomes.first_failure(self._outcomes.values())
        assert failure is not None
        raise RankFailure(failure)

    def wait_consumed(self, feed: int, limit_s: float) -> None:
        """Wait until all workers have read a feed. Raises CollectiveTimeout if one makes no progress."""

        def is_done() -> bool:
            left = [worker for worker in self.workers() if worker.consumed < feed and not worker.is_terminated]
            for worker in left:
                if worker.has_read_all:  # it takes part in the steps of the others
                    continue
                idle = time.monotonic() - worker.last_progress
                if idle > limit_s:
                    raise CollectiveTimeout(
                        f"{worker.name} has requested no rows for {idle:.0f} s (feed_timeout), and has rows left; "
                        "raise feed_timeout, or see its output in the executor's log"
                    )
            return not left

        self.wait(is_done)

    def reset_timeouts(self) -> None:
        """Start the time limits of `wait_consumed` again."""
        with self._changed:
            for worker in self._workers.values():
                worker.last_progress = time.monotonic()

    def close(self) -> None:
        """Kill all ranks, and end."""
        self.send({"kind": "kill"})
        self._is_closed = True
        self._loop.wake()
        self._thread.join()
        self._loop.close()
