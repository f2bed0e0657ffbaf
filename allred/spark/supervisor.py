"""The parent process of a rank in InputMode.SPARK. It outlives the Spark task that started it, and feeds the rank.

The task of a worker ends when the supervisor has connected to the driver, because the tasks that feed the rank need its
slot; the task of a parameter server waits for the end of this process. It ends, and kills the rank, when the executor
(the JVM), the driver or the task of a server ends.

It serves a Unix socket in a directory of mode 0700. Spark tasks (feeder.py) send status, begin and add; the rank
(data_feed.py) sends rank, next, progress, results and terminate. From add on, the supervisor or the rank removes the
file of a partition.
"""

import contextlib
import dataclasses
import os
import signal
import socket
import sys
import tempfile
import time
from multiprocessing.connection import Connection

from allred.errors import ConfigError
from allred.launch.rendezvous_client import shared_memory_domain
from allred.runtime.channel import Channel, HandshakeError, Listener, Message, connect, limit_resending
from allred.runtime.loop import Loop, Timer
from allred.runtime.timings import DRIVER_LOST_S, RANK_EXIT_S, REMIND_ROWS_S
from allred.spark import outcomes
from allred.spark.feed_queue import FEED_PURPOSE, FeedQueue, SpoolFile
from allred.spark.outcomes import Outcome
from allred.spark.rank_process import RankProcess, RankSpec
from allred.watch.process_state import ancestors, name

PURPOSE = "spark"
MAX_UNREAD_BYTES = 2**28  # Spark tasks wait while a worker has more bytes of files to read


