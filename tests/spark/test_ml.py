"""AllredEstimator and AllredModel: fit, transform, saved and loaded by Spark ML; and the examples."""

import argparse
import re
import runpy
import shutil
import sys

import cloudpickle
import numpy as np
import pytest
from harness import ROOT
from page_blocks import programs
from pyspark.ml import Pipeline, PipelineModel

import allred
from allred import RemoteRankError
from allred.errors import InputError
from allred.spark.ml import AllredEstimator, AllredModel

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the executors cannot import it


def predict(params, inputs):
    return {"sum": inputs["x"] @ params["w"], "rows": np.repeat(len(inputs["x"]), len(inputs["x"]))}


def train(args, ctx):
    """Linear regression; the rows of the workers differ in number."""
    allred.init()
    params = {"w": np.zeros(2)}
    opt = allred.distributed(allred.optim.SGD(lr=args.lr))
    opt.broadcast(params)
    feed = ctx.get_data_feed(input_mapping=args.input_mapping)
    while not feed.should_stop():
        batch = feed.next_batch(args.batch_size)
        error = batch["x"] @ params["w"] - batch["y"]
        opt.step(params, {"w": 2 * batch["x"].T @ error / len(error)}, samples=len(error))
    ctx.export_model(args.export_dir, predict, params)


@pytest.fixture(scope="module")
def frame(spark):
    """200 rows of `features`, `label` = features @ [1, 2], and a column that nobody reads."""
    x = np.random.default_rng(0).normal(size=(200, 2))
    rows = [(row.tolist(), float(row @ [1, 2]), "x") for row in x]
    return spark.createDataFrame(rows, "features ARRAY<DOUBLE>, label DOUBLE, other STRING").repartition(3)


@pytest.fixture(scope="module")
def estimator(tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("model"))
    found = AllredEstimator(train, argparse.Namespace(lr=0.1)).setInputMapping({"features": "x", "label": "y"})
    return found.setClusterSize(2).setEpochs(10).setBatchSize(20).setExportDir(directory)


def outputs(model):
    return model.setInputMapping({"features": "x"}).setOutputMapping({"sum": "total DOUBLE", "rows": "rows INT"})


def check(rows):
    assert len(rows) == 200
    assert all(abs(row.total - row.label) < 0.01 for row in rows)
    assert max(row.rows for row in rows) <= 20


def test_an_estimator_and_its_model_in_a_pipeline_saved_and_loaded(frame, estimator, tmp_path):
    Pipeline(stages=[estimator]).save(str(tmp_path / "pipeline"))
    model = Pipeline.load(str(tmp_path / "pipeline")).fit(frame)
    outputs(model.stages[0])
    model.save(str(tmp_path / "model"))
    loaded = PipelineModel.load(str(tmp_path / "model"))
    assert loaded.stages[0].uid == model.stages[0].uid
    result = loaded.transform(frame)
    assert result.columns == ["features", "label", "other", "total", "rows"]
    check(result.collect())


def test_the_arguments_of_map_fun(estimator):
    args = estimator.setSteps(7).setModelDir("/m").setNumPS(1).merged_args()
    assert vars(args) == {
        "lr": 0.1, "batch_size": 20, "epochs": 10, "steps": 7, "cluster_size": 2, "num_ps": 1, "model_dir": "/m",
        "export_dir": estimator.getOrDefault("exportDir"), "input_mapping": {"features": "x", "label": "y"},
    }  # fmt: skip
    estimator.setSteps(0).setModelDir("").setNumPS(0)
    assert estimator.copy({estimator.batchSize: 5}).merged_args().batch_size == 5
    assert AllredEstimator(train).merged_args().input_mapping is None


def test_saved_and_loaded_alone(estimator, tmp_path):
    estimator.save(str(tmp_path / "estimator"))
    with pytest.raises(Exception, match="already exists"):
        estimator.save(str(tmp_path / "estimator"))
    estimator.write().overwrite().save(str(tmp_path / "estimator"))
    loaded = AllredEstimator.load(str(tmp_path / "estimator"))
    assert (loaded.uid, vars(loaded.merged_args())) == (estimator.uid, vars(estimator.merged_args()))


