"""Training on Spark: `run` starts a function as ranks on the executors; `AllredCluster` feeds them from DataFrames.

`allred.spark.ml` has the Estimator and the Model of Spark ML. docs/spark.md compares them with TensorFlowOnSpark.

    barrier_job.py     the Spark job that starts a rank in each task; run()
    rank_process.py    an executor's side of a rank: starts rank_program.py, and waits for its outcome
    supervisor.py      the process that keeps a rank after its task has ended, so that its slot is free to feed it
    cluster_monitor.py the driver's connections to the supervisors
    feeder.py, feed_queue.py, data_feed.py     the way of a partition: Spark task, supervisor, rank
"""

from allred.spark.barrier_job import run
from allred.spark.node_context import NodeContext
from allred.spark.spark_cluster import AllredCluster, InputMode

__all__ = ["AllredCluster", "InputMode", "NodeContext", "run"]
