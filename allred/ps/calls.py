"""What is rare between workers and a server: registration, parameters to start from, state, checkpoints, leaving. An
object each way, by MPI.

A call's answer may come later: workers that register before worker 0 did, or wait for its parameters, are parked.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Generator
from pathlib import Path
from typing import Any

from allred import checkpoint
from allred.arrays import Array
from allred.cluster import topology
from allred.comm.backends.segment import Offer
from allred.comm.work import Steps
from allred.errors import AllredError, InputError, MismatchError
from allred.optim.base import Optimizer
from allred.ps import boxes
from allred.ps.account import Account
from allred.ps.boxes import BoxPort
from allred.ps.layout import lay_out
from allred.ps.placement import Placement
from allred.ps.post import CALL, REPLY, Post
from allred.ps.running import Running
from allred.ps.service import Service
from allred.ps.shard import Parts, Shard
from allred.watch import wait
from allred.watch.start import name_this

Call = tuple[str, tuple[Any, ...]]  # the kind, and the arguments
LATER = object()  # as the result of a call: its answer comes later, or never


@dataclasses.dataclass(frozen=True)
class Registration:
    """What a worker says of itself. `skeleton`: the nest of its parameters, with their positions for leaves.
    `description`: what to serve with, for servers that have to be told (joined.py)."""

    worker: int
    placement: Placement
    skeleton: Any
    settings: str  # what has to be the same on all workers, and the servers, in words
    description: bytes | str = b""


class Calls:
    """Of one server. left: called when a worker says that it leaves."""

    def __init__(
        self, running: Running, post: Post, service: Service, optimizer: Any, settings: str, left: Callable[[int], None]
    ) -> None:
        self.ports: dict[int, BoxPort] = {}  # of workers that share memory with this server
        self._list_boxes()
        self._running, self._post, self._service, self._optimizer = running, post, service, optimizer
        self._settings, self._left = settings, left
        self._first: Registration | None = None  # of worker 0
        self._no_shard: AllredError | None = None  # why it could not be registered
        self._early: list[Registration] = []
        self._memory: Any = None  # of the parameters
        self._shard_offer: Offer | None = None
        self._starts, self._digest = 0, ""  # how often worker 0 has given parameters, and the hash of the last
        self._awaiting: list[tuple[int, int]] = []  # worker, number of the start
        self._steps_before = 0  # of the checkpoint that training goes on from
        self._batch_arguments: dict[int, Any] = {}  # by worker: the arguments of its batches in its first step
        self._gone: set[int] = set()  # workers that have left, or died
        self._ended: set[int] = set()  # workers that make no more requests
        self._saver: int | None = None  # the worker that has the last checkpoint written
        self._saved_last: str | None = None  # what has become of it, in words
        self._draining: list[int] = []  # workers that wait for it
        self._parting: list[int] = []  # those of them that wait for the last one
        self._finished: set[int] = set()  # workers that make no more steps, but are still there
        self._meeting: list[int] = []  # those of them that wait for the last one
        self._told: list[AllredError | None] = []  # by worker 0, to all, each time
        self._heard: Counter[int] = Counter()  # how often each worker has heard it
        self._hearing: list[int] = []  # workers that wait for it

    def answer(self, source: int, call: Call | None = None) -> Steps[None]:
        """Take a call of that rank, if it is not taken yet, and answer it."""
        kind, arguments = call or (yield from self._post.receive(source, CALL))
        worker = source - self._running.servers
        try:
            result = getattr(self, f"_{kind}")(worker, *arguments)
        except AllredError as error:
            result = error
        if isinstance(result, Generator):
            result = yield from result
        if result is not LATER:
            self._reply(worker, result)

    def _reply(self, worker: int, value: Any) -> None:
        self._post.send(worker + self._running.servers, REPLY, value)

    # Registration.

    def _register(self, worker: int, registration: Registration) -> Any:
        if self._no_shard is not None:
            return self._no_shard
        if worker == 0:
            try:
                self._make_shard(registration)
            except AllredError as error:
                self._no_shard = error
                for early in self._early:
                    self._reply(early.worker, error)
                self._early.clear()
                return error
            self._first = registration
            for early in self._early:
                self._reply(early.worker, self._admit(early))
            self._early.clear()
        elif self._first is None and 0 in self._gone:
            return _no_start()
        elif self._first is None:
            self._early.append(registration)
            return LATER
        return self._admit(registration)

    def _admit(self, registration: Registration) -> Any:
        """The offers of memory to a worker, or the error."""
        assert self._first is not None
        for other, words in ((registration.settings, f"worker {registration.worker}"), (self._settings, "the server")):
            if other != self._first.settings:
                return MismatchError(
                    f"mode ps is set differently: {words} has {other}, worker 0 has {self._first.settings}; pass the "
                    "same arguments to allred.distributed on all ranks"
                )
        if registration.placement.fingerprint != self._first.placement.fingerprint:
            return MismatchError(_difference(registration, self._first))
        return self._offers(registration.worker)

    def _make_shard(self, registration: Registration) -> None:
        placement = registration.placement
        layout = lay_out(placement.tensors, placement.of(self._running.rank))
        self._memory, self._shard_offer = boxes.new(layout.nbytes + boxes.BELL_BYTES)
        self._service.shard = Shard(layout, self._memory, self._optimizer, registration.skeleton)

    def _offers(self, worker: int) -> tuple[Offer | None, Offer | None]:
        """How the worker opens its mailbox and the parameters; None if it cannot: it is on another node."""
        nodes = self._running.nodes
        here = nodes[worker + self._running.servers] == nodes[self._running.rank]
        if not here or self._shard_offer is None:
            return None, None
        memory, offer = boxes.new(boxes.BOX_BYTES)
        if offer is not None:
            self.ports[worker] = BoxPort(boxes.mailbox(memory, self._memory))
            self._list_boxes()
        return offer, self._shard_offer

    def forget(self, worker: int) -> None:
        """It has left."""
        self.ports.pop(worker, None)
        self._list_boxes()

    def _list_boxes(self) -> None:
        self.box_workers, self.boxes = list(self.ports), [port.box for port in self.ports.values()]

    def _batches(self, worker: int, arguments: Any) -> dict[int, Any]:
        """Store the arguments of a worker's batches. Returns the arguments of all workers so far, by worker."""
        self._batch_arguments[worker] = arguments
        return self._batch_arguments

    # Parameters to start from.

    def _state_to_start(self, worker: int, state: Any, parts: Parts, digest: str) -> None:
        """Worker 0: the optimizer's state, and the hash of the parameters that come next."""
        self._load(worker, state, parts)
        self._digest = digest

    def started(self) -> None:
        """They have come."""
        self._starts += 1
        ready = [worker for worker, number in self._awaiting if number <= self._starts]
        self._awaiting = [(worker, number) for worker, number in self._awaiting if number > self._starts]
        for worker in ready:
            self._reply(worker, self._digest)

    def _await_start(self, worker: int, number: int) -> Any:
        """The hash of the parameters that worker 0 gives for the `number`-th time, as soon as it has."""
        if number <= self._starts:
            return self._digest
        if 0 in self._gone:
            return _no_start()
        self._awaiting.append((worker, number))
        return LATER

    # State.

    def _load(self, worker: int, state: Any, parts: Parts) -> None:
        assert self._service.shard is not None
        self._service.shard.load(state, parts)

    def _state(self, worker: int) -> tuple[Any, Parts]:
        assert self._service.shard is not None
        return self._service.shard.state()

    def _step_and_version(self, worker: int) -> tuple[int, int]:
        """The optimizer's updates so far, those before a restore included, and those of the parameters here."""
        shard = self._service.shard
        assert shard is not None
        step = getattr(self._optimizer, "global_step", None)
        counts = isinstance(self._optimizer, Optimizer) or shard.layout.pieces  # else it makes no steps
        return step if counts and isinstance(step, int) else self._steps_before + shard.version, shard.version

    def _count_from(self, worker: int, step: int) -> None:
        """Parameters of that step were restored; for an optimizer that does not count by itself."""
        assert self._service.shard is not None
        self._steps_before = step - self._service.shard.version

    def _save(
        self, worker: int, directory: Path, extra: tuple[checkpoint.Entry, Array] | None
    ) -> tuple[checkpoint.ShardInfo, Any, int]:
        """Write this server's part of a checkpoint; what was written, the optimizer's step or state, the version.
        extra: an entry that goes with it."""
        shard = self._service.shard
        assert shard is not None
        state, slots = shard.state()
        entries = []
        for index, piece in enumerate(shard.layout.pieces):
            tensor = shard.layout.tensors[piece.tensor]
            for slot, data in {"": shard.parameter(index), **slots.get(index, {})}.items():
                whole = data.size != piece.stop - piece.start
                shape, start, stop = (data.shape, 0, data.size) if whole else (tensor.shape, piece.start, piece.stop)
                entry = checkpoint.Entry(tensor.name, slot, data.dtype.name, shape, start, stop)
                entries.append((entry, data.reshape(-1)))
        if not isinstance(self._optimizer, Optimizer):
            if self._running.servers > 1:
                raise InputError(
                    f"the state of {type(self._optimizer).__name__} cannot be saved by several parameter servers: "
                    "allred does not know which part belongs to which tensor. Use one of allred.optim, or one server"
                )
            entries.append(checkpoint.pickled_state(state))
            state = None
        if extra is not None:
            entries.append(extra)
        with wait.busy():
            written = checkpoint.write_shard(directory, self._running.rank, self._running.servers, entries)
        return written, state, shard.version

    def _statistics(self, worker: int) -> Account:
        return self._service.account

    def _saved(self, worker: int, path: str) -> None:
        """A checkpoint is complete."""
        name_this(f"{topology.role()}; last checkpoint {path}")

    # Leaving.

    def _drain(self, worker: int) -> bool:
        """Somebody was asked to end. Whether this worker is the first that heard of it."""
        self._service.draining = True
        if self._saver is None:
            self._saver = worker
        return self._saver == worker

    def _drained(self, worker: int, words: str | None) -> Any:
        """What has become of the last checkpoint; None: this worker wants to know."""
        if words is not None:
            self._end_drain(words)
        if self._saved_last is None:
            self._draining.append(worker)
            return LATER
        return self._saved_last

    def _end_drain(self, words: str) -> None:
        self._saved_last = words
        for waiting in self._draining:
            self._reply(waiting, words)
        self._draining.clear()

    def _finish(self, worker: int) -> Steps[None]:
        """The worker makes no more steps, but is still there."""
        yield from self._service.leave(worker)
        self._finished.add(worker)
        self._let_meet()

    def _meet(self, worker: int) -> Any:
        """The worker waits until all have finished, or are gone."""
        self._meeting.append(worker)
        self._let_meet()
        return LATER

    def _let_meet(self) -> None:
        if len(self._finished | self._gone) == self._running.workers:
            for waiting in self._meeting:
                self._reply(waiting, None)
            self._meeting.clear()

    def _hear(self, worker: int, tells: bool, failure: AllredError | None) -> Any:
        """Worker 0 tells the others of a failure, or that there is none."""
        if tells:
            self._told.append(failure)
        self._hearing.append(worker)
        self._let_hear()
        return LATER

    def _let_hear(self) -> None:
        if (
            0 in self._gone
            and self._hearing
            and len(self._told) <= max(self._heard[worker] for worker in self._hearing)
        ):
            self._told.append(AllredError("worker 0, which was to write the last checkpoint, has ended before"))
        for waiting in [worker for worker in self._hearing if self._heard[worker] < len(self._told)]:
            self._hearing.remove(waiting)
            self._reply(waiting, self._told[self._heard[waiting]])
            self._heard[waiting] += 1

    def _leave(self, worker: int) -> Any:
        self._ended.add(worker)
        self._left(worker)
        return LATER  # it does not wait for an answer

    def _part(self, worker: int) -> Any:
        """The same, but it waits for what has passed here until the last worker has left."""
        self._parting.append(worker)
        self._ended.add(worker)
        self._left(worker)
        return LATER

    # Workers that others wait for.

    def awaited(self, live: Collection[int]) -> set[int]:
        """Return the workers that others wait for, here or in MPI_Finalize. live: the workers that have not left."""
        found: set[int] = set()
        early = {registration.worker for registration in self._early}
        starting = early.union((worker for worker, _ in self._awaiting), self._hearing)
        waiting = starting.union(self._service.parked, self._meeting, self._draining)
        if self._service.parked or self._meeting:
            found.update(set(live) - self._finished)
        if starting:
            found.add(0)
        if self._draining and self._saver is not None:
            found.add(self._saver)
        if self._ended:
            found.update(live)
        return found.intersection(live) - waiting

    def at_the_end(self) -> set[int]:
        """Return the workers that wait for the last step of the others, or in MPI_Finalize."""
        return self._ended.union(self._meeting)

    def gone(self, worker: int) -> None:
        """A worker has left, or died."""
        self._gone.add(worker)
        self._early = [early for early in self._early if early.worker != worker]
        self._awaiting = [(waiting, number) for waiting, number in self._awaiting if waiting != worker]
        self._draining = [waiting for waiting in self._draining if waiting != worker]
        self._meeting = [waiting for waiting in self._meeting if waiting != worker]
        self._hearing = [waiting for waiting in self._hearing if waiting != worker]
        self._let_meet()
        self._let_hear()
        if worker == self._saver and self._saved_last is None:
            self._end_drain(f"worker {worker}, which was to write a checkpoint, has ended before")
        if 0 in self._gone:
            for waiting in [*(early.worker for early in self._early), *(waiting for waiting, _ in self._awaiting)]:
                self._reply(waiting, _no_start())
            self._early, self._awaiting = [], []
        if len(self._gone) == self._running.workers:
            for waiting in self._parting:
                self._reply(waiting, self._service.account)


def _no_start() -> AllredError:
    return AllredError(
        "worker 0 has ended without giving the parameters to start from, for which this worker waits; call "
        "broadcast(params), or the first step, on all workers equally often"
    )


def _difference(mine: Registration, first: Registration) -> str:
    """How a worker's parameters, or their places, differ from worker 0's."""
    ours, theirs = mine.placement.tensors, first.placement.tensors
    for a, b in zip(ours, theirs, strict=False):
        if str(a) != str(b):
            return f"parameters differ: worker {mine.worker} has {a} where worker 0 has {b}"
    if len(ours) != len(theirs):
        return f"parameters differ: worker {mine.worker} has {len(ours)}, worker 0 has {len(theirs)}"
    return (
        f"worker {mine.worker} places the parameters differently from worker 0; allred.device around variables, or a "
        "function given as placement, must say the same on all ranks"
    )
