"""Point-to-point communication: send and recv between two ranks of a communicator.

Messages are independent of collectives and of their order. Those with the same sender, receiver and tag are received in
the order in which they are sent. One message:

    1  the sender sends a record: its dtype and shape, or why its arguments cannot be used
    2  the receiver replies with its own record; if the two differ, both ranks raise the same error
    3  the sender sends the bytes in chunks

A send completes only after the receiver has started to receive the last chunk. The messages travel on the `Messages` of
the communicator (messages.py). Like collectives, they make progress while this rank waits for something.
"""

import functools
import operator
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from allred import arrays, world
from allred.arrays import Array
from allred.comm.arguments import target_of
from allred.comm.group import Group
from allred.comm.messages import Messages
from allred.comm.work import Steps, Work, WorkQueue
from allred.errors import InputError, MismatchError, RemoteRankError

CHUNK_BYTES = 2**20
_RECORD = struct.Struct("<B511s")  # 1 if the arguments are invalid; dtype and shape, or the error
_RECORDS, _REPLIES, _BYTES = range(3)  # each uses its own tags of `Messages`
_MAX_QUEUES = 64  # above this number of queues the idle ones are removed


class PointToPoint:
    """Sends and receives of this rank in `group`."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._queues: dict[tuple[str, str, str], WorkQueue] = {}  # by direction, peer and tag

    def send(self, value: Any, dest: Any, tag: Any) -> Work[None]:
        """Start to send `value`; see Communicator.send."""

        def steps() -> Steps[None]:
            messages, tags, peer = self._messages, self._tags(tag), self._peer(dest)
            data, text, problem = _checked(lambda: arrays.as_host_array(value))
            mine = _RECORD.pack(problem, text)
            yield messages.send(_as_record(mine), peer, tags[_RECORDS])
            reply = np.empty(_RECORD.size, np.uint8)
            yield messages.receive(reply, peer, tags[_REPLIES])
            self._compare(mine, reply.tobytes(), self._group.rank, peer, tag)
            stage = np.empty(min(data.nbytes, CHUNK_BYTES), np.uint8)
            for start in range(0, data.nbytes, CHUNK_BYTES):
                part = arrays.as_bytes(data)[start : start + CHUNK_BYTES]
                stage[: part.size] = part
                yield messages.send(stage[: part.size], peer, tags[_BYTES], synchronous=True)

        return self._start("send", dest, tag, f"send(to {dest}, tag {tag})", steps())

    def recv(self, array: Any, source: Any, tag: Any) -> Work[int]:
        """Start to receive into `array`; see Communicator.recv."""

        def steps() -> Steps[int]:
            messages, tags = self._messages, self._tags(tag)
            target, text, problem = _checked(lambda: target_of(array, in_place=True))
            theirs = np.empty(_RECORD.size, np.uint8)
            yield (found := messages.receive(theirs, -1 if source is None else self._peer(source), tags[_RECORDS]))
            peer = found.sender
            mine = _RECORD.pack(problem, text)
            yield messages.send(_as_record(mine), peer, tags[_REPLIES])
            self._compare(theirs.tobytes(), mine, peer, self._group.rank, tag)
            flat = arrays.flat(target)
            stage = np.empty(min(flat.nbytes, CHUNK_BYTES), np.uint8)
            for start in range(0, flat.nbytes, CHUNK_BYTES):
                part = arrays.as_bytes(flat)[start : start + CHUNK_BYTES]
                yield messages.receive(stage[: part.size], peer, tags[_BYTES], waits_for_peers=False)
                part[:] = stage[: part.size]
            arrays.copy_back(target, flat)
            return self._group.ranks[peer]

        sender = "any rank" if source is None else source
        return self._start("recv", source, tag, f"recv(from {sender}, tag {tag})", steps())

    def close(self) -> bool:
        """End all messages. Return whether they were complete."""
        pending = [queue for queue in self._queues.values() if not queue.idle]
        if (messages := self._group.backend.messages) is not None:
            messages.close(pending)
        return not pending

    def _start(self, kind: str, peer: Any, tag: Any, title: str, steps: Steps[Any]) -> Work[Any]:
        if len(self._queues) > _MAX_QUEUES:
            self._queues = {key: queue for key, queue in self._queues.items() if not queue.idle}
        key = kind, str(peer), str(tag)
        if key not in self._queues:
            self._queues[key] = WorkQueue(self._group.queue.timeout_s, members=self._members(peer))
            self._queues[key].connection_error = functools.partial(self._lost, peer)
            world.queues().add(self._queues[key])
        queue, collectives = self._queues[key], self._group.queue
        queue.timeout_s, queue.quiet = collectives.timeout_s, collectives.quiet  # as set by allred.patience
        return queue.start(title, steps)

    def _members(self, peer: Any) -> list[int] | None:
        """Return the world ranks of this rank and a peer; None if the peer may be any rank."""
        here = world.current_or_none()
        if here is None or peer not in self._group.ranks:
            members = self._group.queue.members
            return None if members is None else list(members)
        return [rank + here.topology.servers for rank in (self._group.number, peer)]

    def _peer(self, number: Any) -> int:
        """Return the index of another rank. Raises InputError."""
        ranks = self._group.ranks
        if number not in ranks or number == self._group.number:
            others = [rank for rank in ranks if rank != self._group.number]
            raise InputError(f"rank {number!r} is not another rank of the communicator; expected one of {others}")
        return ranks.index(operator.index(number))

    @property
    def _messages(self) -> Messages:
        """The messages of the communicator. Raises InputError if it has none."""
        if (messages := self._group.backend.messages) is None:
            raise InputError(f"send and recv need several processes; this is backend {self._group.backend.name}")
        return messages

    def _lost(self, peer: Any) -> RemoteRankError | None:
        """Return the error if the connection with a rank, None for any, was lost."""
        lost = {} if self._group.backend.messages is None else self._group.backend.messages.lost_peers()
        for rank, host in ((self._group.ranks[index], host) for index, host in lost.items()):
            if peer in (None, rank):
                text = f"the connection with rank {rank} on host {host} was lost: its process may have been killed"
                return RemoteRankError(text, rank, host, 1)
        return None

    def _tags(self, tag: Any) -> tuple[int, int, int]:
        """Return the tags of records, replies and bytes. Raises InputError."""
        last = self._messages.last_tag // 3 - 1
        if not isinstance(tag, int) or not 0 <= tag <= last:
            raise InputError(f"tag={tag!r} must be a whole number from 0 to {last}")
        return 3 * tag, 3 * tag + 1, 3 * tag + 2

    def _compare(self, sent: bytes, expected: bytes, sender: int, receiver: int, tag: int) -> None:
        """Raise the same error on both ranks if their records differ."""
        ranks = self._group.ranks
        both = [(_RECORD.unpack(record), ranks[each]) for record, each in ((sent, sender), (expected, receiver))]
        (one, other) = (f"{_text(text)} on rank {rank}" for (_, text), rank in both)
        title = f"message from rank {ranks[sender]} to rank {ranks[receiver]}, tag {tag}"
        for (problem, text), rank in both:
            if problem:
                raise InputError(f"{title}: rank {rank}: {_text(text)}")
        if sent != expected:
            raise MismatchError(f"{title}: the array differs: {one}; {other}; both must have the same dtype and shape")


def _checked(convert: Callable[[], Array]) -> tuple[Array, bytes, bool]:
    """Return an array, the text of its record, and whether that is a problem: then the array is empty."""
    try:
        array = convert()
        arrays.copied_code(array.dtype)
    except Exception as error:
        problem = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        return np.empty(0, np.uint8), problem.encode()[:500], True
    return array, arrays.describe(array.shape, array.dtype).encode(), False


def _text(padded: bytes) -> str:
    """The text of a record, whose last character may be cut."""
    return padded.rstrip(bytes(1)).decode(errors="ignore")


def _as_record(record: bytes) -> Array:
    return np.frombuffer(record, np.uint8)
