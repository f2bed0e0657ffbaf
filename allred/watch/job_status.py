"""The state of a job for monitors, in the watcher of the chief's node.

A monitor (`allred top`, the metrics endpoint) finds port and token in a file of the job directory. While one is
connected, the watchers send the steps of their ranks every SAMPLE_PERIOD_S seconds; for a request all counters. From
these samples follows which rank delays which: both have the same number of steps, and only one is in opt.step. Samples
do not interrupt a rank; a request for its state does, once, by a signal.

At the end of the job the last state is written to the job directory, so that it can be shown later.
"""

import contextlib
import functools
import secrets
import time
from pathlib import Path

from allred.counters import Values
from allred.errors import AllredError
from allred.runtime.channel import Channel, Listener, open_listener
from allred.runtime.loop import Loop
from allred.runtime.timings import QUERY_S, SAMPLE_PERIOD_S
from allred.watch import job_directory
from allred.watch.records import Event

PURPOSE = "monitor"
LAST = 0  # the number of the counters that a watcher sends at its end, without a request
STEPS, COUNTERS, STATES = "steps", "counters", "states"  # the detail that a watcher sends: each includes the one before
MOST_PAIR_RANKS = 64  # in a job of more ranks no pairs of waiting and late ranks are kept: too many
MOST_MESSAGES, MESSAGE_CHARS = 30, 3000
MOST_DIRECTORIES = 8


