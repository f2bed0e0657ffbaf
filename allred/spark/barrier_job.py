"""The Spark job that starts the ranks: a barrier stage with a task for each; and SparkJob, any job in a thread.

1  each task starts a rank, which listens at an address, on 127.0.0.1 if all tasks run on one host
2  the tasks exchange the addresses, and a secret that task 0 has made (allGather, which takes Spark a second)
3  the ranks meet at rank 0's address (launch/rendezvous_client.py) and start MPI
4  each task returns its rank's outcome, also after a failure. The driver selects the first failure. If Spark kills a
   task, the kernel kills the rank
"""

import dataclasses
import json
import re
import secrets
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from allred.errors import AllredError, InputError
from allred.run.restarts import End, RestartPolicy
from allred.spark import outcomes
from allred.spark.outcomes import Outcome, RankFailure
from allred.spark.rank_process import RankProcess, RankSpec, check_installed, rank_name
from allred.validators import integer

SLOTS_S = 25.0  # for executors to register, before too few slots are an error
_SLOTS_TICK_S = 0.5
_ALL_SLOTS_S = 3.0
_AGAIN_S = 0.5
_REASONS = (r"ExecutorLostFailure.*", r"(?<=failure reason: ).+", r"(?<=SparkException: ).+", r"\S.*")


# A Spark job in a thread of its own, so that another thread or Ctrl-C can cancel it. Ctrl-C cannot cancel a job of the
# thread that it interrupts: the connection of this thread to the JVM waits for the job.


class SparkJobFailed(AllredError):  # noqa: N818  (it is not a bug of the driver)
    """Spark has ended the job: an executor is lost, or a task of the job failed."""


