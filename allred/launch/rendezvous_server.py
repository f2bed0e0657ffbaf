"""The process at which tasks meet: it listens at the first task's address, and is gone when they are.

Each task has a connection to it for life, which tells of its end: the kernel closes it, however it ends. Until all are
there, that says who is missing; then it says "go", and each task makes another one, which its MPI speaks PMI-1 over.
From a task come "up" and "left", a word a line. What goes to a task after "go" is a line for its person: it ends there.

If the first task ends before all were there, so does this; the others go on knocking at its address. So does a task
that is started again while the job that it was of still runs.
"""

import contextlib
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Hashable, Sequence

from allred.channel import Channel, Listener, dispatch
from allred.detached import serve
from allred.launch.rendezvous_state import PURPOSE, Message, RendezvousState

DEATH_S = 0.5  # for the others to fail by themselves of what a task has failed of
_TICK_S = 0.1


class RendezvousServer:
    """The settings: addresses (of tasks, by name), secret, listener (a descriptor), pid (of the first task)."""

    def __init__(self, settings: Message) -> None:
        self._secret: str = settings["secret"]
        self._first = next(iter(settings["addresses"]))
        self._state = RendezvousState(settings["addresses"])
        self._selector = selectors.DefaultSelector()
        self._tasks: dict[str, Channel] = {}
        self._pmi: Pmi | None = None
        self._speakers: dict[int, Channel] = {}  # connections of MPI, by rank
        self._later: list[tuple[float, list[str], str]] = []  # what to tell to whom, and when
        self._over_at = float("inf")
        self._first_task = os.pidfd_open(settings["pid"])
        self._selector.register(self._first_task, selectors.EVENT_READ, self._lose_first)
        listening = socket.socket(fileno=settings["listener"])
        self._listener = Listener(self._selector, listening, PURPOSE, self._secret, self._take, self._refusal)

    def run(self) -> None:
        """Until the last task is gone."""
        while self._tasks or time.monotonic() < self._over_at:
            dispatch(self._selector, _TICK_S)
            self._listener.close_expired()
            now = time.monotonic()
            for _, names, text in [each for each in self._later if now >= each[0]]:
                self._say(names, text)
            self._later = [each for each in self._later if now < each[0]]

    def _watch(self, channel: Channel, hear: Callable[[], object], lost: Callable[[], None]) -> None:
        def ready() -> None:
            try:
                hear()
            except Exception:  # closed, or not the protocol: no bytes of a peer may end this process
                self._close(channel)
                lost()

        self._selector.register(channel.connection, selectors.EVENT_READ, ready)

    def _close(self, channel: Channel) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(channel.connection)
        channel.connection.close()

    def _say(self, names: list[str], text: str) -> None:
        for name in names:
            if name in self._tasks:
                self._tasks[name].send_line(text)

    # New connections.

    def _refusal(self, host: str, has: bool) -> str:
        text = f"has a different ALLRED_SECRET than {self._first}"
        if has != bool(self._secret):
            one, none = "an ALLRED_SECRET", "no ALLRED_SECRET"
            text = f"has {one if has else none}, but {self._first} has {none if has else one}"
        text += "; set the same ALLRED_SECRET for all tasks"
        self._notice(f"a task at {host} was refused: it {text}")
        return f"this task {text}"

    def _take(self, channel: Channel, messages: list[Message]) -> None:
        """Take the new channel of a task, or of its MPI."""
        hello = messages[0]
        if "rank" in hello:
            return self._take_speaker(channel, hello)
        if late := self._state.late(hello):
            self._watch(channel, channel.receive, lambda: None)  # until this process ends
            return channel.send({"missing": [late]})
        refusal = self._state.come(hello)
        if refusal:
            self._notice(refusal)
            channel.send({"refused": refusal})
            return channel.connection.close()
        name = hello["task"]
        self._watch(channel, lambda: self._hear_task(name), lambda: self._lose(name))
        self._tasks[name] = channel
        if self._state.began:
            self._pmi = Pmi(self._state.nodes())
            self._send_to_all({"go": True})
        else:
            self._tell_missing()

    # Tasks.

    def _notice(self, text: str) -> None:
        """Say it to those who wait."""
        if not self._state.began:
            self._send_to_all({"notice": text})

    def _tell_missing(self) -> None:
        self._send_to_all({"missing": self._state.missing()})

    def _send_to_all(self, message: Message) -> None:
        for channel in self._tasks.values():
            channel.send(message)

    def _hear_task(self, name: str) -> None:
        for word in self._tasks[name].receive_lines():
            {"up": self._state.up, "left": self._state.left}[word](name)
        self._end()

    def _lose(self, name: str) -> None:
        del self._tasks[name]
        started = self._state.began
        if started:
            self._over_at = time.monotonic()
        names, text = self._state.go(name)
        if started:
            self._later.append((time.monotonic() + DEATH_S, names, text))
            self._end()
        elif name == self._first:
            self._lose_first()
        else:
            self._tell_missing()

    def _lose_first(self) -> None:
        """The first task has ended, or given up. If not all were there, others are to find another at its address."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._first_task)
        if not self._state.began:
            for channel in self._tasks.values():
                self._close(channel)
            self._tasks.clear()
            self._over_at = time.monotonic()

    def _end(self) -> None:
        self._say(self._state.end(), "")

    # MPI.

    def _take_speaker(self, channel: Channel, hello: Message) -> None:
        rank = int(hello["rank"])
        if self._pmi is None or rank in self._speakers:
            return channel.connection.close()
        self._watch(channel, lambda: self._hear_mpi(rank), lambda: self._lose_speaker(rank))
        self._speakers[rank] = channel
        channel.send({"speak": True})

    def _lose_speaker(self, rank: int) -> None:
        self._speakers.pop(rank, None)

    def _hear_mpi(self, rank: int) -> None:
        assert self._pmi is not None
        for line in self._speakers[rank].receive_lines():
            for other, answer in self._pmi.hear(rank, line):
                if other in self._speakers:
                    self._speakers[other].send_line(answer)


def _prepare(settings: Message) -> tuple[Message, Callable[[], None]]:
    process = RendezvousServer(settings)
    return {}, process.run


def main() -> None:
    """See detached.py."""
    serve(_prepare)


_MAXES = "cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024"


def mapping(nodes: Sequence[Hashable]) -> str:
    """MPICH's PMI_process_mapping, where nodes[r] names the node of rank r: (first node, nodes, ranks of each) blocks.

    >>> mapping(["a", "a", "b", "a"])
    '(vector,(0,1,2),(1,1,1),(0,1,1))'
    """
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    blocks: list[list[int]] = []
    for node in nodes:
        if blocks and blocks[-1][0] == numbers[node]:
            blocks[-1][1] += 1
        else:
            blocks.append([numbers[node], 1])
    return f"(vector,{','.join(f'({node},1,{count})' for node, count in blocks)})"


class Pmi:
    """Of a world of so many ranks as there are nodes given.

    Its name is one of its own: MPICH names its shared memory by it, and would take that of a job that was killed.
    """

    def __init__(self, nodes: Sequence[Hashable]) -> None:
        self._name = f"allred_{secrets.token_hex(8)}"
        self._size = len(nodes)
        self._values = {"PMI_process_mapping": mapping(nodes)}
        self._in_barrier: set[int] = set()

    def hear(self, rank: int, line: str) -> list[tuple[int, str]]:
        """What to say to whom on a line of that rank. Raises ValueError if it is none of PMI-1."""
        words = dict(word.partition("=")[::2] for word in line.split())
        command = words.get("cmd", "")
        if command == "put":
            self._values[words.get("key", "")] = words.get("value", "")
            return [(rank, "cmd=put_result rc=0 msg=success")]
        if command == "get":
            value = self._values.get(words.get("key", ""))
            found = f"rc=0 value={value}" if value is not None else "rc=1 msg=key_not_found"
            return [(rank, f"cmd=get_result {found}")]
        if command == "barrier_in":
            self._in_barrier.add(rank)
            if len(self._in_barrier) < self._size:
                return []
            self._in_barrier.clear()
            return [(each, "cmd=barrier_out rc=0") for each in range(self._size)]
        if command == "abort":  # allred's own exit protocol ends the others
            return []
        answer = {
            "init": "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=2",
            "get_maxes": _MAXES,
            "get_appnum": "cmd=appnum rc=0 appnum=0",
            "get_my_kvsname": f"cmd=my_kvsname rc=0 kvsname={self._name}",
            "get_universe_size": f"cmd=universe_size rc=0 size={self._size}",
            "finalize": "cmd=finalize_ack rc=0",
        }.get(command)
        if answer is None:
            raise ValueError(f"not of PMI-1, or not needed by MPICH: {line!r}")
        return [(rank, answer)]
