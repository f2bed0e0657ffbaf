"""`AllredCluster`, after TensorFlowOnSpark's TFCluster: the driver starts, feeds and ends the tasks of a cluster."""

import dataclasses
import enum
import pickle
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from allred.errors import AllredError, InputError
from allred.spark.barrier_job import BarrierJob, BarrierTasks, connect, pickled
from allred.spark.cluster_monitor import ClusterMonitor
from allred.spark.outcomes import RankFailure
from allred.spark.rank_process import RankProcess
from allred.spark.rank_program import Start
from allred.spark.spark_job import ExecutorLost, SparkJob
from allred.validators import integer, positive

if TYPE_CHECKING:
    from allred.spark.feeder import FeedTask

_GRACE_S = 5.0  # for Spark tasks to end by themselves, because the ranks have ended


class InputMode(enum.IntEnum):
    """The source of a worker's rows: the Spark tasks of `train` and `inference`; or files that it reads itself."""

    FILES = 0
    SPARK = 1


class AllredCluster:
    """A running cluster; made by `run`.

    cluster = AllredCluster.run(sc, map_fun, args, num_executors=3, num_ps=1, input_mode=InputMode.SPARK)
    cluster.train(df, num_epochs=3)
    cluster.shutdown()
    """

    def __init__(self, job: BarrierJob, input_mode: InputMode) -> None:
        self._job, self._mode = job, input_mode
        self._feeds = 0
        self._monitor: ClusterMonitor | None = None
        self._last_train: tuple[Any, int, float] | None = None
        self._tasks: SparkJob | None = None  # that start the ranks
        self._feed: SparkJob | None = None  # of the last train()
        self._error: BaseException | None = None  # InputMode.FILES: of the ranks
        self._is_over = False
        if input_mode is InputMode.FILES:
            job.check_slots()
            self._thread = threading.Thread(target=self._run_files, name="allred-spark-files", daemon=True)
            self._thread.start()
        else:
            self._repeat(lambda: None, feeds=False)

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
        """Start `map_fun(args, ctx)` as the tasks of a cluster. Return when they run.

        sc: the SparkContext. ctx: a NodeContext. num_executors: the number of tasks, with the servers. num_ps: the
        number of parameter servers. input_mode: FILES: map_fun reads its data itself; SPARK: it reads
        `ctx.get_data_feed()`. env, max_attempts: as for `allred.spark.run`; the next attempt repeats the last `train`.

        Raises InputError, RankFailure and ExecutorLost as `allred.spark.run`.
        """
        integer("AllredCluster.run: num_executors", num_executors, 1)
        function = pickled(map_fun, (args,))
        job = BarrierJob(sc, function, num_executors, num_ps, env, max_attempts, node=True)
        return cls(job, InputMode(input_mode))

    def train(self, data: Any, num_epochs: int = 1, feed_timeout: float = 600.0) -> None:
        """Feed all rows to the workers, each row to one of them, and wait until they have read them.

        data: a DataFrame, whose rows arrive as arrays by column; or an RDD, whose elements arrive in lists. num_epochs:
        how often; the later epochs are read from the workers' disks. feed_timeout: seconds after which a worker that
        reads no rows is an error.

        Raises CollectiveTimeout after feed_timeout, RankFailure if a task failed, ExecutorLost if Spark ended the job.
        """
        self._check_spark("train")
        epochs = integer("train: num_epochs", num_epochs, 1)
        limit_s = positive("train", "feed_timeout", feed_timeout)
        self._last_train = data, epochs, limit_s
        self._repeat(lambda: self._train(data, epochs, limit_s), feeds=True)

    def inference(self, data: Any, feed_timeout: float = 600.0) -> Any:
        """Return an RDD of the results that map_fun gives to `batch_results`, one for each row, in order.

        data: as for `train`. It is computed when an action needs it, which must be before `shutdown`.
        """
        self._check_spark("inference")
        task = self._task(False, 1, positive("inference", "feed_timeout", feed_timeout))
        if hasattr(data, "mapInArrow"):
            rows = data.mapInArrow(task.infer_arrow, "result BINARY").rdd
            return rows.map(lambda row: pickle.loads(row.result))
        return data.mapPartitions(task.infer_objects)

    def shutdown(self) -> None:
        """Tell the workers that there are no more rows, and wait for the end of all tasks. No effect if called again.

        Raises RankFailure if a task failed, ExecutorLost if Spark ended the job.
        """
        if self._is_over:
            return
        if self._mode is InputMode.FILES:
            self._is_over = True
            self._join_files()
            return
        self._repeat(self._shut_down, feeds=False)
        self._is_over = True

    # Attempts.

    def _repeat(self, attempt: Callable[[], None], feeds: bool) -> None:
        """Start the ranks, if they do not run, and call `attempt`; again after a failure. feeds: whether `attempt`
        repeats the last train()."""
        while True:
            try:
                if self._monitor is None:
                    self._start()
                    if self._last_train is not None and not feeds:
                        self._train(*self._last_train)
                attempt()
                return
            except (RankFailure, ExecutorLost) as error:
                self._stop()
                self._is_over = True
                self._job.decide(error)
                self._is_over = False
            except BaseException:
                self._stop()
                self._is_over = True
                raise

    def _start(self) -> None:
        job = self._job
        get = job.context.getConf().get
        host = get("spark.driver.host")
        bind = get("spark.driver.bindAddress") or host
        self._monitor = monitor = ClusterMonitor(job.size, job.servers, host, bind, self._cancel_feed)
        start = dataclasses.replace(job.start, driver=monitor.address)
        self._tasks = tasks = job.start_tasks(lambda index: _supervise(start, index))
        monitor.wait(lambda: monitor.all_connected() or tasks.has_ended)
        if not monitor.all_connected():
            raise RankFailure(min(tasks.wait(), key=lambda each: (each["cause"] is not None, each["rank"])))

    def _stop(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        for running in (self._feed, self._tasks):
            if running is not None:
                running.cancel(_GRACE_S)

    def _shut_down(self) -> None:
        monitor = self._running()
        monitor.send({"kind": "shut_down"})
        monitor.wait(monitor.all_ended)
        self._stop()

    def _run_files(self) -> None:
        try:
            self._job.repeat(self._job.collect)
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
        task, monitor, context = self._task(True, epochs, limit_s), self._running(), self._job.context
        monitor.touch()
        if hasattr(data, "mapInArrow"):
            fed = data.mapInArrow(task.train_arrow, "partition INT, records LONG")
        else:
            fed = data.mapPartitions(task.train_objects)
        self._feed = SparkJob(context, "the feed", fed.collect)
        try:
            self._feed.wait()
        except ExecutorLost:
            monitor.raise_failure()
            if not monitor.all_terminated():
                raise
        monitor.send({"kind": "end_feed", "feed": task.feed, "epochs": epochs})
        monitor.touch()
        monitor.wait_consumed(task.feed, limit_s)

    def _task(self, train: bool, epochs: int, limit_s: float) -> "FeedTask":
        from allred.spark.feeder import FeedTask  # imports pyarrow

        self._feeds += 1
        return FeedTask(self._feeds, train, epochs, limit_s, [worker.about for worker in self._running().workers()])

    def _cancel_feed(self) -> None:
        """End the Spark job of `train`: a worker has failed, or no worker reads rows any more."""
        if self._feed is not None:
            self._feed.request_cancel()

    def _running(self) -> ClusterMonitor:
        if self._monitor is None:
            raise AllredError("the cluster has ended; start another with AllredCluster.run")
        return self._monitor

    def _check_spark(self, what: str) -> None:
        if self._mode is not InputMode.SPARK:
            raise InputError(f"{what}: this cluster reads files; use AllredCluster.run(..., InputMode.SPARK)")
        self._running()


def _supervise(start: Start, rank: int) -> list[Any]:
    """In the task of a rank: start its supervisor. Return the outcome if a rank could not start."""
    start = dataclasses.replace(start, rank=rank, **BarrierTasks().hosts())
    process = RankProcess(start, "allred.spark.supervisor")
    problem = connect(process, rank)
    if problem is not None:
        return [problem]
    if rank < start.servers:
        process.process.wait()
    return []
