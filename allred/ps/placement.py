"""Placement of parameters on servers: a pure function of names, shapes and dtypes, with the same result on every rank.

By bytes, the default: from the largest tensor to the smallest, each goes to the server with the fewest bytes so far. A
tensor that would lift the server more than a slack above the even share is cut: the server is filled up to the even
share, and the rest is placed like a tensor. A cut fills a server, so P servers take at most P - 1 cuts. The slack is
2 % of the mean, but at least SMALL_BYTES: no tensor of that size is cut, and no server gets more than share + slack.
"""

import collections
import dataclasses
import difflib
import functools
import hashlib
import heapq
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from allred.arrays import amount, name_of
from allred.errors import InputError
from allred.fusion import Tensor
from allred.validators import integer
from allred.wording import count

How = str | Callable[[Tensor], int] | Mapping[str, int]

_NAMES = {
    "bytes": "by bytes",
    "round_robin": "round robin, whole tensors",
    "greedy": "greedy by bytes, whole tensors",
}
SMALL_BYTES = 65536  # 7 us at 10 GB/s: less than the cost of a second message
SHOWN_SERVERS, SHOWN_SPLITS = 8, 4  # in a report


@dataclasses.dataclass(frozen=True)
class Piece:
    """Elements `start` to `stop` of the flattened tensor number `tensor`, on one server."""

    tensor: int
    start: int
    stop: int
    server: int