class JobStatus:
    """about: name of the job, program, mode, starts. size, nodes: of the job.

    history: the starts of `allred run` up to this one, with start, time, ranks and why.
    """

    def __init__(self, loop: Loop, about: Event, size: int, nodes: int) -> None:
        self._loop, self._about, self._size, self._nodes = loop, about, size, nodes
        self._clients: list[Channel] = []
        self._requests: list[tuple[Channel, bool]] = []  # with the answer still to send; whether with states
        self._number, self._answers, self._begun_at, self._what = 0, 0, 0.0, STEPS
        self._collecting = False
        self._ranks: dict[int, Event] = {}
        self._new: dict[int, Event] = {}
        self._steps: dict[int, Values] = {}
        self._late: dict[int, tuple[int, float]] = {}  # late rank: most that waited at once, sum of seconds
        self._delays: dict[tuple[int, int], float] = {}  # seconds by (waiting rank, late rank)
        self._begun, self._state = time.time(), "running"
        self._messages: list[Event] = []
        self._directories: list[str] = []
        self.history: list[Event] = []  # set by the watcher
        self.is_replaced = False  # by the next world of an elastic job
        self._sampled_at = 0.0
        token = secrets.token_hex(16)
        listening = open_listener("127.0.0.1")
        self._listener = Listener(loop, listening, PURPOSE, token, self._admit)
        self._entry = {**about, "port": listening.getsockname()[1], "token": token}
        self._file: Path | None = None

    def publish(self) -> None:
        """Write the file by which monitors find this process."""
        with contextlib.suppress(AllredError, OSError):  # then the job has no monitors
            self._file = job_directory.write_entry(self._about["job"], job_directory.JOB, self._entry)

    def close(self) -> None:
        """Write the last state, unless `is_replaced`. Remove the file, and listen no more."""
        self._listener.close()
        for channel in self._clients:
            channel.close()
        if self._file is not None:
            self._state = "ended" if self._state == "running" else self._state
            if not self.is_replaced:
                with contextlib.suppress(AllredError, OSError):
                    job_directory.write_ended(self._about["job"], self.snapshot())
            job_directory.remove_entry(self._file, self._entry)
            self._file = None

    # Events of the job.

    def note(self, message: Event) -> None:
        """Take a message to the ranks or to the user: a long wait, a loss, or the verdict."""
        if message["kind"] not in ("print", "announce", "verdict"):
            return
        text = "\n".join(filter(None, (message["text"], message.get("traceback"))))[:MESSAGE_CHARS]
        if message["kind"] == "verdict":
            self._state = "failed"
        if not any(text == each["text"] for each in self._messages[-2:]):  # a verdict may be announced too
            self._messages = [*self._messages, {"time": time.time(), "text": text}][-MOST_MESSAGES:]

    def take_directory(self, directory: str) -> None:
        """Take a directory of summaries, of rank 0."""
        if directory not in self._directories:
            self._directories = [*self._directories, directory][-MOST_DIRECTORIES:]

    # Monitors.

    def _admit(self, channel: Channel, messages: list[Event]) -> None:
        self._clients.append(channel)
        handle, lost = functools.partial(self._request, channel), lambda error: self._lose(channel)
        channel.serve(self._loop, handle, lost, waits=False)
        self._request(channel, messages)

    def _request(self, channel: Channel, messages: list[Event]) -> None:
        self._requests += [(channel, bool(message.get("states"))) for message in messages]

    def _lose(self, channel: Channel) -> None:
        self._clients.remove(channel)
        self._requests = [request for request in self._requests if request[0] is not channel]

    # Samples.

    def tick(self, now: float) -> list[tuple[int | None, Event]]:
        """Return the messages to send now."""
        if self._collecting and now > self._begun_at + QUERY_S:
            self._finish(now)
        if not self._clients:
            self._sampled_at = 0.0  # do not count the time without monitors as delay
        if self._collecting or not self._clients or now < self._sampled_at + SAMPLE_PERIOD_S:
            return []
        self._number += 1
        self._collecting, self._begun_at = True, now
        has_states = any(states for _, states in self._requests)
        self._what = STATES if has_states else COUNTERS if self._requests else STEPS
        self._new, self._steps, self._answers = {}, {}, 0
        return [(None, {"kind": "collect", "number": self._number, "what": self._what})]

    def take(self, event: Event, now: float) -> None:
        """Take the answer of a watcher: the steps, and perhaps the counters, of the ranks on its node."""
        ranks = {int(rank): values for rank, values in event["ranks"].items()}
        if event["number"] == LAST:
            self._ranks.update(ranks)
        elif self._collecting and event["number"] == self._number:
            self._new.update(ranks)
            self._steps |= {rank: Values(steps=steps, in_step=in_step) for rank, steps, in_step in event["steps"]}
            self._answers += 1
            if self._answers == self._nodes:
                self._finish(now)

    def _finish(self, now: float) -> None:
        self._collecting = False
        for rank, values in self._new.items():
            self._ranks[rank] = {**self._ranks.get(rank, {}), **values}
        if self._sampled_at and self._about["mode"] == "sync":
            self._count_delays(now - self._sampled_at)
        self._sampled_at = now
        if self._what == STATES:
            for rank in [rank for rank in self._ranks if rank not in self._new]:
                self._ranks[rank]["state"] = "no answer"
        due = [each for each in self._requests if self._what == STATES or (self._what == COUNTERS and not each[1])]
        self._requests = [request for request in self._requests if request not in due]
        state = self.snapshot() if due else {}
        for channel, _ in due:
            channel.send(state)

    def _count_delays(self, seconds: float) -> None:
        waiting: dict[float, list[int]] = {}  # ranks by their steps
        for rank, value in self._steps.items():
            if value.in_step:
                waiting.setdefault(value.steps, []).append(rank)
        for late in delaying(self._steps):
            ranks = waiting[self._steps[late].steps]
            most, sum_s = self._late.get(late, (0, 0.0))
            self._late[late] = max(most, len(ranks)), sum_s + seconds * len(ranks)
            for rank in ranks if self._size <= MOST_PAIR_RANKS else ():
                self._delays[rank, late] = self._delays.get((rank, late), 0.0) + seconds

    def snapshot(self) -> Event:
        """Return the state of the job, as JSON."""
        ranks = [
            {
                "rank": rank, "host": entry["host"], "role": entry["role"], "state": entry.get("state", ""),
                **Values(*entry["counters"])._asdict(),
            }
            for rank, entry in sorted(self._ranks.items())
        ]  # fmt: skip
        return {
            **self._about, "size": self._size, "begun": self._begun, "time": time.time(), "state": self._state,
            "ranks": ranks, "delays": [[*pair, round(seconds, 3)] for pair, seconds in sorted(self._delays.items())],
            "late": [[late, most, round(seconds, 3)] for late, (most, seconds) in sorted(self._late.items())],
            "messages": self._messages, "history": self.history, "summaries": self._directories,
        }  # fmt: skip


def delaying(values: dict[int, Values]) -> list[int]:
    """Return the ranks for which others wait in opt.step: they have made as many steps, and compute.

    >>> delaying({0: Values(steps=7, in_step=1), 1: Values(steps=7), 2: Values(steps=8)})
    [1]
    """
    waiting = {value.steps for value in values.values() if value.in_step}
    return [rank for rank, value in values.items() if not value.in_step and value.steps in waiting]
