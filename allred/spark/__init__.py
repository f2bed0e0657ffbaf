"""Training on Spark: `run` starts a function as ranks on the executors; `AllredCluster` feeds them from DataFrames.

`allred.spark.ml` has the Estimator and the Model of Spark ML. docs/spark.md compares them with TensorFlowOnSpark.

    barrier_job.py      on the driver: the Spark job that starts a rank in each task; run()
    spark_cluster.py    on the driver: AllredCluster, with cluster_monitor.py, its connections to the supervisors
    rank_process.py     in a Spark task: starts a rank, its program, and waits for its outcome (outcomes.py)
    supervisor.py       the parent process of a rank that is fed; it outlives the Spark task that started it
    feeder.py, feed_queue.py, data_feed.py    the way of a partition: Spark task, supervisor, rank
"""

from allred.spark.barrier_job import run
from allred.spark.node_context import NodeContext
from allred.spark.spark_cluster import AllredCluster, InputMode

__all__ = ["AllredCluster", "InputMode", "NodeContext", "run"]