class RankSupervisor:
    """spec: of the rank. task: the connection to its Spark task."""

    def __init__(self, spec: RankSpec, task: Connection) -> None:
        self._spec, self._task = spec, task
        self._executor = next((pid for pid in ancestors(os.getpid()) if name(pid) == "java"), 0)
        self._queue = FeedQueue(MAX_UNREAD_BYTES)
        self._loop = Loop()
        self._driver: Channel | None = None
        self._outcome: Outcome | None = None  # sent by the rank
        self._has_returned = self._has_ended = self._must_exit = False
        self._kill_timer: Timer | None = None
        self._writing: dict[Channel, Message] = {}  # by connection of a Spark task
        self._claims: dict[str, tuple[Channel, SpoolFile]] = {}  # sent to the driver, by path
        self._results: dict[str, Channel] = {}  # inference: the task that waits for the results of a file
        self._rank_channel: Channel | None = None
        self._waiting_since = float("inf")  # the rank waits for rows
        self._is_waiting = False  # as the driver knows it

    def run(self) -> None:
        """Start the rank, and run until its end."""
        local = os.environ.get("SPARK_LOCAL_DIRS", "").partition(",")[0]
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="allred-", ignore_cleanup_errors=True))
            self._spool = stack.enter_context(
                tempfile.TemporaryDirectory(
                    prefix="allred-", dir=local if os.path.isdir(local) else None, ignore_cleanup_errors=True
                )
            )
            self._directory = directory
            address = os.path.join(directory, "feed")
            self._listening = stack.enter_context(socket.socket(socket.AF_UNIX))
            self._listening.bind(address)
            self._listening.listen()
            self._rank = RankProcess(dataclasses.replace(self._spec, feed=address))
            stack.callback(self._rank.kill)
            if self._start():
                while not self._must_exit:
                    self._loop.turn()

    def _start(self) -> bool:
        """Start the rank, connect to the driver, and report it to the Spark task. Return False after a failure."""
        address, failure = self._rank.address()
        self._task.send(address or failure)
        if failure is not None:
            return False
        try:
            self._rank.join(*self._task.recv())
        except (EOFError, ConnectionError):
            return False  # another rank has not started
        failure = self._connect()
        self._task.send(failure)
        if failure is not None:
            return False
        Listener(self._loop, self._listening, FEED_PURPOSE, "", self._admit)  # the directory admits only the user
        self._loop.on_input(self._rank.connection.fileno(), self._receive_outcome)
        self._loop.on_input(self._rank.end_descriptor, self._rank_ended)
        if self._executor:
            self._loop.on_input(os.pidfd_open(self._executor), self._exit)
        if self._spec.rank < self._spec.num_ps:
            self._loop.on_input(self._task.fileno(), self._exit)
        else:
            self._task.close()
        return True

    def _connect(self) -> Outcome | None:
        """Connect to the driver. Return an outcome if that fails."""
        host, port, secret = self._spec.driver
        try:
            self._driver = connect((host, port), PURPOSE, secret)
        except (HandshakeError, OSError) as error:
            reason = ConfigError(
                f"the executor cannot reach the driver at {host}:{port} (spark.driver.host, a free port): {error}; "
                "a firewall between them must permit it"
            )
            return outcomes.of_exception(self._spec.rank, reason)
        limit_resending(self._driver.connection, DRIVER_LOST_S)
        about = {"rank": self._spec.rank, "host": socket.gethostname(), "node": shared_memory_domain()}
        self._driver.send({**about, "directory": self._directory, "spool": self._spool})
        self._driver.connection.settimeout(None)
        self._driver.serve(self._loop, self._receive_from_driver, lambda error: self._exit())
        return None

    def _exit(self) -> None:
        self._must_exit = True

    # The driver.

    def _send_to_driver(self, message: Message) -> None:
        assert self._driver is not None
        self._driver.send({"rank": self._spec.rank, **message})

    def _receive_from_driver(self, messages: list[Message]) -> None:
        for message in messages:
            kind = message["kind"]
            if kind == "claim":
                self._on_claim_answer(message)
            elif kind == "end_feed":
                self._queue.end_feed(message["feed"], message["epochs"])
            elif kind == "limits":
                self._queue.limits = message["value"]
            elif kind == "shut_down":
                self._queue.is_shut_down = True
                self._must_exit = self._has_ended
            elif kind == "kill":
                self._exit()
        self._answer_rank()

    def _on_claim_answer(self, message: Message) -> None:
        task, partition = self._claims.pop(message["path"])
        accepted = bool(message["accepted"]) and self._queue.add(partition)
        if not accepted:
            _remove([partition.path])
        task.send({"accepted": accepted})

    # The rank.

    def _receive_outcome(self) -> None:
        """Receive the outcome of the rank. Its process may then wait for the other ranks."""
        self._loop.remove(self._rank.connection.fileno())
        self._outcome, self._has_returned = self._rank.receive_outcome(), True
        if self._outcome is None or self._outcome["code"]:
            self._kill_timer = self._loop.after(RANK_EXIT_S, self._rank.process.kill)
        if self._outcome is not None and self._outcome["code"]:
            self._report(self._outcome)
        self._terminate()

    def _rank_ended(self) -> None:
        """Report the outcome. Then answer Spark tasks until shutdown()."""
        if not self._has_returned:
            self._receive_outcome()
        self._loop.remove(self._rank.end_descriptor)
        self._has_ended = True
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        self._report(self._rank.kill_and_report(self._outcome))
        self._must_exit = self._queue.is_shut_down

    def _report(self, outcome: Outcome) -> None:
        """Send an outcome to the driver, which takes the first one."""
        self._send_to_driver({"kind": "outcome", **{key: outcome[key] for key in outcome if key != "result"}})

    def _answer_rank(self) -> None:
        """Answer the request of the rank, if there is one and an answer. The driver knows who waits: while a worker
        waits for rows, the others accept more than MAX_UNREAD_BYTES, because they may wait for this worker in a step.
        """
        waits = self._rank_channel is not None and self._waiting_since < float("inf")
        if waits and (answer := self._queue.next_answer()) is not None:
            assert self._rank_channel is not None
            self._waiting_since = float("inf")
            self._rank_channel.send(answer)
            waits = False
            if "feed_end" in answer:
                self._send_to_driver({"kind": "read_all"})
        if waits != self._is_waiting:
            self._is_waiting = waits
            self._send_to_driver({"kind": "waits", "value": waits})

    def _terminate(self) -> None:
        _remove(self._queue.terminate())
        for task in self._results.values():
            with contextlib.suppress(OSError):
                task.connection.shutdown(socket.SHUT_RDWR)
        self._send_to_driver({"kind": "terminated"})

    def _remind(self, since: float) -> None:
        """Print that the rank waits for rows, if it has since that time."""
        if self._waiting_since == since:
            self._loop.after(REMIND_ROWS_S, lambda: self._remind(since))
            who = f"rank {self._spec.rank} on {socket.gethostname()}"
            text = f"{who} has waited {time.monotonic() - since:.0f} s for rows: {self._queue.describe()}"
            print(f"allred: {text}", file=sys.stderr, flush=True)

    # Spark tasks, and the rank.

    def _admit(self, peer: Channel, messages: list[Message]) -> None:
        peer.serve(self._loop, lambda messages: self._receive(peer, messages), lambda error: self._forget(peer))
        self._receive(peer, messages)

    def _receive(self, peer: Channel, messages: list[Message]) -> None:
        for message in messages:
            self._handle(peer, message)
        self._answer_rank()

    def _forget(self, peer: Channel) -> None:
        if (begun := self._writing.pop(peer, None)) is not None:
            self._queue.end_write(begun["number"])
        for path in [path for path, task in self._results.items() if task is peer]:
            del self._results[path]
            if self._queue.discard(path):
                _remove([path])

    def _handle(self, peer: Channel, message: Message) -> None:
        kind = message["kind"]
        if kind == "status":
            peer.send(self._queue.status())
        elif kind == "begin":
            self._writing[peer] = message
            self._queue.begin_write(message["number"])
            peer.send({})
        elif kind == "add":
            self._add(peer, message)
        elif kind == "rank":
            self._rank_channel = peer
        elif kind == "next":
            self._waiting_since = since = time.monotonic()
            self._loop.after(REMIND_ROWS_S, lambda: self._remind(since))
            if (found := self._queue.on_request()) is not None:
                feed, files = found
                _remove(files)
                self._send_to_driver({"kind": "consumed", "feed": feed})
            else:
                self._send_to_driver({"kind": "progress"})
        elif kind == "progress":
            self._send_to_driver({"kind": "progress"})
        elif kind == "results":
            self._send_to_driver({"kind": "progress"})
            if (task := self._results.pop(message["of"], None)) is not None:
                task.send({"accepted": True, "results": message["path"]})
            else:  # the task has given up
                _remove([message["path"]])
        elif kind == "terminate":
            self._terminate()

    def _add(self, task: Channel, message: Message) -> None:
        begun = self._writing.pop(task)
        self._queue.end_write(begun["number"])
        fields = {key: message[key] for key in ("path", "rows", "size", "train", "epochs")}
        partition = SpoolFile(begun["feed"], begun["number"], **fields)
        if partition.train:
            self._claims[partition.path] = task, partition
            claim = {"feed": partition.feed, "number": partition.number, "path": partition.path}
            self._send_to_driver({"kind": "claim", **claim})
        elif self._queue.add(partition):  # Spark computes a partition of results as often as it needs it
            self._results[partition.path] = task  # it is answered when the results arrive
        else:
            _remove([partition.path])
            task.send({"accepted": False})


def _remove(files: list[str]) -> None:
    for path in files:
        with contextlib.suppress(OSError):
            os.unlink(path)


def main() -> None:
    """Run the program. Its arguments are those of rank_process.py."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    task = Connection(int(sys.argv[1]))
    RankSupervisor(task.recv(), task).run()
