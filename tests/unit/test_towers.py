"""Towers: the gradients of a batch in parts are those of the whole, with threads and without."""

import ctypes
import gc
import importlib.util
import pathlib
import threading
import time
import traceback

import ml_dtypes
import numpy as np
import pytest
import threadpoolctl

import allred
from allred.cluster import processors
from allred.errors import InputError
from allred.watch import excepthook

RNG = np.random.default_rng(3)
X, Y = RNG.normal(size=(31, 6)), RNG.normal(size=(31, 2))
PARAMS = {"layer": [RNG.normal(size=(6, 2)), RNG.normal(size=2)], "scale": np.array(0.5)}


def loss_and_grads(params, x, y):
    """Mean squared error of a linear model, and an L2 penalty."""
    weight, bias = params["layer"]
    out = x @ weight + bias
    error = out * params["scale"] - y
    back = 2 * error / error.size
    loss = (error**2).mean() + 0.1 * (weight**2).sum()
    layer = [x.T @ back * params["scale"] + 0.2 * weight, back.sum(axis=0) * params["scale"]]
    return loss, {"layer": layer, "scale": np.array((back * out).sum())}


def equal(one, other):
    return allred.digest(one) == allred.digest(other)


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("allred-tower")]


def gone():
    """Free all unused Towers, and return whether their threads end within a minute.

    The threads end one after the other. A loop of gc.collect(), which keeps the GIL for seconds on a busy machine,
    would delay them.
    """
    gc.collect()
    end = time.monotonic() + 60
    for thread in threads():
        thread.join(max(0.0, end - time.monotonic()))
    return not threads()


@pytest.fixture(autouse=True)
def no_threads_left():
    yield
    assert gone()


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 31, 40])
def test_they_give_the_loss_and_the_gradients_of_the_whole_batch(count, parallel):
    loss, grads = allred.Towers(count, loss_and_grads, parallel)(PARAMS, X, Y)
    whole_loss, whole = loss_and_grads(PARAMS, X, Y)
    assert type(loss) is float
    assert loss == pytest.approx(whole_loss, rel=1e-12)
    assert list(grads) == list(whole)
    for mine, theirs in zip((*grads["layer"], grads["scale"]), (*whole["layer"], whole["scale"]), strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        np.testing.assert_allclose(mine, theirs, rtol=1e-11, atol=1e-14)


def test_parts_are_slices_within_one_sample_and_those_without_are_left_out():
    seen = []

    def note(params, x, y):
        assert params is PARAMS
        assert np.shares_memory(x, X)
        seen.append((len(x), len(y)))
        return 0, [float(len(x))]

    _, grads = allred.Towers(4, note, parallel=False)(PARAMS, X[:10], Y[:10])
    assert seen == [(3, 3), (3, 3), (2, 2), (2, 2)]
    assert grads == [pytest.approx((3 * 3 + 3 * 3 + 2 * 2 + 2 * 2) / 10)]  # weighted by samples
    seen.clear()
    allred.Towers(4, note, parallel=False)(PARAMS, X[:2], Y[:2])
    assert seen == [(1, 1), (1, 1)]


@pytest.mark.parametrize("parallel", [True, False])
def test_tower_0_gets_a_batch_without_samples(parallel):
    loss, grads = allred.Towers(3, lambda params, x: (x.sum(), {"w": x.sum(axis=0)}), parallel)(PARAMS, X[:0])
    assert loss == 0
    assert grads["w"].tolist() == [0] * 6
    with pytest.raises(ZeroDivisionError) as caught:
        allred.Towers(3, lambda params, x: 1 / len(x), parallel)(PARAMS, X[:0])
    assert caught.value.__notes__ == ["in tower 0 of 3, with no samples"]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_the_same_bits_whichever_tower_is_first(dtype):
    values = [RNG.normal(size=(5, 3)).astype(dtype) for _ in range(4)]
    order, ended, turn = (), [], threading.Condition()

    def late(params, x):
        tower = int(x[0])
        with turn:
            assert turn.wait_for(lambda: not order or order[len(ended)] == tower, timeout=60)
            ended.append(tower)
            turn.notify_all()
        return values[tower].astype(np.float64).sum(), {"w": values[tower], "b": float(values[tower][0, 0])}

    towers = allred.Towers(4, late)
    alone = allred.Towers(4, late, parallel=False)(None, np.arange(4))
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)):
        ended.clear()
        loss, grads = towers(None, np.arange(4))
        assert tuple(ended) == order
        assert (loss, grads["w"].dtype) == (alone[0], np.dtype(dtype))
        assert equal(grads, alone[1])
    wide = [value.astype(np.float64 if dtype is np.float64 else np.float32) / 4 for value in values]
    assert equal(grads["w"], (wide[0] + wide[1] + wide[2] + wide[3]).astype(dtype))  # one rounding, at the end


