"""The rendezvous process of tasks without mpirun. It listens at the first task's address, and ends after the tasks.

Each task keeps a connection, which the kernel closes when the task ends. Until all tasks have connected, this process
sends the names of some missing ones, to a task when it connects and to all at intervals; then it sends "go", and each
task opens a second connection, for exchanges between the tasks or for PMI-1. A task sends the lines "starts" and "up",
at the begin and the end of each init(), and "left". A line sent to a task after "go" is a message to the user that ends
it.

If the first task ends before all have connected, this process ends; the others try to connect again. A task that is
restarted while its job runs waits for the end of the job.

The hello of a task has `task`, its name; `digest` of the addresses of all tasks; `node`, `host`, `pid`, `user` (a
number); or `problem`, if it cannot take part. A task with another digest gets "differs", and connects again with
`addresses`, all of them by name. The reason of a refusal is sent to the refused task and to the waiting tasks, because
these may be wrong. The job continues, because the user may start the right task.
"""

import base64
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import secrets
import socket
import zlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from allred.runtime.channel import Channel, Listener, user_of_peer
from allred.runtime.detached import serve
from allred.runtime.loop import Loop
from allred.runtime.timings import LINE_BYTES, RENDEZVOUS_DEATH_S, REPORT_TASKS_S
from allred.wording import count

Message = dict[str, Any]
Answer = tuple[Iterable[int], str]  # ranks, and a line to each of them

PURPOSE = "rendezvous"  # of the channels to this process (allred.runtime.channel)
_NAMED = 4  # tasks that a message names


def digest(addresses: Mapping[str, str]) -> str:
    """Return a hash of the addresses of all tasks, in their order."""
    return hashlib.blake2b(json.dumps([*addresses.items()]).encode(), digest_size=16).hexdigest()


@dataclasses.dataclass
class _Task:
    host: str
    pid: int
    node: str
    user: int
    is_connected: bool = True
    begun: int = 0  # how many times it has begun to start
    started: int = 0  # and has started, so that the watchers run
    ended: str = ""  # "left" after success, "gone" after a failure


