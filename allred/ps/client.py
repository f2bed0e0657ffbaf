"""A worker's end of all servers: what a step asks of each of them, and in which order.

With one server a step is one request. With several, who needs the coordinator's leave (server 0's) asks it first, then
the gradient goes to all servers at once, then the coordinator hears that it is everywhere, and parameters are pulled
from all when it lets the worker go on. Without a policy that waits, gradients and parameters pass in one request each.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from allred import checkpoint
from allred.arrays import Array
from allred.comm import collectives
from allred.comm.work import Steps
from allred.errors import AllredError, InputError
from allred.ps.account import Account
from allred.ps.boxes import open_box
from allred.ps.calls import Registration
from allred.ps.drive import All, drive
from allred.ps.layout import Layout, lay_out
from allred.ps.placement import Placement
from allred.ps.post import CALL, REPLY, Exchange, Post
from allred.ps.record import ABSENT, BEGIN, DONE, DRAIN, DRAINING, DROPPED, INIT, PULL, PUSH, SAVE, Answer, Request
from allred.ps.running import Running
from allred.ps.shard import Parts

_LEAVE_S = 2.0  # for a few bytes
_NO_CELLS = np.empty(0, np.int64)
_NO_PLACES = np.empty((0, 2), np.int64)


@dataclasses.dataclass
class _Link:
    """To one server. `box`, `memory`: None where it goes by MPI. version: of the parameters pulled last."""

    server: int
    layout: Layout
    box: Any
    memory: Any
    version: int = 0

    def begin(self, post: Post, record: bytes, up: Sequence[Array], up_cells: Array, down: Sequence[Array]) -> Any:
        """Send a request; what is to be waited for. up, down: contiguous arrays."""
        down_cells = self.layout.down if down else _NO_PLACES
        if self.box is None:
            sources, targets = ([part.reshape(-1).view(np.uint8) for part in parts] for parts in (up, down))
            return Exchange(post, self.server, record, sources, up_cells, targets, down_cells[:, 1])
        self.box.begin(record, list(up), up_cells, list(down), self.memory if len(down_cells) else None, down_cells)
        return self.box


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of a step. `step`: the one that this worker may begin now."""

    step: int
    dropped: bool
    staleness: int
    draining: bool
    save: bool