@dataclasses.dataclass(frozen=True)
class Placement:
    """Placement of each element of each tensor on one server. how: description of the strategy.

    The pieces are sorted by tensor and start. A tensor without elements has one piece without elements.
    """

    tensors: tuple[Tensor, ...]
    servers: int
    pieces: tuple[Piece, ...]
    how: str

    def of(self, server: int) -> list[Piece]:
        """Return the pieces on a server, sorted by tensor and start."""
        return [piece for piece in self.pieces if piece.server == server]

    @property
    def imbalance(self) -> float:
        """Largest share / mean share - 1: 0.0 if all are equal, servers - 1 if one server has all."""
        total = sum(self.loads)
        return max(self.loads) * self.servers / total - 1 if total else 0.0

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the placement, 16 hex digits. Ranks with equal fingerprints have equal placements."""
        tensors = [[name, shape, name_of(dtype), dtype.str] for name, shape, dtype in self.tensors]
        pieces = [(piece.tensor, piece.start, piece.stop, piece.server) for piece in self.pieces]
        text = json.dumps([self.how, self.servers, tensors, pieces])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def report(self) -> str:
        """Return at most 13 lines of text: the load of each server (of many, the fullest), and the largest splits."""
        loads, total = self.loads, sum(self.loads) or 1
        groups = [list(parts) for _, parts in itertools.groupby(self.pieces, lambda piece: piece.tensor)]
        splits = sorted((parts for parts in groups if len(parts) > 1), key=lambda parts: -sum(map(self._bytes, parts)))
        whole = collections.Counter(parts[0].server for parts in groups if len(parts) == 1)
        parts_on = collections.Counter(piece.server for parts in splits for piece in parts)
        lines = [
            f"{count(len(groups), 'tensor')}, {amount(sum(loads))}, on {count(self.servers, 'server')}, "
            f"{self.how}; imbalance {self.imbalance:.1%}, {len(splits)} split"
        ]
        servers = sorted(range(self.servers), key=lambda server: -loads[server])
        shown = SHOWN_SERVERS - (self.servers > SHOWN_SERVERS)  # the last line describes the others
        for server in sorted(servers[:shown]):
            parts = f", {count(parts_on[server], 'part')}" if parts_on[server] else ""
            size = f"{amount(loads[server])}, {loads[server] / total:.1%}"
            lines.append(f"server {server}: {count(whole[server], 'tensor')}{parts}, {size}")
        if others := servers[shown:]:
            lines.append(f"{len(others)} others: {amount(loads[others[-1]])} to {amount(loads[others[0]])} each")
        for pieces in splits[:SHOWN_SPLITS]:
            where = ", ".join(f"{amount(self._bytes(piece))} on {piece.server}" for piece in pieces[:SHOWN_SERVERS])
            more = ", ..." * (len(pieces) > SHOWN_SERVERS)
            lines.append(f"split: {self.tensors[pieces[0].tensor]} in {len(pieces)}: {where}{more}")
        return "\n".join(lines)

    def _bytes(self, piece: Piece) -> int:
        return (piece.stop - piece.start) * self.tensors[piece.tensor].dtype.itemsize

    @functools.cached_property
    def loads(self) -> list[int]:
        """The bytes of parameters on each server."""
        loads = [0] * self.servers
        for piece in self.pieces:
            loads[piece.server] += self._bytes(piece)
        return loads


def place(tensors: Sequence[Tensor], servers: int, how: How = "bytes", split: bool = True) -> Placement:
    """Place `tensors` on servers 0 to `servers` - 1. The result is the same on every rank and in every run.

    how: "bytes"        evenly by bytes; tensors of more than 64 KiB are cut between elements where needed
         "round_robin"  tensor i on server i % servers, whole: TensorFlow's default
         "greedy"       in order, each whole on the first server with the fewest bytes so far:
                        TensorFlow's GreedyLoadBalancingStrategy with byte_size_load_fn
         a function     f(tensor) -> server, whole
         a dict         name -> server, whole; the other tensors by bytes
    split: False for an optimizer that needs whole tensors; "bytes" and a dict then cut none.
    Raises InputError: servers is no integer >= 1; `how` is none of these; the dict has an unknown name; an index is
    not that of a server; the function raises.

    >>> tensors = [Tensor("table", (1000, 300), np.dtype("f4")), Tensor("bias", (300,), np.dtype("f4"))]
    >>> for piece in place(tensors, servers=2).pieces:
    ...     print(piece)
    Piece(tensor=0, start=0, stop=150150, server=0)
    Piece(tensor=0, start=150150, stop=300000, server=1)
    Piece(tensor=1, start=0, stop=300, server=1)
    """
    servers = integer("place: servers", servers, 1, "pass the number of ranks that are parameter servers")
    given = _given(tensors, servers, how)
    loads = [0] * servers
    for index, server in given.items():
        loads[server] += tensors[index].nbytes
    left = [index for index in range(len(tensors)) if index not in given]
    if how != "greedy":
        left.sort(key=lambda index: -tensors[index].nbytes)
    pieces = [Piece(index, 0, tensors[index].elements, server) for index, server in given.items()]
    pieces += _fill(tensors, left, loads, cut=split and how != "greedy")
    pieces.sort(key=lambda piece: (piece.tensor, piece.start))
    return Placement(tuple(tensors), servers, tuple(pieces), _describe(how, split, len(given), len(left)))


def _fill(tensors: Sequence[Tensor], order: Sequence[int], loads: Sequence[int], cut: bool) -> list[Piece]:
    """Place the tensors in `order`, each on the server with the fewest bytes. loads: bytes on each server before."""
    pieces = []
    total = sum(tensors[index].nbytes for index in order)
    # The even share: the bytes on each of the k emptiest servers after they have taken all, for the best k. A server
    # that already has more gets nothing.
    share = min(-(-(total + held) // k) for k, held in enumerate(itertools.accumulate(sorted(loads)), 1))
    limit = share + max(SMALL_BYTES, (total + sum(loads)) // len(loads) // 50)
    heap = sorted((load, server) for server, load in enumerate(loads))
    for index in order:
        start, stop, itemsize = 0, tensors[index].elements, tensors[index].dtype.itemsize
        while True:
            load, server = heap[0]
            fits = not cut or load + (stop - start) * itemsize <= limit
            end = stop if fits else start + max(1, (share - load) // itemsize)
            pieces.append(Piece(index, start, end, server))
            heapq.heapreplace(heap, (load + (end - start) * itemsize, server))
            if end == stop:
                break
            start = end
    return pieces


def check_placement(how: object) -> None:
    """Raise InputError unless `how` is a placement for `place`."""
    known = how in _NAMES if isinstance(how, str) else isinstance(how, Mapping) or callable(how)
    if not known:
        raise InputError(
            f"placement={how!r} must be 'bytes', 'round_robin', 'greedy', a function of a tensor that returns its "
            "server, or a dict from tensor names to servers"
        )


def _given(tensors: Sequence[Tensor], servers: int, how: How) -> dict[int, int]:
    """Return {tensor: server} of the tensors that `how` places independently of the others."""
    check_placement(how)
    if isinstance(how, Mapping):
        names = {tensor.name for tensor in tensors}
        for name in how:
            if name not in names:
                raise InputError(f"place: no tensor has the name {name!r}; {_suggest(name, names)}")
        chosen = {name: _index(server, servers, f"the dict places {name!r}") for name, server in how.items()}
        return {index: chosen[tensor.name] for index, tensor in enumerate(tensors) if tensor.name in chosen}
    if callable(how):
        return {index: _call(how, tensor, servers) for index, tensor in enumerate(tensors)}
    return {index: index % servers for index in range(len(tensors))} if how == "round_robin" else {}


def _call(function: Callable[[Tensor], int], tensor: Tensor, servers: int) -> int:
    try:
        server = function(tensor)
    except Exception as error:
        raise InputError(
            f"place: {_name(function)} raised {error!r} for {tensor}; it must return a server for every tensor"
        ) from error
    return _index(server, servers, f"{_name(function)} places {tensor}")


def _index(server: object, servers: int, who: str) -> int:
    if isinstance(server, bool) or not isinstance(server, (int, np.integer)) or not 0 <= server < servers:
        raise InputError(
            f"place: {who} on server {server!r}, but the servers are 0 to {servers - 1}; give one of these, as an int"
        )
    return int(server)


def _suggest(name: object, names: Iterable[str]) -> str:
    names = sorted(names)
    close = difflib.get_close_matches(str(name), names, n=3)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return f"the tensors are {', '.join(map(repr, names[:8]))}{' ...' * (len(names) > 8)}"


def _describe(how: How, split: bool, given: int, left: int) -> str:
    by_bytes = "by bytes" if split else "by bytes, whole tensors"
    if isinstance(how, str):
        return by_bytes if how == "bytes" else _NAMES[how]
    return f"{given} by name, {left} {by_bytes}" if isinstance(how, Mapping) else f"by {_name(how)}, whole tensors"


def _name(function: object) -> str:
    """Return the name of a function. Its repr has an address, which differs between ranks."""
    return f"function {getattr(function, '__qualname__', type(function).__qualname__)}"