class SparkJob:
    """A running job. action: runs it and returns its result. subject: the subject of the job, for errors."""

    def __init__(self, context: Any, subject: str, action: Callable[[], Any]) -> None:
        from pyspark import InheritableThread

        self._context, self._subject, self._action = context, subject, action
        self._tag = f"allred-{uuid.uuid4().hex}"
        self._result: Any = None
        self._error: Exception | None = None
        self._thread = InheritableThread(target=self._run, name="allred-spark-job", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._context.addJobTag(self._tag)
            self._result = self._action()
        except Exception as error:
            self._error = error

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> Any:
        """Return the result. Raises SparkJobFailed if Spark ended the job. Ctrl-C cancels the job."""
        try:
            self._thread.join()
        except BaseException:
            self.cancel()
            raise
        if self._error is not None:
            raise SparkJobFailed(f"Spark ended {self._subject}: {reason_of(self._error)}") from self._error
        return self._result

    def request_cancel(self) -> None:
        """Let Spark cancel the job, if it has begun and the context has not been stopped."""
        if self._context._jsc is not None:
            self._context.cancelJobsWithTag(self._tag)

    def cancel(self, grace_s: float = 0.0) -> None:
        """Wait until the job has ended; cancel it after grace_s seconds."""
        self._thread.join(grace_s)
        while self._thread.is_alive():
            self.request_cancel()
            self._thread.join(_AGAIN_S)


def reason_of(error: Exception) -> str:
    """Return the reason in an exception of Spark, one line: of the last Python traceback in it, if there is one."""
    text, traceback, last = str(error).rpartition("Traceback (most recent call last):")
    patterns = (r"(?m)^\S.*",) if traceback else _REASONS
    found = (re.search(pattern, last) for pattern in patterns)
    return next((match.group() for match in found if match), text)[:500]


# The job that starts the ranks.


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

    One Spark barrier stage, one task for each rank. fn calls allred.init(), as a script under mpirun would. The
    executors need allred[spark]; with servers also MPICH (allred[mpich]).

    num_proc: number of ranks, including the num_ps servers; default: the slots of the cluster, when their number has
    not changed for 3 s. num_ps: number of parameter servers, which have the lowest ranks; their result is None. env:
    environment variables of the ranks. max_attempts: attempts in total; 1: no restart. In the next attempt fn resumes
    from its newest checkpoint.

    Raises InputError for wrong arguments, or if there are fewer slots than ranks after 25 s; RankFailure (a
    RemoteRankError) with the traceback of the first rank that failed; SparkJobFailed if Spark ended the job.
    """
    if not isinstance(args, list | tuple):
        raise InputError(f"allred.spark.run: args must be a list or a tuple, got {args!r}")
    function = pickle_function(fn, tuple(args))  # checks that pyspark is installed
    job = BarrierJob(active_context(), function, num_proc, num_ps, env, max_attempts)
    found: list[Any] = job.run_with_restarts(job.collect)
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


def pickle_function(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """Pickle a function and its arguments by value. Raises InputError if that fails."""
    check_installed("of this driver")
    import cloudpickle

    if not callable(function):
        raise InputError(f"allred.spark: expected a function, got {function!r}")
    try:
        return bytes(cloudpickle.dumps((function, arguments)))
    except Exception as error:
        raise InputError(
            f"the function or its arguments cannot be sent to the executors: {error}; they must not use the "
            "SparkContext, DataFrames, open files or locks of the driver"
        ) from None


def count_slots(context: Any) -> int:
    """Return how many tasks the cluster can run at the same time."""
    spark = context._jsc.sc()
    return int(spark.maxNumConcurrentTasks(spark.resourceProfileManager().defaultResourceProfile()))


class BarrierJob:
    """A job that starts ranks. The arguments are those of `run`. function: result of `pickle_function`. passes_context:
    see RankSpec."""

    def __init__(
        self, context: Any, function: bytes, num_proc: int | None, num_ps: int, env: Mapping[str, str] | None,
        max_attempts: int, passes_context: bool = False,
    ) -> None:  # fmt: skip
        if not hasattr(context, "parallelize"):
            raise InputError(f"allred.spark: expected a SparkContext (spark.sparkContext), got {context!r}")
        self.context = context
        conf = context.getConf()
        if not self._is_local() and conf.get("spark.dynamicAllocation.enabled", "false") == "true":
            raise InputError(
                "allred.spark: Spark runs no barrier stage with dynamic allocation; set "
                "spark.dynamicAllocation.enabled=false, and the number of executors"
            )
        integer("allred.spark: num_ps", num_ps, 0)
        integer("allred.spark: max_attempts", max_attempts, 1)
        if not isinstance(env or {}, Mapping):
            raise InputError(f"allred.spark: env must be a dict of strings, got {env!r}")
        for name, value in (env or {}).items():
            if not isinstance(name, str) or not isinstance(value, str) or "=" in name or "\0" in name + value:
                raise InputError(f"allred.spark: env needs strings for names and values, got {name!r}: {value!r}")
        num_proc = self._all_slots() if num_proc is None else integer("allred.spark: num_proc", num_proc, 1)
        if num_ps >= num_proc:
            raise InputError(f"allred.spark: {num_ps} parameter servers of {num_proc} ranks leave no worker")
        self.size, self.num_ps = num_proc, num_ps
        self.spec = RankSpec(function, 0, num_proc, num_ps, passes_context, dict(env or {}))
        self._restarts = RestartPolicy(max_attempts - 1)
        self._failure: Exception | None = None  # of the last attempt
        self._tasks: SparkJob | None = None
        self._cancelled = threading.Event()

    def check_slots(self) -> None:
        """Raise InputError if the cluster cannot run a task for each rank at the same time: Spark would wait."""
        until = time.monotonic() + (0 if self._is_local() else SLOTS_S)
        while (found := count_slots(self.context)) < self.size:
            if time.monotonic() >= until:
                raise InputError(
                    f"allred.spark: {self.size} ranks need {self.size} slots, and the cluster ({self.context.master}) "
                    f"has {found}: ask for fewer ranks, or for more executors or cores (spark.executor.cores divided "
                    "by spark.task.cpus is the number of slots of an executor)"
                ) from self._failure
            time.sleep(_SLOTS_TICK_S)

    def _is_local(self) -> bool:
        return bool(self.context.master.partition("[")[0] == "local")

    def _all_slots(self) -> int:
        """Return the number of slots, after all executors have registered: it has not changed for a while."""
        until = time.monotonic() + SLOTS_S
        found, since = count_slots(self.context), time.monotonic()
        while not self._is_local() and time.monotonic() < min(until, since + _ALL_SLOTS_S if found else until):
            time.sleep(_SLOTS_TICK_S)
            if (now := count_slots(self.context)) != found:
                found, since = now, time.monotonic()
        return max(found, 1)

    def collect(self) -> list[Any]:
        """Run the job once. Return the results by rank."""
        spec = self.spec
        return outcomes.results(self.start_tasks(lambda index: [_run_rank(spec, index)]).wait())

    def start_tasks(self, task: Callable[[int], list[Any]]) -> SparkJob:
        """Start a barrier stage. task: called with the number of the task. The result of the job is a list of what all
        tasks returned."""
        self.check_slots()

        def partition(index: int, _: Iterator[int]) -> list[Any]:
            return task(index)

        ranks = self.context.parallelize(range(self.size), self.size).barrier().mapPartitionsWithIndex(partition)
        self._tasks = SparkJob(self.context, "the ranks", ranks.collect)
        if self._cancelled.is_set():
            self._tasks.cancel()
        return self._tasks

    def cancel(self, grace_s: float = 0.0) -> None:
        """Cancel the tasks if they have not ended within grace_s seconds. No further attempt follows."""
        self._cancelled.set()
        if self._tasks is not None:
            self._tasks.cancel(grace_s)

    def run_with_restarts(self, attempt: Callable[[], Any]) -> Any:
        """Call `attempt` until it succeeds, as often as max_attempts permits."""
        while True:
            try:
                return attempt()
            except (RankFailure, SparkJobFailed) as error:
                self.raise_or_wait(error)

    def raise_or_wait(self, error: RankFailure | SparkJobFailed) -> None:
        """After a failure: return when the next attempt may start. Raises the error if there is none."""
        self._failure = error
        code, exception = (error.code, error.exception) if isinstance(error, RankFailure) else (1, "")
        decision = self._restarts.decide(End(code, str(error), exception))
        if decision.delay_s is None or self._cancelled.is_set():
            if decision.reason and self._restarts.made:
                error.add_note(f"allred.spark: no further attempt: {decision.reason.replace('--restarts', 'restarts')}")
            raise error
        first = str(error).partition("\n")[0]
        print(f"allred.spark: attempt {self._restarts.made} failed: {first}; starting again", file=sys.stderr)
        if self._cancelled.wait(decision.delay_s):
            raise error


def _run_rank(spec: RankSpec, index: int) -> Outcome:
    """In the task of a rank: start it, and return its outcome."""
    process = RankProcess(dataclasses.replace(spec, rank=index, **BarrierTasks().hosts()))
    return exchange_addresses(process, index) or process.outcome()


def exchange_addresses(process: RankProcess, rank: int) -> Outcome | None:
    """Exchange the addresses of the ranks. Return the outcome if a rank could not start."""
    address, outcome = process.address()
    gathered = BarrierTasks().gather({"address": address, "secret": secrets.token_hex(32) if rank == 0 else ""})
    failed = [number for number, each in enumerate(gathered) if not each["address"]]
    if failed:
        process.stop_before_join()
        return outcome or outcomes.of_rank_not_started(rank, failed[0])
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
        """Return whether all tasks are on one host, and the host of another task: attributes of RankSpec."""
        mine = self._context.partitionId()
        found = [each.address.rpartition(":")[0].strip("[]") for each in self._context.getTaskInfos()]
        others = [host for host in found if host != found[mine]]
        return {"on_one_host": not others, "other_host": (others or found)[0]}
