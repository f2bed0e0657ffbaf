"""A driver for test_clusters.py: cluster_program.py MASTER CASE DIRECTORY. A case is a function."""

import os
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np
from spark_session import build

import allred
import allred.spark
from allred.spark import AllredCluster, InputMode, barrier_job


def record(directory, rank):
    """Write host and process id of a rank. Return whether this is its first start."""
    (Path(directory) / f"host-{rank}").write_text(socket.gethostname())
    file = Path(directory) / f"rank-{rank}"
    first = not file.exists()
    with file.open("a") as pids:
        print(os.getpid(), file=pids)
    return first


def kill_executor():
    """Kill the Java program that this rank is a descendant of."""
    pid = os.getppid()
    while Path(f"/proc/{pid}/comm").read_text() != "java\n":
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(pid, signal.SIGKILL)


def train(directory, feed=None):
    """Count 20 steps in a parameter; rank 1 kills its executor once. Return the step of the resume, and w."""
    allred.init()
    first = record(directory, allred.rank())
    params = {"w": np.zeros(1)}
    opt = allred.distributed(allred.optim.SGD(lr=1.0))
    with allred.Session(f"{directory}/checkpoints", save_steps=5, max_steps=20) as session:
        begin = session.track(params=params, optimizer=opt) or 0
        for _ in session.steps(range(100) if feed is None else feed.batches(10)):
            opt.step(params, {"w": np.ones(1)})
            time.sleep(0.05)
            if first and session.step == 12 and allred.rank() == 1:
                kill_executor()
    if feed is not None:
        feed.terminate()
    return begin, float(params["w"][0])


def map_fun(args, ctx):
    begin, w = train(args["directory"], ctx.get_data_feed())
    (Path(args["directory"]) / f"result-{ctx.task_index}").write_text(f"{begin} {w}")


def read_all(args, ctx):
    feed = ctx.get_data_feed()
    while not feed.should_stop():
        feed.next_batch(10)


def feed_forever(args, ctx):
    allred.init()
    record(args["directory"], allred.rank())
    feed = ctx.get_data_feed()
    while not feed.should_stop():
        feed.next_batch(10)
        time.sleep(0.1)


def lost(spark, directory):
    waits_s, barrier_job.SLOTS_S = barrier_job.SLOTS_S, 2.0
    try:
        allred.spark.run(train, (directory,), num_proc=9)
    except allred.errors.InputError as error:
        print(error)
    barrier_job.SLOTS_S = waits_s
    print("results", allred.spark.run(train, (directory,), num_proc=2, max_attempts=2))
    cluster = AllredCluster.run(spark.sparkContext, read_all, {}, 2, input_mode=InputMode.SPARK)
    cluster.train(spark.range(0, 100, 1, 2))
    cluster.shutdown()


def fed_lost(spark, directory):
    cluster = AllredCluster.run(
        spark.sparkContext, map_fun, {"directory": directory}, 2, input_mode=InputMode.SPARK, max_attempts=2
    )
    cluster.train(spark.range(0, 1000, 1, 4))
    cluster.shutdown()
    print("results", [(Path(directory) / f"result-{index}").read_text() for index in range(2)], flush=True)


def feeding(spark, directory):
    cluster = AllredCluster.run(
        spark.sparkContext, feed_forever, {"directory": directory}, 2, input_mode=InputMode.SPARK
    )
    cluster.train(spark.range(0, 100_000, 1, 4), 1000)


def fed_lost_then_feeding(spark, directory):
    fed_lost(spark, f"{directory}/lost")
    feeding(spark, f"{directory}/feeding")


if __name__ == "__main__":
    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules["spark_session"])
    master, case, directory = sys.argv[1:]
    session = build(master, spark_executor_memory="512m")
    session.sparkContext.setLogLevel("WARN")
    globals()[case](session, directory)
    session.stop()
