"""`bench ps`: a step with parameter servers: push, update by SGD, pull, through `opt.step`.

    ranks 0 to --servers - 1 are servers, the others workers -> verify one step -> time steps interleaved
    (measure.interleave_steps) -> verify the parameters after all steps

With --against mpi, one server and one worker also run the raw MPI round trips of baselines.py in the same processes:
the worker asks the server to leave its loop for a number of round trips. algbw = bytes / p50; a step moves these bytes
twice, to the server and back.
"""

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

import allred
from allred import arrays, native
from allred.bench import arenas, baselines, measure, output, verify
from allred.bench.verify import LR, WrongResultError
from allred.errors import ConfigError
from allred.modes.options import StepOptions
from allred.optim import SGD
from allred.ps.consistency import Policy, Sync
from allred.ps.context import Context
from allred.ps.context import current as current_context
from allred.ps.control import NO_REPLY
from allred.ps.mpi_transport import CALL, MpiTransport
from allred.ps.protocol import ControlRequest, Statistics
from allred.ps.server_loop import ServerLoop


def run(options: argparse.Namespace, comm: Any, conditions: dict[str, Any]) -> None:
    """Measure; worker 0 prints. Raises ConfigError or WrongResultError on all ranks. Calls allred.shutdown()."""
    context = current_context()
    policy = _policy(options.consistency, context)
    workers = comm.Split(context.serves, context.rank)
    baseline = None
    if options.against:
        baseline = baselines.server_baseline(comm, verify.PS_SETS[options.set](), options.dtype, LR)
    if context.serves:
        return _serve(context, policy, comm, baseline)
    labels = {
        "ranks": comm.Get_size(),
        "servers": context.servers,
        "workers": context.workers,
        "consistency": type(policy).__name__.lower(),
        "dtype": arrays.name_of(options.dtype),
        "backend": "shm" if native.available and len(set(context.nodes)) == 1 else "mpi",
    }
    conditions = {"op": "push, SGD, pull", **conditions}
    writer = output.ResultWriter(options.json, enabled=context.worker == 0)
    writer.header(options.bench, labels, conditions, options.against)
    worker = _BenchWorker(options, policy, workers, comm, baseline)
    try:
        for result in worker.measure(options.seconds):
            writer.line({"bench": options.bench, **worker.what, **labels, **result, **conditions})
    except WrongResultError as error:
        worker.report_to_servers(str(error))
        raise
    finally:
        allred.shutdown()


def _policy(name: str | None, context: Context) -> Policy:
    """The consistency policy `name`, or that of the settings. Raises ConfigError for backup workers."""
    config = context.config if name is None else dataclasses.replace(context.config, consistency=name)
    policy = StepOptions("opt").policy(config)
    if isinstance(policy, Sync) and policy.replicas_to_aggregate not in (None, context.workers):
        raise ConfigError(
            f"bench ps does not support backup workers: ALLRED_REPLICAS_TO_AGGREGATE is {policy.replicas_to_aggregate} "
            f"with {context.workers} workers; all workers make the same number of steps, and one could wait forever; "
            "unset ALLRED_REPLICAS_TO_AGGREGATE"
        )
    return policy


# Server.


class _RoundTrips(ControlRequest):
    """Serve `count` raw MPI round trips of one baseline. There is no reply."""

    name: str
    count: int


class _WrongResult(ControlRequest):
    """A worker reports a wrong result. There is no reply."""

    problem: str


def _serve(context: Context, policy: Policy, comm: Any, baseline: baselines.ServerBaseline | None) -> None:
    """Serve until the last worker has left. Raises WrongResultError if a worker has reported one."""
    problems: list[str] = []
    optimizer, options = SGD(lr=LR), StepOptions("opt", consistency=policy)
    agreement = options.agreement(optimizer, context.config)

    def round_trips(worker: int, request: _RoundTrips) -> Any:
        assert baseline is not None
        round_trip = baseline.round_trips[request.name]
        empty = np.empty(0, np.uint8)
        comm.Send(empty, worker + 1)  # the server is ready
        for _ in range(request.count):
            round_trip.serve()
        comm.Send(empty, worker + 1)  # the server has completed all round trips
        return NO_REPLY

    def wrong_result(worker: int, request: _WrongResult) -> Any:
        problems.append(request.problem)
        return NO_REPLY

    loop = ServerLoop(context, optimizer, policy, options.locks(optimizer, context.config), agreement)
    loop.control.handlers |= {_RoundTrips: round_trips, _WrongResult: wrong_result}
    loop.serve()
    if problems:
        raise WrongResultError(problems[0])


# Worker.


