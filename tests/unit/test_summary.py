"""Summaries: JSON lines by a strict parser, TensorBoard's files by its own reader."""

import errno
import json
import math
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import worlds

from allred.errors import InputError
from allred.session import summary
from allred.session.summary import SummaryWriter, histogram


def refused(word):
    raise AssertionError(f"{word} is no JSON")


def lines(path, name="scalars"):
    text = (path / f"{name}.jsonl").read_text()
    assert text.endswith("\n") or not text
    return [json.loads(line, parse_constant=refused) for line in text.splitlines()]


def accumulated(path):
    pytest.importorskip("tensorboard", reason="needs the package tensorboard: pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(path), size_guidance={"scalars": 0, "histograms": 0}).Reload()


def write(path, steps, step=0, offset=0.0):
    writer = SummaryWriter(path, step)
    for at in steps:
        writer.scalars(at, {"loss": at + offset})
        writer.histogram(at, "w", np.full(3, at + offset))
    return writer


def test_json_lines(tmp_path):
    writer = SummaryWriter(tmp_path / "a" / "b")
    values = {"loss": 0.1, "n": np.float32(2), "a": np.array(3), "nan": math.nan, "inf": math.inf, "-inf": -math.inf}
    writer.scalars(1, values)
    first = lines(tmp_path / "a" / "b")  # before it is closed
    writer.scalars(2, {"Größe\n\udc80": 1e300})
    writer.close()
    writer.close()
    first, second = lines(tmp_path / "a" / "b")
    assert first.pop("time") > 1e9
    assert first == {
        **{"step": 1, "loss": 0.1, "n": 2.0, "a": 3.0},
        **{"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"},
    }
    assert math.isnan(float(first["nan"]))
    assert float(first["-inf"]) == -math.inf
    assert second["Größe\n\udc80"] == 1e300


@pytest.mark.parametrize("values", [{"step": 1}, {"time": 1}, {"loss": "x"}, {"loss": None}, {"loss": np.ones(2)}])
def test_what_is_no_scalar_is_refused_and_not_written(tmp_path, values):
    writer = SummaryWriter(tmp_path)
    with pytest.raises(InputError, match=f"scalars: '{next(iter(values))}'"):
        writer.scalars(1, {"good": 1.0, **values})
    writer.close()
    assert lines(tmp_path) == []


def test_a_resumed_run_purges_later_steps(tmp_path):
    write(tmp_path, range(1, 11)).close()
    with open(tmp_path / "scalars.jsonl", "a") as file:
        file.write('{"step": 3, "lo')  # killed
    write(tmp_path, np.array([8, 9]), step=6, offset=0.5).close()
    assert [line["loss"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6, 8.5, 9.5]
    assert [line["step"] for line in lines(tmp_path, "histograms")] == [1, 2, 3, 4, 5, 6, 8, 9]
    assert not list(tmp_path.glob(".*"))


def test_tensorboard_reads_the_same(tmp_path):
    writer = SummaryWriter(tmp_path)
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    for step in (10, 20):
        writer.scalars(step, {"loss": 1 / step, "nan": math.nan})
        writer.histogram(step, "w", values * step)
    read = accumulated(tmp_path)  # before it is closed: a killed run has lost nothing
    writer.close()
    losses = [(event.step, event.value) for event in read.Scalars("train/loss")]
    assert losses == [(10, np.float32(0.1)), (20, np.float32(0.05))]
    assert math.isnan(read.Scalars("train/nan")[0].value)
    (_, event), line = read.Histograms("w"), lines(tmp_path, "histograms")[1]
    assert (event.step, event.histogram_value.num, sum(event.histogram_value.bucket)) == (20, 1000, 1000)
    assert event.histogram_value.bucket_limit == line["edges"][1:]
    assert event.histogram_value.bucket == line["counts"]
    assert event.histogram_value.sum == pytest.approx(float((values * 20).sum(dtype=np.float64)))
    assert event.wall_time == line["time"]


def test_tensorboard_purges_later_steps(tmp_path):
    write(tmp_path, range(1, 11)).close()
    write(tmp_path, (8, 9), step=6, offset=0.5).close()  # within the same second
    write(tmp_path, (9, 10), step=8, offset=0.25).close()
    read = accumulated(tmp_path)
    assert [event.value for event in read.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6, 8.5, 9.25, 10.25]
    assert [event.step for event in read.Histograms("w")] == [1, 2, 3, 4, 5, 6, 8, 9, 10]
    assert [line["loss"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6, 8.5, 9.25, 10.25]


def test_a_resumed_run_whose_clock_is_behind(tmp_path, monkeypatch):
    write(tmp_path, (1, 2, 3)).close()
    monkeypatch.setattr(summary.time, "time", lambda: 1e9)
    write(tmp_path, (2, 3), step=1, offset=0.5).close()
    assert [event.value for event in accumulated(tmp_path).Scalars("train/loss")] == [1, 2.5, 3.5]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int64, np.bool_])
@pytest.mark.parametrize("shape", [(), (7,), (300, 2000)])
def test_histograms_of_all_dtypes(dtype, shape):
    values = np.asarray(np.random.default_rng(1).normal(size=shape) * 3).astype(dtype)
    made, wide = histogram("w", values.T), values.astype(np.float64)
    assert (made.minimum, made.maximum, made.count) == (wide.min(), wide.max(), wide.size)
    assert (made.total, made.total_squares) == pytest.approx((wide.sum(), (wide * wide).sum()))
    expected = [
        np.count_nonzero((wide >= low) & ((wide < high) | (last & (wide <= high))))
        for low, high, last in zip(made.edges, made.edges[1:], [False] * 29 + [True], strict=False)
    ]
    assert made.counts.tolist() == expected
    assert sum(expected) == wide.size


def test_histograms_are_those_that_tensorboard_makes():
    pytest.importorskip("tensorboard", reason="needs the package tensorboard: pip install tensorboard")
    from tensorboard.plugins.histogram.summary_v2 import histogram_pb
    from tensorboard.util.tensor_util import make_ndarray

    rng = np.random.default_rng(2)
    for values in (rng.normal(size=5000), np.full(3, 7.5), np.zeros(0), rng.exponential(size=100)):
        made = histogram("w", values)
        theirs = make_ndarray(histogram_pb("w", values).value[0].tensor)
        edges = np.stack([made.edges[:-1], made.edges[1:]], axis=1)
        np.testing.assert_allclose(edges, theirs[:, :2], rtol=1e-12, atol=1e-14)
        assert made.counts.tolist() == theirs[:, 2].tolist()


@pytest.mark.parametrize(
    "values", [[], [np.nan], [0.0], [-0.0, 5e-324], [1.0, 1 + 2e-16, 1 + 4e-16], [-1.7e308, 0, 1.7e308], [np.inf, 1]]
)
def test_histograms_of_hardly_any_range_and_of_too_much(tmp_path, values, capsys):
    with worlds.installed():
        made = histogram("w", np.array(values))
        finite = np.isfinite(values)
        assert (made.count, made.counts.sum(), made.nonfinite) == (finite.sum(), finite.sum(), (~finite).sum())
        assert np.isfinite(made.edges).all()
        assert (made.edges[1:] >= made.edges[:-1]).all()
        writer = SummaryWriter(tmp_path)
        for step in (1, 2):
            writer.histogram(step, "w", np.array(values))
        writer.close()
    assert [line["nonfinite"] for line in lines(tmp_path, "histograms")] == [made.nonfinite] * 2
    told = capsys.readouterr().err
    assert told.count("are not finite at step 1") == told.count("summary:") == int(made.nonfinite > 0)
    with np.errstate(over="ignore"):  # tensorboard's
        read = accumulated(tmp_path)
    assert read.Histograms("w")[0].histogram_value.num == made.count
    if made.nonfinite:
        assert [event.value for event in read.Scalars("w/nonfinite")] == [made.nonfinite] * 2


def test_what_has_no_histogram():
    with pytest.raises(InputError, match=r"histogram: 'w' is complex128 \(2,\); expected an array of real numbers"):
        histogram("w", np.ones(2, complex))


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"SummaryWriter: .*file cannot be written: .*; choose another directory"):
        SummaryWriter(tmp_path / "file")