class RendezvousState:
    """The state machine: which of the tasks at `addresses` are connected, by name, in rank order. It has no clock,
    socket or process."""

    def __init__(self, addresses: dict[str, str]) -> None:
        self._addresses, self._names, self._digest = addresses, list(addresses), digest(addresses)
        self._tasks: dict[str, _Task] = {}
        self._missing = dict.fromkeys(self._names)
        self._of_node: dict[str, dict[str, None]] = {}  # the tasks of each node
        self._gone: list[str] = []  # that have failed
        self.all_connected = False
        self._end_reported = False

    # Until all tasks have connected.

    def connect(self, hello: Message) -> str:
        """Handle a hello. Return why it is refused; "" if it is accepted."""
        name = str(hello.get("task"))
        who = f"{name} (pid {hello.get('pid')} on {hello.get('host')})"
        if hello.get("problem"):
            return f"{who} cannot start: {hello['problem']}"
        if name not in self._addresses or not self._has_same_addresses(hello):
            return f"{who} has another cluster than {self._names[0]}: {self._difference(name, hello)}"
        if name in self._tasks:
            other = self._tasks[name]
            return (
                f"{who} was started a second time; pid {other.pid} on {other.host} is {name} already. Give each task "
                "its own task_index"
            )
        task = _Task(str(hello["host"]), int(hello["pid"]), str(hello["node"]), int(hello["user"]))
        there = next(iter(self._of_node.get(task.node, ())), name)
        if there != name and (user := self._tasks[there].user) != task.user:
            return (
                f"{who} is of user {task.user}, but {there} of user {user}; on one machine they share "
                "memory, so start them as the same user"
            )
        self._of_node.setdefault(task.node, {})[name] = None
        self._tasks[name] = task
        del self._missing[name]
        self.all_connected = len(self._tasks) == len(self._names)
        return ""

    def needs_addresses(self, hello: Message) -> bool:
        """Return whether the task of a hello has to send its addresses: they differ, and the refusal says where."""
        return not ("problem" in hello or "addresses" in hello or self._has_same_addresses(hello))

    def _has_same_addresses(self, hello: Message) -> bool:
        theirs = hello.get("addresses")
        return hello.get("digest") == self._digest or (isinstance(theirs, dict) and digest(theirs) == self._digest)

    def wait_of_restarted(self, hello: Message) -> str:
        """Return what a restarted task of a running job has to wait for; "" for other tasks."""
        task = self._tasks.get(str(hello.get("task"))) if self.all_connected else None
        if task is None or task.is_connected or hello.get("problem") or not self._has_same_addresses(hello):
            return ""
        first, address = next(iter(self._addresses.items()))
        return f"the end of the job at {first} ({address}), in which pid {task.pid} on {task.host} was {hello['task']}"

    def _difference(self, name: str, hello: Message) -> str:
        theirs = hello.get("addresses")
        theirs = theirs if isinstance(theirs, dict) else {}
        for task in [*self._addresses, *theirs]:
            ours, other = (tasks.get(task, "nothing") for tasks in (self._addresses, theirs))
            if ours != other:
                return f"there {task} is {other}, here it is {ours}. Give all tasks exactly the same addresses"
        return "the order of the tasks differs" if name in self._addresses else f"it has no {name}"

    def missing(self) -> list[str]:
        """Return the first tasks that have not connected, with addresses, and the number of others."""
        found = [f"{name} ({self._addresses[name]})" for name in itertools.islice(self._missing, _NAMED)]
        others = len(self._missing) - len(found)
        return [*found, *[count(others, "other task")] * (others > 0)]

    @property
    def size(self) -> int:
        return len(self._names)

    def nodes(self) -> list[str]:
        return [self._tasks[name].node for name in self._names]

    # Afterwards.

    def begins(self, name: str) -> list[str]:
        """A task begins to start. Return messages for it: of the tasks that have ended, and for which it would wait."""
        self._tasks[name].begun += 1
        return [self._end_of(other) for other in self._gone if name in self.wait_for(other)]

    def started(self, name: str) -> None:
        """A task has started; the watchers report its end."""
        self._tasks[name].started += 1

    def wait_for(self, name: str) -> list[str]:
        """Return the tasks that wait, while they start, for a task that has failed."""
        gone = self._tasks[name]
        others = self._tasks.items() if gone.ended == "gone" else ()
        return [each for each, other in others if not other.ended and gone.started < other.begun > other.started]

    def _end_of(self, name: str) -> str:
        task = self._tasks[name]
        return f"{name} (pid {task.pid} on {task.host}) has ended while the tasks started; this task ends, too"

    def finished(self, name: str) -> None:
        """A task has ended without an error, and waits in MPI_Finalize for the others."""
        self._tasks[name].ended = "left"

    def disconnect(self, name: str) -> str:
        """A task has disconnected. Return the message for those that wait for it: `wait_for`."""
        task = self._tasks[name]
        task.is_connected = False
        if not self.all_connected:
            del self._tasks[name], self._of_node[task.node][name]
            self._missing = {each: None for each in self._names if each not in self._tasks}
            return ""
        if not task.ended:
            task.ended = "gone"
            self._gone.append(name)
        return self._end_of(name)

    def blocked_in_finalize(self) -> list[str]:
        """Return the tasks to end, which block in MPI_Finalize: those that left, if all have ended and one failed."""
        if not self._gone or self._end_reported or not all(task.ended for task in self._tasks.values()):
            return []
        self._end_reported = True
        return [name for name, task in self._tasks.items() if task.ended == "left"]


