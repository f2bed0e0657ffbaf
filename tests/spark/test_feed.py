"""AllredCluster with InputMode.SPARK: each row reaches one worker once per epoch; results, early stop, failures."""

import glob
import os
import re
import signal
import sys
import tempfile
import time

import cloudpickle
import numpy as np
import pytest

import allred
from allred import RemoteRankError
from allred.errors import CollectiveTimeout, InputError
from allred.spark import AllredCluster, InputMode
from allred.spark.barrier_job import SparkJobFailed

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the executors cannot import it


def read_rows(args, ctx):
    """Read all rows, with a step for each batch, and write the ids that this worker has seen."""
    allred.init()
    params = {"w": np.zeros(3)}
    opt = allred.distributed(allred.optim.SGD(lr=1.0))
    opt.broadcast(params)
    feed = ctx.get_data_feed()
    seen = [np.zeros(0, int)]
    while not feed.should_stop():
        batch = feed.next_batch(args.get("batch", 64))
        assert len(batch["id"]) <= args.get("batch", 64)
        seen.append(batch["id"])
        opt.step(params, {"w": np.ones(3)})
    np.save(f"{args['out']}/{ctx.task_index}.npy", np.concatenate(seen))


def ids_of(out):
    return [np.load(name) for name in sorted(glob.glob(f"{out}/*.npy"))]


def start(sc, map_fun, args, workers=3, **options):
    return AllredCluster.run(sc, map_fun, args, workers, input_mode=InputMode.SPARK, **options)


@pytest.mark.parametrize("servers", [pytest.param(0, marks=pytest.mark.full), 1])
def test_every_row_arrives_once_in_each_epoch(spark, sc, tmp_path, servers):
    """In mode sync, where workers get different numbers of rows, and in mode async."""
    cluster = start(sc, read_rows, {"out": str(tmp_path)}, 3 + servers, num_ps=servers)
    cluster.train(spark.range(0, 10_007, 1, 7), num_epochs=3)
    cluster.shutdown()
    cluster.shutdown()
    found = ids_of(tmp_path)
    assert len(found) == 3
    assert np.array_equal(np.bincount(np.concatenate(found)), np.full(10_007, 3))
    until = time.monotonic() + 10
    while glob.glob(f"{tempfile.gettempdir()}/allred-*/feed"):  # of the session: see conftest.py
        assert time.monotonic() < until
        time.sleep(0.1)


def test_several_calls_of_train_and_empty_partitions(spark, sc, tmp_path):
    cluster = start(sc, read_rows, {"out": str(tmp_path)}, 2)
    cluster.train(spark.range(0, 100, 1, 3))
    cluster.train(spark.range(0, 3, 1, 8))
    cluster.train(spark.range(0, 0, 1, 2))
    cluster.shutdown()
    counts = np.bincount(np.concatenate(ids_of(tmp_path)))
    assert counts.tolist() == [2, 2, 2, *[1] * 97]


def test_columns_become_arrays_under_their_new_names(spark, sc, tmp_path):
    def check(args, ctx):
        feed = ctx.get_data_feed(input_mapping={"x": "pixels", "name": "label"})
        batch = feed.next_batch(10)
        assert sorted(batch) == ["label", "pixels"]
        assert batch["pixels"].shape == (5, 3)
        assert batch["pixels"].dtype == np.float32
        assert batch["label"].tolist() == ["a", None, "c", "d", "e"]
        assert feed.should_stop()
        assert len(feed.next_batch(10)) == 0
        (tmp_path / "checked").touch()

    rows = [([0.0, 1.0, 2.0], name, 7) for name in ("a", None, "c", "d", "e")]
    cluster = start(sc, check, {}, 1)
    cluster.train(spark.createDataFrame(rows, "x ARRAY<FLOAT>, name STRING, other INT").coalesce(1))
    cluster.shutdown()
    assert (tmp_path / "checked").exists()


def test_elements_of_an_rdd_arrive_in_lists(sc, tmp_path):
    def collect(args, ctx):
        feed, seen = ctx.get_data_feed(), []
        while not feed.should_stop():
            seen += feed.next_batch(3)
        (tmp_path / "seen").write_text(repr(sorted(seen)))

    cluster = start(sc, collect, {}, 1)
    cluster.train(sc.parallelize([(number, {"text": str(number)}) for number in range(10)], 4), 2)
    cluster.shutdown()
    expected = sorted([(number, {"text": str(number)}) for number in range(10)] * 2, key=lambda row: row[0])
    assert (tmp_path / "seen").read_text() == repr(expected)