class _BenchWorker:
    """One worker. workers, comm: mpi4py communicators of all workers, and of all ranks."""

    def __init__(
        self,
        options: argparse.Namespace,
        policy: Policy,
        workers: Any,
        comm: Any,
        baseline: baselines.ServerBaseline | None,
    ) -> None:
        self._shapes, self._dtype = verify.PS_SETS[options.set](), options.dtype
        self._workers, self._comm, self._baseline = workers, comm, baseline
        self._round_trips = baseline.round_trips if baseline else {}
        self._averages = isinstance(policy, Sync)
        self._transport = MpiTransport(current_context().comm)
        self._opt = allred.distributed(allred.optim.SGD(lr=LR), consistency=policy)
        self._params = baselines.allocate(self._shapes, self._dtype)
        self._grads = baselines.allocate(self._shapes, self._dtype, arenas.empty)
        nbytes = sum(array.nbytes for array in self._params)
        self.what: dict[str, Any] = {"set": options.set, "bytes": nbytes, "tensors": len(self._shapes)}

    def measure(self, seconds: float) -> list[dict[str, Any]]:
        """One record per baseline, or one without. Raises WrongResultError on all workers. Collective."""
        self._verify_one_step()
        self._verify_round_trips()
        start = verify.whole_params(self._shapes, self._dtype)
        self._initialize(start, verify.whole_gradients(self._shapes, self._dtype))
        calls: dict[str, Any] = {"allred": self._step}
        calls |= {name: round_trip.work for name, round_trip in self._round_trips.items()}
        before = self._statistics()
        seconds *= max(1, len(self._round_trips))
        found = measure.interleave_steps(calls, self._workers, seconds, self._server_context)
        after = self._statistics()
        ours = found.pop("allred")
        updates = after.updates - before.updates
        self._verify_all_steps(updates, ours.steps, start)
        shared = {
            "updates_per_s": output.rounded(ours.steps_per_s * updates / (ours.steps * self._workers.Get_size())),
            "staleness": dict(sorted((after.staleness - before.staleness).items())),
        }
        others: list[tuple[str | None, measure.CallTimes | None]]
        others = [(name, other.times) for name, other in found.items()] or [(None, None)]
        return [{**output.result(ours.times, *other, self.what["bytes"]), **shared} for other in others]

    def report_to_servers(self, problem: str) -> None:
        """Worker 0 sends the error to all servers, which raise it too."""
        context = current_context()
        for server in range(context.servers if context.worker == 0 else 0):
            self._transport.send(server, CALL, _WrongResult(problem))

    def _step(self) -> None:
        self._opt.step(self._params, self._grads)

    def _initialize(self, params: list[Any], grads: list[Any]) -> None:
        for targets, sources in ((self._params, params), (self._grads, grads)):
            for target, source in zip(targets, sources, strict=True):
                target[...] = source
        self._opt.broadcast(self._params)

    @contextlib.contextmanager
    def _server_context(self, name: str, calls: int) -> Iterator[None]:
        """The server serves `calls` raw round trips inside. The last message makes MPI complete the last send."""
        empty = np.empty(0, np.uint8)
        if name in self._round_trips:
            self._transport.send(0, CALL, _RoundTrips(name, calls))
            self._comm.Recv(empty, 0)
        yield
        if name in self._round_trips:
            self._comm.Recv(empty, 0)

    def _statistics(self) -> Statistics:
        self._workers.Barrier()
        found: Statistics = self._opt.statistics()
        self._workers.Barrier()
        return found

    def _verify_one_step(self) -> None:
        params, grads = (verify.random_arrays(self._shapes, self._dtype, seed) for seed in (0, 1))
        self._initialize(params, grads)
        self._step()
        self._pull()
        expected = verify.after_one_step(params, grads, self._workers.Get_size(), self._averages)
        self._raise_if_any("a step", verify.first_difference(self._params, expected))

    def _verify_round_trips(self) -> None:
        for name, round_trip in self._round_trips.items():
            with self._server_context(name, 1):
                round_trip.work()
            assert self._baseline is not None
            self._raise_if_any(f"a round trip of {name}", self._baseline.wrong(name))

    def _verify_all_steps(self, updates: int, steps: int, start: list[Any]) -> None:
        self._pull()
        expected = steps * (1 if self._averages else self._workers.Get_size())
        problem = verify.wrong_after_updates(updates, self._params, start, self._grads)
        if updates != expected:
            problem = f"the servers made {updates} updates, expected {expected}"
        self._raise_if_any(f"the result of {updates} updates", problem)

    def _pull(self) -> None:
        self._workers.Barrier()
        self._opt.pull(self._params)
        self._workers.Barrier()

    def _raise_if_any(self, what: str, problem: str) -> None:
        verify.raise_if_any(f"ps {self.what['set']}: {what}", problem, self._workers, role="worker")