class Client:
    """Of one worker, for one optimizer."""

    def __init__(self, running: Running, policy: Any, placement: Placement) -> None:
        coordinator = policy.coordinator(running.workers)
        self.placement = placement
        self.step_number = 0
        self.waited_s = 0.0
        self._asks, self._waits = coordinator.asks, coordinator.waits
        self._running = running
        self._post = Post(running.comm)
        self._layouts = [lay_out(placement.tensors, placement.of(server)) for server in range(running.servers)]
        self._links: list[_Link] = []
        self._starts = 0  # how often parameters to start from were waited for

    # Calls.

    def _drive(self, title: str, steps: Steps[Any]) -> Any:
        queue = collectives.current().queue
        return drive(title, steps, queue.timeout_s, queue.quiet)

    def call(self, title: str, kind: str, arguments: Sequence[tuple[Any, ...]], late: bool = False) -> list[Any]:
        """Call all servers, the r-th with arguments[r]; their answers. late: they may come to it later."""

        def steps() -> Steps[list[Any]]:
            for server, each in enumerate(arguments):
                self._post.send(server, CALL, (kind, each))
            answers = []
            for server in range(len(arguments)):
                answers.append((yield from self._post.receive(server, REPLY, peers=late)))
            return answers

        answers: list[Any] = self._drive(title, steps())
        for answer in answers:
            if isinstance(answer, AllredError):
                raise answer
        return answers

    def register(self, skeleton: Any, settings: str) -> None:
        """Tell all servers what there is to train. Raises MismatchError if worker 0 has something else."""
        mine = Registration(self._running.worker, self.placement, skeleton, settings)
        offers = self.call("registration with the parameter servers", "register", [(mine,)] * len(self._layouts), True)
        for server, (layout, offer) in enumerate(zip(self._layouts, offers, strict=True)):
            box, memory = open_box(offer) or (None, None)
            self._links.append(_Link(server, layout, box, memory))

    def give_start(self, sources: Sequence[Array], states: Sequence[tuple[Any, ...]], digest: str) -> None:
        """Worker 0: the parameters that all start from. states: of the optimizer, for each server."""
        self.call("the optimizer's state to start from", "state_to_start", [(*state, digest) for state in states])
        self._request("the parameters to start from", PUSH | INIT, self._parts(sources, gradients=True), None)
        self._starts += 1

    def await_start(self) -> str:
        """The others: wait for them; their hash."""
        self._starts += 1
        title = f"parameters that worker 0 gives by broadcast() #{self._starts}"
        digests: list[str] = self.call(title, "await_start", [(self._starts,)] * len(self._links), late=True)
        return digests[0]

    # Steps.

    def pull(self, targets: Sequence[Array]) -> None:
        """All parameters, into arrays of the tensors' shapes."""
        parts = self._parts(targets)
        self._request("a pull of the parameters", PULL, None, parts)

    def step(
        self, sources: Sequence[Array], absent: Sequence[int], targets: Sequence[Array], lr: float, drain: bool
    ) -> Outcome:
        """Push a gradient, and pull.

        sources: contiguous, in the dtypes of the layout, zeros for those that are `absent`.
        """
        up, down = self._parts(sources, gradients=True), self._parts(targets)
        here = PUSH | (BEGIN if self._asks else 0) | (DONE if self._waits else 0) | PULL
        more: dict[str, Any] = {"absent": absent, "lr": lr, "drain": DRAIN * drain}
        title = f"step {self.step_number} with the parameter servers"
        if len(self._links) == 1:
            answers = self._request(title, here, up, down, **more)
            return self._outcome(answers, answers[0].flags)
        if not self._waits:
            return self._outcome(self._request(title, PUSH | PULL, up, down, **more), 0)
        dropped = False
        if self._asks:
            dropped = bool(self._request(title, BEGIN, None, None, only=1)[0].flags & DROPPED)
        answers = [] if dropped else self._request(title, PUSH, up, None, **more)
        done = self._request(title, DONE, None, None, only=1, drain=DRAIN * (drain and dropped))
        pulled = self._request(title, PULL, None, down)
        outcome = self._outcome([done[0], *pulled[1:]], DROPPED * dropped)
        staleness = max((answer.staleness for answer in answers), default=0)
        return dataclasses.replace(
            outcome, staleness=staleness, save=any(a.flags & SAVE for a in (*answers, *done, *pulled))
        )

    def _outcome(self, answers: list[Answer], flags: int) -> Outcome:
        for answer in answers:
            flags |= answer.flags
        self.step_number = answers[0].step
        staleness = max(answer.staleness for answer in answers)
        return Outcome(self.step_number, bool(flags & DROPPED), staleness, bool(flags & DRAINING), bool(flags & SAVE))

    def _request(
        self, title: str, flags: int, up: list[list[Array]] | None, down: list[list[Array]] | None,
        absent: Sequence[int] = (), lr: float = float("nan"), drain: int = 0, only: int | None = None,
    ) -> list[Answer]:  # fmt: skip
        """One request to each server (the first `only`)."""
        pending = []
        links = self._links[:only]
        for link in links:
            record = Request(flags | drain, self.step_number, link.version, lr).pack()
            sources, cells = ([], _NO_CELLS) if up is None else (up[link.server], link.layout.up)
            if absent:
                marks = np.isin([piece.tensor for piece in link.layout.pieces], absent).astype(np.uint8)
                sources, cells = [marks, *sources], np.concatenate([[marks.size], cells])
                record = Request(flags | drain | ABSENT, self.step_number, link.version, lr).pack()
            pending.append(link.begin(self._post, record, sources, cells, [] if down is None else down[link.server]))

        def steps() -> Steps[list[bytes]]:
            replies = list(pending)
            yield All(list(pending)) if len(pending) > 1 else pending[0]
            return [each.reply for each in replies]

        at_once = len(pending) == 1 and pending[0].done()
        replies = [pending[0].reply] if at_once else self._drive(title, steps())
        answers = [Answer.unpack(reply) for reply in replies]
        if flags & PULL:
            for link, answer in zip(links, answers, strict=True):
                link.version = answer.version
        return answers

    def _parts(self, values: Sequence[Array], gradients: bool = False) -> list[list[Array]]:
        """The pieces of arrays, one for each tensor, by server, as views."""
        found = []
        for layout in self._layouts:
            parts = []
            for piece in layout.pieces:
                value = values[piece.tensor]
                whole = piece.stop - piece.start == value.size
                parts.append(value if whole else value.reshape(-1)[piece.start : piece.stop])
            found.append(parts)
        return found

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

    def save(self, root: str) -> str:
        """A checkpoint of parameters and optimizer, written by the servers; its path."""
        title = f"a checkpoint in {root}"
        (step, *_) = self.call(title, "step_number", [()] * len(self._links))
        directory = checkpoint.begin(root, step)
        try:
            saved = self.call(title, "save", [(directory,)] * len(self._links))
            versions = [version for *_, version in saved]
            meta = {"optimizer": saved[0][1], "versions": versions}
            path = str(checkpoint.commit(directory, step, [shard for shard, *_ in saved], meta))
        except BaseException:
            checkpoint.abandon(directory)
            raise
        self.call(title, "saved", [(path,)] * len(self._links))
        return path

    def statistics(self) -> list[Account]:
        """The servers' accounts."""
        return self.call("statistics of the parameter servers", "statistics", [()] * len(self._layouts))


def leave(running: Running) -> None:
    """This worker asks for nothing any more; also one that never did."""
    post, until = Post(running.comm), time.monotonic() + _LEAVE_S
    for server in range(running.servers):
        post.send(server, CALL, ("leave", ()))
    while not post.tend() and time.monotonic() < until:
        pass
