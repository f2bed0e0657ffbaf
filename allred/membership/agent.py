"""The agent of a host in a job of `allred run --elastic`: it starts the processes of its host and reports their deaths.

    process  -- Unix socket -->  agent of its host  -- TCP -->  `allred run`, which has the WorldCoordinator

The agent is the parent of its processes, so it knows each death at once. Each process has a session of its own. The
agent is also the watcher of its node (watch/process.py): it has one `Watcher` for each world. The agent passes messages
between the processes and `allred run`; it decides nothing. All processes end with the agent, and the agent ends with
its connection to `allred run`.

A message is a JSON object. To the agent:

    start                 names of processes to start
    poison, to            a world that these processes have to leave, and why: `text`, `rank`, `code`
    signal, to            the number of a signal to these processes; to their whole sessions if it is SIGKILL
    to, ...               any other message is passed on to these processes
    alive                 the answer to the heartbeat of that number

From the agent:

    agent                 the name of the host; the first message
    died, how, code       this process has died
    from, ...             a message of this process; its first one has `pid`
    alive                 a heartbeat, with its number

Of a process: `watch`, the settings of the watcher, with the answer `watcher`; `failed`, the last line of the traceback
with which it ends, and its exit `code`; other messages are passed on.

A world is poisoned by a number in memory that the process shares with its agent (agent_connection.py): a process tests
it in each wait, without a system call.
"""

import contextlib
import functools
import json
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from allred.launcher_variables import AGENT
from allred.membership.agent_process import NEVER, AgentProcess, prepare
from allred.runtime.channel import Channel, connect
from allred.runtime.loop import Loop
from allred.runtime.timings import HEARTBEAT_PERIOD_S, LEASE_S, LEAVE_S, RETRY_S
from allred.watch import process_state
from allred.watch.process import Watcher
from allred.watch.rank import accept, owner, refuse
from allred.watch.records import WatcherSettings

Message = dict[str, Any]