def test_towers_run_at_the_same_time_in_kept_threads_with_the_callers_context():
    meet, idents = threading.Barrier(3, timeout=10), set()

    def together(params, x):
        meet.wait()
        idents.add(threading.get_ident())
        return 0, {"w": np.array(1.0) / np.zeros(())}

    towers = allred.Towers(3, together)
    assert threads() == []  # not before they are needed
    with np.errstate(divide="ignore"):  # a warning would be an error here
        for _ in range(5):
            _, grads = towers(None, np.arange(3))
    assert grads["w"] == np.inf
    assert len(idents) == len(threads()) == 3
    assert threading.get_ident() not in idents
    del towers
    assert gone()


def test_what_towers_return_may_be_reused_by_them():
    buffer = np.zeros(1)

    def reuse(params, x):
        buffer[:] = x.mean()
        return x.mean(), (buffer, None)

    towers = allred.Towers(2, reuse, parallel=False)
    loss, (first, none) = towers(None, np.array([1.0, 2.0, 6.0]))
    assert (loss, first.tolist(), none) == (3.0, [3.0], None)
    towers(None, np.array([9.0, 9.0, 9.0]))
    assert first.tolist() == [3.0]  # new arrays


def test_a_part_of_a_complex_gradient_that_is_infinite_leaves_the_other():
    grads = [np.array([complex(np.inf, 1)], "c8"), np.array([2 + 3j], "c8")]
    loss, mean = allred.Towers(2, lambda params, x: (0.0, [grads[int(x[0])]]), parallel=False)(None, np.arange(2))
    assert (loss, mean[0].dtype, mean[0].tolist()) == (0.0, np.complex64, [complex(np.inf, 2)])


def test_none_counts_as_zeros():
    towers = allred.Towers(2, lambda params, x: (0, {"w": np.ones(2) if x[0] else None, "b": None}))
    _, grads = towers(None, np.array([0, 0, 1, 1]))
    assert (grads["w"].tolist(), grads["b"]) == ([0.5, 0.5], None)


# ---- BLAS threads: 3 s, of which 2 are two interpreters


def threads_of(kind):
    return [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == kind]


def test_blas_threads_are_a_towers_share_while_towers_run_and_then_as_before():
    count, seen = processors.cores_per_rank() + 1, []

    def note(params, x):
        seen.extend(threads_of("blas"))
        return 1 / params, [x.mean()]

    towers = allred.Towers(count, note)
    with threadpoolctl.threadpool_limits(4, user_api="blas"):
        towers(1, np.zeros(count))
        assert set(seen) == {1}
        assert set(threads_of("blas")) == {4}
        with pytest.raises(ZeroDivisionError):
            towers(0, np.zeros(count))
        assert set(threads_of("blas")) == {4}
    seen.clear()
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        allred.Towers(2, note)(1, np.zeros(2))
    assert set(seen) == {1}  # never more than the user wants


def test_towers_of_two_threads_at_once_leave_the_blas_threads_as_before():
    before, inside, first_is_done = threads_of("blas"), threading.Barrier(2, timeout=10), threading.Event()

    def first(params, x):
        if x[0] == 0:
            inside.wait()
        return 0, [x.mean()]

    def second(params, x):
        if x[0] == 0:
            inside.wait()
            assert first_is_done.wait(10)
        return 0, [x.mean()]

    other = threading.Thread(target=lambda: allred.Towers(2, second)(None, np.arange(2)))
    other.start()
    allred.Towers(2, first)(None, np.arange(2))
    first_is_done.set()
    other.join(10)
    assert threads_of("blas") == before
    allred.Towers(2, nothing)(None, np.arange(2))  # the limit can be set again
    assert threads_of("blas") == before


