"""Control requests at a server: a table of handlers by request class, and one list of requests that wait.

A handler returns the reply, NO_REPLY, or NOT_YET. In the last case the request waits, and `retry` calls its handler
again; so the handler of a request that may wait must have the same effect when it is called again.
"""

from collections.abc import Callable, Generator
from typing import Any

from allred import checkpoint
from allred.checkpoint import table_rows
from allred.cluster import topology
from allred.comm.backends.segment import Offer, accept
from allred.comm.work import Steps
from allred.embeddings.row_store import RowStore
from allred.errors import AllredError, InputError, MismatchError
from allred.optim.base import Optimizer
from allred.ps import protocol, shm_transport, table_cells
from allred.ps.compiled_steps import CompiledSteps
from allred.ps.context import Context
from allred.ps.mpi_transport import CALL, REPLY, MpiTransport
from allred.ps.placement import Placement
from allred.ps.shard import Shard, lay_out
from allred.ps.shm_transport import MailboxPort
from allred.ps.step_handler import StepHandler, Turn
from allred.watch import wait
from allred.watch.start import set_role

NOT_YET, NO_REPLY = object(), object()


class Control:
    """Control requests at one server.

    handlers: {request class: handler(worker, request)}. waiting: the requests that wait, with their workers. live: the
    workers that have not left. ports: the mailboxes of workers that share memory with this server.
    """

    def __init__(
        self,
        context: Context,
        transport: MpiTransport,
        step_handler: StepHandler,
        optimizer: Any,
        policy: Any,
        agreement: str,
    ) -> None:
        self._policy = policy
        self._context, self._transport, self._step_handler = context, transport, step_handler
        self._optimizer, self._agreement = optimizer, agreement
        self.live = set(range(context.workers))
        self.ports: dict[int, MailboxPort] = {}
        self._list_boxes()
        self.waiting: list[tuple[int, protocol.ControlRequest]] = []
        self._first: protocol.Register | None = None  # registration of worker 0
        self._shard_error: AllredError | None = None  # the error of that registration
        self._memory: Any = None  # of the parameters
        self._shard_offer: Offer | None = None
        self._digest = ""  # hash of the last initial parameters
        self._steps_before = 0  # step of the restored checkpoint
        self._batch_arguments: dict[int, Any] = {}  # {worker: arguments of its batches in its first step}
        self._gone: set[int] = set()  # workers that have left or died
        self._ended: set[int] = set()  # workers that make no more requests
        self._finished: set[int] = set()  # workers that make no more steps
        self._saver: int | None = None  # the worker that writes the last checkpoint
        self._save_result: str | None = None  # the result of the last checkpoint
        self._failures: dict[int, AllredError | None] = {}  # {number: status of worker 0}
        self.handlers: dict[type, Callable[[int, Any], Any]] = {
            protocol.Register: self._register,
            protocol.InitialParameters: self._initial_parameters,
            protocol.AwaitStart: self._await_start,
            protocol.CompareBatches: self._compare_batches,
            protocol.CountRows: lambda _, request: step_handler.require_shard().tables[request.table].rows,
            protocol.GetRows: lambda _, request: step_handler.require_shard().tables[request.table].columns(),
            protocol.LoadRows: self._load_rows,
            protocol.WriteRows: lambda _, r: step_handler.require_shard().tables[r.table].write(r.columns),
            protocol.LoadState: self._load_state,
            protocol.SetHyperparameters: lambda _, request: optimizer.set_hyperparameters(request.values),
            protocol.GetState: lambda _, request: step_handler.require_shard().state(),
            protocol.GetStep: self._get_step,
            protocol.SetStep: self._set_step,
            protocol.Save: self._save,
            protocol.CheckpointComplete: self._checkpoint_complete,
            protocol.GetStatistics: lambda _, request: step_handler.statistics,
            protocol.BeginDrain: self._begin_drain,
            protocol.EndDrain: self._end_drain,
            protocol.Finish: self._finish,
            protocol.AwaitFinish: self._await_finish,
            protocol.ShareFailure: self._share_failure,
            protocol.Leave: self._leave,
            protocol.LeaveAndWait: self._leave_and_wait,
        }

    def handle(self, source: int, request: protocol.ControlRequest | None = None) -> Steps[None]:
        """Receive a request of a rank, or take `request`, and handle it."""
        if request is None:
            request = yield from self._transport.receive(source, CALL)
        worker = source - self._context.servers
        reply = self._call_handler(worker, request)
        if isinstance(reply, Generator):
            reply = yield from reply
        if not self._send(worker, reply):
            self.waiting.append((worker, request))

    def retry(self) -> None:
        """Handle the waiting requests again."""
        self.waiting = [
            (worker, request)
            for worker, request in self.waiting
            if not self._send(worker, self._call_handler(worker, request))
        ]

    def _call_handler(self, worker: int, request: protocol.ControlRequest) -> Any:
        try:
            return self.handlers[type(request)](worker, request)
        except AllredError as error:
            return error

    def _send(self, worker: int, reply: Any) -> bool:
        """Send a reply; False for NOT_YET."""
        if reply is not NO_REPLY and reply is not NOT_YET:
            self._transport.send(worker + self._context.servers, REPLY, reply)
        return reply is not NOT_YET

    # Registration.

    def _register(self, worker: int, request: protocol.Register) -> Any:
        if self._shard_error is not None:
            raise self._shard_error
        if worker == 0:
            layout = lay_out(request.placement.tensors, request.placement.of(self._context.rank))
            self._memory, self._shard_offer = shm_transport.allocate(layout.nbytes + shm_transport.BELL_BYTES)
            try:
                shard = Shard(layout, self._memory, self._optimizer, request.skeleton)
                shard.tables = [RowStore(form) for form in request.tables]
                self._step_handler.shard = shard
                handler = self._step_handler
                handler.compiled = CompiledSteps.of(shard, self._optimizer, self._policy, handler.locking)
            except AllredError as error:
                self._shard_error = error
                raise
            self._first = request
        if self._first is None:
            return self._wait_for_worker_0()
        for agreement, name in ((request.agreement, f"worker {worker}"), (self._agreement, "the server")):
            if agreement != self._first.agreement:
                raise MismatchError(
                    f"mode ps is set differently: {name} has {agreement}, worker 0 has {self._first.agreement}; pass "
                    "the same arguments to allred.distributed on all ranks"
                )
        if request.placement.fingerprint != self._first.placement.fingerprint:
            raise MismatchError(_difference(worker, request.placement, self._first.placement))
        if (forms := [form.text for form in request.tables]) != (first := [form.text for form in self._first.tables]):
            raise MismatchError(f"tables differ: worker {worker} has {forms}, worker 0 has {first}")
        offers = self._offers(worker, bool(forms))
        reads_arena = offers[0] is not None and self._map_arena(worker, request.arena)
        return protocol.Registration(*offers, reads_arena, bool(self._context.servers_return))

    def _offers(self, worker: int, has_tables: bool) -> tuple[Offer | None, Offer | None, Offer | None]:
        """Create the mailbox of a worker on this node. Return the offers of the mailbox, of the parameters, and of the
        memory of vectors."""
        nodes = self._context.nodes
        on_this_node = nodes[worker + self._context.servers] == nodes[self._context.rank]
        if not on_this_node or self._shard_offer is None:
            return None, None, None
        memory, offer = shm_transport.allocate(shm_transport.BOX_BYTES)
        vectors, vectors_offer = shm_transport.allocate(table_cells.VECTORS_BYTES * has_tables)
        if offer is None or vectors_offer is None:
            return None, None, None
        self.ports[worker] = MailboxPort(shm_transport.mailbox(memory, self._memory))
        self.ports[worker].set_vectors(vectors)
        self._list_boxes()
        return offer, self._shard_offer, vectors_offer

    def _map_arena(self, worker: int, offer: Offer | None) -> bool:
        """Let a worker's gradients be read from its arena. Return whether that is possible."""
        if offer is None or (memory := accept(offer)) is None:
            return False
        self.ports[worker].box.set_arena(memory)
        return True

    def _list_boxes(self) -> None:
        self.box_workers, self.boxes = list(self.ports), [port.box for port in self.ports.values()]
        self._step_handler.boxes = {worker: number for number, worker in enumerate(self.box_workers)}
        if self._step_handler.compiled is not None:
            self._step_handler.compiled.set_boxes(self.boxes, self.box_workers)

    def _compare_batches(self, worker: int, request: protocol.CompareBatches) -> dict[int, Any]:
        self._batch_arguments[worker] = request.arguments
        return self._batch_arguments

    # Initial parameters.

    def _initial_parameters(self, worker: int, request: protocol.InitialParameters) -> None:
        self._digest = request.digest

    def _await_start(self, worker: int, request: protocol.AwaitStart) -> Any:
        return self._digest if request.number <= self._step_handler.starts else self._wait_for_worker_0()

    def _wait_for_worker_0(self) -> Any:
        if 0 in self._gone:
            raise AllredError(
                "worker 0 ended before it sent the initial parameters, for which this worker waits; call "
                "broadcast(params), or the first step, on all workers equally often"
            )
        return NOT_YET

    # State.

    def _load_state(self, worker: int, request: protocol.LoadState) -> None:
        self._step_handler.require_shard().load(request.state, request.parts)

    def _get_step(self, worker: int, request: protocol.GetStep) -> tuple[int, int]:
        shard = self._step_handler.require_shard()
        step = getattr(self._optimizer, "global_step", None)
        counts = isinstance(self._optimizer, Optimizer) or shard.layout.pieces  # else it makes no steps
        return step if counts and isinstance(step, int) else self._steps_before + shard.version, shard.version

    def _set_step(self, worker: int, request: protocol.SetStep) -> None:
        """For an optimizer that does not count its steps."""
        self._steps_before = request.step - self._step_handler.require_shard().version

    def _load_rows(self, worker: int, request: protocol.LoadRows) -> None:
        store = self._step_handler.require_shard().tables[request.table]
        with wait.busy():
            parts = table_rows.read_rows(request.path, store.form.name)
            store.load(request.step, parts, self._context.rank, self._context.servers)

    def _save(
        self, worker: int, request: protocol.Save
    ) -> tuple[checkpoint.ShardInfo, Any, int, dict[str, tuple[checkpoint.ShardInfo, int, str]]]:
        shard = self._step_handler.require_shard()
        state, slots = shard.state()
        entries = []
        for index, piece in enumerate(shard.layout.pieces):
            tensor = shard.layout.tensors[piece.tensor]
            held, name = slots.get(index, {}), request.names.get(tensor.name, tensor.name)
            stored_slots = {checkpoint.stored_slot(name, slot): data for slot, data in held.items()}
            for slot, data in {"": shard.parameter(index), **stored_slots}.items():
                whole = data.size != piece.stop - piece.start
                shape, start, stop = (data.shape, 0, data.size) if whole else (tensor.shape, piece.start, piece.stop)
                entry = checkpoint.Entry(name, slot, data.dtype.name, shape, start, stop)
                entries.append((entry, data.reshape(-1)))
        if not isinstance(self._optimizer, Optimizer):
            if self._context.servers > 1:
                raise InputError(
                    f"the state of {type(self._optimizer).__name__} cannot be saved by several parameter servers: "
                    "allred does not know which part belongs to which tensor. Use one of allred.optim, or one server"
                )
            entries.append(checkpoint.pickled_state(state))
            state = None
        if request.extra is not None:
            entries.append(request.extra)
        where, rows = (self._context.rank, self._context.servers), {}
        with wait.busy():
            written = checkpoint.write_shard(request.directory, *where, entries)
            for number, store in enumerate(shard.tables):
                name = store.form.name
                columns, base = store.save(request.directory.resolve().parent, request.name, request.complete)
                info = table_rows.write_rows(request.directory, number, name, *where, columns)
                rows[name] = info, store.optimizer.global_step, base
        return written, state, shard.version, rows

    def _checkpoint_complete(self, worker: int, request: protocol.CheckpointComplete) -> None:
        set_role(f"{topology.role()}; last checkpoint {request.path}")

    # The end.

    def _begin_drain(self, worker: int, request: protocol.BeginDrain) -> Any:
        self._saver = worker if self._saver is None else self._saver
        version = self._step_handler.drain()
        return NOT_YET if version is None else (self._saver == worker, version)

    def _end_drain(self, worker: int, request: protocol.EndDrain) -> Any:
        if request.result is not None:
            self._save_result = request.result
        return NOT_YET if self._save_result is None else self._save_result

    def _finish(self, worker: int, request: protocol.Finish) -> Steps[None]:
        yield from self._step_handler.leave(worker)
        self._finished.add(worker)

    def _await_finish(self, worker: int, request: protocol.AwaitFinish) -> Any:
        return None if len(self._finished | self._gone) == self._context.workers else NOT_YET

    def _share_failure(self, worker: int, request: protocol.ShareFailure) -> Any:
        if request.is_chief:
            self._failures[request.number] = request.failure
        if request.number not in self._failures and 0 in self._gone:
            raise AllredError("worker 0 ended before it wrote the last checkpoint")
        return self._failures.get(request.number, NOT_YET)

    def _leave(self, worker: int, request: protocol.Leave) -> Any:
        self._ended.add(worker)
        self.remove(worker)
        return NO_REPLY

    def _leave_and_wait(self, worker: int, request: protocol.LeaveAndWait) -> Any:
        self._leave(worker, request)
        return self._step_handler.statistics if len(self._gone) == self._context.workers else NOT_YET

    # Workers that are gone.

    def remove(self, worker: int) -> None:
        """Remove a worker that leaves or has died."""
        if worker in self.live:
            self.live.discard(worker)
            self.ports.pop(worker, None)
            self._list_boxes()
            self._step_handler.forget_reader(worker)
            self._step_handler.turns.append(Turn(None, self._remove(worker)))

    def _remove(self, worker: int) -> Steps[None]:
        yield from self._step_handler.leave(worker)
        self._gone.add(worker)  # after the leave, which may end a step and count unused gradients
        self.waiting = [
            each for each in self.waiting if each[0] != worker or isinstance(each[1], protocol.LeaveAndWait)
        ]
        if worker == self._saver and self._save_result is None:
            self._save_result = f"worker {worker} ended before it wrote the checkpoint"

    # Workers that others wait for.

    def awaited(self) -> set[int]:
        """Return the workers that others wait for, here or in MPI_Finalize."""
        found: set[int] = set()
        if self._step_handler.parked or self._waiting_in(protocol.AwaitFinish):
            found.update(self.live - self._finished)
        if self._waiting_in(protocol.Register, protocol.AwaitStart, protocol.ShareFailure):
            found.add(0)
        if self._saver is not None and self._waiting_in(protocol.EndDrain):
            found.add(self._saver)
        if self._waiting_in(protocol.BeginDrain):
            found.update(self._step_handler.sending)
        if self._ended:
            found.update(self.live)
        waiting = self._waiting_in(protocol.ControlRequest).union(self._step_handler.parked)
        return found.intersection(self.live) - waiting

    def at_end(self) -> set[int]:
        """Return the workers that wait for the last step of the others, or in MPI_Finalize."""
        return self._ended.union(self._waiting_in(protocol.AwaitFinish))

    def _waiting_in(self, *classes: type[protocol.ControlRequest]) -> set[int]:
        return {worker for worker, request in self.waiting if isinstance(request, classes)}


def _difference(worker: int, mine: Placement, first: Placement) -> str:
    """Describe how a worker's parameters or placement differ from worker 0's."""
    for a, b in zip(mine.tensors, first.tensors, strict=False):
        if str(a) != str(b):
            return f"parameters differ: worker {worker} has {a} where worker 0 has {b}"
    if len(mine.tensors) != len(first.tensors):
        return f"parameters differ: worker {worker} has {len(mine.tensors)}, worker 0 has {len(first.tensors)}"
    return (
        f"worker {worker} places the parameters differently from worker 0; allred.device around variables, or a "
        "function given as placement, must say the same on all ranks"
    )
