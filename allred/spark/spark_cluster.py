"""`AllredCluster`, after TensorFlowOnSpark's TFCluster: the driver starts, feeds and ends the tasks of a cluster."""

import dataclasses
import enum
import pickle
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from allred.errors import AllredError, InputError
from allred.runtime.timings import TASKS_END_S
from allred.spark.barrier_job import (
    BarrierJob,
    BarrierTasks,
    SparkJob,
    SparkJobFailed,
    exchange_addresses,
    pickle_function,
)
from allred.spark.cluster_monitor import ClusterMonitor
from allred.spark.outcomes import Outcome, RankFailure, first_failure
from allred.spark.rank_process import RankProcess, RankSpec
from allred.validators import integer, positive

if TYPE_CHECKING:
    from allred.spark.feeder import FeedTask


class InputMode(enum.IntEnum):
    """The source of a worker's rows: the Spark tasks of `train` and `inference`; or files that it reads itself."""

    FILES = 0
    SPARK = 1


class AllredCluster:
    """A running cluster; made by `run`.

        cluster = AllredCluster.run(sc, map_fun, args, num_executors=3, num_ps=1, input_mode=InputMode.SPARK)
        cluster.train(df, num_epochs=3)
        cluster.shutdown()

    The ranks also end if the driver ends without `shutdown`.
    """

    def __init__(self, job: BarrierJob, input_mode: InputMode) -> None:
        self._job, self._mode = job, input_mode
        self._feed_count = 0
        self._monitor: ClusterMonitor | None = None
        self._last_train: tuple[Any, int, float] | None = None
        self._tasks: SparkJob | None = None  # that start the ranks
        self._feed_job: SparkJob | None = None  # of the last train()
        self._error: BaseException | None = None  # InputMode.FILES: of the ranks
        self._is_over = False
        self._cause: BaseException | None = None  # of the end of the cluster
        if input_mode is InputMode.FILES:
            job.check_slots()
            from pyspark import InheritableThread

            self._thread = InheritableThread(target=self._run_files, name="allred-spark-files", daemon=True)
            self._thread.start()
        else:
            self._with_restarts(lambda: None, feeds=False)

    @classmethod
    def run(
        cls,
        sc: Any,
        map_fun: Callable[[Any, Any], Any],
        args: Any,
        num_executors: int,
        num_ps: int = 0,
        input_mode: InputMode = InputMode.FILES,
        *,
        env: Mapping[str, str] | None = None,
        max_attempts: int = 1,
    ) -> "AllredCluster":
        """Start `map_fun(args, ctx)` as the tasks of a cluster. SPARK: returns when all are connected to the driver.
        FILES: returns at once, and `shutdown` reports failures.

        sc: the SparkContext. ctx: a NodeContext. num_executors: number of tasks, including the servers. num_ps: number
        of parameter servers. input_mode: FILES: map_fun reads its data itself; SPARK: it reads `ctx.get_data_feed()`.
        env, max_attempts: as for `allred.spark.run`; the next attempt repeats the last `train`.

        Raises InputError, RankFailure and SparkJobFailed as `allred.spark.run`.
        """
        integer("AllredCluster.run: num_executors", num_executors, 1)
        function = pickle_function(map_fun, (args,))
        job = BarrierJob(sc, function, num_executors, num_ps, env, max_attempts, passes_context=True)
        return cls(job, InputMode(input_mode))

    def train(self, data: Any, num_epochs: int = 1, feed_timeout: float = 600.0) -> None:
        """Feed all rows to the workers, each row to one of them, and wait until they have read them.

        data: a DataFrame, whose rows arrive as arrays by column; or an RDD, whose elements arrive in lists. num_epochs:
        how often; the later epochs are read from the workers' disks. feed_timeout: seconds without a request for rows
        after which CollectiveTimeout is raised.

        Raises CollectiveTimeout after feed_timeout, RankFailure if a task failed, SparkJobFailed if Spark ended the
        job.
        """
        self._check("train", data)
        epochs = integer("train: num_epochs", num_epochs, 1)
        limit_s = positive("train", "feed_timeout", feed_timeout)
        self._last_train = data, epochs, limit_s
        self._with_restarts(lambda: self._train(data, epochs, limit_s), feeds=True)

    def inference(self, data: Any, feed_timeout: float = 600.0) -> Any:
        """Return an RDD of the results that map_fun gives to `batch_results`, one for each row, in order.

        data: as for `train`. It is computed when an action needs it, which must be before `shutdown`.
        """
        self._check("inference", data)
        task = self._new_feed(False, 1, positive("inference", "feed_timeout", feed_timeout))
        if hasattr(data, "mapInArrow"):
            rows = data.mapInArrow(task.infer_arrow, "result BINARY").rdd
            return rows.map(lambda row: pickle.loads(row.result))
        return data.mapPartitions(task.infer_objects)

    def shutdown(self) -> None:
        """Tell the workers that there are no more rows, and wait for the end of all tasks. No effect if called again.

        Raises RankFailure if a task failed, SparkJobFailed if Spark ended the job.
        """
        if self._is_over:
            return
        if self._mode is InputMode.FILES:
            self._is_over = True
            self._join_files()
            return
        self._require_context()
        self._with_restarts(self._shut_down, feeds=False)
        self._is_over = True

    # Attempts.

    def _with_restarts(self, call: Callable[[], None], feeds: bool) -> None:
        """Start the ranks, if they do not run, and call `call`; again after a failure. feeds: whether `call` repeats
        the last train()."""

        def attempt() -> None:
            try:
                if self._monitor is None:
                    self._start()
                    if self._last_train is not None and not feeds:
                        self._train(*self._last_train)
                call()
            except BaseException as error:
                self._cause = error
                self._stop()
                raise

        try:
            self._job.run_with_restarts(attempt)
        except BaseException:
            self._is_over = True
            raise

    def _start(self) -> None:
        job = self._job
        get = job.context.getConf().get
        host = get("spark.driver.host").strip("[]")
        bind = get("spark.driver.bindAddress", host).strip("[]")
        self._monitor = monitor = ClusterMonitor(job.size, job.num_ps, host, bind, self._cancel_feed)
        spec = dataclasses.replace(job.spec, driver=monitor.address)
        self._tasks = tasks = job.start_tasks(lambda index: _supervise(spec, index))
        monitor.wait(lambda: monitor.all_connected() or tasks.has_ended)
        if tasks.has_ended and (failure := first_failure(tasks.wait())) is not None:
            raise RankFailure(failure)
        monitor.wait(monitor.all_connected)

    def _stop(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        for running in (self._feed_job, self._tasks):
            if running is not None:
                running.cancel(TASKS_END_S)

    def _shut_down(self) -> None:
        monitor = self._require_monitor()
        monitor.send({"kind": "shut_down"})
        monitor.wait(monitor.all_ended)
        self._stop()

    def _run_files(self) -> None:
        try:
            self._job.run_with_restarts(self._job.collect)
        except BaseException as error:
            self._error = error

    def _join_files(self) -> None:
        try:
            self._thread.join()
        except BaseException:
            self._job.cancel()
            raise
        if self._error is not None:
            raise self._error

    # Feeds.

    def _train(self, data: Any, epochs: int, limit_s: float) -> None:
        task, monitor, context = self._new_feed(True, epochs, limit_s), self._require_monitor(), self._job.context
        monitor.raise_failure()
        monitor.reset_timeouts()
        if hasattr(data, "mapInArrow"):
            fed = data.mapInArrow(task.train_arrow, "partition INT, records LONG")
        else:
            fed = data.mapPartitions(task.train_objects)
        self._feed_job = SparkJob(context, "the feed", fed.collect)
        try:
            self._feed_job.wait()
        except SparkJobFailed:
            monitor.raise_failure()
            if not monitor.all_terminated():
                raise
        monitor.send({"kind": "end_feed", "feed": task.feed, "epochs": epochs})
        monitor.reset_timeouts()
        monitor.wait_consumed(task.feed, limit_s)

    def _new_feed(self, train: bool, epochs: int, limit_s: float) -> "FeedTask":
        from allred.spark.feeder import FeedTask  # imports pyarrow

        self._feed_count += 1
        return FeedTask(
            self._feed_count, train, epochs, limit_s, [worker.about for worker in self._require_monitor().workers()]
        )

    def _cancel_feed(self) -> None:
        """End the Spark job of `train`: a worker has failed, or no worker reads rows any more."""
        if self._feed_job is not None:
            self._feed_job.request_cancel()

    def _require_monitor(self) -> ClusterMonitor:
        if self._monitor is None:
            cause = f" ({type(self._cause).__name__}: {str(self._cause).partition(chr(10))[0]})" if self._cause else ""
            raise AllredError(f"the cluster has ended{cause}; start another with AllredCluster.run")
        return self._monitor

    def _require_context(self) -> None:
        if self._job.context._jsc is None:
            self._stop()
            self._is_over = True
            raise AllredError("the SparkContext was stopped before the cluster; call shutdown() first")

    def _check(self, what: str, data: Any) -> None:
        if self._mode is not InputMode.SPARK:
            raise InputError(f"{what}: this cluster reads files; use AllredCluster.run(..., InputMode.SPARK)")
        self._require_context()
        self._require_monitor()
        if not hasattr(data, "mapInArrow") and not hasattr(data, "mapPartitions"):
            raise InputError(f"{what}: expected a DataFrame or an RDD, got {data!r}")


def _supervise(spec: RankSpec, rank: int) -> list[Outcome]:
    """In the task of a rank: start its supervisor. Return the outcome if a rank could not start."""
    process = RankProcess(dataclasses.replace(spec, rank=rank, **BarrierTasks().hosts()), supervised=True)
    failure = exchange_addresses(process, rank) or process.connected()
    if failure is None and rank < spec.num_ps:
        process.process.wait()
    return [] if failure is None else [failure]
