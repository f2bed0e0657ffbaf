"""The Spark job that starts the ranks: a task of a barrier stage for each.

1  each task starts a rank, which listens at an address: of loopback, if Spark's addresses of the tasks have one host
2  the tasks exchange the addresses, and a secret that task 0 has made (allGather, which takes Spark a second)
3  the ranks meet at rank 0's address (launch/rendezvous_client.py) and start MPI
4  each task waits for its rank, and returns the outcome, also after a failure: so all outcomes reach the driver, which
   finds the first failure. If Spark kills a task, the kernel kills the rank
"""

import dataclasses
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from allred.errors import InputError
from allred.run.restarts import End, RestartPolicy
from allred.spark import outcomes
from allred.spark.outcomes import Outcome, RankFailure
from allred.spark.rank_process import RankProcess
from allred.spark.rank_program import Start, check_installed, rank_name
from allred.spark.spark_job import ExecutorLost, SparkJob
from allred.validators import integer

SLOTS_S = 25.0  # for executors to register, before too few slots are an error
_SLOTS_TICK_S = 0.5


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    num_proc: int | None = None,
    num_ps: int = 0,
    env: Mapping[str, str] | None = None,
    *,
    max_attempts: int = 1,
) -> list[Any]:
    """Call `fn(*args)` as ranks on the executors of the active SparkContext. Return the results in rank order.

        def train(steps):
            allred.init()
            ...
            return loss

        losses = allred.spark.run(train, (100,), num_proc=4)

    It is a Spark job with one task for each rank, which all run at the same time. fn calls allred.init(), as a script
    under mpirun would. The executors need allred[spark] and MPICH (allred[mpich]).

    num_proc: the number of ranks, with the servers; default: the slots of the cluster. num_ps: the number of parameter
    servers, which have the lowest ranks; their result is None. env: environment variables for the ranks. max_attempts:
    how often the job may start; a failed job starts again, and fn resumes from its newest checkpoint.

    Raises InputError for wrong arguments, or if there are fewer slots than ranks after 25 s; RankFailure (a
    RemoteRankError) with the traceback of the first rank that failed; ExecutorLost if Spark ended the job.
    """
    job = BarrierJob(active_context(), pickled(fn, tuple(args)), num_proc, num_ps, env, max_attempts)
    found: list[Any] = job.repeat(job.collect)
    return found


def active_context() -> Any:
    """Return the active SparkContext. Raises InputError without one."""
    from pyspark import SparkContext

    context = getattr(SparkContext, "_active_spark_context", None)
    if context is None:
        raise InputError(
            "allred.spark needs an active SparkContext: create a SparkSession first. Spark Connect has none"
        )
    return context


