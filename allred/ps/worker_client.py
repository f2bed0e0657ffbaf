"""Client of the parameter servers on a worker: step requests and control requests to each server, in the right order.

With one server a step is one request. With several and a policy that waits, the worker first asks the coordinator on
server 0 (BEGIN), then pushes the gradient to all servers, then reports that to the coordinator (DONE), whose reply has
the step that the worker may begin, and then pulls from all servers (step_handler.py gives the reasons). With a policy
that does not wait, one request to each server pushes the gradient and pulls the parameters.
"""

import dataclasses
import math
import os
import pathlib
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from allred import arena, checkpoint, world
from allred.arrays import Array, as_buffer
from allred.checkpoint import table_rows
from allred.checkpoint.directory import name_of_step
from allred.comm import functions
from allred.comm.work import Steps
from allred.errors import AllredError, CheckpointError, InputError
from allred.ps import protocol, table_cells
from allred.ps.context import Context
from allred.ps.mpi_transport import CALL, LOST, REPLY, Exchange, MpiTransport, send_leave
from allred.ps.placement import Piece, Placement
from allred.ps.protocol import ServerStatistics
from allred.ps.run_steps import AllPending, run_steps
from allred.ps.shard import Layout, Parts, lay_out
from allred.ps.shm_transport import open_mailbox
from allred.ps.table_cells import TableGradient
from allred.timeline import recorder
from allred.timeline.recorder import span
from allred.watch.wait import Awaited

_INTERRUPTED = (
    "a request to the parameter servers was interrupted (Ctrl-C, a time limit), and cannot be taken back; end this "
    "worker, and start again from a checkpoint"
)
_FORKED = "this process was forked from a rank after allred.init(); use allred in the rank only"
_LEFT = "this worker has left the parameter servers (allred.shutdown()); make a new optimizer with allred.distributed"
_LOOKUP = "a lookup of embeddings"
_PUSH_PULL = protocol.PUSH | protocol.PULL
_KINDS = {protocol.PUSH: "push", protocol.PULL: "pull", _PUSH_PULL: "push+pull", 0: "wait"}  # in the timeline
_NOTHING: list[Any] = []
_NO_CELLS = np.empty(0, np.int64)
_NO_PLACES = np.empty((0, 2), np.int64)


@dataclasses.dataclass
class _ServerLink:
    """The connection to one server. box, memory: its shared memory; None with MPI. version: of this worker's
    parameters."""

    server: int
    layout: Layout
    box: Any
    memory: Any
    vectors: Any = None  # memory of the vectors that are looked up
    version: int = 0

    def begin(self, transport: MpiTransport, record: bytes, up: list[Array], up_cells: Array, down: list[Array]) -> Any:
        """Send a step request and return its `Pending`. up, down: contiguous arrays to push and to pull."""
        down_cells = self.layout.down if down else _NO_PLACES
        if self.box is None:
            sources, targets = ([part.reshape(-1).view(np.uint8) for part in parts] for parts in (up, down))
            return Exchange(transport, self.server, record, sources, up_cells, targets, down_cells[:, 1])
        if self.layout.has_bfloat16:
            down = [as_buffer(part) for part in down]
        self.box.begin(record, up, up_cells, down, self.memory if down else None, down_cells)
        return self.box

    def look_up(self, transport: MpiTransport, record: bytes, ids: Array, rows: Array, waits: bool) -> Any:
        """Send a lookup and return its `Pending`. rows: contiguous, to fill. waits: whether the worker waits for it."""
        row_bytes = rows.shape[1] * rows.itemsize
        up = np.array([(b - a) * table_cells.ID_BYTES for a, b in table_cells.id_ranges(len(ids))], np.int64)
        down = np.array(
            [
                (table_cells.vectors_at(number, row_bytes, waits), (stop - start) * row_bytes)
                for number, (start, stop) in enumerate(table_cells.vector_ranges(len(ids), row_bytes))
            ],
            np.int64,
        )
        flat = rows.reshape(-1).view(np.uint8)
        if self.box is None:
            return Exchange(transport, self.server, record, [ids.view(np.uint8)], up, [flat], down[:, 1])
        self.box.begin(record, [ids], up, [flat], self.vectors, down.reshape(-1, 2), waits)
        return self.box

    def mark(self, absent: Sequence[int], sources: list[Array], cells: Array) -> tuple[list[Array], Array]:
        """Return sources and cells with a first cell that marks the pieces without a gradient."""
        marks = np.isin([piece.tensor for piece in self.layout.pieces], absent).astype(np.uint8)
        return [marks, *sources], np.concatenate([[marks.size], cells])