def double(args, ctx):
    feed = ctx.get_data_feed(train=False)
    while not feed.should_stop():
        batch = feed.next_batch(7)
        values = batch["id"] if isinstance(batch, dict) else batch
        feed.batch_results([2 * int(value) for value in values])


def test_inference_returns_a_result_for_each_row_in_order(spark, sc):
    cluster = start(sc, double, {}, 2)
    frame = cluster.inference(spark.range(0, 1000, 1, 5))
    assert frame.collect() == list(range(0, 2000, 2))
    assert frame.count() == 1000  # computed again
    assert cluster.inference(sc.parallelize(range(100), 3)).collect() == list(range(0, 200, 2))
    cluster.shutdown()


def test_inference_needs_a_feed_of_inference_and_a_result_for_each_row(spark, sc):
    cluster = start(sc, lambda args, ctx: ctx.get_data_feed().next_batch(1), {}, 1)
    with pytest.raises(Exception, match=r"partition \d+: .*(has ended|stopped reading)"):  # when a task notices it
        cluster.inference(spark.range(5)).collect()
    with pytest.raises(RemoteRankError, match=r"the driver has called inference\(\), which needs ctx.get_data_feed"):
        cluster.shutdown()
    cluster = start(sc, lambda args, ctx: None, {}, 1)
    with pytest.raises(Exception, match="the workers have stopped reading, so its rows get no results"):
        cluster.inference(spark.range(5)).collect()
    cluster.shutdown()


def test_slow_steps_are_progress(spark, sc):
    """Of one partition; and while the other worker, which has no rows, takes part in the steps."""

    def read_slowly(args, ctx):
        allred.init()
        feed = ctx.get_data_feed()
        while not feed.should_stop():
            feed.next_batch(10)
            allred.allreduce(np.ones(1))
            time.sleep(0.5)

    cluster = start(sc, read_slowly, {}, 2)
    cluster.train(spark.range(0, 100, 1, 1), feed_timeout=2)
    cluster.shutdown()


def test_a_worker_may_stop_early(spark, sc, tmp_path):
    def stop(args, ctx):
        allred.init()
        feed = ctx.get_data_feed()
        rows = sum(len(feed.next_batch(10)["id"]) for _ in range(3))
        feed.terminate()
        assert feed.should_stop()
        (tmp_path / str(ctx.task_index)).write_text(str(rows))

    def return_early(args, ctx):
        ctx.get_data_feed().next_batch(10)

    for map_fun in (stop, return_early):
        cluster = start(sc, map_fun, {}, 2)
        cluster.train(spark.range(0, 100_000, 1, 20), num_epochs=1000)
        cluster.shutdown()
    assert [(tmp_path / str(index)).read_text() for index in range(2)] == ["30", "30"]


def test_a_worker_stops_early_while_another_has_no_rows(spark, sc, tmp_path):
    """The second worker is in join() when the first one stops."""

    def stop(args, ctx):
        allred.init()
        params = {"w": np.zeros(1)}
        opt = allred.distributed(allred.optim.SGD(lr=1.0))
        opt.broadcast(params)
        feed = ctx.get_data_feed()
        for steps, _ in enumerate(feed.batches(10), 1):
            opt.step(params, {"w": np.ones(1)})
            if steps == 3:
                feed.terminate()
        (tmp_path / str(ctx.task_index)).write_text(str(params["w"][0]))

    cluster = start(sc, stop, {}, 2)
    cluster.train(spark.range(0, 1000, 1, 1))
    cluster.shutdown()
    assert [(tmp_path / str(index)).read_text() for index in range(2)] == ["-3.0", "-3.0"]


def test_a_failing_worker_ends_the_feed_with_its_traceback(spark, sc):
    def fail(args, ctx):
        allred.init()
        feed = ctx.get_data_feed()
        feed.next_batch(10)
        if ctx.task_index == 1:
            raise OSError("disk full")
        while not feed.should_stop():
            feed.next_batch(10)

    cluster = start(sc, fail, {}, 2)
    with pytest.raises(RemoteRankError, match=r"rank 1 on .* raised OSError: disk full\nTraceback"):
        cluster.train(spark.range(0, 100_000, 1, 20), num_epochs=1000)
    cluster.shutdown()  # no effect
    with pytest.raises(allred.AllredError, match=r"the cluster has ended \(RankFailure: rank 1 on .* disk full\)"):
        cluster.train(spark.range(5))