def test_openmp_threads_of_a_tower_are_its_share():
    library = next(
        iter(pathlib.Path(importlib.util.find_spec("sklearn").origin).parents[1].glob("scikit_learn.libs/libgomp*"))
    )
    ctypes.CDLL(str(library))
    count, before, seen = processors.cores_per_rank() + 1, threads_of("openmp"), []

    def note(params, x):
        seen.extend(threads_of("openmp"))
        return 0, [x.mean()]

    allred.Towers(count, note)(None, np.zeros(count))
    assert set(seen) == {1}
    assert threads_of("openmp") == before


# ---- what goes wrong


class OddError(BaseException):
    """Of no usual kind."""


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("kind", [ValueError, StopIteration, SystemExit, KeyboardInterrupt, OddError])
def test_the_error_of_a_tower_is_raised_with_a_note_that_names_it(kind, parallel):
    def fail(params, x):
        if x[0] > 3:
            raise kind("what it was")
        return 0, [x.mean()]

    towers = allred.Towers(3, fail, parallel)
    x = np.array([0, 0, 0, 0, 5, 5, 5, 6, 6, 6])
    for _ in range(2):  # it can go on
        with pytest.raises(kind, match="what it was") as caught:
            towers(None, x)
        assert caught.value.__notes__ == ["in tower 1 of 3, with samples 4 to 6 of the batch"]  # the first that failed
        assert excepthook._last_line(kind, caught.value).endswith("what it was")  # what the other ranks hear in short
        assert "in fail" in "".join(traceback.format_tb(caught.value.__traceback__))
        del caught
    assert towers(None, np.zeros(10))[0] == 0


def nothing(params, x):
    return 0, [np.zeros(2)]


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((), "call it with a batch"),
        ((X, Y[:30]), r"equal first dimensions, got \[31, 30\]"),
        ((X, [1, 2]), "but here is a list of 2"),
        ((X, np.array(1.0)), "but here is a ndarray"),
        ((X, 1.0), "but here is a float"),
    ],
)
def test_batches_that_cannot_be_split(batch, words):
    with pytest.raises(InputError, match=words):
        allred.Towers(2, nothing)(PARAMS, *batch)


@pytest.mark.parametrize(
    ("results", "words"),
    [
        ([0.0], "tower 0 returned a float; expected a tuple"),
        ([(0.0, [1.0], 2)], r"tower 0 returned a tuple of 3; expected a tuple \(loss, grads\)"),
        ([(np.zeros(2), [])], r"the loss of tower 0 is float64 \(2,\); expected a number"),
        ([("x", [])], "the loss of tower 0"),
        ([(0, {"w": "x"})], "the gradient of 'w' of tower 0"),
        ([(0, {"w": np.arange(3)})], "the gradient of 'w' of tower 0 is int64; only floats have a mean"),
        ([(0, {"w": 1.0}), (0, {"v": 1.0})], "only tower 1 returned a gradient 'v'"),
        ([(0, {"w": 1.0, "a": 1.0}), (0, {"w": 1.0})], "only tower 0 returned a gradient 'a'"),
        (
            [(0, [np.ones(3)]), (0, [np.ones(4)])],
            r"'0' is float64 \(4,\) in tower 1, but float64 \(3,\) in those before",
        ),
        ([(0, [np.ones(3)]), (0, [np.ones(3, np.float32)])], r"is float32 \(3,\) in tower 1, but float64 \(3,\)"),
    ],
)
def test_results_that_cannot_be_averaged(results, words):
    with pytest.raises(InputError, match=words):
        allred.Towers(2, lambda params, x: results[x[0]] if x[0] < len(results) else results[-1])(None, np.arange(2))


@pytest.mark.parametrize("count", [0, -1, 1.5, "2", None])
def test_a_count_that_is_none(count):
    with pytest.raises(InputError, match="count must be an integer >= 1"):
        allred.Towers(count, nothing)


def test_a_function_that_is_none():
    with pytest.raises(InputError, match="loss_and_grads=3 is not a function"):
        allred.Towers(2, 3)
