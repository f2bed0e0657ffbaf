"""The watcher: a process on every node that answers while ranks hold the GIL, block in MPI, are stopped or dead.

    rank     -- Unix socket -->  watcher of its node  -- TCP -->  watcher of the chief's node, which has the JobState

It imports only allred.watch and its dependencies (detached.py). It holds no pipe from a rank to mpirun, because mpirun
would wait for it, and ends after its ranks. The chief's node is the node of rank 0. A watcher that loses the connection
to the chief's watcher continues for its own node. If another host is unreachable until the time limit, each side ends
its own ranks, and then its launcher.
"""

import contextlib
import functools
import json
import os
import secrets
import signal
import socket
import time

from allred.runtime import timings
from allred.runtime.channel import Channel, HandshakeError, Listener, connect, limit_resending, open_listener
from allred.runtime.detached import serve
from allred.runtime.loop import Loop
from allred.watch import process_state, runner_link
from allred.watch.heartbeat import Heartbeat
from allred.watch.job_state import JobState
from allred.watch.job_status import LAST, STATES, STEPS, JobStatus
from allred.watch.launchers import Launchers
from allred.watch.rank import WatchedRank, accept, refuse
from allred.watch.records import Event, WatcherSettings

PURPOSE = "watcher"  # of the channels between watchers


