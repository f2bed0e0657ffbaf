"""The contract of a backend: what every communicator offers, and the few primitives a backend has to supply.

Every collective starts the same way on every backend: the ranks show each other a header (header.py); if they
disagree, or one of them has unusable arguments, all raise the same error and nothing has been moved. Arguments are
checked here, once, so a check that fails on one rank never leaves the others waiting.

Each method starts an operation and returns its Work; `.wait()` gives the result. Operations complete in the order they
were started, and an array belongs to the operation until then. Order of GPU work: an operation on device arrays begins
after what the caller's current stream holds, and `wait` makes the current stream wait for it, not the host.

Results are the same on every rank, bit for bit (but for the payload of a NaN). Whether they are the same from run to
run is the backend's to say.

Ranks may have joined (join.py): to every operation they bring a header that says so. Then the headers differ, nothing
has been moved, and the others move their bytes on a communicator of their own, as if they were all there is.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from allred import arrays
from allred.arrays import Array
from allred.comm import header, objects, work
from allred.comm.arguments import (
    array_call,
    check_name,
    group_call,
    index_of,
    listed,
    source_and_target,
    splits_of,
    target_of,
)
from allred.comm.header import Call, quoted
from allred.comm.ops import ReduceOp
from allred.comm.work import Engine, Steps, Work, WorkQueue
from allred.compression import Compression, narrows
from allred.errors import InputError
from allred.timeline.track import Operation, Track

T = TypeVar("T")

_BEHIND = 16  # operations that were started behind one that differs, and that may explain why


class Communicator(ABC):
    """A group of `size` ranks that move arrays. `name` is the backend's. A root is given as one of `ranks`."""

    name: str

    def __init__(self, rank: int, size: int, timeout_s: float, engine: Engine | None = None) -> None:
        self.rank = rank
        self.size = size
        self.ranks: Sequence[int] = range(size)  # the numbers of its members, as callers know them: for roots and words
        self.queue = WorkQueue(timeout_s, engine)
        work.communicators.add(self.queue)
        self.checks_places = False  # whether all ranks must call an operation at the same line of the program
        self.among: Callable[[Sequence[int]], Steps[Communicator]] | None = None  # makes that of some, by their numbers
        self.unfinished: WeakKeyDictionary[object, str] = WeakKeyDictionary()  # what must end before it joins, in words
        self._active: Communicator | None = None
        self._sequence = 0
        self._sent_bytes = 0

    @property
    def number(self) -> int:
        """This rank's, among `ranks`."""
        return self.ranks[self.rank]

    @property
    def active(self) -> "Communicator":
        """That of the ranks that took part in the last operation: this one, or that of those that have not joined."""
        return self._active or self

    # What a backend supplies. All arrays are flat and contiguous; counts are elements (bytes where the array is bytes).

    @abstractmethod
    def _exchange(self, record: bytes) -> Steps[list[bytes]]:
        """Every rank's record of header.BYTES bytes, in rank order."""

    @abstractmethod
    def _allreduce(self, flat: Array, op: ReduceOp, wire: int = 0) -> Steps[None]:
        """Reduce in place. wire: if it is not 0, the code of the dtype that these wide numbers are to travel in."""

    @abstractmethod
    def _broadcast(self, data: Array, root: int) -> Steps[None]:
        """Bytes of the root into everyone's `data`."""

    @abstractmethod
    def _allgather(self, send: Array, recv: Array, counts: list[int]) -> Steps[None]:
        """Bytes of all ranks, one after the other, into `recv`; counts[r] from rank r."""

    @abstractmethod
    def _alltoall(self, send: Array, recv: Array, counts: Array) -> Steps[None]:
        """Bytes to each rank in order, from each in order; counts[i, j] go from rank i to rank j."""

    @abstractmethod
    def _reducescatter(self, flat: Array, out: Array, counts: list[int], op: ReduceOp) -> Steps[None]:
        """Reduce; rank r gets the r-th part, of counts[r] elements, in `out`."""

    def allocate(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Memory that lives as long as the communicator, and from which it may reduce without a copy."""
        return np.zeros(count, dtype)

    @property
    def sent_bytes(self) -> int:
        """What this rank has brought to allreduces so far, in bytes as they travel. On several nodes these are slices
        of its node's sums, which cross between nodes; alone, backend single, nothing travels."""
        return self._sent_bytes

    def attend(self) -> None:  # noqa: B027  (not a must)
        """See to it that started operations go on while nobody waits for them, if that is possible; else they go on
        when somebody waits, asks whether one is done, or starts another."""

    fuses = False  # whether a group passes as one stream, without a fusion buffer

    def record(self, track: Track) -> None:
        """Have what passes here noted for the timeline."""
        self.queue.track = track

    @property
    def _noted(self) -> Operation | None:
        """The operation whose steps are being taken, in the timeline."""
        return None if self.queue.advancing is None else self.queue.advancing.noted

    def close(self) -> None:
        """Give back what the backend holds; on all ranks. The communicator cannot be used afterwards."""
        self.queue.poison("it was shut down")

    # The collectives.

    def allreduce(
        self, value: Any, op: ReduceOp = ReduceOp.AVERAGE, name: str = "", compression: Compression = Compression.none
    ) -> Work[Array]:
        """The reduction over all ranks of `value` (an array or a number): a new array of the same shape and dtype."""
        return self._start("allreduce", name, self._reduce_one(value, op, name, compression, in_place=False))

    def allreduce_(
        self, array: Array, op: ReduceOp = ReduceOp.AVERAGE, name: str = "", compression: Compression = Compression.none
    ) -> Work[Array]:
        """The same, in place; the result is `array`, which must be writable."""
        return self._start("allreduce", name, self._reduce_one(array, op, name, compression, in_place=True))

    def allreduce_now(
        self, value: Any, in_place: bool, op: ReduceOp, name: str, compression: Compression = Compression.none
    ) -> Array:
        """allreduce or allreduce_, started and waited for. A backend may have a shorter way to the same result."""
        if self.queue.track is not None:
            self.queue.track.call("allreduce")
        start = self.allreduce_ if in_place else self.allreduce
        return start(value, op, name, compression).wait()

    def _reduce_one(
        self, value: Any, op: ReduceOp, name: str, compression: Compression, in_place: bool
    ) -> Steps[Array]:
        source, target = source_and_target(value, in_place)
        call = array_call("allreduce", source, name, op, compression=compression)
        yield from self._reduce(call, [source], [target], op, compression)
        return target

    def grouped_allreduce(
        self,
        group: Sequence[Any],
        op: ReduceOp = ReduceOp.AVERAGE,
        name: str = "",
        compression: Compression = Compression.none,
    ) -> Work[list[Array]]:
        """allreduce of several arrays as one operation; new arrays."""
        return self._start("grouped_allreduce", name, self._reduce_group(group, op, name, compression, in_place=False))

    def grouped_allreduce_(
        self,
        group: Sequence[Array],
        op: ReduceOp = ReduceOp.AVERAGE,
        name: str = "",
        compression: Compression = Compression.none,
    ) -> Work[list[Array]]:
        """The same, in place."""
        return self._start("grouped_allreduce", name, self._reduce_group(group, op, name, compression, in_place=True))

    def grouped_allreduce_now(
        self,
        group: Sequence[Any],
        in_place: bool,
        op: ReduceOp,
        name: str,
        compression: Compression = Compression.none,
    ) -> list[Array]:
        """grouped_allreduce or grouped_allreduce_, started and waited for; see `allreduce_now`."""
        if self.queue.track is not None:
            self.queue.track.call("grouped_allreduce")
        start = self.grouped_allreduce_ if in_place else self.grouped_allreduce
        return start(group, op, name, compression).wait()

    def _reduce_group(
        self, group: Sequence[Any], op: ReduceOp, name: str, compression: Compression, in_place: bool
    ) -> Steps[list[Array]]:
        pairs = [source_and_target(value, in_place) for value in listed(group)]
        sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
        if in_place and arrays.overlap([target for target in targets if target.size]):
            raise InputError("the same memory is in the group twice, and would be reduced twice")
        yield from self._reduce(group_call(sources, name, op, compression), sources, targets, op, compression)
        return targets

    def _reduce(
        self, call: Call, sources: list[Array], targets: list[Array], op: ReduceOp, compression: Compression
    ) -> Steps[None]:
        """Agree on the call, then reduce each source into its target, which is it, or a new contiguous array."""
        group, _ = yield from self._agree(call)
        yield from group._reduce_all(sources, targets, op, compression)

    def _reduce_all(
        self, sources: list[Array], targets: list[Array], op: ReduceOp, compression: Compression
    ) -> Steps[None]:
        for source, target in zip(sources, targets, strict=True):
            if source is not target:
                target[...] = source
            flat = arrays.flat(target)
            wire = compression.value if narrows(flat.dtype, compression.value) else 0
            yield from self._allreduce(flat, op, wire)
            arrays.put_back(target, flat)

    def broadcast(self, value: Any, root: int = 0, name: str = "") -> Work[Array]:
        """The root's `value` as a new array on every rank; shape and dtype must be the same everywhere."""
        return self._start("broadcast", name, self._cast(value, root, name, in_place=False))

    def broadcast_(self, array: Array, root: int = 0, name: str = "") -> Work[Array]:
        """The same, in place."""
        return self._start("broadcast", name, self._cast(array, root, name, in_place=True))

    def _cast(self, value: Any, root: int, name: str, in_place: bool) -> Steps[Array]:
        target = target_of(value, in_place)
        source = index_of(root, self.ranks)
        flat = arrays.flat(target)
        call = array_call("broadcast", target, name, root=self.ranks[source])
        yield from self._agree_and_broadcast(call, flat, source)
        arrays.put_back(target, flat)
        return target

    def _agree_and_broadcast(self, call: Call, flat: Array, root: int) -> Steps[None]:
        group, _ = yield from self._agree(call)
        yield from group._broadcast(arrays.as_bytes(flat), self._root_in(group, root, call))

    def allgather(self, value: Any, name: str = "") -> Work[Array]:
        """All ranks' arrays, joined along the first dimension in rank order; a new array on every rank.

        Ranks may differ in the first dimension. A 0-d value counts as one of shape (1,).
        """

        def steps() -> Steps[Array]:
            source = np.atleast_1d(arrays.as_host_array(value))
            rest = source.shape[1:]
            call = array_call("allgather", source, name, shape=("any", *rest), rows=len(source))
            group, headers = yield from self._agree(call)
            rows = [header.rows_and_note(record)[0] for record in headers]
            result = np.empty((sum(rows), *rest), source.dtype)
            row_bytes = arrays.size_of(rest) * source.itemsize
            send, recv = arrays.as_bytes(source), arrays.as_bytes(result)
            yield from group._allgather(send, recv, [count * row_bytes for count in rows])
            return result

        return self._start("allgather", name, steps())

    def reducescatter(self, value: Any, op: ReduceOp = ReduceOp.AVERAGE, name: str = "") -> Work[Array]:
        """This rank's part of the reduction, split along the first dimension; a new array.

        Where the rows do not divide, the first ranks get one more.
        """

        def steps() -> Steps[Array]:
            source = arrays.as_host_array(value)
            call = array_call("reducescatter", source, name, op)
            if source.ndim == 0:
                raise InputError("a 0-d array has no first dimension to split; use allreduce")
            rest = source.shape[1:]
            rows = arrays.split_sizes(len(source), self.size)
            result = np.empty((rows[self.rank], *rest), source.dtype)
            counts = [count * arrays.size_of(rest) for count in rows]
            yield from self._agree_and_reducescatter(call, arrays.flat(source), result.reshape(-1), counts, op)
            return result

        return self._start("reducescatter", name, steps())

    def _agree_and_reducescatter(
        self, call: Call, flat: Array, out: Array, counts: list[int], op: ReduceOp
    ) -> Steps[None]:
        group, _ = yield from self._agree(call)
        self._require_all(group, call)
        yield from self._reducescatter(flat, out, counts, op)

    def alltoall(self, value: Any, splits: Sequence[int] | None = None, name: str = "") -> Work[tuple[Array, Array]]:
        """Rows to every rank, rows from every rank in rank order: (new array, int64 array of the rows received).

        `splits[r]` rows go to rank r; without it the rows must divide evenly.
        """

        def steps() -> Steps[tuple[Array, Array]]:
            source = np.atleast_1d(arrays.as_host_array(value))
            rest = source.shape[1:]
            sent = splits_of(len(source), splits, self.size)
            call = array_call("alltoall", source, name, shape=("any", *rest))
            group, _ = yield from self._agree(call)
            rows = np.empty((group.size, self.size), np.int64)
            yield from group._allgather(arrays.as_bytes(sent), arrays.as_bytes(rows), [sent.nbytes] * group.size)
            matrix, here = np.zeros((self.size, self.size), np.int64), [self.ranks.index(rank) for rank in group.ranks]
            matrix[here] = rows
            if matrix.sum() != matrix[:, here].sum():
                self._require_all(group, call)
            result = np.empty((int(matrix[:, self.rank].sum()), *rest), source.dtype)
            counts = matrix[np.ix_(here, here)] * (arrays.size_of(rest) * source.itemsize)
            yield from group._alltoall(arrays.as_bytes(source), arrays.as_bytes(result), counts)
            return result, matrix[:, self.rank].copy()

        return self._start("alltoall", name, steps())

    def allgather_object(self, value: Any, name: str = "") -> Work[list[Any]]:
        """Every rank's picklable object, in rank order."""

        def steps() -> Steps[list[Any]]:
            data = objects.dumps(value)
            group, _ = yield from self._agree(Call("allgather_object", name, f"allgather_object(){quoted(name)}"))
            return (yield from objects.gather(group, data))

        return self._start("allgather_object", name, steps())

    def broadcast_object(self, value: Any, root: int = 0, name: str = "") -> Work[Any]:
        """The root's picklable object, on the others a copy of it."""

        def steps() -> Steps[Any]:
            source = index_of(root, self.ranks)
            data = objects.dumps(value if self.rank == source else None)
            title = f"broadcast_object(root={self.ranks[source]}){quoted(name)}"
            call = Call("broadcast_object", name, title, root=self.ranks[source])
            group, _ = yield from self._agree(call)
            received = yield from objects.cast(group, data, self._root_in(group, source, call))
            return value if self.rank == source else received

        return self._start("broadcast_object", name, steps())

    def barrier(self) -> Work[None]:
        """Complete once every rank has started it: the exchange of headers is all it takes."""

        def steps() -> Steps[None]:
            yield from self._meet(Call("barrier", title="barrier()"))

        return self._start("barrier", "", steps())

    def check(
        self, kind: str, title: str, tensors: Sequence[str] = (), settings: str = "", note: int = 0, problem: str = ""
    ) -> Work[list[int]]:
        """That all ranks bring the same title, tensors (a line each) and settings. The result is the `note` of every
        rank that takes part (`active`).

        A note is 0 to 2**64 - 1. A `problem` on any rank, in words, is an InputError on all.
        """

        def steps() -> Steps[list[int]]:
            call = Call(kind, "", title, tuple(tensors), settings, note=note, problem=problem)
            _, headers = yield from self._agree(call)
            return [header.rows_and_note(record)[1] for record in headers]

        return self._start(kind, "", steps())

    def join(self, first: bool) -> Work[int | None]:
        """Be there, and no more, in the next operation of the others: None. If there is none, for all have joined: the
        number of the rank that did so last. first: whether this rank joins with this operation."""

        def steps() -> Steps[int | None]:
            call = Call("join", title="join()", note=first, problem=next(iter(self.unfinished.values()), ""))
            if call.problem:
                yield from self._agree(call)
            headers = yield from self._exchange(self._announce(call))
            if header.agree(headers):
                now = [header.rows_and_note(record)[1] for record in headers]
                return self.ranks[now.index(1)]
            yield from objects.gather(self, objects.dumps(call))
            return None

        return self._start("join", "", steps())

    def _start(self, kind: str, name: str, body: Steps[T]) -> Work[T]:
        """Start an operation. If its arguments cannot be used here, the other ranks are told in place of its header."""

        title = f"{kind}{quoted(name)}".encode(errors="backslashreplace").decode()

        def steps() -> "Steps[T]":  # in quotes, since it would be put together at every operation, for a microsecond
            before = self._sequence
            try:
                check_name(name)
                return (yield from body)
            except Exception as error:
                if self._sequence != before:  # past the headers: the ranks know
                    raise
                problem = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
            yield from self._agree(Call(kind, title=title, problem=problem))
            raise AssertionError("a header with a problem never agrees")

        return self.queue.start(title, steps())

    def _under_way(self, call: Callable[[], Call], number: Callable[[], int]) -> None:
        """Remember what is being waited for, for the words about it, which are rarely needed."""
        assert self.queue.advancing is not None
        self.queue.advancing.described = call, number

    def _place(self) -> str:
        """Where the program started the operation."""
        return self.queue.advancing.place if self.queue.advancing and self.queue.advancing.place else header.call_site()

    def _meet(self, call: Call) -> Steps[None]:
        """That all ranks are in this call, and no more."""
        yield from self._agree(call)

    def _agree(self, call: Call) -> "Steps[tuple[Communicator, list[bytes]]]":
        """The communicator that moves the bytes, and the headers of its ranks, once they are found to agree; else the
        error that every rank raises."""
        headers = yield from self._exchange(self._announce(call))
        if (noted := self._noted) is not None:
            noted.agree()
        if header.agree(headers):
            self._active = None
            return self, headers
        return (yield from self._narrowed(call))

    def _announce(self, call: Call) -> bytes:
        """The header of the call. From here on the other ranks know of it."""
        if self.checks_places and call.kind != "join":  # which ranks do where they like
            call = dataclasses.replace(call, place=self._place())
        number = self._sequence
        if (noted := self._noted) is not None:
            noted.nbytes = call.nbytes
        self._under_way(lambda: call, lambda: number)
        self._sequence += 1
        return call.pack(number)

    def _narrowed(self, call: Call) -> "Steps[tuple[Communicator, list[bytes]]]":
        """As `_agree`, where headers differ: the communicator of those that have not joined, if their calls agree."""
        assert self.queue.advancing is not None
        behind, place = tuple(self.queue.behind(self.queue.advancing, _BEHIND)), self._place()
        found = dataclasses.replace(call, found_at=place, place=place if self.checks_places else "", behind=behind)
        calls = yield from objects.gather(self, objects.dumps(found))
        if self.among is None or any(each.kind == "shutdown" for each in calls):
            raise header.verdict(calls, self.ranks)
        here = [index for index, each in enumerate(calls) if each.kind != "join" or each.problem]
        ranks = [self.ranks[index] for index in here]
        headers = [calls[index].pack(0) for index in here]
        if not header.agree(headers):
            raise header.verdict([calls[index] for index in here], ranks)
        self._active = yield from self.among(ranks)
        return self._active, headers

    def _root_in(self, group: "Communicator", root: int, call: Call) -> int:
        """Where a root of this communicator is in that of those that have not joined."""
        number = self.ranks[root]
        if number not in group.ranks:
            raise InputError(f"{call.title}: rank {number} has joined; the root must be one of {list(group.ranks)}")
        return group.ranks.index(number)

    def _require_all(self, group: "Communicator", call: Call) -> None:
        """That nobody has joined, for an operation that would have rows for those that have."""
        if gone := [rank for rank in self.ranks if rank not in group.ranks]:
            raise InputError(f"{call.title}: some rows are for {header.rank_list(gone)}, which joined before")