class RendezvousServer:
    """Keys of settings: addresses of the tasks by name; secret; listener, a descriptor; pid of the first task."""

    def __init__(self, settings: Message) -> None:
        self._secret: str = settings["secret"]
        self._first = next(iter(settings["addresses"]))
        self._state = RendezvousState(settings["addresses"])
        self._loop = Loop()
        self._tasks: dict[str, Channel] = {}
        self._pmi: Pmi | None = None
        self._pmi_channels: dict[int, Channel] = {}  # PMI-1 connections, by rank
        self._is_over = False  # the first task has ended, or another one after all had connected
        self._will_report = False  # the missing tasks, to all
        self._first_task = os.pidfd_open(settings["pid"])
        self._loop.on_input(self._first_task, self._on_first_task_end)
        listening = socket.socket(fileno=settings["listener"])
        tasks = len(settings["addresses"])  # all of them may connect at once
        Listener(self._loop, listening, PURPOSE, self._secret, self._accept, self._refusal, expected=tasks)

    answer: ClassVar[Message] = {}  # to the task that has started this process

    def run(self) -> None:
        """Run until all tasks have disconnected."""
        while self._tasks or not self._is_over:
            self._loop.turn()

    def _send_text(self, names: list[str], text: str) -> None:
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

    def _accept(self, channel: Channel, messages: list[Message]) -> None:
        """Handle the new channel of a task, or of its MPI."""
        hello = messages[0]
        if not self._secret and (user := user_of_peer(channel.connection)) not in (None, os.geteuid()):
            if user >= 0:
                who = f"this task is of user {user}, but {self._first} of user {os.geteuid()}"
                channel.send({"refused": f"{who}; set the same ALLRED_SECRET for all tasks"})
            return channel.close()
        if "rank" in hello:
            return self._accept_pmi(channel, hello)
        if late := self._state.wait_of_restarted(hello):
            channel.serve(self._loop, lambda messages: None, lambda error: None)  # until this process ends
            return channel.send({"missing": [late]})
        if self._state.needs_addresses(hello):
            channel.send({"differs": True})
            return channel.close()
        refusal = self._state.connect(hello)
        if refusal:
            self._notice(refusal)
            channel.send({"refused": refusal})
            return channel.close()
        name = hello["task"]
        handle, lost = lambda words: self._handle_task(name, words), lambda error: self._on_task_end(name)
        channel.serve(self._loop, handle, lost, channel.receive_lines)
        self._tasks[name] = channel
        if self._state.all_connected:
            self._pmi = Pmi(self._state.nodes())
            self._send_to_all({"go": True})
        else:
            channel.send({"missing": self._state.missing()})
            self._report_missing()

    # Tasks.

    def _report_missing(self) -> None:
        """Send the missing tasks to all that wait, soon: once for all tasks that connect until then."""

        def report() -> None:
            self._will_report = False
            if not self._state.all_connected:
                self._send_to_all({"missing": self._state.missing()})

        if not self._will_report:
            self._will_report = True
            self._loop.after(REPORT_TASKS_S, report)

    def _notice(self, text: str) -> None:
        """Send a notice to the waiting tasks."""
        if not self._state.all_connected:
            self._send_to_all({"notice": text})

    def _send_to_all(self, message: Message) -> None:
        line = (json.dumps(message) + "\n").encode()
        for channel in self._tasks.values():
            channel.send_bytes(line)

    def _handle_task(self, name: str, words: list[str]) -> None:
        for word in words:
            if word == "starts":
                for text in self._state.begins(name)[:1]:
                    self._send_text([name], text)
            elif word == "up":
                self._state.started(name)
            elif word == "left":
                self._state.finished(name)
            else:
                raise ValueError(word)
        self._send_text(self._state.blocked_in_finalize(), "")

    def _on_task_end(self, name: str) -> None:
        del self._tasks[name]
        started = self._state.all_connected
        if started:
            self._is_over = True
        text = self._state.disconnect(name)
        if started:
            self._loop.after(RENDEZVOUS_DEATH_S, lambda: self._send_text(self._state.wait_for(name), text))
            self._send_text(self._state.blocked_in_finalize(), "")
        elif name == self._first:
            self._on_first_task_end()
        else:
            self._report_missing()

    def _on_first_task_end(self) -> None:
        """The first task has ended. Unless all had connected, the others try to connect to its address again."""
        self._loop.remove(self._first_task)
        if not self._state.all_connected:
            for channel in self._tasks.values():
                channel.close()
            self._tasks.clear()
            self._is_over = True

    # MPI.

    def _accept_pmi(self, channel: Channel, hello: Message) -> None:
        rank = int(hello["rank"])
        if self._pmi is None or rank in self._pmi_channels or rank not in range(self._state.size):
            return channel.close()
        handle, lost = lambda lines: self._handle_pmi(rank, lines), lambda error: self._pmi_channels.pop(rank, None)
        channel.serve(self._loop, handle, lost, channel.receive_lines)
        self._pmi_channels[rank] = channel
        channel.send({"connected": True})

    def _handle_pmi(self, rank: int, lines: list[str]) -> None:
        assert self._pmi is not None
        for line in lines:
            for ranks, answer in self._pmi.handle(rank, line):
                encoded = f"{answer}\n".encode()
                for other in ranks:
                    if other in self._pmi_channels:
                        self._pmi_channels[other].send_bytes(encoded)