def transformed(frame, directory, result, **mapping):
    """Transform with a predict function that returns `result`."""
    from allred.spark.node_context import write_model

    shutil.rmtree(directory, ignore_errors=True)
    write_model(directory, lambda params, inputs: result(inputs), {})
    return (
        AllredModel()
        .setExportDir(str(directory))
        .setOutputMapping(mapping or {"y": "y INT"})
        .transform(frame)
        .collect()
    )


def test_results_have_the_types_of_the_output_mapping(spark, tmp_path):
    frame = spark.range(0, 3, 1, 1)
    assert [row.y for row in transformed(frame, tmp_path / "1", lambda inputs: 2 * inputs["id"])] == [0, 2, 4]
    rows = transformed(
        frame,
        tmp_path / "2",
        lambda inputs: {"p": np.ones((3, 2)), "s": ["a", "b", "c"]},
        p="p ARRAY<FLOAT>",
        s="s STRING",
    )
    assert [(row.p, row.s) for row in rows] == [([1.0, 1.0], each) for each in "abc"]


def test_wrong_calls(spark, frame, estimator, tmp_path):
    with pytest.raises(InputError, match="AllredEstimator: no column 'z' in features, label, other"):
        estimator.copy({estimator.inputMapping: {"z": "x"}}).fit(frame)
    with pytest.raises(InputError, match="AllredEstimator: setExportDir is missing"):
        AllredEstimator(train).fit(frame)
    with pytest.raises(InputError, match="the DataFrame has a column 'label'"):
        AllredModel().setExportDir("/x").setOutputMapping({"y": "label INT"}).transform(frame)
    with pytest.raises(TypeError, match="expected a dict of strings"):
        estimator.setInputMapping(["x"])
    with pytest.raises(InputError, match="setOutputMapping takes"):
        AllredModel().setExportDir("/x").transform(frame)
    with pytest.raises(InputError, match="setExportDir names the directory"):
        AllredModel().setOutputMapping({"y": "y INT"}).transform(frame)
    ids = spark.range(0, 3, 1, 1)
    with pytest.raises(Exception, match=f"there is no model in {tmp_path}/none .* ctx.export_model"):
        AllredModel().setExportDir(f"{tmp_path}/none").setOutputMapping({"y": "y INT"}).transform(ids).collect()
    for number, (result, text) in enumerate([
        (lambda inputs: {"z": inputs["id"]}, "predict returned z; setOutputMapping expects 'y'"),
        (lambda inputs: inputs["id"][1:], "predict returned 2 values of 'y' for 3 rows"),
        (lambda inputs: inputs["id"] + 0.5, "predict returned double for 'y', and .* 'y' of type int32: .* truncated"),
    ]):  # fmt: skip
        with pytest.raises(Exception, match=text):
            transformed(ids, tmp_path / str(number), result)


def test_a_second_model_in_the_same_directory(spark, tmp_path):
    """Python workers of Spark are used again."""
    frame = spark.range(0, 1, 1, 1)
    assert [transformed(frame, tmp_path, lambda inputs, y=y: inputs["id"] + y)[0].y for y in (1, 2)] == [1, 2]


def test_a_failing_map_fun(frame):
    def fail(args, ctx):
        raise OSError("disk full")

    with pytest.raises(RemoteRankError, match="raised OSError: disk full"):
        AllredEstimator(fail).setExportDir("/x").fit(frame)


def test_the_programs_of_the_page(spark, capsys, tmp_path):
    printed = ["[(0, [0.5, 0.5, 0.5]), (1, [0.5, 0.5, 0.5])]\n", "rows: 3000\n"]
    for program, expected in zip(programs("spark.md"), printed, strict=True):
        (tmp_path / "program.py").write_text(program.replace("/tmp/", f"{tmp_path}/"))
        runpy.run_path(str(tmp_path / "program.py"), run_name="__main__")
        assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("program", "last"),
    [
        ("spark_digits.py", r"test accuracy: 0\.9\d\d"),
        ("spark_parameter_server.py", r"found \[1\. 2\. 3\. 4\.\] at step \d+"),
    ],
)
def test_an_example(spark, monkeypatch, capsys, program, last):
    """In the session of the tests, which a program of spark-submit gets from getOrCreate() in the same way."""
    monkeypatch.setattr(sys, "argv", [program])
    runpy.run_path(str(ROOT / "examples" / program), run_name="__main__")
    assert re.fullmatch(last, capsys.readouterr().out.splitlines()[-1])