def pickled(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """Pickle a function and its arguments by value. Raises InputError if that fails."""
    check_installed("of this driver")
    import cloudpickle

    if not callable(function):
        raise InputError(f"allred.spark: expected a function, got {function!r}")
    try:
        return bytes(cloudpickle.dumps((function, arguments)))
    except Exception as error:
        raise InputError(
            f"the function or its arguments cannot be sent to the executors: {error}; do not refer to the "
            "SparkContext, a DataFrame, an open file or a lock in it"
        ) from None


def slots_of(context: Any) -> int:
    """Return how many tasks the cluster can run at the same time."""
    spark = context._jsc.sc()
    return int(spark.maxNumConcurrentTasks(spark.resourceProfileManager().defaultResourceProfile()))


class BarrierJob:
    """A job that starts ranks. The arguments are those of `run`. function: of `pickled`. node: see Start."""

    def __init__(
        self, context: Any, function: bytes, num_proc: int | None, num_ps: int, env: Mapping[str, str] | None,
        max_attempts: int, node: bool = False,
    ) -> None:  # fmt: skip
        self.context = context
        integer("allred.spark: num_ps", num_ps, 0)
        integer("allred.spark: max_attempts", max_attempts, 1)
        if num_proc is None:
            num_proc = max(slots_of(context), 1)
        integer("allred.spark: num_proc", num_proc, 1)
        if num_ps >= num_proc:
            raise InputError(f"allred.spark: {num_ps} parameter servers of {num_proc} ranks leave no worker")
        self.size, self.servers = num_proc, num_ps
        self.start = Start(function, 0, num_proc, num_ps, node, dict(env or {}), one_node=True, peer="")
        self._restarts = RestartPolicy(max_attempts - 1)
        self._tasks: SparkJob | None = None
        self._is_cancelled = False

    def check_slots(self) -> None:
        """Raise InputError if the cluster cannot run a task for each rank at the same time: Spark would wait."""
        fixed = self.context.master.partition("[")[0] == "local"
        until = time.monotonic() + (0 if fixed else SLOTS_S)
        while (found := slots_of(self.context)) < self.size:
            if time.monotonic() >= until:
                raise InputError(
                    f"allred.spark: {self.size} ranks need {self.size} slots, and the cluster ({self.context.master}) "
                    f"has {found}: ask for fewer ranks, or for more executors or cores (spark.executor.cores divided "
                    "by spark.task.cpus is the number of slots of an executor)"
                )
            time.sleep(_SLOTS_TICK_S)

    def collect(self) -> list[Any]:
        """Run the job once. Return the results by rank."""
        start = self.start
        return outcomes.results(self.start_tasks(lambda index: [_run_rank(start, index)]).wait())

    def start_tasks(self, task: Callable[[int], list[Any]]) -> SparkJob:
        """Start a barrier stage. task: called with the number of the task. The result of the job is a list of what all
        tasks returned."""
        self.check_slots()

        def partition(index: int, _: Iterator[int]) -> list[Any]:
            return task(index)

        tasks = self.context.parallelize(range(self.size), self.size).barrier().mapPartitionsWithIndex(partition)
        self._tasks = SparkJob(self.context, "the ranks", tasks.collect)
        return self._tasks

    def cancel(self, grace_s: float = 0.0) -> None:
        """End the tasks, if they run after grace_s seconds. No further attempt follows."""
        self._is_cancelled = True
        if self._tasks is not None:
            self._tasks.cancel(grace_s)

    def repeat(self, attempt: Callable[[], Any]) -> Any:
        """Call `attempt` until it succeeds, as often as max_attempts permits."""
        while True:
            try:
                return attempt()
            except (RankFailure, ExecutorLost) as error:
                self.decide(error)

    def decide(self, error: RankFailure | ExecutorLost) -> None:
        """After a failure: return when the next attempt may start. Raises the error if there is none."""
        code, exception = (error.code, error.exception) if isinstance(error, RankFailure) else (1, "")
        decision = self._restarts.decide(End(code, str(error), exception))
        if decision.delay_s is None or self._is_cancelled:
            if decision.reason and self._restarts.made:
                error.add_note(f"allred.spark: no further attempt: {decision.reason.replace('--restarts', 'restarts')}")
            raise error
        first = str(error).partition("\n")[0]
        print(f"allred.spark: attempt {self._restarts.made} failed: {first}; starting again", file=sys.stderr)
        time.sleep(decision.delay_s)


def _run_rank(start: Start, index: int) -> Outcome:
    """In the task of a rank: start it, and return its outcome."""
    process = RankProcess(dataclasses.replace(start, rank=index, **BarrierTasks().hosts()))
    problem = connect(process, index)
    return process.outcome() if problem is None else problem


def connect(process: Any, rank: int) -> Outcome | None:
    """Exchange the addresses of the ranks. process: a RankProcess. Return the outcome if a rank could not start."""
    address, outcome = process.address()
    gathered = BarrierTasks().gather({"address": address, "secret": secrets.token_hex(32) if rank == 0 else ""})
    failed = [number for number, each in enumerate(gathered) if not each["address"]]
    if failed:
        process.cancel()
        return outcome or {**outcomes.ended(rank, 1), "text": f"ended: rank {failed[0]} did not start"}
    addresses = {rank_name(number): each["address"] for number, each in enumerate(gathered)}
    process.join(addresses, gathered[0]["secret"])
    return None


class BarrierTasks:
    """The tasks of the barrier stage that this process is in."""

    def __init__(self) -> None:
        from pyspark import BarrierTaskContext

        self._context = BarrierTaskContext.get()

    def gather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the values of all tasks, by rank. Collective."""
        return [json.loads(text) for text in self._context.allGather(json.dumps(value))]

    def hosts(self) -> dict[str, Any]:
        """Return the attributes one_node and peer of Start, from the addresses of the executors."""
        mine = self._context.partitionId()
        found = [each.address.rpartition(":")[0].strip("[]") for each in self._context.getTaskInfos()]
        others = [host for host in found if host != found[mine]]
        return {"one_node": not others, "peer": (others or found)[0]}
