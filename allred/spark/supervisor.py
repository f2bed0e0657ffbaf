"""The process that keeps a rank after its Spark task has ended, and feeds it. One for each rank in InputMode.SPARK.

The task of a worker ends when the ranks have met, because the tasks that feed it need its slot; the task of a parameter
server waits for the end of this process. It ends, and kills the rank, when the executor (the JVM), the driver or the
task of a server ends.

It serves a Unix socket in a directory of mode 0700. Spark tasks (feeder.py) send load, open and add; the rank
(data_feed.py) sends rank, next, results and terminate.
"""

import contextlib
import dataclasses
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from allred import channel
from allred.channel import Channel, HandshakeError, Message, dispatch
from allred.launch.rendezvous_client import shared_memory_domain
from allred.spark.feed_queue import FeedQueue, SpoolFile
from allred.spark.outcomes import Outcome
from allred.spark.rank_process import EXIT_S, RankProcess
from allred.spark.rank_program import Start

PURPOSE = "spark"
MOST_UNREAD = 2**28  # bytes of spool files that a worker has not read, from which Spark tasks wait
REMIND_S = 10.0
_TICK_S = 0.2


class RankSupervisor:
    """start: of the rank. task: the connection to its Spark task."""

    def __init__(self, start: Start, task: Connection) -> None:
        self._start, self._task = start, task
        self._queue = FeedQueue(MOST_UNREAD)
        self._selector = selectors.DefaultSelector()
        self._directory = tempfile.mkdtemp(prefix="allred-")
        local = os.environ.get("SPARK_LOCAL_DIRS", "").partition(",")[0]
        self._spool = tempfile.mkdtemp(prefix="allred-", dir=local if os.path.isdir(local) else None)
        self._listening = socket.socket(socket.AF_UNIX)
        self._address = os.path.join(self._directory, "feed")
        self._listening.bind(self._address)
        self._listening.listen(64)
        self._listening.setblocking(False)
        self._rank = RankProcess(dataclasses.replace(start, feed=self._address))
        self._driver: Channel | None = None
        self._sent: Outcome | None = None  # by the rank
        self._rank_end = -1  # a descriptor that reports the end of its process
        self._has_ended = False
        self._kill_at = float("inf")
        self._opened: dict[Channel, Message] = {}  # by connection of a Spark task
        self._claims: dict[tuple[int, int], tuple[Channel, SpoolFile]] = {}  # sent to the driver
        self._results: dict[str, Channel] = {}  # inference: the task that waits for the results of a file
        self._reader: Channel | None = None  # the rank's connection
        self._asked_at = float("inf")  # since when the rank waits for rows
        self._remind_at = float("inf")
        self._is_over = False

    def run(self) -> None:
        """Start the rank, and run until its end."""
        try:
            address, outcome = self._rank.address()
            self._task.send(address or outcome)
            if outcome is not None:
                return
            try:
                self._rank.join(*self._task.recv())
            except (EOFError, ConnectionError):
                return  # another rank has not started
            self._connect()
            while not self._is_over:
                dispatch(self._selector, _TICK_S)
                self._check_times()
        finally:
            self._rank.end()
            for directory in (self._directory, self._spool):
                shutil.rmtree(directory, ignore_errors=True)

    def _connect(self) -> None:
        host, port, secret = self._start.driver
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._driver = channel.connect(family, (host, port), PURPOSE, secret)
        about = {"rank": self._start.rank, "host": socket.gethostname(), "node": shared_memory_domain()}
        self._driver.send({**about, "directory": self._directory, "spool": self._spool, "pid": os.getpid()})
        self._driver.connection.settimeout(None)
        self._on_input(self._driver.connection, self._receive_from_driver)
        self._on_input(self._listening, self._accept)
        self._on_input(self._rank.connection, self._receive_outcome)
        if java := _executor():
            self._on_input(os.pidfd_open(java), self._end)
        if self._start.rank < self._start.servers:
            self._on_input(self._task, self._end)
        else:
            self._task.close()

    def _on_input(self, file: object, call: Callable[[], object]) -> None:
        self._selector.register(file, selectors.EVENT_READ, call)  # type: ignore[arg-type]

    def _end(self) -> None:
        self._is_over = True

    # The driver.

    def _tell(self, message: Message) -> None:
        assert self._driver is not None
        self._driver.send({"rank": self._start.rank, **message})

    def _receive_from_driver(self) -> None:
        assert self._driver is not None
        try:
            messages = self._driver.receive()
        except (OSError, ValueError):
            return self._end()
        for message in messages:
            kind = message["kind"]
            if kind == "claim":
                self._settle_claim(message)
            elif kind == "end_feed":
                self._queue.end_feed(message["feed"], message["epochs"])
            elif kind == "shut_down":
                self._queue.shut_down()
                self._is_over = self._has_ended
            elif kind == "kill":
                self._end()
        self._serve_rank()

    def _settle_claim(self, message: Message) -> None:
        task, partition = self._claims.pop((message["feed"], message["number"]))
        accepted = bool(message["accepted"]) and self._queue.add(partition)
        task.send({"accepted": accepted})

    # The rank.

    def _receive_outcome(self) -> None:
        """Receive the outcome of the rank, which reads no more. Its process may wait for the other ranks now."""
        self._selector.unregister(self._rank.connection)
        self._sent = self._rank.sent_outcome()
        if self._sent is None or self._sent["code"]:
            self._kill_at = time.monotonic() + EXIT_S
        if self._sent is not None and self._sent["code"]:
            self._report(self._sent)
        self._terminate()
        for task in self._results.values():
            task.connection.shutdown(socket.SHUT_RDWR)
        self._rank_end = os.pidfd_open(self._rank.process.pid)
        self._on_input(self._rank_end, self._rank_ended)

    def _rank_ended(self) -> None:
        """Report the outcome. Then answer Spark tasks until shutdown()."""
        self._selector.unregister(self._rank_end)
        os.close(self._rank_end)
        self._has_ended, self._kill_at = True, float("inf")
        self._report(self._rank.final_outcome(self._sent))
        self._is_over = self._queue.is_over

    def _report(self, outcome: Outcome) -> None:
        """Send an outcome to the driver, which takes the first one."""
        self._tell({"kind": "outcome", **{key: value for key, value in outcome.items() if key != "result"}})

    def _serve_rank(self) -> None:
        """Answer the rank, if it waits for rows and there are some."""
        if self._reader is None or self._asked_at == float("inf"):
            return
        answer = self._queue.answer()
        if answer is not None:
            self._asked_at = self._remind_at = float("inf")
            self._reader.send(answer)

    def _terminate(self) -> None:
        _remove(self._queue.terminate())
        self._tell({"kind": "terminated"})

    def _check_times(self) -> None:
        now = time.monotonic()
        if now >= self._kill_at:
            self._rank.end()
        if now >= self._remind_at:
            self._remind_at = now + REMIND_S
            who = f"rank {self._start.rank} on {socket.gethostname()}"
            text = f"{who} waits for rows since {now - self._asked_at:.0f} s: {self._queue.describe()}"
            print(f"allred: {text}", file=sys.stderr, flush=True)

    # Spark tasks, and the rank.

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listening.accept()
            peer = Channel(connection)
            connection.settimeout(channel.SEND_S)
            self._on_input(connection, lambda: self._receive(peer))

    def _receive(self, peer: Channel) -> None:
        try:
            messages = peer.receive()
        except (OSError, ValueError):
            return self._close(peer)
        for message in messages:
            self._handle(peer, message)
        self._serve_rank()

    def _close(self, peer: Channel) -> None:
        self._selector.unregister(peer.connection)
        peer.connection.close()
        if (opened := self._opened.pop(peer, None)) is not None:
            self._queue.close(opened["number"])
        self._results = {path: task for path, task in self._results.items() if task is not peer}

    def _handle(self, peer: Channel, message: Message) -> None:
        kind = message["kind"]
        if kind == "load":
            peer.send(self._queue.load())
        elif kind == "open":
            self._opened[peer] = message
            self._queue.open(message["number"])
            peer.send({})
        elif kind == "add":
            self._add(peer, message)
        elif kind == "rank":
            self._reader = peer
        elif kind == "next":
            self._asked_at = time.monotonic()
            self._remind_at = self._asked_at + REMIND_S
            if (found := self._queue.ask()) is not None:
                feed, files = found
                _remove(files)
                self._tell({"kind": "consumed", "feed": feed})
            else:
                self._tell({"kind": "progress"})
        elif kind == "results" and (task := self._results.pop(message["of"], None)) is not None:
            task.send({"accepted": True, "results": message["path"]})
            self._tell({"kind": "progress"})
        elif kind == "terminate":
            self._terminate()

    def _add(self, task: Channel, message: Message) -> None:
        opened = self._opened.pop(task)
        self._queue.close(opened["number"])
        fields = {key: message[key] for key in ("path", "rows", "size", "train", "epochs")}
        partition = SpoolFile(opened["feed"], opened["number"], **fields)
        if partition.train:
            self._claims[partition.feed, partition.number] = task, partition
            self._tell({"kind": "claim", "feed": partition.feed, "number": partition.number})
        else:  # Spark computes a partition of results as often as it needs it
            if self._queue.add(partition):
                self._results[partition.path] = task  # it gets its answer with the results
            else:
                task.send({"accepted": False})


def _remove(files: list[str]) -> None:
    for path in files:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _executor() -> int:
    """Return the process id of the executor, the first ancestor that is a Java program; 0 if there is none."""
    pid = os.getppid()
    while pid > 1:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == "java":
                return pid
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            continue
        return 0
    return 0


def main() -> None:
    """Run the program. Its arguments are those of rank_program.py."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    task = Connection(int(sys.argv[1]))
    start: Start = task.recv()
    try:
        RankSupervisor(start, task).run()
    except (HandshakeError, OSError) as error:
        (host, port, _), who = start.driver, f"rank {start.rank} on {socket.gethostname()}"
        sys.exit(f"allred: {who} cannot reach the driver at {host}:{port}: {error}")