def main() -> None:
    """See detached.py."""
    serve(RendezvousServer)


_MAXES = "cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024"
MAPPING_CHARS = 960  # of PMI_process_mapping: MPICH reads lines of 1024


def mapping(nodes: Sequence[Hashable]) -> str:
    """Return MPICH's PMI_process_mapping, blocks of (first node, nodes, ranks per node). nodes: the node of each rank.

    >>> mapping(["a", "a", "b", "b", "a"])
    '(vector,(0,2,2),(0,1,1))'
    """
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    blocks: list[list[int]] = []
    for node, ranks in itertools.groupby(nodes):
        number, size = numbers[node], len(list(ranks))
        if blocks and [sum(blocks[-1][:2]), blocks[-1][2]] == [number, size]:
            blocks[-1][1] += 1
        else:
            blocks.append([number, 1, size])
    return f"(vector,{','.join(f'({first},{many},{size})' for first, many, size in blocks)})"


@functools.lru_cache(64)
def members_of(text: str, size: int) -> Mapping[int, None]:
    """Return the ranks that `wording.ranges_in_order` has written, in their order. Raises ValueError if they are not
    different ranks of a job of `size` ranks.

    >>> list(members_of("4,0-2", size=5))
    [4, 0, 1, 2]
    """
    found: dict[int, None] = {}
    for word in text.split(","):
        low, _, high = word.partition("-")
        ranks = range(int(low), int(high or low) + 1)
        if not (0 <= ranks.start < ranks.stop <= size) or any(rank in found for rank in ranks):
            raise ValueError(f"not ranks of a job of {size}: {text[:100]}")
        found.update(dict.fromkeys(ranks))
    return found


def decode_values(text: str, number: int) -> list[bytes]:
    """Return the values of an exchange with this number of members. text: of all lines. Raises ValueError."""
    unpacker = zlib.decompressobj()
    try:
        values = unpacker.decompress(base64.b64decode(text), number * LINE_BYTES).split(b",")
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(values) != number or not unpacker.eof:
        raise ValueError(f"not the values of an exchange of {number} ranks")
    decoded = {value: base64.b64decode(value) for value in set(values)}
    return [decoded[value] for value in values]