class Agent:
    """The agent of this host. Keys of settings: address, port and secret of `allred run`; host, the name of this host;
    program, environ and directory of the processes."""

    def __init__(self, settings: Message) -> None:
        self._settings = settings
        self._loop = Loop()
        self._processes: dict[str, AgentProcess] = {}
        self._is_connected = True
        self._watchers: list[Watcher] = []
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unix.bind("")  # Linux chooses a name, which is not a file
        self._name = unix.getsockname().decode("latin-1").lstrip("\0")
        unix.listen(1024)
        self._loop.on_input(unix, lambda: self._accept(unix))
        self._run = connect((settings["address"], settings["port"]), settings["purpose"], settings["secret"])
        self._run.serve(self._loop, self._handle, self._lose_run)
        self._run.send({"agent": settings["host"]})
        self._beats: dict[int, float] = {}  # heartbeats that were not answered, and when they were sent
        self._sent, self._lease_from = 0, time.monotonic()
        self._beat()

    def run(self) -> None:
        """Run until the connection to `allred run` ends."""
        now = time.monotonic()
        while self._is_connected:
            now = self._loop.turn(min((each.tick_s(now) for each in self._watchers), default=float("inf")))
            for watcher in self._watchers:
                watcher.tick(now)
                if watcher.is_done(now):
                    watcher.end()
                    self._watchers = [each for each in self._watchers if each is not watcher]
        for process in self._processes.values():
            process.kill()

    def _beat(self) -> None:
        """Send a heartbeat, or end if none has been answered for LEASE_S: then `allred run` may count this host as
        lost, and the others go on without it."""
        self._loop.after(HEARTBEAT_PERIOD_S, self._beat)
        now = time.monotonic()
        if now > self._lease_from + LEASE_S:
            self._is_connected = False
        self._sent += 1
        self._beats[self._sent] = now
        self._run.send({"alive": self._sent})

    def _lose_run(self, error: Exception) -> None:
        self._is_connected = False

    # Messages of `allred run`.

    def _handle(self, messages: list[Message]) -> None:
        for message in messages:
            if "alive" in message:
                self._lease_from = self._beats[message["alive"]]
                self._beats = {each: at for each, at in self._beats.items() if each > message["alive"]}
            elif "start" in message:
                for name in message["start"]:
                    self._start(name)
            else:
                self._pass_on(message.pop("to"), message)

    def _pass_on(self, names: list[str], message: Message) -> None:
        line = (json.dumps(message) + "\n").encode()
        for process in [self._processes[name] for name in names if name in self._processes]:
            if "signal" in message:
                self._signal(process, message["signal"])
                continue
            if process.channel is not None:
                process.channel.send_bytes(line)
            if "poison" in message:
                process.poison(message["poison"])
            elif "stop" in message or "restart" in message:
                process.poison(NEVER)

    def _signal(self, process: AgentProcess, number: int) -> None:
        """Send a signal to a process. SIGUSR1, the warning of a batch system, is kept until the process handles it."""
        if process.name not in self._processes:
            return
        if number == signal.SIGKILL:
            process.kill()
        elif number == signal.SIGUSR1 and not process_state.handles(process.rank_pid, number):
            self._loop.after(RETRY_S, functools.partial(self._signal, process, number))
        else:
            with contextlib.suppress(OSError):
                os.kill(process.rank_pid, number)

    def _start(self, name: str) -> None:
        here = self._run.connection.getsockname()[0]
        environ = {**self._settings["environ"], AGENT: f"{self._name} {name} {here}"}
        try:
            popen = subprocess.Popen(
                self._settings["program"], env=environ, cwd=self._settings["directory"], stdin=subprocess.DEVNULL,
                start_new_session=True, preexec_fn=prepare,
            )  # fmt: skip
        except OSError as error:
            how = f"cannot start {self._settings['program'][0]}: {error.strerror or error}"
            return self._run.send({"died": name, "how": how, "code": 127})
        self._processes[name] = process = AgentProcess(name, popen)
        self._loop.on_input(process.pidfd, functools.partial(self._end, process))

    # Processes.

    def _accept(self, listening: socket.socket) -> None:
        if (found := accept(listening, 2)) is None:
            return
        connection, hello, files = found
        try:
            process, pidfd, page = self._processes[hello["name"]], *files
            process.page = mmap.mmap(page, mmap.PAGESIZE)
        except (OSError, ValueError, KeyError, TypeError):
            return refuse(connection, files)
        os.close(page)
        process.rank_pid, _ = owner(connection)
        if process.rank_pid == process.popen.pid:
            os.close(pidfd)
        else:
            process.rank_pidfd = pidfd
            self._loop.on_input(pidfd, functools.partial(self._end, process))
        process.channel = Channel(connection)
        process.channel.serve(self._loop, functools.partial(self._report, process), lambda error: None)
        self._run.send({"from": process.name, "pid": process.rank_pid})

    def _report(self, process: AgentProcess, messages: list[Message]) -> None:
        for message in messages:
            if "watch" in message:
                self._watch(process, message["watch"])
            elif "failed" in message:
                process.failure, process.failed_with = message["failed"], message["code"]
                self._loop.after(LEAVE_S, functools.partial(self._kill_failed, process))  # its threads may run on
            else:
                self._run.send({"from": process.name, **message})

    def _kill_failed(self, process: AgentProcess) -> None:
        if process.name in self._processes:
            process.is_late = True
            process.kill()

    def _watch(self, process: AgentProcess, settings: Message) -> None:
        """Be the watcher of this node, in a new world. The watcher of the world before ends after its ranks have left
        it."""
        for each in self._watchers:
            each.replace()
        try:
            watcher = Watcher(WatcherSettings(**settings), self._loop)
        except OSError as error:
            answer = {"problem": str(error.strerror or error)}
        else:
            watcher.begin()
            self._watchers, answer = [*self._watchers, watcher], watcher.answer
        if process.channel is not None:
            process.channel.send({"watcher": answer})

    def _end(self, process: AgentProcess) -> None:
        """The process that the agent has started, or the rank, has died. Kill all that is left of it, and report."""
        pidfd, pid, has_ended = process.pidfd, process.popen.pid, process.popen.poll() is not None
        if process.rank_pidfd >= 0 and _is_dead(process.rank_pidfd):
            process.has_success = process.has_success or not process_state.exit_status(
                process.rank_pidfd, process.rank_pid
            )
            if process.has_success and not has_ended:  # the program that has started the rank goes on
                return self._loop.remove(process.rank_pidfd)
            if not process.has_success:
                pidfd, pid = process.rank_pidfd, process.rank_pid
        how, code = process_state.describe_end(pidfd, pid)
        if pidfd == process.pidfd and has_ended and process.popen.returncode >= 0:
            code = process.popen.returncode
            how = f"ended with exit code {code}"
        elif process.is_late:
            how, code = (
                f"failed with exit code {process.failed_with}, and was killed {LEAVE_S:g} s later",
                process.failed_with,
            )
        process.kill()
        if process.rank_pidfd >= 0 and not _is_dead(process.rank_pidfd):
            return self._loop.remove(process.pidfd)  # its end follows
        if not process.is_reported:
            process.is_reported = True
            if process.channel is not None:  # its last messages
                with contextlib.suppress(OSError, ValueError):
                    process.channel.connection.setblocking(False)
                    while messages := process.channel.receive():
                        self._report(process, messages)
                process.channel.close()
            failure = process.failure if code else ""
            how += f": {failure}" if failure else ""
            self._run.send({"died": process.name, "how": how, "code": code, "failure": failure})
        if process.popen.poll() is not None:
            for each in (process.pidfd, process.rank_pidfd):
                if each >= 0:
                    self._loop.remove(each)
                    os.close(each)
            del self._processes[process.name]
        elif pidfd != process.pidfd:
            self._loop.remove(pidfd)


def _is_dead(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def main() -> None:
    """Run the agent. The settings are a line of stdin."""
    settings = json.loads(sys.stdin.readline())
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    Agent(settings).run()
