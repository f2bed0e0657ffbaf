"""A worker's end of all servers: what a step asks of each of them, and in which order.

With one server a step is one request. With several, who needs the coordinator's leave (server 0's) asks it first, then
the gradient goes to all servers at once, then the coordinator hears that it is everywhere, and parameters are pulled
from all when it lets the worker go on, with the number of the step that it may begin (service.py says why). Without a
policy that waits, gradients and parameters pass in one request each.
"""

import dataclasses
import math
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from allred import checkpoint, world
from allred.arrays import Array, as_buffer
from allred.comm import functions
from allred.comm.work import Steps
from allred.errors import AllredError, InputError
from allred.ps.account import Account
from allred.ps.boxes import open_box
from allred.ps.calls import Registration
from allred.ps.drive import All, drive
from allred.ps.layout import Layout, lay_out
from allred.ps.placement import Piece, Placement
from allred.ps.post import CALL, LOST, REPLY, Exchange, Post
from allred.ps.record import (
    ABSENT,
    BEGIN,
    DONE,
    DRAIN,
    DROPPED,
    INIT,
    PULL,
    PUSH,
    Answer,
    pack_request,
    unpack_answer,
)
from allred.ps.running import Running
from allred.ps.shard import Parts
from allred.timeline.recorder import span
from allred.watch.wait import Awaited

_CUT_SHORT = (
    "a request to the parameter servers was interrupted (Ctrl-C, a time limit), and cannot be taken back; end this "
    "worker, and start again from a checkpoint"
)
_LEAVE_S = 2.0  # for a few bytes
_KINDS = {PUSH: "push", PULL: "pull", PUSH | PULL: "push+pull", 0: "wait"}  # of requests, in the timeline
_NOTHING: list[Any] = []
_NO_CELLS = np.empty(0, np.int64)
_NO_PLACES = np.empty((0, 2), np.int64)


@dataclasses.dataclass
class _Link:
    """To one server. `box`, `memory`: None where it goes by MPI. version: of this worker's parameters."""

    server: int
    layout: Layout
    box: Any
    memory: Any
    version: int = 0

    def begin(self, post: Post, record: bytes, up: list[Array], up_cells: Array, down: list[Array]) -> Any:
        """Send a request; what is to be waited for. up, down: contiguous arrays."""
        down_cells = self.layout.down if down else _NO_PLACES
        if self.box is None:
            sources, targets = ([part.reshape(-1).view(np.uint8) for part in parts] for parts in (up, down))
            return Exchange(post, self.server, record, sources, up_cells, targets, down_cells[:, 1])
        if self.layout.has_bfloat16:
            down = [as_buffer(part) for part in down]
        self.box.begin(record, up, up_cells, down, self.memory if down else None, down_cells)
        return self.box

    def mark(self, absent: Sequence[int], sources: list[Array], cells: Array) -> tuple[list[Array], Array]:
        """The same, with a first cell that says which pieces have no gradient."""
        marks = np.isin([piece.tensor for piece in self.layout.pieces], absent).astype(np.uint8)
        return [marks, *sources], np.concatenate([[marks.size], cells])


class Outcome(NamedTuple):
    """Of a step. flags: DROPPED, DRAINING of record.py. staleness: of the gradient, in updates; the largest."""

    flags: int
    staleness: int


def _cut(layout: Layout, piece: Piece) -> tuple[int, int | None, int]:
    """The tensor's number, and the elements of a part; None for the whole."""
    whole = piece.stop - piece.start == layout.tensors[piece.tensor].elements
    return piece.tensor, None if whole else piece.start, piece.stop


def _until_done(pending: list[Any]) -> Steps[None]:
    yield All(pending)


