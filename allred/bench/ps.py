"""`bench ps`: a step with parameter servers: push, update by SGD, pull, through `opt.step`.

    ranks 0 to --servers - 1 are servers, the others workers -> verify one step -> time steps interleaved
    (measure.interleave_steps) -> verify the parameters after all steps

algbw = bytes / p50; a step moves these bytes twice, to the server and back.

`make_baseline` of `run` is for benchmarks/ps_raw_mpi.py: called with the mpi4py communicator, the shapes and the dtype,
on all ranks, it returns another implementation of a step for one server and one worker, timed in turn with allred's.
Its attributes: calls, the steps of the worker by name; handlers, of the server, for control requests of `context`,
which surrounds a turn of the worker; verify(), which makes each step once and returns {name: problem or ""}.
"""

import argparse
import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import allred
from allred import arrays, native
from allred.bench import measure, output, verify
from allred.bench.allreduce import allocate, in_arena
from allred.bench.measure import Call
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


def run(
    options: argparse.Namespace, comm: Any, conditions: dict[str, Any], make_baseline: Callable[..., Any] | None = None
) -> None:
    """Measure; worker 0 prints. Raises ConfigError or WrongResultError on all ranks. Calls allred.shutdown()."""
    context = current_context()
    policy = _policy(options.consistency, context)
    workers = comm.Split(context.serves, context.rank)
    baseline = None
    if make_baseline is not None:
        baseline = make_baseline(comm, verify.PS_SETS[options.set](), options.dtype)
    if context.serves:
        return _serve(context, policy, baseline)
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
    worker = _BenchWorker(options, policy, workers, baseline)
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


class _WrongResult(ControlRequest):
    """A worker reports a wrong result. There is no reply."""

    problem: str


def _serve(context: Context, policy: Policy, baseline: Any) -> None:
    """Serve until the last worker has left. Raises WrongResultError if a worker has reported one."""
    problems: list[str] = []
    optimizer, options = SGD(lr=LR), StepOptions("opt", consistency=policy)
    agreement = options.agreement(optimizer, context.config)

    def wrong_result(worker: int, request: _WrongResult) -> Any:
        problems.append(request.problem)
        return NO_REPLY

    loop = ServerLoop(context, optimizer, policy, options.locks(optimizer, context.config), agreement)
    loop.control.handlers[_WrongResult] = wrong_result
    loop.control.handlers.update(baseline.handlers if baseline else {})
    loop.serve()
    if problems:
        raise WrongResultError(problems[0])


# Worker.


class _BenchWorker:
    """One worker. workers: mpi4py communicator of all workers."""

    def __init__(self, options: argparse.Namespace, policy: Policy, workers: Any, baseline: Any) -> None:
        self._shapes, self._dtype = verify.PS_SETS[options.set](), options.dtype
        self._workers, self._baseline = workers, baseline
        self._averages = isinstance(policy, Sync)
        self._opt = allred.distributed(allred.optim.SGD(lr=LR), consistency=policy)
        self._params = allocate(self._shapes, self._dtype)
        self._grads = allocate(self._shapes, self._dtype, in_arena)
        nbytes = sum(array.nbytes for array in self._params)
        self.what: dict[str, Any] = {"set": options.set, "bytes": nbytes, "tensors": len(self._shapes)}

    def measure(self, seconds: float) -> list[dict[str, Any]]:
        """One record per baseline, or one without. Raises WrongResultError on all workers. Collective."""
        self._verify_one_step()
        for name, problem in (self._baseline.verify() if self._baseline else {}).items():
            self._raise_if_any(f"a round trip of {name}", problem)
        start = verify.whole_params(self._shapes, self._dtype)
        self._initialize(start, verify.whole_gradients(self._shapes, self._dtype))
        others = self._baseline.calls if self._baseline else {}
        calls: dict[str, Call] = {"allred": self._step, **others}
        before = self._statistics()
        found = measure.interleave_steps(calls, self._workers, seconds * max(1, len(others)), self._turn)
        after = self._statistics()
        ours = found.pop("allred")
        updates = after.updates - before.updates
        self._verify_all_steps(updates, ours.steps, start)
        shared = {
            "updates_per_s": output.rounded(ours.steps_per_s * updates / (ours.steps * self._workers.Get_size())),
            "staleness": dict(sorted((after.staleness - before.staleness).items())),
        }
        compared: list[tuple[str | None, measure.CallTimes | None]]
        compared = [(name, other.times) for name, other in found.items()] or [(None, None)]
        return [{**output.result(ours.times, *other, self.what["bytes"]), **shared} for other in compared]

    def report_to_servers(self, problem: str) -> None:
        """Worker 0 sends the error to all servers, which raise it too."""
        context = current_context()
        transport = MpiTransport(context.comm)
        for server in range(context.servers if context.worker == 0 else 0):
            transport.send(server, CALL, _WrongResult(problem))

    def _step(self) -> None:
        self._opt.step(self._params, self._grads)

    def _initialize(self, params: list[Any], grads: list[Any]) -> None:
        for targets, sources in ((self._params, params), (self._grads, grads)):
            for target, source in zip(targets, sources, strict=True):
                target[...] = source
        self._opt.broadcast(self._params)

    def _turn(self, name: str, calls: int) -> Any:
        return contextlib.nullcontext() if name == "allred" else self._baseline.context(name, calls)

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
