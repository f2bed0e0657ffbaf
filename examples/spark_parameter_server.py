"""Linear regression on Spark: a parameter server, two workers that are fed from an RDD, and checkpoints.

    spark-submit --master 'local[3]' examples/spark_parameter_server.py    Spark in this process
    spark-submit --master ... examples/spark_parameter_server.py /shared   a cluster with three slots; /shared: a
                                                                           directory that all nodes share

It needs Java and pip install '/path/to/clone[mpich,spark]'. The last line is

    found [1. 2. 3. 4.] at step ...
"""

import sys
import tempfile

import numpy as np
from pyspark.sql import SparkSession

from allred import checkpoint
from allred.spark import AllredCluster, InputMode


def train(args, ctx):
    """Run on each task; the server serves from the line where the optimizer is made, and does not return."""
    import numpy as np

    import allred

    allred.init()
    params = {"w": np.zeros(4)}
    opt = allred.distributed(allred.optim.SGD(lr=0.05))
    feed = ctx.get_data_feed()
    with allred.Session(args["model_dir"], save_steps=100) as session:
        session.track(params=params, optimizer=opt)
        for batch in session.steps(feed.batches(args["batch_size"])):
            x, y = map(np.array, zip(*batch, strict=True))
            opt.step(params, {"w": 2 * x.T @ (x @ params["w"] - y) / len(x)})


def main():
    spark = SparkSession.builder.appName("parameter server").getOrCreate()
    x = np.random.default_rng(0).normal(size=(2000, 4))
    rows = spark.sparkContext.parallelize(list(zip(x, x @ [1, 2, 3, 4], strict=True)), 8)

    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as directory:
        args = {"model_dir": directory, "batch_size": 50}
        cluster = AllredCluster.run(
            spark.sparkContext, train, args, num_executors=3, num_ps=1, input_mode=InputMode.SPARK, max_attempts=3
        )
        cluster.train(rows, num_epochs=5)
        cluster.shutdown()
        newest = checkpoint.read_checkpoint(checkpoint.newest(directory))
    print(f"found {newest.params['w'].round(2)} at step {newest.step}")


if __name__ == "__main__":
    main()