def test_a_killed_worker_and_a_second_attempt_from_the_checkpoint(spark, sc, tmp_path):
    def resume(args, ctx):
        allred.init()
        params = {"w": np.zeros(1)}
        opt = allred.distributed(allred.optim.SGD(lr=1.0))
        feed = ctx.get_data_feed()
        with allred.Session(args["dir"], save_steps=5) as session:
            first = session.track(params=params, optimizer=opt) or 0
            for _ in session.steps(feed.batches(10)):
                opt.step(params, {"w": np.ones(1)})
                if session.step == 12 and first == 0 and ctx.task_index == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                if session.step == 20:
                    feed.terminate()
        (tmp_path / f"rank-{ctx.task_index}").write_text(f"{first} {session.step} {params['w'][0]}")

    cluster = start(sc, resume, {"dir": str(tmp_path / "checkpoints")}, 2, max_attempts=2)
    cluster.train(spark.range(0, 1000, 1, 4))
    cluster.shutdown()
    found = [(tmp_path / f"rank-{index}").read_text() for index in range(2)]
    assert re.fullmatch(r"(5|1[0-3]) 21 -21\.0", found[0])  # it resumed from the newest complete checkpoint
    assert found[0] == found[1]


def test_a_worker_that_does_not_read_is_named(spark, sc):
    def sleep(args, ctx):
        time.sleep(600)

    cluster = start(sc, sleep, {}, 2)
    with pytest.raises(CollectiveTimeout, match=r"rank [01] on .* has requested no rows for \d+ s \(f"):
        cluster.train(spark.range(0, 100, 1, 2), feed_timeout=2)


def test_wrong_calls(spark, sc, tmp_path):
    with pytest.raises(InputError, match=r"expected a SparkContext \(spark.sparkContext\), got <"):
        start(spark, double, {}, 1)
    with pytest.raises(InputError, match="num_executors must be an integer >= 1"):
        AllredCluster.run(sc, double, {}, 0)
    cluster = AllredCluster.run(sc, lambda args, ctx: ctx.get_data_feed(), {}, 1)
    with pytest.raises(InputError, match="this cluster reads files"):
        cluster.train(spark.range(5))
    with pytest.raises(RemoteRankError, match=r"is not fed: this needs AllredCluster.run\(..., InputMode.SPARK\)"):
        cluster.shutdown()
    cluster = start(sc, lambda args, ctx: ctx.get_data_feed(input_mapping={"z": "x"}).next_batch(1), {}, 1)
    with pytest.raises(RemoteRankError, match=r"no column 'z' in the DataFrame .input_mapping.; it has id"):
        cluster.train(spark.range(5))
    cluster = start(sc, read_rows, {"out": str(tmp_path)}, 1)
    with pytest.raises(InputError, match="num_epochs must be an integer >= 1"):
        cluster.train(spark.range(5), num_epochs=0)
    with pytest.raises(InputError, match="train: expected a DataFrame or an RDD, got 'x'"):
        cluster.train("x")
    with pytest.raises(SparkJobFailed, match=r"Spark ended the feed: .*ZeroDivisionError"):
        cluster.train(sc.parallelize(range(4), 2).map(lambda value: 1 // 0))


def test_files_mode_and_the_attributes_of_the_context(sc, tmp_path):
    def report(args, ctx):
        spec, server = ctx.start_cluster_server()
        text = f"{ctx.job_name} {ctx.task_index} {ctx.worker_num} {ctx.num_workers} {sorted(spec)} {args}"
        (tmp_path / str(ctx.worker_num)).write_text(text)
        if ctx.job_name == "ps":
            server.join()
        else:
            params = {"w": np.zeros(3)}
            opt = allred.distributed(allred.optim.SGD(lr=1.0))
            opt.broadcast(params)
            opt.step(params, {"w": np.ones(3)})

    AllredCluster.run(sc, report, "args", 3, 1).shutdown()
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == [
        "ps 0 0 2 ['ps', 'worker'] args", "worker 0 1 2 ['ps', 'worker'] args", "worker 1 2 2 ['ps', 'worker'] args",
    ]  # fmt: skip
