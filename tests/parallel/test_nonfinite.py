"""Gradients with NaN or infinity on some ranks: what happens is the same on all, and says who and what."""

import contextlib
import re

import ml_dtypes
import numpy as np
import pytest

import allred
from allred import optim
from allred.errors import InputError, NonFiniteError
from allred.wording import named

pytestmark = pytest.mark.mpi

FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def start(dtype=np.float32):
    return {"w": np.ones((3, 4), dtype), "b": np.ones(5, dtype), "s": np.ones((), dtype)}


def poisoned(params, name, value=np.nan, where=-1):
    grads = {key: np.ones_like(param) for key, param in params.items()}
    grads[name].reshape(-1)[where] = value
    return grads


def fine(params):
    return {key: np.ones_like(param) for key, param in params.items()}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("value", "word"), [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf")])
def test_the_error_names_tensor_rank_and_place_and_no_parameter_has_changed(rank, size, dtype, value, word):
    opt, params = allred.distributed(optim.SGD(lr=1.0, momentum=0.9)), start(dtype)
    grads = poisoned(params, "w", value) if rank == size - 1 else fine(params)
    before = [array.tobytes() for array in params.values()]
    place = rf"1 of 12 elements, the first is {word} at \[2, 3\]"
    with pytest.raises(
        NonFiniteError, match=rf"^opt.step\(\): gradients are not finite: 'w' on rank {size - 1} \({place}\). Look at"
    ) as error:
        opt.step(params, grads)
    assert len(set(allred.allgather_object(str(error.value)))) == 1
    assert [array.tobytes() for array in params.values()] == before
    assert opt.optimizer.global_step == 0
    opt.step(params, fine(params))
    assert params["b"].tolist() == [0] * 5


@pytest.mark.parametrize(("part", "text"), [("real", r"\(inf\+0j\)"), ("imag", r"\(1\+infj\)")])
@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"bucket_bytes": 16}, {"clip_norm": 1.0}])
def test_either_part_of_a_complex_gradient(rank, size, dtype, part, text, options):
    """It is found, and with nonfinite="ignore" the other part has its usual result."""
    for samples, policy in ((None, "raise"), (None, "ignore"), (1 + rank, "raise"), (1 + rank, "ignore")):
        params, opt = start(dtype), allred.distributed(optim.SGD(lr=1.0), nonfinite=policy, **options)
        grads = fine(params)
        if rank == size - 1:
            getattr(grads["w"], part)[2, 3] = np.inf
        words = rf"'w' on rank {size - 1} \(1 of 12 elements, the first is {text} at \[2, 3\]\)"
        with pytest.raises(NonFiniteError, match=words) if policy == "raise" else contextlib.nullcontext():
            for _ in range(options.get("accumulate", 1)):
                opt.step(params, grads, samples=samples)
        numbers = params["w"].reshape(-1)
        assert (numbers[:-1] == (1 if policy == "raise" else 0)).all() or "clip_norm" in options
        parts = {"real": numbers.real, "imag": numbers.imag}
        assert np.isfinite(parts.pop(part)).all() == (policy == "raise")
        assert np.isfinite(*parts.values()).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_nan_of_large_gradients_is_counted(rank, size, dtype):
    """Of gradients that pass in several chunks, the NaN in all of which are counted after the others are averaged."""
    params = {name: np.zeros(60_000, dtype) for name in "abc"}
    grads = {name: np.full(60_000, rank, dtype) for name in params}
    if rank == size - 1:
        grads["a"][[7, 59_999]] = np.nan
    grads["b"][[0, 30_000 + rank]] = np.inf
    with pytest.raises(NonFiniteError) as error:
        allred.distributed(optim.SGD()).step(params, grads)
    assert f"'a' on rank {size - 1} (2 of 60000 elements, the first is nan at [7])" in str(error.value)
    assert re.search(r"'b' on ranks? 0.* \(2 of 60000 elements, the first is inf at \[0\]\)", str(error.value))
    assert not any(param.any() for param in params.values())


def test_several_tensors_on_several_ranks(rank, size):
    if size == 1:
        pytest.skip("one rank is not several")
    opt, params = allred.distributed(optim.SGD()), start()
    grads = poisoned(params, "s" if rank == 0 else "b")
    others = named("rank", range(1, size))
    with pytest.raises(NonFiniteError, match=rf"'s' on rank 0 \(it is nan\); 'b' on {others} \(1 of 5"):
        opt.step(params, grads)


def test_only_the_first_tensors_are_named(rank):
    params = [np.ones(1) for _ in range(7)]
    with pytest.raises(NonFiniteError, match=r"'2' on rank.*; and 4 more. Look at"):
        allred.distributed(optim.SGD()).step(params, [np.full(1, np.inf) for _ in params])