class Client:
    """Of one worker, for one optimizer."""

    def __init__(self, running: Running, policy: Any, placement: Placement) -> None:
        coordinator = policy.coordinator(running.workers)
        self.placement = placement
        self.step_number = 0
        self.waited_s = 0.0
        self._asks, self._waits = coordinator.asks, coordinator.waits
        self._running = running
        self._all_flags = PUSH | PULL | BEGIN * self._asks | DONE * self._waits
        self._post = Post(running.comm)
        self._layouts = [lay_out(placement.tensors, placement.of(server)) for server in range(running.servers)]
        self._cuts = [[_cut(layout, piece) for piece in layout.pieces] for layout in self._layouts]
        self._whole = [[cut[:2] for cut in cuts] for cuts in self._cuts] == [
            [(number, None) for number in range(len(placement.tensors))]
        ]
        self._links: list[_Link] = []
        self._up_bytes = sum(int(layout.up.sum()) for layout in self._layouts)
        self._down_bytes = sum(int(layout.down[:, 1].sum()) for layout in self._layouts)
        self._writes = False  # the last checkpoint, since the job is to end
        self._starts = 0  # how often parameters to start from were waited for

        self._unusable = ""  # why nothing can be asked for any more; during a request it says what an interrupt makes
        self._thread: int | None = None  # that has a request under way
        self._under_way: list[Any] = []
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self._unusable = "this process was forked from a rank after allred.init(); use allred in the rank only"

    def _refusal(self) -> AllredError:
        if self._thread not in (None, threading.get_ident()):
            return AllredError(
                "two threads of this worker call the parameter servers at once; call them from one thread, or under a "
                "lock"
            )
        return world.error() or AllredError(self._unusable)

    def _begin(self) -> None:
        """A request, of which there is one at a time."""
        if self._unusable:
            raise self._refusal()
        self._unusable, self._thread = _CUT_SHORT, threading.get_ident()

    @staticmethod
    def _lost(error: Exception) -> AllredError:
        """What to say where a server is gone: the watcher knows more, in a moment."""
        if (watcher := world.watcher()) is not None:
            watcher.await_verdict()
            if watcher.verdict is not None:
                return watcher.error()
        return AllredError(f"a parameter server is gone: {error}")

    # Calls.

    def _drive(self, title: str, steps: Steps[Any], trains: bool = False) -> Any:
        queue = functions.current().queue
        awaited = Awaited(servers=range(len(self._links)), trains=trains)
        return drive(title, steps, queue.timeout_s, queue.quiet or trains, awaited=awaited)

    def call(
        self, title: str, kind: str, arguments: Sequence[tuple[Any, ...]], late: bool = False, trains: bool = False
    ) -> list[Any]:
        """Call all servers, server r with arguments[r], and return their answers. late: the servers may answer later.
        trains: the wait lasts while other workers make steps, and the servers warn of a worker that makes none."""
        self._begin()
        try:
            with span("wait", title):
                answers: list[Any] = self._drive(title, self._calls(kind, arguments, late), trains)
        except LOST as error:
            raise self._lost(error) from error
        finally:
            self._thread = None
        self._unusable = ""
        for answer in answers:
            if isinstance(answer, AllredError):
                raise answer
        return answers

    def _calls(self, kind: str, arguments: Sequence[tuple[Any, ...]], late: bool) -> Steps[list[Any]]:
        for server, each in enumerate(arguments):
            self._post.send(server, CALL, (kind, each))
        answers = []
        for server in range(len(arguments)):
            answers.append((yield from self._post.receive(server, REPLY, waits_for_peers=late)))
        return answers

    def register(self, skeleton: Any, settings: str, description: bytes | str = b"") -> None:
        """Tell all servers what there is to train, and on worker 0 what to serve with. Raises MismatchError if worker 0
        has something else."""
        mine = Registration(self._running.worker, self.placement, skeleton, settings, description)
        offers = self.call("registration with the parameter servers", "register", [(mine,)] * len(self._layouts), True)
        for server, (layout, offer) in enumerate(zip(self._layouts, offers, strict=True)):
            box, memory = open_box(offer) or (None, None)
            self._links.append(_Link(server, layout, box, memory))

    def give_start(self, sources: list[Array], states: Sequence[tuple[Any, ...]], digest: str) -> None:
        """Worker 0: the parameters that all start from. states: of the optimizer, for each server."""
        self.call("the optimizer's state to start from", "state_to_start", [(*state, digest) for state in states])
        self._request("the parameters to start from", PUSH | INIT, self._parts(sources), None)
        self._starts += 1

    def await_start(self) -> str:
        """The others: wait for them; their hash."""
        self._starts += 1
        title = f"parameters that worker 0 gives by broadcast() #{self._starts}"
        digests: list[str] = self.call(title, "await_start", [(self._starts,)] * len(self._links), late=True)
        return digests[0]

    # Steps.

    def pull(self, targets: list[Array]) -> None:
        """All parameters, into contiguous arrays of the tensors' shapes."""
        self._request("a pull of the parameters", PULL, None, self._parts(targets))

    def step(
        self, sources: list[Array], absent: Sequence[int], targets: list[Array], lr: float, drain: bool
    ) -> Outcome:
        """Push a gradient, and pull.

        sources: contiguous, in the dtypes of the layout, zeros for those that are `absent`. targets: contiguous.
        """
        up, down = self._parts(sources), self._parts(targets)
        asked = DRAIN if drain else 0
        if len(self._links) == 1 or not self._waits:
            return self._outcome(self._request("", self._all_flags | asked, up, down, absent, lr))
        dropped = self._asks and self._request("", BEGIN, None, None, only=1)[0].flags & DROPPED
        pushed = [] if dropped else self._request("", PUSH | asked, up, None, absent, lr)
        done = self._request("", DONE | asked, None, None, only=1)
        self.step_number = done[0].step  # the pull tells all servers that the step before it is complete
        pulled = self._request("", PULL, None, down)
        return self._outcome([done[0]._replace(flags=done[0].flags | dropped), *pushed, *pulled])

    def _outcome(self, answers: list[Answer]) -> Outcome:
        """What several answers say together; the step is the first one's."""
        flags, self.step_number, _, staleness = answers[0]
        for answer in answers[1:]:
            flags |= answer.flags
            staleness = max(staleness, answer.staleness)
        return Outcome(flags, staleness)

    def _request(
        self, title: str, flags: int, up: list[list[Array]] | None, down: list[list[Array]] | None,
        absent: Sequence[int] = (), lr: float = math.nan, only: int | None = None,
    ) -> list[Answer]:  # fmt: skip
        """One request to each server, or to the first `only`. title: "" for a step."""
        self._begin()
        nbytes = (flags & PUSH > 0) * self._up_bytes + (flags & PULL > 0) * self._down_bytes
        try:
            with span(_KINDS[flags & (PUSH | PULL)], title, nbytes):
                pending = self._send(flags, up, down, absent, lr, only)
                if len(pending) > 1 or not pending[0].done():
                    self._drive(title or f"step {self.step_number} with the parameter servers", _until_done(pending))
        except LOST as error:
            raise self._lost(error) from error
        finally:
            self._thread = None
        self._unusable = ""
        answers = [unpack_answer(each.reply) for each in pending]
        if flags & (PULL | INIT):
            for link, answer in zip(self._links, answers, strict=True):
                link.version = answer.version
        return answers

    def _send(
        self, flags: int, up: list[list[Array]] | None, down: list[list[Array]] | None, absent: Sequence[int],
        lr: float, only: int | None,
    ) -> list[Any]:  # fmt: skip
        """Begin the requests; what is to be waited for."""
        self._under_way = pending = []  # kept, for MPI may write into its buffers even after an interrupt
        for link in self._links[:only]:
            number = link.server
            sources, cells = (_NOTHING, _NO_CELLS) if up is None else (up[number], link.layout.up)
            here = flags
            if absent:
                sources, cells = link.mark(absent, sources, cells)
                here |= ABSENT
            record = pack_request(here, self.step_number, link.version, lr)
            pending.append(link.begin(self._post, record, sources, cells, _NOTHING if down is None else down[number]))
        return pending

    def _parts(self, values: list[Array]) -> list[list[Array]]:
        """The pieces of arrays, one for each tensor, by server: whole arrays, or views of flat ones."""
        if self._whole:  # all at one server
            return [values]
        return [
            [values[i] if start is None else values[i].reshape(-1)[start:stop] for i, start, stop in cuts]
            for cuts in self._cuts
        ]

    def finish(self) -> None:
        """No more steps of this worker: the others need not wait for it."""
        self.call("the end of this worker's steps", "finish", [()] * len(self._links))

    def meet(self) -> None:
        """Wait until all workers have finished, or are gone."""
        self.call("the end of the other workers' steps", "meet", [()], late=True, trains=True)

    def hear(self, failure: AllredError | None, tells: bool) -> AllredError | None:
        """What worker 0 tells all others, after they have met."""
        told: list[AllredError | None] = self.call("worker 0's last words", "hear", [(tells, failure)], late=True)
        return told[0]

    # State.

    def slots_by_server(self, slots: dict[str, dict[str, Array]]) -> list[Parts]:
        """An optimizer's slots, of whole tensors by name, as the pieces of each server."""
        found = []
        for layout in self._layouts:
            parts: Parts = {}
            for index, piece in enumerate(layout.pieces):
                tensor = layout.tensors[piece.tensor]
                if tensor.name in slots:
                    split = piece.stop - piece.start != tensor.elements
                    parts[index] = {
                        name: value.reshape(-1)[piece.start : piece.stop] if split else value
                        for name, value in slots[tensor.name].items()
                    }
            found.append(parts)
        return found

    def load(self, states: Sequence[tuple[Any, Parts]]) -> None:
        """Give the servers an optimizer's state."""
        self.call("the optimizer's state", "load", states)

    def state(self, by_name: bool) -> Any:
        """The optimizer's state, as its state_dict gives it. by_name: it is one of allred.optim."""
        answers = self.call("the optimizer's state", "state", [()] * len(self._layouts))
        if not by_name:
            if len(answers) > 1:
                raise InputError(
                    "the state of an optimizer that is not of allred.optim can be had from one server only"
                )
            return answers[0][0]
        slots: dict[str, dict[str, Array]] = {}
        for layout, (_, parts) in zip(self._layouts, answers, strict=True):
            for index, part in parts.items():
                piece = layout.pieces[index]
                tensor = layout.tensors[piece.tensor]
                whole = slots.setdefault(tensor.name, {})
                for name, value in part.items():
                    if piece.stop - piece.start == tensor.elements:
                        whole[name] = value
                        continue
                    target = whole.setdefault(name, np.empty(tensor.shape, value.dtype))
                    target.reshape(-1)[piece.start : piece.stop] = value
        return {"global_step": answers[0][0]["global_step"], "slots": slots}

    def count_from(self, step: int) -> None:
        """The parameters that the servers have are those of that step."""
        self.call("the number of the step", "count_from", [(step,)] * len(self._links))

    def step_and_version(self) -> tuple[int, int]:
        """Of server 0, now: the number of its updates, those before a restore included, and without them."""
        found: tuple[int, int] = self.call("the number of the step", "step_and_version", [()])[0]
        return found

    @property
    def version(self) -> int:
        """The version of this worker's parameters at server 0: of the last pull or broadcast."""
        return self._links[0].version

    def save(self, root: str, extra: Any = None) -> str:
        """A checkpoint of parameters and optimizer, written by the servers; its path. extra: goes with it, pickled."""
        title = f"a checkpoint in {root}"
        entry = None if extra is None else checkpoint.pickled_extra(extra)
        step, _ = self.step_and_version()
        directory = checkpoint.begin(root, step)
        try:
            others = [(directory, None)] * (len(self._links) - 1)
            saved = self.call(title, "save", [(directory, entry), *others])
            versions = [version for *_, version in saved]
            meta = {"optimizer": saved[0][1], "versions": versions}
            path = str(checkpoint.commit(directory, step, [shard for shard, *_ in saved], meta))
        except BaseException:
            checkpoint.abandon(directory)
            raise
        self.call(title, "saved", [(path,)] * len(self._links))
        return path

    def drain(self) -> bool:
        """Tell all servers that the job is to end. Whether this worker is to have the checkpoint written."""
        first: bool = self.call("the end that somebody asked for", "drain", [()] * len(self._links))[0]
        self._writes = first
        return first

    def drained(self, words: str) -> str:
        """What has become of that checkpoint, in the words of the worker that had it written."""
        arguments = [(words if self._writes else None,)]
        told: str = self.call("the checkpoint at the end", "drained", arguments)[0]
        return told

    def statistics(self) -> list[Account]:
        """The servers' accounts."""
        return self.call("statistics of the parameter servers", "statistics", [()] * len(self._layouts))

    @property
    def cut_short(self) -> bool:
        """Whether a request was interrupted."""
        return self._unusable == _CUT_SHORT

    def leave(self) -> None:
        """This worker asks for nothing any more."""
        leave(self._running)

    def part(self) -> list[Account]:
        """The same. The servers' accounts, once the last worker has left."""
        steps = self._calls("part", [()] * len(self._layouts), late=False)
        accounts: list[Account] = self._drive("the end of the other workers", steps, trains=True)
        return accounts


def leave(running: Running) -> None:
    """This worker asks for nothing any more; also one that never did."""
    post, until = Post(running.comm), time.monotonic() + _LEAVE_S
    for server in range(running.servers):
        post.send(server, CALL, ("leave", ()))
    while not post.tend() and time.monotonic() < until:
        pass