def _range_of(layout: Layout, piece: Piece) -> tuple[int, int | None, int]:
    """Return a piece as (tensor, start, stop); start is None for a whole tensor."""
    whole = piece.stop - piece.start == layout.tensors[piece.tensor].elements
    return piece.tensor, None if whole else piece.start, piece.stop


def _until_done(pending: list[Any]) -> Steps[None]:
    yield AllPending(pending)


_clients: "weakref.WeakSet[Client]" = weakref.WeakSet()


def _refuse_in_child() -> None:
    for client in _clients:
        client._unusable = _FORKED


os.register_at_fork(after_in_child=_refuse_in_child)


class Client:
    """Client of the parameter servers for one optimizer on one worker.

    step_number: the step that this worker may make now. weight: of its gradients in the mean of a step. Used by one
    thread at a time.
    """

    def __init__(self, context: Context, policy: Any, placement: Placement) -> None:
        coordinator = policy.coordinator(context.workers)
        self.placement = placement
        self.step_number, self.weight = 0, 1.0
        self._asks, self._waits = coordinator.asks, coordinator.waits
        self._context = context
        self._all_flags = _PUSH_PULL | protocol.BEGIN * self._asks | protocol.DONE * self._waits
        self._transport = MpiTransport(context.comm)
        self._layouts = [lay_out(placement.tensors, placement.of(server)) for server in range(context.servers)]
        self._ranges = [[_range_of(layout, piece) for piece in layout.pieces] for layout in self._layouts]
        self._is_whole = [[part[:2] for part in ranges] for ranges in self._ranges] == [
            [(number, None) for number in range(len(placement.tensors))]
        ]
        self._links: list[_ServerLink] = []
        self._is_short = False  # whether a step is one request in shared memory, of arrays as they are
        self._up_bytes = sum(int(layout.up.sum()) for layout in self._layouts)
        self._down_bytes = sum(int(layout.down[:, 1].sum()) for layout in self._layouts)
        self._starts = 0  # number of initial parameters so far
        self._start_bytes = 0  # of these, read from the arena
        self._committed: set[pathlib.Path] = set()  # checkpoints with tables that this worker has written
        self._failures = 0  # number of final statuses of worker 0 so far
        self._unusable = ""  # the error of further requests; during a request: the error if it is interrupted
        self._thread: int | None = None  # the thread that makes a request now
        self._in_flight: list[Any] = []
        self._tables: Sequence[Sequence[TableGradient]] = ()  # of the current step
        self._prefetch: list[Any] = []  # lookups that this worker has not waited for yet
        _clients.add(self)

    def check_usable(self) -> None:
        """Raise AllredError if no request can be made now."""
        if self._unusable and self._thread not in (None, threading.get_ident()):
            raise AllredError(
                "two threads of this worker call the parameter servers at once; call them from one thread, or under a "
                "lock"
            )
        if self._unusable:
            raise world.error() or AllredError(self._unusable)

    def _begin(self) -> None:
        """Begin a request; only one is allowed at a time."""
        if self._unusable:
            self.check_usable()
        if self._prefetch:
            self.await_prefetch()
        self._unusable, self._thread = _INTERRUPTED, threading.get_ident()

    @staticmethod
    def _lost(error: Exception) -> AllredError:
        """Return the error for a dead server, with the verdict of the watcher if there is one."""
        if (watcher := world.watcher()) is not None:
            watcher.await_verdict()
            if watcher.verdict is not None:
                return watcher.error()
        return AllredError(f"a parameter server is gone: {error}")

    def _run(self, title: str, steps: Steps[Any], trains: bool = False) -> Any:
        queue = functions.current().queue
        awaited = Awaited(servers=range(len(self._links)), trains=trains)
        return run_steps(title, steps, queue.timeout_s, queue.quiet or trains, awaited=awaited)

    # Control requests.

    def call(self, request: protocol.ControlRequest, title: str = "") -> list[Any]:
        """Send a control request to all servers, and return their replies. title: instead of the request's own."""
        return self.call_each([request] * len(self._layouts), title)

    def call_first(self, request: protocol.ControlRequest, title: str = "") -> Any:
        """Send a control request to server 0, and return its reply."""
        return self.call_each([request], title)[0]

    def call_each(self, requests: Sequence[protocol.ControlRequest], title: str = "") -> list[Any]:
        """Send requests[r] to server r, and return the replies. Raises the first error among them."""
        title = title or requests[0].title
        self._begin()
        try:
            with span("wait", title):
                replies: list[Any] = self._run(title, self._exchange(requests), requests[0].trains)
        except LOST as error:
            raise self._lost(error) from error
        finally:
            self._thread = None
        self._unusable = ""
        for reply in replies:
            if isinstance(reply, AllredError):
                raise reply
        return replies

    def _exchange(self, requests: Sequence[protocol.ControlRequest]) -> Steps[list[Any]]:
        for server, request in enumerate(requests):
            self._transport.send(server, CALL, request, copies=False)  # the arrays do not change before the reply
        replies = []
        for server, request in enumerate(requests):
            replies.append((yield from self._transport.receive(server, REPLY, waits_for_peers=request.late)))
        return replies

    def register(self, request: protocol.Register) -> None:
        """Register with all servers. Raises MismatchError if worker 0 registers other parameters or options."""
        for server, (layout, reply) in enumerate(zip(self._layouts, self.call(request), strict=True)):
            box, memory, vectors = open_mailbox(reply.mailbox, reply.parameters, reply.vectors)
            if box is not None and reply.reads_arena and (own := arena.memory()) is not None:
                box.set_arena(own[0])
            self._links.append(_ServerLink(server, layout, box, memory, vectors))
            self._context.servers_return = reply.server_returns
        first = self._links[0]
        self._is_short = self._is_whole and first.box is not None and not first.layout.has_bfloat16

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient."""
        return self._up_bytes

    @property
    def referenced_bytes(self) -> int:
        """Bytes of all gradients so far that servers have read from the arena of this worker."""
        read: int = sum(link.box.referenced for link in self._links if link.box is not None)
        return read - self._start_bytes

    def send_start(self, sources: list[Array], digest: str) -> None:
        """Worker 0: send the parameters to start from, with their hash."""
        self.call(protocol.InitialParameters(digest))
        before = self.referenced_bytes
        self._request("the parameters to start from", protocol.PUSH | protocol.INIT, self._parts(sources), None)
        self._start_bytes += self.referenced_bytes - before
        self._starts += 1

    def await_start(self) -> str:
        """Other workers: wait for the initial parameters, and return their hash."""
        self._starts += 1
        title = f"parameters that worker 0 gives by broadcast() #{self._starts}"
        digest: str = self.call(protocol.AwaitStart(self._starts), title)[0]
        return digest

    def share_failure(self, failure: AllredError | None) -> None:
        """Send worker 0's final status to all workers; they wait for it. Raises the error if there is one."""
        self._failures += 1
        self.call_first(protocol.ShareFailure(self._failures, self._context.worker == 0, failure))

    # Steps.

    def pull(self, targets: list[Array]) -> None:
        """Pull all parameters into contiguous arrays of the tensors' shapes."""
        if self._asks and len(self._links) > 1:  # servers other than 0 may wait for a request of the next step
            self.step_number = max(self.step_number, self.step_and_version()[1])
        self._request("a pull of the parameters", protocol.PULL, None, self._parts(targets))

    def look_up(self, table: int, ids: Array, counts: Sequence[int], rows: Array, train: bool) -> None:
        """Look up vectors of an embedding table. ids: uint64, those of each server together. counts: of each server.
        rows: contiguous, to fill: shape (ids, dim)."""
        self._begin()
        with recorder.NO_SPAN if recorder.current is None else span("lookup", _LOOKUP, rows.nbytes):
            self._end_look_up(self._begin_look_up(table, ids, counts, rows, train, waits=True))

    def prefetch(self, table: int, ids: Array, counts: Sequence[int], rows: Array, train: bool) -> None:
        """As `look_up`, but return before the vectors have arrived, if the servers share memory with this worker that
        has room for them. The next request, or `await_prefetch`, waits for them."""
        row_bytes = rows.shape[1] * rows.itemsize
        room = table_cells.vector_cells(row_bytes, waits=False)
        fits = all(len(table_cells.vector_ranges(count, row_bytes)) <= room for count in counts)
        if not fits or any(link.box is None for link in self._links):
            return self.look_up(table, ids, counts, rows, train)
        self._begin()
        self._prefetch = self._begin_look_up(table, ids, counts, rows, train, waits=False)
        self._thread, self._unusable = None, ""

    def await_prefetch(self) -> None:
        """Wait until the vectors of `prefetch` have arrived."""
        if self._prefetch:
            pending, self._prefetch = self._prefetch, []
            self._unusable, self._thread = _INTERRUPTED, threading.get_ident()
            self._end_look_up(pending)

    def _begin_look_up(
        self, table: int, ids: Array, counts: Sequence[int], rows: Array, train: bool, waits: bool
    ) -> list[Any]:
        flags = protocol.LOOKUP | protocol.TRAIN * train | protocol.PREFETCH * (not waits)
        pending: list[Any] = []
        self._in_flight, start = pending, 0
        try:
            for link, count in zip(self._links, counts, strict=True):
                if count:
                    record = protocol.pack_request(
                        flags, self.step_number, link.version, math.nan, self.weight, table, count
                    )
                    part = slice(start, start + count)
                    pending.append(link.look_up(self._transport, record, ids[part], rows[part], waits))
                    start += count
        except LOST as error:
            raise self._lost(error) from error
        return pending

    def _end_look_up(self, pending: list[Any]) -> None:
        try:
            if pending and (len(pending) > 1 or not pending[0].done()):
                self._run(_LOOKUP, _until_done(pending))
        except LOST as error:
            raise self._lost(error) from error
        finally:
            self._thread = None
        self._unusable = ""

    def step(
        self, sources: list[Array], absent: Sequence[int], targets: list[Array], lr: float, drain: bool,
        tables: Sequence[Sequence[TableGradient]] = (),
    ) -> protocol.StepReply:  # fmt: skip
        """Push a gradient and pull the parameters. tables: for each server, the gradients of each table.

        sources: contiguous arrays in the gradient dtypes of the layout, zeros for the tensors in `absent`. targets:
        contiguous arrays. lr: the learning rate, NaN for no change. drain: ask all workers to stop. Returns the flags
        and the largest staleness of all servers.
        """
        asked = protocol.DRAIN if drain else 0
        if self._is_short and not (absent or tables) and recorder.current is None:
            return self._short_step(self._all_flags | asked, sources, targets, lr)
        up, down = self._parts(sources), self._parts(targets)
        self._tables = tables
        if len(self._links) == 1 or not self._waits:
            return self._outcome(self._request("", self._all_flags | asked, up, down, absent, lr))
        dropped = self._asks and self._request("", protocol.BEGIN, None, None, only=1)[0].flags & protocol.DROPPED
        pushed = [] if dropped else self._request("", protocol.PUSH | asked, up, None, absent, lr)
        done = self._request("", protocol.DONE | asked, None, None, only=1)
        self.step_number = done[0].step  # so the pull tells all servers that the step before is complete
        pulled = self._request("", protocol.PULL, None, down)
        return self._outcome([done[0]._replace(flags=done[0].flags | dropped), *pushed, *pulled])

    def _short_step(self, flags: int, sources: list[Array], targets: list[Array], lr: float) -> protocol.StepReply:
        """As `step`, with one server that shares memory with this worker, without tables and timeline: it takes half
        of the time of `_request`."""
        self._begin()
        link = self._links[0]
        box, layout = link.box, link.layout
        record = protocol.pack_request(flags, self.step_number, link.version, lr, self.weight, 0, 0)
        try:
            if not box.begin(record, sources, layout.up, targets, link.memory, layout.down):
                self._run(self._step_title(), _until_done([box]))
        except LOST as error:
            raise self._lost(error) from error
        finally:
            self._thread = None
        self._unusable = ""
        reply = protocol.unpack_reply(box.reply)
        link.version, self.step_number = reply.version, reply.step
        return reply

    def _step_title(self) -> str:
        return f"step {self.step_number} with the parameter servers"

    def _outcome(self, replies: list[protocol.StepReply]) -> protocol.StepReply:
        """Combine several replies: all flags, the largest staleness, and the step of the first."""
        outcome = replies[0]
        for reply in replies[1:]:
            staleness = max(outcome.staleness, reply.staleness)
            outcome = outcome._replace(flags=outcome.flags | reply.flags, staleness=staleness)
        self.step_number = outcome.step
        return outcome

    def _request(
        self, title: str, flags: int, up: list[list[Array]] | None, down: list[list[Array]] | None,
        absent: Sequence[int] = (), lr: float = math.nan, only: int | None = None,
    ) -> list[protocol.StepReply]:  # fmt: skip
        """Send one step request to each server, or to the first `only`. title: "" for a step."""
        self._begin()
        nbytes = (flags & protocol.PUSH > 0) * self._up_bytes + (flags & protocol.PULL > 0) * self._down_bytes
        try:
            kind = _KINDS[flags & _PUSH_PULL]
            with recorder.NO_SPAN if recorder.current is None else span(kind, title, nbytes):
                pending = self._send(flags, up, down, absent, lr, only)
                if len(pending) > 1 or not pending[0].done():
                    self._run(title or self._step_title(), _until_done(pending))
        except LOST as error:
            raise self._lost(error) from error
        finally:
            self._thread = None
        self._unusable = ""
        replies = [protocol.unpack_reply(each.reply) for each in pending]
        if flags & (protocol.PULL | protocol.INIT):
            for link, reply in zip(self._links, replies, strict=True):
                link.version = reply.version
        return replies

    def _send(
        self, flags: int, up: list[list[Array]] | None, down: list[list[Array]] | None, absent: Sequence[int],
        lr: float, only: int | None,
    ) -> list[Any]:  # fmt: skip
        """Begin the requests and return their `Pending` objects."""
        self._in_flight = pending = []  # kept: MPI may write into its buffers even after an interrupt
        for link in self._links[:only]:
            number = link.server
            sources, cells = (_NOTHING, _NO_CELLS) if up is None else (up[number], link.layout.up)
            here = flags
            if absent:
                sources, cells = link.mark(absent, sources, cells)
                here |= protocol.ABSENT
            if self._tables and here & protocol.PUSH and not here & protocol.INIT:
                parts, sizes = table_cells.push_parts(self._tables[number])
                sources, cells = [*parts, *sources], np.concatenate([sizes, cells])
                here |= protocol.TABLES
            record = protocol.pack_request(here, self.step_number, link.version, lr, self.weight, 0, 0)
            targets = _NOTHING if down is None else down[number]
            pending.append(link.begin(self._transport, record, sources, cells, targets))
        return pending

    def _parts(self, values: list[Array]) -> list[list[Array]]:
        """Return the pieces of each server of one array per tensor: whole arrays, or flat views."""
        if self._is_whole:  # one server has all
            return [values]
        return [
            [values[i] if start is None else values[i].reshape(-1)[start:stop] for i, start, stop in ranges]
            for ranges in self._ranges
        ]

    def begin_drain(self) -> bool:
        """Begin no more steps, on all servers. Return whether this worker writes the last checkpoint."""
        replies = self.call(protocol.BeginDrain())
        if self._asks:  # a leave may have completed the step at some servers only: complete it at the others
            self.step_number = max(version for _, version in replies)
            self._request("the last step", 0, None, None)
        return bool(replies[0][0])

    # State.

    def split_slots(self, slots: dict[str, dict[str, Array]]) -> list[Parts]:
        """Return the pieces of each server of an optimizer's slots, given as {tensor: {slot: array}}."""
        return [
            {
                index: {
                    name: value if start is None else value.reshape(-1)[start:stop]
                    for name, value in slots[self.placement.tensors[number].name].items()
                }
                for index, (number, start, stop) in enumerate(ranges)
                if self.placement.tensors[number].name in slots
            }
            for ranges in self._ranges
        ]

    def state(self, by_name: bool) -> Any:
        """Return the optimizer's state_dict. by_name: it is an optimizer of allred.optim, whose slots have names."""
        replies = self.call(protocol.GetState())
        if not by_name:
            if len(replies) > 1:
                raise InputError(
                    "the state of an optimizer that is not of allred.optim is available from one server only"
                )
            return replies[0][0]
        slots: dict[str, dict[str, Array]] = {}
        for ranges, (_, parts) in zip(self._ranges, replies, strict=True):
            for index, part in parts.items():
                number, start, stop = ranges[index]
                tensor = self.placement.tensors[number]
                whole = slots.setdefault(tensor.name, {})
                for name, value in part.items():
                    if start is None:
                        whole[name] = value
                    else:
                        target = whole.setdefault(name, np.empty(tensor.shape, value.dtype))
                        target.reshape(-1)[start:stop] = value
        return {**replies[0][0], "slots": slots}

    def step_and_version(self) -> tuple[int, int]:
        """Return server 0's number of updates now, with and without those before a restore."""
        found: tuple[int, int] = self.call_first(protocol.GetStep())
        return found

    @property
    def version(self) -> int:
        """The version at server 0 of this worker's parameters, from the last pull or broadcast."""
        return self._links[0].version

    def save(self, root: str, meta: dict[str, str], names: dict[str, str], extra: Any = None) -> str:
        """Write a checkpoint in `root` and return its path. meta: for its manifest. names: see protocol.Save. extra: an
        object that is pickled into it."""
        title = f"a checkpoint in {root}"
        entry = None if extra is None else checkpoint.pickled_extra(extra)
        step, _ = self.step_and_version()
        directory = checkpoint.begin(root, step)
        try:
            complete = frozenset[str]()
            if self._committed:
                self._committed.discard(pathlib.Path(root).resolve() / name_of_step(step))  # it may be replaced
                paths = [path for path in checkpoint.list_complete(root) if path.resolve() in self._committed]
                complete = frozenset(path.name for path in paths)
            save = protocol.Save(directory, names, entry, name_of_step(step), complete)
            others = [dataclasses.replace(save, extra=None)] * (len(self._links) - 1)
            saved = self.call_each([save, *others], title)
            versions = [version for _, _, version, _ in saved]
            parts = {name: [rows[name][0] for *_, rows in saved] for name in saved[0][3]}
            steps, bases = ({name: each[i] for name, each in saved[0][3].items()} for i in (1, 2))
            for name, base in bases.items():
                if {rows[name][2] for *_, rows in saved} != {base}:
                    raise CheckpointError(f"the servers have based table {name!r} on different checkpoints; save again")
            tables = table_rows.describe_tables(parts, steps, bases)
            manifest = {**meta, "optimizer": saved[0][1], "versions": versions, **tables}
            path = str(checkpoint.commit(directory, step, [shard for shard, *_ in saved], manifest))
        except BaseException:
            checkpoint.abandon(directory)
            raise
        if tables:
            self._committed.add(pathlib.Path(path).resolve())
        self.call(protocol.CheckpointComplete(path), title)
        return path

    # The end.

    @property
    def is_interrupted(self) -> bool:
        return self._unusable == _INTERRUPTED

    def leave(self) -> None:
        """Tell the servers that this worker makes no more requests."""
        self.await_prefetch()
        send_leave(self._context.comm, self._context.servers)
        self._unusable = _LEFT

    def leave_and_wait(self) -> list[ServerStatistics]:
        """As `leave`, but wait until the last worker has left. Return the statistics of the servers."""
        self.await_prefetch()
        request = protocol.LeaveAndWait()
        found: list[ServerStatistics] = self._run(request.title, self._exchange([request] * len(self._links)), True)
        self._unusable = _LEFT
        return found