class Exchanges:
    """Exchanges of values between some ranks of a job of `size` ranks. No sockets.

    client                                  server
    cmd=allgather key= ranks= value=        cmd=allgathered key= left= values=     see `handle`
    cmd=missing key=                        cmd=missing key= ranks=                some that have not sent a value

    ranks: the members, in their order (`wording.ranges_in_order`). value: base64. When all members have sent a value,
    all get the same lines. Each line has a part; `left` is the number of lines that follow. The parts together are the
    values in the order of the members, joined by commas, compressed (values of different ranks are nearly equal), in
    base64.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: dict[str, dict[int, str]] = {}  # by rank, of exchanges that are not complete
        self._members: dict[str, Mapping[int, None]] = {}  # of these exchanges

    def handle(self, rank: int, words: dict[str, str]) -> list[Answer]:
        """Handle the words of a line of a rank. Return the answers."""
        key = words.get("key", "")
        if words.get("cmd") == "missing":
            left = (each for each in self._members.get(key, ()) if each not in self._values[key])
            return [([rank], f"cmd=missing key={key} ranks={','.join(map(str, itertools.islice(left, _NAMED)))}")]
        members = self._members.get(key) or members_of(words.get("ranks", ""), self._size)
        if rank not in members:
            raise ValueError(f"rank {rank} is not one of {words.get('ranks', '')[:100]}")
        self._members[key] = members
        values = self._values.setdefault(key, {})
        values[rank] = words.get("value", "")
        if len(values) < len(members):
            return []
        del self._values[key], self._members[key]
        text = base64.b64encode(zlib.compress(",".join(values[each] for each in members).encode(), 1)).decode()
        parts = [text[start : start + LINE_BYTES // 2] for start in range(0, len(text), LINE_BYTES // 2)]
        return [
            (members, f"cmd=allgathered key={key} left={len(parts) - 1 - index} values={part}")
            for index, part in enumerate(parts)
        ]


class Pmi:
    """The PMI-1 server of one world: MPICH's processes start and find each other by this protocol. No sockets.

    nodes: the node of each rank. Values that processes have put are visible to all after the next barrier.

        client                                  server
        cmd=init pmi_version= pmi_subversion=   cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=2
        cmd=get_maxes                           cmd=maxes rc=0 kvsname_max= keylen_max= vallen_max=
        cmd=get_appnum                          cmd=appnum rc=0 appnum=0
        cmd=get_my_kvsname                      cmd=my_kvsname rc=0 kvsname=
        cmd=get_universe_size                   cmd=universe_size rc=0 size=
        cmd=put kvsname= key= value=            cmd=put_result rc=0 msg=success
        cmd=get kvsname= key=                   cmd=get_result rc=0 value=     (rc=1 without a value)
        cmd=barrier_in                          cmd=barrier_out rc=0           to all, once all are in
        cmd=finalize                            cmd=finalize_ack rc=0
        cmd=allgather key= ranks= value=        see `Exchanges`; not of PMI-1
        cmd=missing key=                        see `Exchanges`

    The name is unique: MPICH derives the name of its shared memory from it, and would use that of a killed job.
    """

    def __init__(self, nodes: Sequence[Hashable]) -> None:
        self._name = f"allred_{secrets.token_hex(8)}"
        self._size = len(nodes)
        self._values = {"PMI_process_mapping": mapping(nodes)}
        self._in_barrier: set[int] = set()
        self._exchanges = Exchanges(self._size)

    def handle(self, rank: int, line: str) -> list[Answer]:
        """Handle a line of a rank. Return the answers. Raises ValueError if the command is unknown."""
        words = dict(word.partition("=")[::2] for word in line.split())
        command = words.get("cmd", "")
        if command == "put":
            self._values[words.get("key", "")] = words.get("value", "")
            return [([rank], "cmd=put_result rc=0 msg=success")]
        if command == "get":
            value = self._values.get(words.get("key", ""))
            found = f"rc=0 value={value}" if value is not None else "rc=1 msg=key_not_found"
            return [([rank], f"cmd=get_result {found}")]
        if command == "barrier_in":
            self._in_barrier.add(rank)
            if len(self._in_barrier) < self._size:
                return []
            self._in_barrier.clear()
            return [(range(self._size), "cmd=barrier_out rc=0")]
        if command in ("allgather", "missing"):
            return self._exchanges.handle(rank, words)
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
        return [([rank], answer)]