def test_a_full_disk_ends_the_summaries_and_not_the_training(tmp_path, monkeypatch, capsys):
    writer = write(tmp_path, (1, 2))

    def full(record):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer._scalars, "write", full)
    with worlds.installed():
        for step in (3, 4):
            writer.scalars(step, {"loss": 1.0})
            writer.histogram(step, "w", np.ones(3))
        writer.close()
    assert capsys.readouterr().err == (
        f"allred: summary: {tmp_path} cannot be written any more ([Errno 28] No space left on device); "
        "summaries end here\n"
    )
    assert len(lines(tmp_path)) == len(lines(tmp_path, "histograms")) == 2


def test_without_tensorboard_json_lines_alone(tmp_path, monkeypatch):
    for name in ("tensorboard", "tensorboard.compat", "tensorboard.compat.proto"):
        monkeypatch.setitem(sys.modules, name, None)
    write(tmp_path, (1,)).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["histograms.jsonl", "scalars.jsonl"]


def test_a_tensorboard_that_cannot_be_used(tmp_path, monkeypatch, capsys):
    def unusable(directory, step):
        raise TypeError("Descriptors cannot be created directly")

    monkeypatch.setattr("allred.session.summary._EventFile", unusable)
    with worlds.installed():
        write(tmp_path, (1,)).close()
    assert "tensorboard cannot be used (Descriptors cannot be created directly)" in capsys.readouterr().err
    assert len(lines(tmp_path)) == 1


def test_neither_tensorflow_nor_torch_is_imported(tmp_path):
    """Where they are installed, too: here are two that only look like it."""
    for name in ("tensorflow", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    program = (
        "import sys, numpy; from allred.session.summary import SummaryWriter; "
        "print('tensorboard' in sys.modules); writer = SummaryWriter('out'); writer.scalars(1, {'a': 1}); "
        "writer.histogram(1, 'h', numpy.ones(3)); writer.close()"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (run.stdout, run.stderr, run.returncode) == ("False\n", "", 0)
