"""A group of ranks: its queue of operations, and the header exchange that every operation starts with.

At the start of an operation each rank sends every other a header (header.py). If the headers disagree, or the arguments
of one rank cannot be used, all ranks raise the same error and no bytes have moved. So a check that fails on one rank
never leaves the others waiting.

Ranks may have joined: their header of every operation is `join`. Then headers differ, no bytes have moved,
and the other ranks run the operation on a subgroup of their own.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

from allred.comm import header
from allred.comm.arguments import check_name
from allred.comm.backends.backend import Backend, DeviceBackend, WithHeader, pickled
from allred.comm.header import OpDescriptor, quoted
from allred.comm.work import Steps, Work, WorkQueue, call_site
from allred.errors import InputError
from allred.gpu.launch_order import LaunchTurn
from allred.timeline.recorder import Operation, Track
from allred.wording import named

if TYPE_CHECKING:
    from allred.native._kernels import Operation as CheckedOperation

T = TypeVar("T")

_MAX_LATER = 16  # later operations sent along with a mismatch, because they may explain it


class Group:
    """The ranks of `backend`, which the group owns. timeout_s: how long an operation may wait, in seconds. ranks: the
    numbers of the members as callers know them, for roots and messages. devices: moves arrays on GPUs."""

    def __init__(self, backend: Backend, timeout_s: float) -> None:
        self.backend = backend
        self.name = backend.name
        self.rank, self.size = backend.rank, backend.size
        self.ranks: Sequence[int] = range(backend.size)
        self.queue = WorkQueue(timeout_s, backend.engine)
        self.queue.connection_error = backend.connection_error
        self.devices: DeviceBackend | None = None
        self.checks_places = False  # whether all ranks must call an operation at the same line of the program
        self._generation = 0
        self.make_subgroup: Callable[[Sequence[int]], Steps[Group]] | None = None  # of some ranks, by their numbers
        self.unfinished: WeakKeyDictionary[object, str] = WeakKeyDictionary()  # what must end before this rank joins
        self._active: Group | None = None
        self._sequence = 0

    @property
    def number(self) -> int:
        """This rank's number in `ranks`."""
        return self.ranks[self.rank]

    @property
    def generation(self) -> int:
        """The generation of the world, which the headers of all ranks must agree on."""
        return self._generation

    @generation.setter
    def generation(self, generation: int) -> None:
        self._generation = generation
        self.backend.set_generation(generation)

    @property
    def active(self) -> "Group":
        """The group that ran the last operation: this one, or the subgroup of the ranks that have not joined."""
        return self._active or self

    @property
    def operations(self) -> int:
        """The number of the last operation that was begun: the same on all ranks that have completed it, if no other is
        under way. Ranks that have joined count the operations of the others."""
        backend = self.backend.with_header
        return self._sequence if backend is None else backend.number

    @property
    def in_place_bytes(self) -> int:
        """Bytes of `sent_bytes` that were reduced in place."""
        return self.backend.traffic.in_place

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has contributed to allreduces so far; see Traffic."""
        traffic = self.backend.traffic
        return traffic.sent + traffic.in_place + (0 if self.devices is None else self.devices.sent_bytes)

    @contextlib.contextmanager
    def at_any_place(self) -> Iterator[None]:
        """Inside this block ranks may call an operation at different lines of the program."""
        before, self.checks_places = self.checks_places, False
        try:
            yield
        finally:
            self.checks_places = before

    def close(self) -> None:
        """Release all resources; collective. The communicator cannot be used afterwards."""
        sound = not self.queue.poisoned
        if self.devices is not None:
            self.devices.close(sound)
        self.queue.poison("it was shut down")
        self.backend.close(sound)

    def record(self, track: Track) -> None:
        """Record operations for the timeline."""
        self.queue.track = track
        self.backend.record(track)

    def stop_recording(self) -> None:
        """Do not record operations any more."""
        self.queue.track = None
        self.backend.stop_recording()

    def start(self, kind: str, name: str, body: Steps[T], turn: LaunchTurn | None = None) -> Work[T]:
        """Start an operation. If its arguments cannot be used on this rank, its header says so to the other ranks.
        turn: of an operation on device arrays."""

        return self.queue.start(f"{kind}{quoted(name)}", self.announcing(kind, name, body), turn)

    def announcing(self, kind: str, name: str, body: Steps[T]) -> Steps[T]:
        """Run the steps of an operation. If its arguments cannot be used on this rank, announce this to the others."""
        before = self._sequence
        try:
            check_name(name)
            result = yield from body
            assert self.queue.advancing is not None
            self.queue.advancing.ranks = self.active.size
            return result
        except Exception as error:
            if self._sequence != before:  # after the header exchange: the other ranks know
                raise
            problem = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        yield from self.agree(OpDescriptor(kind, title=f"{kind}{quoted(name)}", problem=problem))
        raise AssertionError("a header with a problem never agrees")

    def agree(self, descriptor: OpDescriptor) -> "Steps[tuple[Group, list[bytes]]]":
        """Exchange headers. Return the group that runs the operation, and the headers of its ranks. Raises the same
        error on every rank if the headers disagree."""
        headers = yield from self.backend.exchange(self._announce(descriptor))
        if (timeline_record := self._timeline_record) is not None:
            timeline_record.agree()
        if header.agree(headers):
            self._active = None
            return self, headers
        return (yield from self._resolve(descriptor))

    def begin_without_header(self, descriptor: OpDescriptor) -> "Group":
        """Begin an operation on which the ranks have agreed in the header exchange before. Return the group that runs
        it."""
        number, work = self._sequence - 1, self.queue.advancing
        assert work is not None
        self._describe(lambda: descriptor, lambda: number)
        work.ranks = self.active.size
        if (timeline_record := self._timeline_record) is not None:
            timeline_record.nbytes = descriptor.nbytes
            timeline_record.agree()
        return self.active

    def agree_and_move(
        self,
        descriptor: OpDescriptor,
        begin: Callable[[WithHeader, bytes], "CheckedOperation"],
        move: "Callable[[Group], Steps[None]]",
        wire: int = 0,
    ) -> Steps[None]:
        """Exchange headers, then move the bytes of the operation. begin: starts both as one operation, for a backend
        that can; move: moves the bytes on a group that has agreed. wire: as in Backend.allreduce."""
        backend = self.backend.with_header
        if backend is None or not self.backend.begins_with_header(descriptor.kind, wire):
            group, _ = yield from self.agree(descriptor)
        else:
            operation = begin(backend, self._announce(descriptor))
            group = yield from self.finish(operation, lambda: descriptor)
            if group is self:
                return
        yield from move(group)

    def finish(self, operation: "CheckedOperation", describe: Callable[[], OpDescriptor]) -> "Steps[Group]":
        """Wait for an operation that includes the header exchange.

        Returns this group; or the subgroup on which the bytes have still to be moved, if some ranks have joined. Raises
        the same error on every rank if the headers disagree.
        """
        assert self.backend.with_header is not None
        backend = self.backend.with_header
        self._describe(describe, lambda: backend.number)
        yield operation
        if operation.headers_agree:
            self._active = None
            return self
        group, _ = yield from self._resolve(describe())
        return group

    @property
    def _timeline_record(self) -> Operation | None:
        """The record of the current operation in the timeline."""
        return None if self.queue.advancing is None else self.queue.advancing.timeline_record

    def _announce(self, descriptor: OpDescriptor) -> bytes:
        """Return the header of the operation. From here on the other ranks know of it."""
        if self.checks_places and descriptor.kind != "join":  # ranks may join at any line
            descriptor = dataclasses.replace(descriptor, place=self._place())
        number = self._sequence
        if (timeline_record := self._timeline_record) is not None:
            timeline_record.nbytes = descriptor.nbytes
        self._describe(lambda: descriptor, lambda: number)
        self._sequence += 1
        return descriptor.pack(number, self._generation)

    def _describe(self, describe: Callable[[], OpDescriptor], number: Callable[[], int]) -> None:
        """Keep what a message needs to describe the current operation. The text is made only if it is shown."""
        assert self.queue.advancing is not None
        self.queue.advancing.described = describe, number

    def _place(self) -> str:
        """Return the line of the program that started the current operation."""
        return self.queue.advancing.place if self.queue.advancing and self.queue.advancing.place else call_site()

    def _resolve(self, descriptor: OpDescriptor) -> "Steps[tuple[Group, list[bytes]]]":
        """As `agree`, after headers differ: exchange descriptors, and find the ranks that have not joined. If some
        ranks have sent `step_allreduce` and others `step`, the former return to their caller without a result, which
        starts `check("step")`; the latter exchange headers again here."""
        assert self.queue.advancing is not None
        started_later, place = tuple(self.queue.started_later(self.queue.advancing, _MAX_LATER)), self._place()
        mine = dataclasses.replace(
            descriptor,
            found_at=place,
            place=place if self.checks_places else "",
            earlier=self.queue.earlier,
            started_later=started_later,
            generation=self._generation,
        )
        descriptors = yield from self.backend.allgather_object(pickled(mine))
        if len({each.generation for each in descriptors}) > 1:
            raise header.verdict(descriptors, self.ranks)
        if header.repeats_step(descriptors):
            if descriptor.kind == "step_allreduce":
                return self, []
            self.queue.begin_again()
            return (yield from self.agree(descriptor))
        if self.make_subgroup is None or any(each.kind == "shutdown" for each in descriptors):
            raise header.verdict(descriptors, self.ranks)
        here = [index for index, each in enumerate(descriptors) if each.kind != "join" or each.problem]
        ranks = [self.ranks[index] for index in here]
        headers = [descriptors[index].pack(0) for index in here]
        if not header.agree(headers):
            raise header.verdict([descriptors[index] for index in here], ranks)
        self._active = yield from self.make_subgroup(ranks)
        return self._active, headers

    def root_in(self, group: "Group", root: int, descriptor: OpDescriptor) -> int:
        """Return the index in `group` of a root given by its index in this group. Raises InputError if it joined."""
        number = self.ranks[root]
        if number not in group.ranks:
            raise InputError(
                f"{descriptor.title}: rank {number} has joined; the root must be one of {list(group.ranks)}"
            )
        return group.ranks.index(number)

    def require_all(self, group: "Group", descriptor: OpDescriptor) -> None:
        """Raise InputError if a rank has joined, for an operation that sends rows to every rank."""
        if gone := [rank for rank in self.ranks if rank not in group.ranks]:
            raise InputError(f"{descriptor.title}: some rows are for {named('rank', gone)}, which joined before")