@pytest.mark.parametrize("layout", ["strided", "fortran", "read-only", "number"])
def test_any_layout_is_looked_through(rank, size, layout):
    whole = np.ones((6, 8))
    params = [np.ones((6, 4)), np.ones(())]
    grads = [whole[:, ::2] if layout == "strided" else np.asfortranarray(np.ones((6, 4))), 1.0]
    if rank == size - 1:
        if layout == "number":
            grads[1] = float("nan")
        else:
            grads[0][4, 2] = np.nan
    if layout == "read-only":
        grads[0].flags.writeable = False
    with pytest.raises(NonFiniteError, match=rf"'{int(layout == 'number')}' on rank {size - 1}"):
        allred.distributed(optim.SGD()).step(params, grads)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_skipped_step_is_skipped_on_all_ranks_and_counted(rank, size, accumulate):
    opt = allred.distributed(optim.SGD(lr=1.0), nonfinite="skip", accumulate=accumulate)
    params = start()
    for step in range(4):
        for micro in range(accumulate):
            bad = step in (1, 2) and micro == 0 and rank == size - 1
            opt.step(params, poisoned(params, "b") if bad else fine(params), samples=2)
    assert opt.skipped == 2
    assert opt.optimizer.global_step == 2
    assert params["b"].tolist() == [-1] * 5
    assert "skipped: 2 steps with gradients that were not finite" in opt.summary()
    assert "skipped" not in allred.distributed(optim.SGD()).summary()


def test_the_first_skipped_step_is_told(rank, capfd):
    opt, params = allred.distributed(optim.SGD(), nonfinite="skip"), start()
    for _ in range(3):
        opt.step(params, poisoned(params, "b"))
    told = capfd.readouterr().err
    assert told.count("is skipped") == told.count("opt.step(): step 1 is skipped") == (rank == 0)


def test_a_nan_of_a_micro_step_is_found_when_the_step_is_complete(rank, size):
    opt, params = allred.distributed(optim.SGD(lr=1.0), accumulate=2), start()
    opt.step(params, poisoned(params, "w") if rank == 0 else fine(params))
    with pytest.raises(NonFiniteError, match="'w' on rank 0 "):
        opt.step(params, fine(params))
    for _ in range(2):
        opt.step(params, fine(params))
    assert params["w"].max() == 0


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_sum_that_overflows_is_an_error_on_all(rank, size, dtype):
    if size == 1:
        pytest.skip("nothing is summed")
    params, largest = start(dtype), ml_dtypes.finfo(dtype).max
    opt = allred.distributed(optim.SGD(lr=1.0), op=allred.Sum)
    name = np.dtype(dtype).name
    with (
        np.errstate(over="ignore"),
        pytest.raises(
            NonFiniteError,
            match=rf"every rank's gradient is finite, but the sum .* of 'b' is not: it exceeds .* of {name};",
        ),
    ):
        opt.step(params, poisoned(params, "b", largest))
    assert params["b"].tolist() == [1] * 5
    skipping = allred.distributed(optim.SGD(lr=1.0), op=allred.Sum, nonfinite="skip")
    with np.errstate(over="ignore"):
        skipping.step(params, poisoned(params, "b", largest))
    assert skipping.skipped == 1
    assert params["b"].tolist() == [1] * 5


@pytest.mark.parametrize("dtype", FLOATS)
def test_large_gradients_whose_sum_is_finite_pass(rank, size, dtype):
    params = start(dtype)
    part = np.asarray(ml_dtypes.finfo(dtype).max, np.float64) / size / 1.1
    allred.distributed(optim.SGD(lr=1.0), op=allred.Sum).step(params, poisoned(params, "b", part))
    assert np.isfinite(params["b"]).all()


def test_integers_are_always_finite(size):
    class Add:
        def step(self, params, grads):
            params[0] += grads[0]

    params = [np.zeros(2, np.int32)]
    allred.distributed(Add(), op=allred.Sum).step(params, [np.full(2, 2**31 // size - 1, np.int32)])
    assert params[0][0] > 0


def test_gradient_functions_raise(rank, size):
    @allred.distributed.gradients
    def loss_and_grads(value):
        return value, [np.full(3, value)]

    with pytest.raises(
        NonFiniteError, match=rf"^loss_and_grads\(\): gradients are not finite: '0' on rank {size - 1} "
    ):
        loss_and_grads(np.nan if rank == size - 1 else 1.0)
    assert loss_and_grads(2.0)[1][0].tolist() == [2, 2, 2]
    with pytest.raises(InputError, match="a gradient function has none"):
        allred.distributed.gradients(nonfinite="skip")(lambda: 0)
    unchecked = allred.distributed.gradients(nonfinite="ignore")(lambda value: [np.full(3, value)])
    assert np.isnan(unchecked(np.nan if rank == 0 else 1.0)[0]).all()


def test_different_policies_are_the_same_error_on_every_rank(rank, size):
    if size == 1:
        pytest.skip("one rank cannot differ")
    opt = allred.distributed(optim.SGD(), nonfinite="skip" if rank == 0 else "raise")
    with pytest.raises(allred.MismatchError, match=r"nonfinite=skip .* on rank 0; .*nonfinite=raise"):
        opt.step(start(), fine(start()))