class Watcher:
    """The watcher of one node."""

    def __init__(self, settings: WatcherSettings, loop: Loop | None = None) -> None:
        self._settings = settings
        self._loop = loop or Loop()
        self._has_ended = False
        self._ranks: dict[int, WatchedRank] = {}
        self._links: list[Channel] = []
        self._heartbeats: dict[Channel, Heartbeat] = {}  # of the connections to other watchers
        self._links_by_rank: dict[int, Channel] = {}  # of ranks of other nodes
        self._chief: Channel | None = None
        self._job: JobState | None = None
        if settings.chief:
            how = settings.expendable, settings.launcher, settings.elastic
            self._job = JobState(settings.size, settings.nodes, settings.warn_s, *how)
        self._counts: dict[str, int] = {}  # of allred.SharedCounter, on the chief's node
        self._has_reported_verdict = False
        self._gone: dict[int, Event] = {}  # expendable ranks that are gone, with the message
        self._has_verdict = False  # so the job ends
        self._give_up_at = time.monotonic() + timings.FIRST_RANK_S
        self._starter = os.getppid()  # the rank that has started this process
        self._last_death = self._last_event = 0.0
        self._launchers = Launchers()
        self._ended_launcher = ""
        self._has_lost_host = False
        self._stderr = -1  # a descriptor of the job's stderr
        self._runner: Channel | None = None
        self._status: JobStatus | None = None
        if settings.chief:
            self._status = JobStatus(self._loop, settings.about, settings.size, settings.nodes)
        if settings.chief and settings.runner:
            self._connect_to_runner(*settings.runner.split())
        self._unix = unix = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        unix.bind("")  # Linux chooses a name, which is not a file
        self.name = unix.getsockname().decode("latin-1")
        unix.listen(1024)
        self._loop.on_input(unix, lambda: self._accept_rank(unix))
        self.port = 0
        self._listener: Listener | None = None
        self._beat()
        if settings.chief and settings.address:
            tcp = open_listener(settings.address)
            self.port = tcp.getsockname()[1]
            accept, expected = self._accept_watcher, settings.nodes
            self._listener = Listener(self._loop, tcp, PURPOSE, settings.token, accept, expected=expected)

    @property
    def answer(self) -> Event:
        """The answer to the process that has started this one."""
        return {"name": self.name, "port": self.port}

    def run(self) -> None:
        """Run until all ranks of this node have died or left, and on the chief's node all other watchers have ended."""
        now = time.monotonic()
        self.begin()
        while not self.is_done(now):
            now = self._loop.turn(self.tick_s(now))
            self.tick(now)
        self.end()

    def begin(self) -> None:
        """Let monitors find this process."""
        if self._status is not None:
            self._status.publish()

    def tick_s(self, now: float) -> float:
        """Return the seconds until the next tick, if nothing happens before."""
        return timings.IDLE_TICK_S if now > self._last_event + timings.IDLE_S else timings.WATCHER_TICK_S

    def tick(self, now: float) -> None:
        """Send what is due. Called after each turn of the loop."""
        if self._job is not None:
            self._send(self._job.tick(now))
            self._report_verdict(self._job.verdict)
        if self._status is not None:
            self._send(self._status.tick(now))
        if now > self._last_death + timings.REPORT_DEATH_S:
            self._print("")

    def replace(self) -> None:
        """The job continues with another watcher."""
        if self._status is not None:
            self._status.is_replaced = True

    def end(self) -> None:
        """End it, after its ranks."""
        self._has_ended = True
        if self._status is not None or self._chief is not None:
            self._report_counters(LAST, STATES)
        if self._status is not None:
            self._status.close()
        if self._settings.launcher and self._has_lost_host:
            self._launchers.end()
        elif self._settings.launcher and self._settings.nodes == 1 and self._has_failed:
            self._launchers.end_childless()
        self._close()

    def _close(self) -> None:
        """Close everything that the loop watches: the loop may be used on."""
        for rank in self._ranks.values():
            rank.close(self._loop)
        for link in [*self._links, *filter(None, (self._chief, self._runner))]:
            link.finish()
        self._loop.remove(self._unix)
        self._unix.close()
        if self._listener is not None:
            self._listener.close()

    @property
    def _has_failed(self) -> bool:
        """Whether the job has failed."""
        return self._has_verdict or (self._job is not None and self._job.verdict is not None)

    def is_done(self, now: float) -> bool:
        """Whether all ranks of this node have died or left, and on the chief's node all other watchers have ended."""
        if self._links:  # ranks of other nodes are still leaving, or there are deaths to report
            return False
        if not all(rank.gone for rank in self._ranks.values()):
            return False
        is_past_death = now > self._last_death + timings.REPORT_DEATH_S
        if not (self._ranks or self._settings.elastic or process_state.is_alive(self._starter)):
            # The rank that started this process has died before it connected; others may still connect.
            self._give_up_at = min(self._give_up_at, now + timings.REPORT_DEATH_S)
        if len(self._ranks) < self._settings.ranks and now <= self._give_up_at:
            return bool(self._ranks) and is_past_death  # a rank that died in init() keeps the others from connecting
        return is_past_death or all(rank.left for rank in self._ranks.values())

    # Ranks of this node.

    def _accept_rank(self, listening: socket.socket) -> None:
        if (found := accept(listening, 3)) is None:
            return
        connection, hello, files = found
        try:
            if not secrets.compare_digest(hello["token"], self._settings.token):
                raise ValueError
            rank = WatchedRank(connection, hello, *files)
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return refuse(connection, files)
        if not rank.send({"kind": "welcome"}) and process_state.is_alive(rank.pid):
            return rank.close(self._loop)  # it continues without a watcher; the death of another one is reported
        self._ranks[rank.number] = rank
        for name, pidfd in self._launchers.record(rank.pid).items() if self._settings.launcher else ():
            self._loop.on_input(pidfd, functools.partial(self._launcher_ended, name, pidfd))
        self._loop.on_input(connection, lambda: self._receive_event(rank))
        self._loop.on_input(rank.pidfd, lambda: self._handle_death(rank))
        if len(self._ranks) == 1 and self._job is None:
            self._connect_to_chief(hello["chief"])
        self._report({"event": "joined", "rank": rank.number, "host": rank.host})

    def _receive_event(self, rank: WatchedRank) -> bool:
        """Handle one event of a rank. Return whether there was one."""
        event = rank.receive()
        if event is None:
            return False
        if not event:
            self._loop.remove(rank.connection)
            rank.hang_up()
            self._loop.after(timings.RELEASE_S, lambda: self._clear_state(rank))
            return False
        self._report(event | {"rank": rank.number})
        return True

    def _clear_state(self, rank: WatchedRank) -> None:
        """If a rank has closed its connection and lives on: its next events are missing."""
        if not (rank.dead or rank.left):
            rank.waits_in = ""
            self._report({"event": "resumed", "rank": rank.number})
            self._report({"event": "busy", "rank": rank.number, "is_busy": False})

    def _handle_death(self, rank: WatchedRank) -> None:
        while self._receive_event(rank):  # its last events
            pass
        self._loop.remove(rank.pidfd)
        rank.dead, code = process_state.describe_end(rank.pidfd, rank.pid)
        self._open_stderr()  # before ago_s is computed, because it takes a while
        ago_s = time.monotonic() - (rank.hung_up_at or time.monotonic())
        self._report({"event": "died", "rank": rank.number, "how": rank.dead, "code": code, "ago_s": ago_s})

    def _launcher_ended(self, name: str, pidfd: int) -> None:
        self._loop.remove(pidfd)
        self._ended_launcher = name
        self._loop.after(timings.LAUNCHER_ENDS_RANKS_S, self._report_orphans)

    def _report_orphans(self) -> None:
        """Report that the launcher has ended, and this node's ranks have not."""
        if left := [rank.number for rank in self._ranks.values() if not rank.dead and not rank.left]:
            how = f"has lost its launcher: {self._ended_launcher} has ended"
            self._report({"event": "orphaned", "rank": min(left), "how": how})

    # Watchers of other nodes.

    def _connect_to_chief(self, chief: Event) -> None:
        address, port = chief["address"], chief["port"]
        try:
            # An agent must not block for long: `allred run` would count its host as lost.
            limit_s = timings.CHIEF_CONNECT_S if self._settings.elastic else timings.AUTHENTICATE_S
            self._chief = connect((address, port), PURPOSE, chief["token"], limit_s)
        except (HandshakeError, OSError) as error:
            why = getattr(error, "strerror", None) or error
            where = f"at {address} port {port}"
            return self._continue_alone(f"cannot reach the watcher of the chief's node {where} ({why})")
        limit_resending(self._chief.connection, self._settings.limit_s)
        self._chief.serve(self._loop, self._receive_from_chief, self._lose_chief, waits=False)
        self._heartbeats[self._chief] = Heartbeat(time.monotonic(), self._settings.limit_s, chief["host"])

    def _receive_from_chief(self, messages: list[Event]) -> None:
        assert self._chief is not None
        self._warn(self._heartbeats[self._chief].heard(time.monotonic()))
        for each in messages:
            self._deliver(each["rank"], each["message"])

    def _lose_chief(self, error: Exception) -> None:
        assert self._chief is not None
        self._disconnect(self._chief)
        self._continue_alone("has lost the connection to the watcher of the chief's node")

    def _disconnect(self, link: Channel) -> None:
        """Close the connection to another watcher."""
        link.close()
        del self._heartbeats[link]
        if link in self._links:
            self._links.remove(link)

    # `allred run`; runner_link.py has the messages.

    def _connect_to_runner(self, host: str, port: str, secret: str) -> None:
        """If that fails, the job continues, and `allred run` has only the exit code of mpirun."""
        with contextlib.suppress(HandshakeError, OSError):
            self._runner = connect((host, int(port)), runner_link.PURPOSE, secret)
            self._runner.send({"event": "hello", "size": self._settings.size})
            self._runner.serve(self._loop, self._receive_from_runner, self._lose_runner, waits=False)

    def _receive_from_runner(self, messages: list[Event]) -> None:
        if not all({"kind", "rank"} <= message.keys() for message in messages):
            raise ValueError("a message without kind or rank")
        for message in messages:
            if message["kind"] == "starts" and self._status is not None:
                self._status.history = message["starts"]
            else:
                self._send([(message["rank"], message)])

    def _lose_runner(self, error: Exception) -> None:
        """`allred run` was killed, and mpirun with it."""
        self._runner = None

    def _report_verdict(self, verdict: Event | None) -> None:
        """Report the failure that ends the job, once."""
        if self._runner is not None and verdict is not None and not self._has_reported_verdict:
            self._has_reported_verdict = True
            self._runner.send({"event": "verdict", **{key: verdict[key] for key in ("rank", "code", "text")}})

    def _continue_alone(self, why: str) -> None:
        """Continue for the ranks of this node. why: a predicate for the message; "" for no message."""
        launcher = self._settings.launcher
        elastic = self._settings.elastic
        self._chief = None
        self._job = JobState(self._settings.size, 1, self._settings.warn_s, launcher=launcher, elastic=elastic)
        here = [rank for rank in self._ranks.values() if not rank.dead]
        for rank in here:
            self._report({"event": "joined", "rank": rank.number, "host": rank.host})
            self._report({"event": "role", "rank": rank.number, "text": rank.role})
            if rank.left:
                self._report({"event": "left", "rank": rank.number})
            elif rank.waits_in:
                since_s = time.monotonic() - rank.since
                waiting = {"what": rank.waits_in, "since_s": since_s, "peers": False, "quiet": False}
                self._report({"event": "waiting", "rank": rank.number, **waiting})
        if self._gone and not self._has_verdict:
            self._job.conclude(next(iter(self._gone.values())), time.monotonic())
        if (
            why
            and not self._settings.elastic
            and here
            and not any(rank.ending for rank in here if rank.number not in self._gone)
        ):
            text = f"the watcher of {here[0].host} {why}; it continues for the ranks of its own node"
            here[0].send({"kind": "print", "text": text})

    def _accept_watcher(self, link: Channel, events: list[Event]) -> None:
        limit_resending(link.connection, self._settings.limit_s)
        self._links.append(link)
        self._heartbeats[link] = Heartbeat(time.monotonic(), self._settings.limit_s)
        handle, lost = functools.partial(self._handle_events, link), lambda error: self._lose_watcher(link)
        link.serve(self._loop, handle, lost, waits=False)
        self._handle_events(link, events)

    def _lose_watcher(self, link: Channel) -> None:
        ranks = self._heartbeats[link].ranks
        self._disconnect(link)
        self._open_stderr()  # the launcher may end in a moment, because a host has failed
        for rank in sorted(rank for rank in ranks if self._links_by_rank[rank] is link):
            self._report({"event": "unwatched", "rank": rank})

    def _handle_events(self, link: Channel, events: list[Event]) -> None:
        heartbeat = self._heartbeats[link]
        self._warn(heartbeat.heard(time.monotonic()))
        for event in events:
            if event["event"] == "alive":
                continue
            if event["event"] == "joined":
                self._links_by_rank[event["rank"]] = link
                heartbeat.host = event["host"]
                heartbeat.ranks.add(event["rank"])
            elif event["event"] == "died":
                self._open_stderr()
            self._report(event)

    def _beat(self) -> None:
        """Send heartbeats, and report hosts that have sent none. Give up those that were silent until the time limit;
        once the job is ending, all silent hosts at once."""
        if self._has_ended:
            return
        self._loop.after(timings.HEARTBEAT_PERIOD_S, self._beat)
        now = self._loop.now
        for link, heartbeat in [*self._heartbeats.items()]:
            link.send({"event": "alive"} if link is self._chief else {"rank": None, "message": {"kind": "alive"}})
            self._warn(heartbeat.check(now))
            if heartbeat.is_lost(now) or (self._has_failed and heartbeat.is_silent):
                self._lose_host(link, now)

    def _lose_host(self, link: Channel, now: float) -> None:
        heartbeat, self._has_lost_host = self._heartbeats[link], True
        self._disconnect(link)
        if link is self._chief:
            self._continue_alone("")
            heartbeat.ranks.add(0)
            self._report({"event": "joined", "rank": 0, "host": heartbeat.host})
        if heartbeat.ranks:
            ranks = sorted(heartbeat.ranks)
            self._report({"event": "unreachable", "rank": ranks[0], "ranks": ranks, "how": heartbeat.lost(now)})

    def _warn(self, text: str) -> None:
        """Let a rank of this node print a warning, if there is one, until the job ends."""
        here = [rank for rank in self._ranks.values() if not rank.dead and not rank.left]
        if self._settings.elastic:  # the agents have heartbeats of their own
            return
        if text and here and not self._has_verdict:
            message = {"kind": "print", "text": text}
            here[0].send(message)
            if self._status is not None:
                self._status.note(message)

    # Events up, messages down.

    def _report(self, event: Event) -> None:
        self._last_event = time.monotonic()
        needs_answer = event["event"] in ("failed", "limit")
        if needs_answer and self._chief is not None and self._heartbeats[self._chief].is_silent:
            self._lose_host(self._chief, time.monotonic())
        if event["event"] == "count" and self._chief is None:
            before = self._counts.get(event["name"], 0) if self._settings.chief else None  # None: the chief's is lost
            self._counts[event["name"]] = (before or 0) + event["number"]
            self._send([(event["rank"], {"kind": "counted", "request": event["request"], "before": before})])
        elif self._status is not None and event["event"] == "counters":
            self._status.take(event, time.monotonic())
        elif self._status is not None and event["event"] == "summaries":
            self._status.take_directory(event["directory"])
        elif self._job is not None:
            self._job.handle(event, time.monotonic())
            if self._runner is not None and event["event"] in runner_link.REPORTED:
                self._runner.send({key: value for key, value in event.items() if key != "traceback"})
        elif self._chief is not None:
            self._chief.send(event)

    def _send(self, messages: list[tuple[int | None, Event]]) -> None:
        for rank, message in messages:
            if self._status is not None:
                self._status.note(message)
            if message.get("opens"):  # else the death of a rank opens it
                self._open_stderr()
            if message["kind"] == "announce" and self._stderr >= 0:  # of this node, which is mpirun's as a rule
                self._print(f"allred: {message['text']}\n")
                continue
            line = json.dumps({"rank": rank, "message": message})
            for link in self._links if rank is None else filter(None, [self._links_by_rank.get(rank)]):
                link.send_line(line)
            self._deliver(rank, message)

    def _deliver(self, rank: int | None, message: Event) -> None:
        """Handle a message on this node."""
        living = [each for each in self._ranks.values() if not each.dead]
        if rank is not None:
            if rank in self._ranks:
                self._ranks[rank].send(message)
        elif message["kind"] in ("verdict", "gone"):
            if message["kind"] == "verdict":
                self._has_verdict = True
            else:
                self._gone[message["rank"]] = message
                if message["rank"] in self._ranks:
                    self._ranks[message["rank"]].ending = "has failed"
            for each in living:
                each.send(message)
        elif message["kind"] == "signal":
            number = message["number"]
            for each in living:
                if number == signal.SIGUSR1 and not process_state.handles(each.pid, number):
                    continue  # it would be killed by a warning
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(each.pidfd, number)
        elif message["kind"] == "query":
            states, stacks = self._states(stacks=self._settings.stacks)
            self._report({"event": "states", "query": message["query"], "states": states, "stacks": stacks})
        elif message["kind"] == "collect":
            self._report_counters(message["number"], message["what"])
        elif message["kind"] == "kill":
            for each in living:
                if (each.left and not self._settings.launcher) or (
                    "rank" in message and message["rank"] != each.number
                ):
                    continue  # it ends by itself, or is not meant
                with contextlib.suppress(ProcessLookupError):  # it has just died
                    signal.pidfd_send_signal(each.pidfd, signal.SIGKILL)
        elif message["kind"] == "announce" and message["rank"] in self._ranks:
            self._print(f"allred: {message['text']}\n")

    def _report_counters(self, number: int, what: str) -> None:
        """Report what monitors show of the ranks of this node. what: STEPS, COUNTERS or STATES."""
        steps = [(rank, *each.steps()) for rank, each in self._ranks.items()]
        ranks = {} if what == STEPS else {rank: each.monitored() for rank, each in self._ranks.items()}
        for rank, state in self._states()[0].items() if what == STATES else ():
            ranks[rank]["state"] = state
        self._report({"event": "counters", "number": number, "steps": steps, "ranks": ranks})

    def _states(self, stacks: bool = False) -> tuple[dict[int, str], dict[str, list[int]]]:
        """Return the states of the ranks of this node; and with `stacks` each stack, as text, with its ranks."""
        states = {each.number: each.state() for each in self._ranks.values()}
        asked = [each for each in self._ranks.values() if not states[each.number] or (stacks and each.has_stack)]
        ranks = {each.number: (each.pidfd, each.stack_signal, each.pipe) for each in asked}

        def ask_threads() -> None:
            for each in asked:
                each.send({"kind": "threads"})

        texts = process_state.read_stacks(ranks, ask_threads if stacks else None)
        found: dict[str, list[int]] = {}
        left = timings.STACKS_CHARS
        for each in asked:
            program, others = process_state.split_threads(texts[each.number], each.main_thread)
            states[each.number] = states[each.number] or process_state.program_line(program)
            stack = process_state.shown_stack(program, others) if stacks and each.has_stack else ""
            left -= 0 if stack in found else len(stack)
            if stack and left >= 0:
                found.setdefault(stack, []).append(each.number)
        return states, found

    def _open_stderr(self) -> None:
        """Open the stderr of the job."""
        if self._stderr < 0:
            living = [rank.pid for rank in self._ranks.values() if not rank.dead]
            self._stderr = self._launchers.open_stderr(living)
            self._last_death = time.monotonic()

    def _print(self, line: str) -> None:
        """Write a line to the job's stderr if it is open, and close it."""
        descriptor, self._stderr = self._stderr, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.write(descriptor, line.encode())
            os.close(descriptor)


def main() -> None:
    """See detached.py."""
    serve(lambda settings: Watcher(WatcherSettings(**settings)))
