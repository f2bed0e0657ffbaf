"""The data feed on Spark against DataFrame.mapInArrow.

    python benchmarks/spark.py                  needs Java and pip install '/path/to/clone[mpich,spark]'

In turn: mapInArrow with a function that discards its rows, and AllredCluster.train with workers that discard theirs,
in the same Spark, which has a slot for each worker. The last line is the ratio of the median throughputs.
"""

import argparse
import statistics
import sys
import time

from pyspark.sql import SparkSession

from allred.spark import AllredCluster, InputMode


def discard(batches):
    for _ in batches:
        pass
    return iter(())


def read(args, ctx):
    feed = ctx.get_data_feed()
    while not feed.should_stop():
        feed.next_batch(args["batch_size"])


def timed(call):
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--columns", type=int, default=8, help="of type DOUBLE")
    parser.add_argument("--partitions", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=1)
    options = parser.parse_args()
    spark = SparkSession.builder.master(f"local[{options.workers}]").config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    columns = [f"id * {number + 0.5}D AS x{number}" for number in range(options.columns)]
    frame = spark.range(0, options.rows, 1, options.partitions).selectExpr(*columns)
    size = options.rows * options.columns * 8
    cluster = AllredCluster.run(
        spark.sparkContext, read, {"batch_size": options.batch_size}, options.workers, input_mode=InputMode.SPARK
    )
    cases = {
        "mapInArrow": lambda: frame.mapInArrow(discard, "x DOUBLE").collect(),
        "train": lambda: cluster.train(frame, num_epochs=options.epochs),
    }
    seconds_of = {name: [] for name in cases}
    for run in range(options.runs + 1):
        for name, call in cases.items():
            seconds = timed(call)
            if run:  # the first one starts Python workers and compiles
                seconds_of[name].append(seconds)
                print(f"{name}: {seconds:.2f} s, {size / seconds / 1e6:.0f} MB/s", file=sys.stderr)
    cluster.shutdown()
    first, second = (statistics.median(seconds_of[name]) for name in cases)
    print(f"{options.rows} rows of {options.columns} DOUBLE; mapInArrow {size / first / 1e6:.0f} MB/s, ", end="")
    print(f"train {size * options.epochs / second / 1e6:.0f} MB/s, ratio {first * options.epochs / second:.2f}")


if __name__ == "__main__":
    main()
