"""Mode ps on a worker: it pushes gradients, the servers apply them with their own optimizer, and it pulls parameters.

A worker's optimizer makes no step. It supplies only the initial state, and a learning rate that the program assigns
(worker 0's is sent with its steps).
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from allred import arena, arrays, log, nest, world
from allred.arrays import Array
from allred.comm import functions
from allred.comm.arguments import memory_conflicts
from allred.counters import shares
from allred.errors import AllredError, CollectiveTimeout, DriftError, InputError, NonFiniteError, ShutdownError
from allred.fusion import Tensor
from allred.modes import ps_payload
from allred.modes.clipping import Clipper
from allred.modes.detect.batch_arguments import compare_at_server
from allred.modes.detect.drift import warn_of_stale_start
from allred.modes.detect.drift_window import ParameterChanges, remedy
from allred.modes.detect.mistake_checks import used
from allred.modes.match import parameter
from allred.modes.options import Mode, StepInput, StepOptions
from allred.modes.ps_payload import HostStaging, PushedGradients, PushedLearningRate
from allred.modes.server_tables import ServerTables
from allred.native import arena_attach
from allred.optim.base import Optimizer, load_new_state, splittable
from allred.ps import context, protocol, shm_transport
from allred.ps.context import Context
from allred.ps.placement import place
from allred.ps.protocol import ServerStatistics, Statistics
from allred.ps.shard import Parts
from allred.ps.table_cells import TableGradient
from allred.ps.variable import checkpoint_names, describe, places
from allred.watch import exit as exit_protocol
from allred.wording import count

if TYPE_CHECKING:
    from allred.ps.worker_client import Client


_NONE: list[int] = []


class PsMode(Mode):
    """Mode ps of one optimizer on a worker. meta: for the manifest of checkpoints."""

    is_lockstep = False
    skipped = 0
    counts_steps = True  # in the counters of this rank
    weight = 1.0  # of the gradients of this worker in the mean of a step
    _waiting_s = 0.0

    def __init__(self, optimizer: Any, options: StepOptions, clipper: Clipper, meta: dict[str, str]) -> None:
        self._optimizer, self._options, self._clipper, self._meta = optimizer, options, clipper, meta
        self._title = f"{options.name}.step()"
        self._pushed: Any = None  # the hyperparameters that the servers have; None: those they were started with
        self._lr = PushedLearningRate(optimizer, self._title)
        self._context: Context = context.current()
        self._sends_hyperparameters = hasattr(optimizer, "pushed_hyperparameters") and self._context.worker == 0
        self._client: Client | None = None
        self._tensors: list[Tensor] = []
        self._checked: Any = None  # the list of tensors that was checked last
        self._loaded = self._has_sent_state = False
        self._stop_requested = self._finished = False
        self._process = os.getpid()
        self._names: dict[str, str] = {}  # in checkpoints, of parameters that have another name there
        self._final_save: Callable[[], str] | None = None  # of a session, instead of a checkpoint in checkpoint_dir
        self._steps_before: int | None = None  # step of the restored checkpoint; None: ask the servers
        self._steps, self._start = 0, 0.0
        self._pulled_at = 0.0
        self._changes = ParameterChanges()
        self._ended_at = 0.0  # when the step before ended
        self._staging = HostStaging()
        self._tables = ServerTables(options.tables, self._title, self._context.servers) if options.tables else None

    # The start.

    def broadcast(self, params: Any, tensors: list[Tensor], root: int, problem: str, values: bool) -> None:
        if root != 0:
            problem = problem or f"root={root!r}: in mode ps training starts from worker 0's parameters; omit root"
        if problem:
            raise InputError(f"{self._options.name}.broadcast(): {problem}")
        leaves = [leaf for _, leaf in nest.leaves(params)]
        self._connect(f"{self._options.name}.broadcast()", params, tensors, leaves)
        self._agree_on_start(params)
        if self._context.worker != 0:  # worker 0 sent the parameters
            self._pull(leaves)
        else:
            self._record_pull(self._staging.host_targets(leaves))
        functions.barrier()  # no worker makes a step before all have pulled
        self._pulled_at = time.perf_counter()

    @property
    def _servers(self) -> "Client":
        assert self._client is not None, "not connected to the servers"
        return self._client

    def _connect(self, title: str, params: Any, tensors: list[Tensor], leaves: list[Any]) -> None:
        """Register with the servers at the first call. Later, check that these are the parameters of the servers."""
        host_leaves = self._staging.host_targets(leaves)
        for first, second in memory_conflicts(host_leaves):
            raise InputError(f"{title}: {ps_payload.shared_memory_problem(tensors[first].name, tensors[second].name)}")
        if self._client is not None:
            if tensors != self._tensors:
                what = ps_payload.difference(tensors, self._tensors)
                raise InputError(f"{title}: parameters differ from those that the servers have: {what}")
            return
        if not tensors:
            raise InputError(f"{title}: there are no parameters to train")
        for tensor in tensors:
            if not arrays.is_inexact(tensor.dtype):
                raise InputError(f"{title}: {tensor} cannot be trained by parameter servers; floats can")
        if self._context.has_optimizer:
            raise InputError(
                f"{title}: this program trains another optimizer with the parameter servers already, which serve "
                "one; put all parameters into one optimizer, or use mode sync"
            )
        self._context.has_optimizer = True
        self._gradients = PushedGradients(tensors)
        self._client, self._tensors = self._register(title, params, tensors, leaves), tensors
        with contextlib.suppress(ValueError):  # only the main thread can set handlers
            handler = signal.getsignal(signal.SIGTERM)
            if handler == signal.SIG_DFL or getattr(handler, "__func__", None) is PsMode._on_signal:
                signal.signal(signal.SIGTERM, self._on_signal)
        self._context.leave_servers = self._leave

    def _register(self, title: str, params: Any, tensors: list[Tensor], leaves: list[Any]) -> "Client":
        from allred.ps.worker_client import Client  # imports MPI

        options, settings = self._options, self._context.config
        named = [(tensor.name, leaf) for tensor, leaf in zip(tensors, leaves, strict=True)]
        given, self._names = places(named), checkpoint_names(named)
        if given and options.placement is not None:
            raise InputError(
                f"{title}: '{next(iter(given))}' was made inside allred.device, and allred.distributed was given a "
                "placement; use one of the two"
            )
        how = options.placement if options.placement is not None else given or settings.placement
        placement = place(tensors, self._context.servers, how, split=splittable(self._optimizer))
        policy = options.policy(settings)
        client = Client(self._context, policy, placement)
        skeleton = nest.rebuild(params, list(range(len(tensors))))
        sends_optimizer = self._context.joins and self._context.worker == 0
        described = options.describe(self._optimizer) if sends_optimizer else b""
        agreement = options.agreement(self._optimizer, settings)
        arena.learn(gradient.elements * gradient.dtype.itemsize for gradient in self._gradients.tensors)
        forms = tuple(table.form.check_pickled() for table in options.tables)
        client.register(
            protocol.Register(placement, skeleton, agreement, described, shm_transport.offer_arena(), forms)
        )
        if self._tables is not None:
            self._tables.client = client
        log.info(f"mode ps, {policy.describe()}")
        if options.locks(self._optimizer, settings) and not options.asks_to_lock(settings):
            log.info("use_locking=0 has no effect: gradients are gathered before they are applied")
        for line in [*placement.report().splitlines(), *describe(named)]:
            log.info(line)
        return client

    def _agree_on_start(self, params: Any, check: bool = False) -> None:
        """Worker 0 sends its parameters to the servers, in the first call also the optimizer's state. The others wait.
        check: raise DriftError if their parameters differ."""
        values = self._staging.download([leaf for _, leaf in nest.leaves(params)])
        digest = nest.digest(nest.rebuild(params, values)) if check or self._context.worker == 0 else ""
        if self._context.worker == 0:
            if not self._has_sent_state:
                self._send_state()
            self._servers.send_start(self._gradients.to_wire(values), digest)
        elif (chiefs := self._servers.await_start()) != digest and check:
            raise DriftError(
                f"{self._title}: worker {self._context.worker} starts from other parameters (hash {digest}) than "
                f"worker 0 (hash {chiefs}); call {self._options.name}.broadcast(params) before the first step"
            )

    # Steps.

    def step(self, given: StepInput) -> None:
        _, params, _, tensors, leaves, values, samples, problem, _ = given
        rows = [] if self._tables is None else self._tables.take(self._context.worker == 0, samples != 0)
        if problem:
            raise InputError(f"{self._title}: {problem}")
        if self._finished:
            raise InputError(
                f"{self._title}: this worker has called {self._options.name}.finish(); it makes no more steps"
            )
        start, counters = time.perf_counter(), world.current().counters
        if self.counts_steps:
            counters.begin_step()
        arena_attach()
        as_before, params_given = tensors is self._checked, leaves
        if not as_before:
            leaves = self._staging.host_targets(params_given)
            self._check(params, tensors, params_given, leaves)
            values = self._staging.download(values)
        client = self._client
        assert client is not None
        if changed := self._changes.find(self._gradients.plan, leaves):
            client.check_usable()
            raise InputError(
                f"{self._title}: the program has changed {changed} since the last pull. {remedy(self._options.name)}"
            )
        sources, targets, absent = values, leaves, _NONE
        if samples == 0:  # the gradients are of no sample
            values = [None] * len(values)
        if not (as_before and self._gradients.same_dtypes and samples != 0):
            absent = [index for index, value in enumerate(values) if value is None]
            sources, targets = self._gradients.to_wire(values), ps_payload.targets(leaves)
        usable = self._finite(sources) and self._finite_rows(rows)
        clipper = self._clipper
        if usable and (clipper.limit is not None or clipper.scaler is not None):
            sources = clipper.clip_local(sources)
        if clipper.scaler is not None:
            clipper.scaler.update(not usable, self._title)
        if not usable:
            return self._end_step(start, samples, 0)
        if self._sends_hyperparameters:
            self._send_hyperparameters(client)
        client.weight = self.weight
        outcome = client.step(sources, absent, targets, self._lr.value(), self._stop_requested, rows)
        if not as_before:
            ps_payload.put_back(leaves, targets)
            self._staging.upload(params_given, leaves)
        self._steps += 1
        self._record_pull(leaves)
        dropped = bool(outcome.flags & protocol.DROPPED)
        if dropped:
            self.dropped += 1
        elif self._steps == 1:
            late_s = start - self._pulled_at
            warn_of_stale_start(
                self._options.name, self._context.worker, self._context.workers, outcome.staleness, late_s
            )
        self._end_step(start, samples, client.gradient_bytes, outcome.staleness, dropped)
        if outcome.flags & protocol.DRAINING:
            self._end()

    def _end_step(
        self, start: float, samples: int | None, nbytes: int, staleness: int = 0, dropped: bool = False
    ) -> None:
        """Count a step that began at `start`."""
        end = time.perf_counter()
        since_s = end - (self._ended_at or start)
        counters = world.current().counters
        if self.counts_steps:
            counters.end_step(self.global_step, samples or 0, since_s, end - start, 0.0, nbytes, staleness, dropped)
        else:
            counters.count_gradient(staleness, dropped)
        self._ended_at = end
        self._waiting_s += end - start

    def _send_hyperparameters(self, client: "Client") -> None:
        """Send the hyperparameters if the program has changed them, as a torch scheduler does."""
        if (values := self._optimizer.pushed_hyperparameters()) != self._pushed:
            client.call(protocol.SetHyperparameters(values))
            self._pushed = values

    def _check(self, params: Any, tensors: list[Tensor], leaves: list[Any], host_leaves: list[Any]) -> None:
        new = self._client is None
        own = [Tensor(t.name, leaf.shape, leaf.dtype) for t, leaf in zip(tensors, host_leaves, strict=True)]
        self._connect(self._title, params, own, leaves)
        if new:
            self._agree_on_start(params, check=True)
        if self._checked is None:
            compare_at_server(self._servers, self._title)
        self._start = self._start or time.perf_counter()
        self._checked = tensors
        used(self._optimizer)

    def _finite(self, sources: list[Array]) -> bool:
        """Whether the gradients may be used. Raises NonFiniteError if the policy is to raise."""
        if self._policy == "ignore" or not self._gradients.any_not_finite(sources):
            return True
        return self._refuse_nonfinite(self._gradients.describe(sources))

    @property
    def _policy(self) -> str:
        return self._options.nonfinite or str(self._context.config.nonfinite)

    def _finite_rows(self, rows: list[list[TableGradient]]) -> bool:
        """As `_finite`, of the gradients of tables."""
        if self._tables is None or self._policy == "ignore":
            return True
        found = self._tables.describe_nonfinite(rows)
        return not found or self._refuse_nonfinite(found)

    def _refuse_nonfinite(self, found: dict[str, str]) -> bool:
        """Skip the step, and return False, or raise NonFiniteError. found: descriptions by name."""
        if self._policy == "skip":
            self.skipped += 1
            world.current().counters.skip()
            return False
        name, how = next(iter(found.items()))
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        raise NonFiniteError(
            f"{self._title}: the gradient of {nest.quoted(name)} of worker {self._context.worker} is not finite ({how})"
            f"{more}; nothing was pushed. Policies: raise, skip, ignore (ALLRED_NONFINITE)"
        )

    @property
    def table_link(self) -> ServerTables | None:
        return self._tables

    def share(self, params: Any) -> Any:
        raise InputError(f"{self._options.name}.share() is available in mode sync only; parameter servers send copies")

    def pull(self, params: Any) -> None:
        title, named = f"{self._options.name}.pull()", nest.leaves(params)
        if self._client is None:
            raise InputError(f"{title}: the servers have no parameters yet; call broadcast(params)")
        leaves = [leaf for _, leaf in named]
        try:
            tensors = [parameter(name, leaf) for name, leaf in named]
        except InputError as error:
            raise InputError(f"{title}: {error}") from None
        self._connect(title, params, tensors, leaves)
        self._pull(leaves)

    def _pull(self, leaves: list[Any]) -> None:
        host_leaves = self._staging.host_targets(leaves)
        targets = ps_payload.targets(host_leaves)
        self._servers.pull(targets)
        ps_payload.put_back(host_leaves, targets)
        self._staging.upload(leaves, host_leaves)
        self._record_pull(host_leaves)
        self._pulled_at = time.perf_counter()

    def _record_pull(self, leaves: list[Any]) -> None:
        if self._context.config.check_steps:
            self._changes.record(self._steps, self._gradients.plan, leaves)

    def finish(self) -> None:
        if self._client is not None and not self._finished:
            self._client.call(protocol.Finish())
        self._finished = True

    def wait_all_workers(self) -> None:
        self.finish()
        if self._client is not None:
            self._client.call_first(protocol.AwaitFinish())

    def broadcast_failure(self, failure: AllredError | None) -> AllredError | None:
        self._servers.share_failure(failure)
        return None

    # State.

    def _states(self) -> list[tuple[Any, Parts]]:
        assert self._client is not None
        if not isinstance(self._optimizer, Optimizer):
            if self._loaded and self._context.servers > 1:
                raise InputError(
                    f"the state of {type(self._optimizer).__name__} can be given to one parameter server only: allred "
                    "does not know which part belongs to which tensor. Use an optimizer of allred.optim, or one server"
                )
            return [(self._optimizer.state_dict() if self._loaded else None, {})] * self._context.servers
        state = self._optimizer.live_state()
        others = {key: value for key, value in state.items() if key != "slots"}
        return [(others, parts) for parts in self._servers.split_slots(state["slots"])]

    def state_dict(self) -> Any:
        if self._client is None:
            return self._optimizer.state_dict()
        return self._client.state(isinstance(self._optimizer, Optimizer))

    def load_state_dict(self, state: Any) -> None:
        self._optimizer.load_state_dict(state)
        self._send_loaded_state()

    def load_new_state(self, state: Any) -> None:
        load_new_state(self._optimizer, state)
        self._send_loaded_state()

    def _send_loaded_state(self) -> None:
        self._loaded = True
        if self._client is not None and self._context.worker == 0:
            self._send_state()

    def _send_state(self) -> None:
        """Worker 0: send the state of its optimizer to the servers, which load it."""
        self._servers.call_each([protocol.LoadState(*state) for state in self._states()])
        self._has_sent_state = True

    def count_from(self, step: int) -> None:
        self._steps_before = None
        if self._context.worker == 0:
            self._servers.call(protocol.SetStep(step))

    # Reports.

    def statistics(self) -> Statistics:
        if self._client is None:
            raise InputError(f"{self._options.name}.statistics(): no step was made yet")
        return self._statistics(self._client.call(protocol.GetStatistics()))

    def _statistics(self, servers: Sequence[ServerStatistics]) -> Statistics:
        policy = self._options.policy(self._context.config)
        return Statistics(tuple(servers), policy.describe(), self._servers.placement.how)

    def summary(self) -> str:
        shape, seconds = world.current().topology, time.perf_counter() - self._start
        speed = "no steps yet"
        if self._steps:
            speed = (
                f"{self._steps} steps of this worker in {seconds:.2f} s: {self._steps / seconds:.1f} steps/s; of a "
                f"step {shares(seconds, self._waiting_s, 0.0)} (waiting: with the servers)"
            )
        skipped = f"\nskipped: {self.skipped} steps with gradients that were not finite" if self.skipped else ""
        gradients = ""
        if self._steps and (client := self._client) is not None:
            in_arena = 100 * client.referenced_bytes / (self._steps * client.gradient_bytes)
            amount = arrays.amount(client.gradient_bytes)
            gradients = f"\ngradients: {amount} a step; {in_arena:.0f} % read from the arena by servers"
        head = (
            f"world: {count(shape.size, 'worker')} and {count(self._context.servers, 'parameter server')} on "
            f"{count(shape.nodes, 'node')}, mode ps\n"
            f"speed: {speed}{skipped}{gradients}"
        )
        return head if self._client is None else f"{head}\n{self.statistics()}"

    # The end.

    def request_stop(self) -> None:
        """Send a stop request with the next step; the servers pass it on to all workers."""
        self._stop_requested = True

    def set_final_save(self, save: Callable[[], str]) -> None:
        self._final_save = save

    def _on_signal(self, number: int, frame: Any) -> None:
        if os.getpid() == self._process:
            self.request_stop()
        else:  # a process that was forked from this one, such as a data loader, ends as without this handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _end(self) -> NoReturn:
        """A rank was asked to stop: one worker writes a checkpoint, then all leave the training loop."""
        root, client = self._context.config.checkpoint_dir, self._servers
        save = self._final_save or (None if root == "none" else lambda: client.save(root, self._meta, self._names))
        result = "no checkpoint_dir is set, so nothing was saved"
        is_saver = client.begin_drain()
        if is_saver and save is not None:
            try:
                result = f"the checkpoint is {save()}"
            except AllredError as error:
                result = f"no checkpoint was written: {error}"
        if save is not None:
            result = client.call_first(protocol.EndDrain(result if is_saver else None))
        raise ShutdownError(f"{self._title}: the job was asked to end; {result}")

    def save(self, params: Any, extra: Any, copy: bool) -> Callable[[str], str]:
        if self._client is None:
            raise InputError(f"{self._options.name}.save(): the servers have no parameters yet; call broadcast(params)")
        client = self._client
        return lambda directory: client.save(directory, self._meta, self._names, extra)

    @property
    def update_interrupted(self) -> bool:
        return self._client is not None and self._client.is_interrupted

    @property
    def global_step(self) -> int:
        if self._client is None:
            return 0
        if self._steps_before is None:
            step, version = self._client.step_and_version()
            self._steps_before = step - version
        return self._steps_before + self._client.version

    def latest_step(self) -> int:
        return 0 if self._client is None else self._client.step_and_version()[0]

    def _leave(self) -> None:
        """Leave the servers. Worker 0 waits for the other workers, and prints the statistics."""
        if self._servers.is_interrupted:  # a server may wait for the rest of a request, and other workers for it
            return exit_protocol.stuck()
        if self._context.worker != 0:
            return self._servers.leave()
        try:
            statistics = self._statistics(self._servers.leave_and_wait())
        except CollectiveTimeout as error:  # this wait may end the job; no other process reports it
            return log.rank_warning(str(error))
        except AllredError:  # another error ends the job, and was reported
            return
        for line in str(statistics).splitlines() if statistics.servers[0].gradients else ():
            log.info(line)
