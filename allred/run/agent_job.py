"""One start of a job of `allred run --elastic`: agents, their processes, and the worlds that these form.

It has the interface of `Job`, and the WorldCoordinator (membership/agreement.py). A rank that dies is replaced by a
spare, or by a new process while restarts are left; else the others go on without it.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import operator
import os
import shlex
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from allred.errors import AllredError, ConfigError
from allred.launch.rendezvous_server import Exchanges
from allred.membership.agreement import Finished, Form, Orders, Poison, Ready, Restart, Running, Stop, WorldCoordinator
from allred.run import host_list
from allred.run.restarts import End
from allred.runtime import detached, timings
from allred.runtime.channel import Channel, Message
from allred.runtime.loop import Loop, Timer
from allred.watch import runner_link
from allred.wording import count

_REPORTS = {"ready": Ready, "running": Running, "finished": Finished}


@dataclasses.dataclass(eq=False)
class _JobProcess:
    """A process of a rank or spare. world_rank: its rank in its last world; -1: none."""

    name: str
    host: str
    pid: int = 0
    has_joined: bool = False
    is_leaving: bool = False
    world_rank: int = -1
    how: str = ""  # it ended
    code: int = 0
    failure: str = ""  # the last line of its traceback


class _AgentLink:
    """The agent of a host. heard_at: when its last message came, in seconds of time.monotonic(); 0: none has."""

    def __init__(self, host: str, popen: "subprocess.Popen[str]") -> None:
        self.host, self.popen = host, popen
        self.channel: Channel | None = None
        self.started_at, self.heard_at = time.monotonic(), 0.0


class AgentJob:
    """A running elastic job.

    assigned: the number of ranks of each host. slots: how many processes each host may run; empty: no limit. program:
    the command of a process. environ: its variables. listening: where this process listens: address, port and secret.
    spares: the number of processes that wait. minimum: with fewer ranks the job ends. replacements: how many processes
    may be started for dead ones. start_s: ALLRED_START_TIMEOUT_S, for an agent to connect. limit_s: ALLRED_TIMEOUT_S.
    say: prints a line.
    """

    def __init__(
        self, assigned: Mapping[str, int], slots: Mapping[str, int], program: list[str], environ: Mapping[str, str],
        listening: tuple[str, int, str], loop: Loop, *, spares: int, minimum: int, replacements: int, start_s: float,
        limit_s: float, say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._loop, self._say, self._limit_s, self._timers = loop, say, limit_s, list[Timer]()
        self._slots, self._start_s, self._what_to_start = slots, start_s, (program, environ, listening)
        self.replacements, self._most = replacements, replacements
        self._coordinator = WorldCoordinator(sum(assigned.values()), minimum)
        self._exchanges, self._generation, self._ranks = Exchanges(0), 0, dict[str, int]()  # of the last world
        self._agents, self._processes = dict[str, _AgentLink](), dict[str, _JobProcess]()
        self._starting: set[str] = set()  # processes that live and have not joined
        self._lost_at: float | None = None  # when the first death since the last world was reported
        self._dead: list[_JobProcess] = []  # since then, members
        self._waits_since = float("inf")  # since when the same members are awaited
        self._is_terminated = self._is_training = False
        self._kept: list[int] = []  # signals
        self._pending = 0  # processes that will be started for dead ones
        self._last_end: _JobProcess | None = None  # the last member of the last world that has ended, or any process
        self.lost_hosts: set[str] = set()
        self._restart = ""
        for host, ranks in assigned.items():
            self._agents[host] = self._start_agent(host)
            for _ in range(ranks):
                self._start(host)
        for _ in range(spares):
            self._start_anywhere()
        self._look_for_lost()

    # Agents.

    def _start_agent(self, host: str) -> _AgentLink:
        program, environ, (address, port, secret) = self._what_to_start
        settings = {
            "address": address, "port": port, "secret": secret, "purpose": runner_link.PURPOSE, "host": host,
            "program": program, "environ": dict(environ), "directory": os.getcwd(),
        }  # fmt: skip
        words = detached.program_of("allred.membership.agent")
        if not host_list.is_local(host):
            start = host_list.agent(os.environ)
            is_argument_list = os.path.basename(start[0]) == "srun"  # ssh passes one line to a shell
            words = [*start, host, *(words if is_argument_list else [shlex.join(words)])]
        try:
            popen = subprocess.Popen(words, stdin=subprocess.PIPE, text=True, start_new_session=True)
        except OSError as error:
            raise ConfigError(f"the agent of {host} cannot be started by {words[0]}: {error.strerror}") from None
        assert popen.stdin is not None
        with contextlib.suppress(OSError), popen.stdin:  # it may have ended already
            popen.stdin.write(json.dumps(settings) + "\n")
        return _AgentLink(host, popen)

    def connect(self, link: Channel, messages: list[Message]) -> None:
        """Take the connection of an agent. messages: its first ones."""
        agent = self._agents[messages[0]["agent"]]
        agent.channel, agent.heard_at = link, time.monotonic()
        link.serve(self._loop, lambda messages: self._handle(agent, messages), lambda error: self._lose_agent(agent))
        link.send({"start": [each.name for each in self._processes.values() if each.host == agent.host]})
        for number in self._kept:
            self._tell([each.name for each in self._processes.values() if each.host == agent.host], {"signal": number})
        self._handle(agent, messages[1:])

    def _start(self, host: str) -> None:
        """Start one more process on a host; if its agent has not connected yet, as soon as it has."""
        name, channel = str(len(self._processes)), self._agents[host].channel
        if not self._is_over:
            self._processes[name] = _JobProcess(name, host)
            self._starting.add(name)
            if channel is not None:
                channel.send({"start": [name]})

    def _start_anywhere(self, preferred: str = "") -> None:
        """Start one more process on this host if it has a free slot, else on the host with the most free ones."""

        running = Counter(process.host for process in self._processes.values() if not process.how)

        def free(host: str) -> float:
            return self._slots.get(host, 0 if self._slots else math.inf) - running[host]

        if hosts := self._usable_hosts:
            self._start(preferred if preferred in hosts and free(preferred) > 0 else max(reversed(hosts), key=free))

    def _handle(self, agent: _AgentLink, messages: list[Message]) -> None:
        agent.heard_at = time.monotonic()
        for message in messages:
            if "alive" in message:
                if agent.channel is not None:
                    agent.channel.send(message)
            elif "died" in message:
                self._processes[message["died"]].failure = message.get("failure", "")
                self._lose(self._processes[message["died"]], message["how"], message["code"])
            else:
                self._handle_process(self._processes[message["from"]], message)

    def _handle_process(self, process: _JobProcess, message: Message) -> None:
        if "pid" in message:
            process.pid, process.has_joined = message["pid"], True
            self._starting.discard(process.name)
            self._send(self._coordinator.join(process.name, int(process.name)))
            self._leave_removed_hosts()
        elif "line" in message:
            self._exchange(process, message)
        else:
            report, given = _REPORTS[message["report"]], {"generation": message["generation"]}
            given |= {"step": message["step"]} if report is Ready else {}
            self._send(self._coordinator.receive(process.name, report(**given)))

    def _exchange(self, process: _JobProcess, message: Message) -> None:
        if message["generation"] != self._coordinator.generation or process.name not in self._ranks:
            return
        words = dict(word.partition("=")[::2] for word in message["line"].split())
        for ranks, line in self._exchanges.handle(self._ranks[process.name], words):
            names = [*self._ranks]
            self._tell([names[rank] for rank in ranks], {"line": line, "generation": message["generation"]})

    def _tell(self, names: Iterable[str], message: Message) -> None:
        """Send a message to processes: one to the agent of each host."""
        of_host: dict[str, list[str]] = {}
        for name in names:
            if not self._processes[name].how:
                of_host.setdefault(self._processes[name].host, []).append(name)
        for host, there in of_host.items():
            if (channel := self._agents[host].channel) is not None:
                channel.send({"to": there, **message})

    def _lose_agent(self, agent: _AgentLink) -> None:
        """The connection of an agent has ended. Its processes end with it."""
        agent.channel = None
        self._lost_at = self._lost_at or time.monotonic()
        self._after(timings.AGENT_END_S, lambda: self._lose_host(agent, "has ended with the agent of its host"))

    def _lose_host(self, agent: _AgentLink, how: str) -> None:
        for process in [*self._processes.values()]:
            if process.host == agent.host and not process.how:
                self._lose(process, how, 1)

    # Worlds.

    def _lose(self, process: _JobProcess, how: str, code: int) -> None:
        """A process has died."""
        process.how, process.code = how, code
        self._starting.discard(process.name)
        if not self._is_terminated and (self._last_end is None or process.name in self._ranks):
            self._last_end = process
        members = self._coordinator.members
        is_replaced = code and process.has_joined and self.replacements and not self._is_over
        left = len({*members, *self._coordinator.spares} - {process.name}) if is_replaced else 0
        if is_replaced and left < self._coordinator.target:
            self.replacements, self._pending = self.replacements - 1, self._pending + 1
            self._after(timings.RESTART_DELAY_S, lambda: self._replace(process.host))
        if process.name not in members or code:
            self._lose_now(process)
        elif all(self._processes[name].how for name in members):  # all have ended with success
            self._send(self._coordinator.receive(process.name, Finished(self._coordinator.generation)))
        else:  # the others are about to end, too, as a rule
            self._after(timings.LEFT_RANK_S, lambda: self._lose_now(process))

    def _lose_now(self, process: _JobProcess) -> None:
        if process.name in self._coordinator.members:
            self._lost_at = self._lost_at or time.monotonic()
            self._dead.append(process)
        self._send(self._coordinator.lost(process.name))

    def _replace(self, host: str) -> None:
        """Start a process for a dead one, on its host if that is not lost."""
        self._pending -= 1
        self._start_anywhere(host)
        self._look()

    @property
    def _usable_hosts(self) -> list[str]:
        """The hosts that may get processes: their agents live, or may still connect."""
        living = [host for host, agent in self._agents.items() if agent.channel is not None or not agent.heard_at]
        return [host for host in living if host in self._slots or not self._slots]

    def _send(self, orders: Orders) -> None:
        """Send the orders of the coordinator."""
        for order, group in itertools.groupby(orders, key=operator.itemgetter(1)):
            names = [name for name, _ in group]
            if isinstance(order, Form):
                if order.generation != self._generation:
                    self._begin_world(order)
                self._tell(names, {"form": vars(order)})
            elif isinstance(order, Poison):
                self._tell(names, {"poison": order.generation, **self._cause()})
            elif isinstance(order, Stop):
                for name in names:
                    self._processes[name].is_leaving = True
                is_over = self._coordinator.end is not None  # then members are about to end by themselves
                self._tell([name for name in names if not (is_over and name in self._ranks)], {"stop": order.reason})
            else:
                self._tell(names, {"restart": order.reason})
        self._waits_since = time.monotonic() if orders else self._waits_since
        self._look()

    def _begin_world(self, form: Form) -> None:
        self._exchanges, self._generation = Exchanges(len(form.members)), form.generation
        self._ranks = {name: rank for rank, name in enumerate(form.members)}
        for name, rank in self._ranks.items():
            self._processes[name].world_rank = rank

    def _cause(self) -> Message:
        """Describe why the world changes, for the error of the ranks."""
        if not self._dead:
            return {"text": "ranks join or leave the job", "rank": -1, "host": "", "code": 1}
        first = self._dead[0]
        text = f"rank {first.world_rank} on {first.host} {first.how}"
        return {"text": text, "rank": first.world_rank, "host": first.host, "code": first.code}

    def _look(self) -> None:
        """Report a new world when all train in it, and end the job if no world can be formed."""
        coordinator = self._coordinator
        is_training = coordinator.phase == "training"
        if is_training and not self._is_training and coordinator.generation > 1:
            self._report_world()
        self._is_training = is_training
        if isinstance(coordinator.end, Restart) and not self._restart:
            self._restart = coordinator.end.reason
            self._end_soon()
        elif self._is_stuck and not self._restart:
            if coordinator.generation:
                size, least = len(coordinator.members), coordinator.minimum
                self._restart = f"{count(size, 'rank')} left, but the job needs {least} (--min-np)"
            else:
                self._restart = "a process ended before all had called allred.init()"
            self._end_soon()

    @property
    def _is_stuck(self) -> bool:
        """Whether no world can be formed: too few processes are left, and none may join."""
        is_short = self._coordinator.phase == "gathering" and self._coordinator.missing() > 0
        return is_short and not (self._starting or self._pending or self._has_success)

    @property
    def _has_success(self) -> bool:
        """Whether a rank of the last world has ended with success. Then the others are about to end, too: they may
        compute alone, after their last operation."""
        return any(self._processes[name].how and not self._processes[name].code for name in self._ranks)

    def _report_world(self) -> None:
        change, now = self._coordinator.change, time.monotonic()
        assert change is not None
        who = " and ".join(f"rank {each.world_rank} on {each.host} (pid {each.pid}) {each.how}" for each in self._dead)
        what = [f"{count(change.size, 'rank')} go on"] if change.size > 1 else ["1 rank goes on"]
        if change.joined:
            what.append(f"{len(change.joined)} of them new")
        if self._what_to_start[1].get("ALLRED_MODE") != "local":  # whose steps are not repeated
            step = f"step {change.step + 1}" if change.step >= 0 else "the first step"
            what.append(f"{step} is " + ("repeated" if change.repeated else "next"))
        if self._lost_at is not None:
            what.append(f"{1000 * (now - self._lost_at):.0f} ms")
        self._say("; ".join([who] * bool(who) + [", ".join(what)]))
        self._lost_at, self._dead = None, []

    def _look_for_lost(self) -> None:
        """Give up hosts without heartbeats. Kill members that do not leave their world, and form a world again that is
        not complete, after a limit."""
        self._after(timings.HEARTBEAT_PERIOD_S, self._look_for_lost)
        for agent in self._agents.values():
            if agent.channel is None and not agent.heard_at:
                self._check_start(agent)
            if agent.channel is not None and self._loop.now > agent.heard_at + timings.LOST_AGENT_S:
                agent.channel.close()
                agent.channel = None
                agent.popen.kill()  # such as ssh, which would wait for the host
                self.lost_hosts.add(agent.host)
                self._lose_host(agent, f"is unreachable: its host has been silent for {timings.LOST_AGENT_S:g} s")
        change = self._coordinator.change
        if self._coordinator.phase == "forming" and change is not None and change.step < 0:
            return  # the programs prepare their state for as long as they need
        late = self._coordinator.waits_for()
        if not late or self._is_over or self._has_success or time.monotonic() < self._waits_since + self._limit_s:
            return
        if self._coordinator.phase == "forming":
            return self._send(self._coordinator.interrupt())
        for name in late:
            process = self._processes[name]
            who = f"rank {process.world_rank} on {process.host} is killed"
            self._say(f"{who}: it {late[name]}, and has not done so for {self._limit_s:g} s (ALLRED_TIMEOUT_S)")
            self._tell([name], {"signal": signal.SIGKILL})
        self._waits_since = time.monotonic()

    def _check_start(self, agent: _AgentLink) -> None:
        """Give up a host whose agent has ended before it has connected, or does not connect."""
        code, waited_s = agent.popen.poll(), self._loop.now - agent.started_at
        if code is None and waited_s < self._start_s:
            return
        agent.heard_at = self._loop.now
        how = f"has ended with exit code {code}"
        if code is None:
            how = f"has not connected for {waited_s:.0f} s (ALLRED_START_TIMEOUT_S)"
            agent.popen.kill()
        self._lose_host(agent, f"was not started: the agent of its host {how}")

    # The interface of `Job`.

    def change_hosts(self, slots: Mapping[str, int], assigned: Mapping[str, int]) -> None:
        """Use other hosts: the ranks of hosts that are not in `slots` leave, and new hosts get processes. slots,
        assigned: as in the constructor."""
        self._slots = slots
        for host in assigned:
            if host not in self._usable_hosts:
                self._agents[host] = self._start_agent(host)
        self._resize(sum(assigned.values()))
        self._leave_removed_hosts()

    def _leave_removed_hosts(self) -> None:
        """Let the processes of removed hosts leave, if others are there which can receive the state."""
        if not self._slots or self._agents.keys() <= self._slots.keys():
            return
        living = [process for process in self._processes.values() if process.has_joined and not process.how]
        removed = [process for process in living if process.host not in self._slots]
        if len(removed) < len(living):
            for process in removed:
                self._send(self._coordinator.leave(process.name))

    def resize(self, target: int) -> str:
        """Change the number of ranks. Spares become ranks, and processes are started for other new ones. Return the
        answer for the user. Raises AllredError if that is not possible."""
        coordinator = self._coordinator
        if not coordinator.generation or self._is_over:
            raise AllredError("the job has no ranks yet, or ends; nothing was changed")
        if target < coordinator.minimum:
            raise AllredError(f"{count(target, 'rank')}, but --min-np is {coordinator.minimum}")
        before = len(coordinator.members)
        self._resize(target)
        return f"{count(target, 'rank')} instead of {before}; the processes go on"

    def _resize(self, target: int) -> None:
        here = [each for each in self._processes.values() if each.host in self._slots or not self._slots]
        left = sum(not (each.how or each.is_leaving) for each in here) + self._pending
        self._send(self._coordinator.resize(target))
        for _ in range(target - left):
            self._start_anywhere()

    def send_signal(self, number: int) -> None:
        """Send a signal to all processes; on hosts whose agents have not connected yet, as soon as they have."""
        if any(not agent.heard_at for agent in self._agents.values()):
            self._kept.append(number)
        self._tell(self._processes, {"signal": number})

    def request_stop(self, reason: str) -> bool:
        """Sessions receive the signal itself."""
        return False

    def terminate(self) -> None:
        """End all processes, after TERMINATE_S by SIGKILL."""
        if not self._is_terminated:
            self.send_signal(signal.SIGTERM)
            self._end_soon(timings.TERMINATE_S)

    @property
    def _is_over(self) -> bool:
        return self._is_terminated or self._coordinator.end is not None

    def _after(self, seconds: float, call: Callable[[], object]) -> None:
        self._timers = [timer for timer in self._timers if timer.at > self._loop.now]
        self._timers.append(self._loop.after(seconds, call))

    def _end_soon(self, seconds: float = 0.0) -> None:
        self._is_terminated = True
        self._after(seconds, lambda: self.send_signal(signal.SIGKILL))

    @property
    def replaced(self) -> int:
        """How many processes were started for dead ones."""
        return self._most - self.replacements

    def has_ended(self) -> bool:
        """Return whether all processes have ended, and the agents. Call it whenever something has happened."""
        if any(not each.how for each in self._processes.values()):
            return False
        agents = [each for each in self._agents.values() if each.popen.poll() is None]
        if agents and not self._is_over and self._pending:
            return False
        for agent in self._agents.values():
            if agent.channel is not None:
                agent.channel.close()
                agent.channel = None
        if agents:
            return False
        for timer in self._timers:
            timer.cancel()
        return True

    def end(self) -> End:
        """Return how it ended."""
        joined = any(each.has_joined for each in self._processes.values())
        last = self._last_end
        if last is None:
            return End(1, "no agent of a host could be started", joined=False)
        if not last.code and (not self._restart or not joined):
            return End(0, joined=joined)
        text = f"rank {last.world_rank} on {last.host} {last.how}" if last.world_rank >= 0 else f"a process {last.how}"
        change = self._coordinator.change
        step = None if change is None else change.step
        why = "; ".join(filter(None, [text, self._restart]))
        return End(last.code or 1, why, exception=last.failure, step=step, joined=joined)
