"""Clipping by the norm of all gradients, and gradient scaling: the same on all ranks, in the modes' right places."""

import math

import numpy as np
import pytest

import allred
from allred import Compression, optim
from allred.errors import InputError, MismatchError, NonFiniteError

pytestmark = pytest.mark.mpi


def start(dtype=np.float32):
    return {"w": np.zeros((30, 70), dtype), "b": np.zeros(5, dtype), "s": np.zeros((), dtype)}


def gradients(rank, seed=0, factor=1.0, dtype=np.float32):
    rng = np.random.default_rng([seed, rank])
    return {k: np.asarray(factor * rng.normal(size=v.shape)).astype(dtype) for k, v in start().items()}


def mean(size, **options):
    everyone = [gradients(r, **options) for r in range(size)]
    return {k: sum(g[k].astype(np.float64) for g in everyone) / size for k in everyone[0]}


def norm_of(grads):
    return math.sqrt(sum(float(np.square(np.asarray(g, np.float64)).sum()) for g in grads.values()))


# ---- clipping


@pytest.mark.parametrize("limit", [0.5, 1e9, math.inf])
def test_the_16_bit_mean_is_clipped_by_the_norm_of_all_gradients(rank, size, limit):
    dtype = np.float16
    opt, params = allred.distributed(optim.SGD(lr=1.0), clip_norm=limit), start(dtype)
    assert opt.grad_norm is None
    opt.step(params, gradients(rank, dtype=dtype))
    exact = mean(size, dtype=dtype)
    assert opt.grad_norm == pytest.approx(norm_of(exact), rel=1e-3)
    factor = min(1.0, limit / norm_of(exact))
    for name, value in params.items():
        np.testing.assert_allclose(value, -factor * exact[name], rtol=2e-3, atol=1e-3)
    assert norm_of(params) <= limit * 1.001
    assert len(set(allred.allgather_object((opt.grad_norm, allred.digest(params))))) == 1


def test_the_norm_is_the_same_number_whatever_the_layouts(rank, size):
    """Summed in the order of memory it would differ in the last bits, and parameters would part."""
    for seed in range(5):
        opt, params = allred.distributed(optim.SGD(lr=1.0), clip_norm=0.1), start(np.float64)
        grads = {k: v.astype(np.float64) for k, v in gradients(rank, seed).items()}
        grads["w"] = np.asfortranarray(grads["w"]) if rank % 2 else grads["w"]
        opt.step(params, grads)
        assert len(set(allred.allgather_object((opt.grad_norm, allred.digest(params))))) == 1


def test_integers_cannot_be_clipped(rank):
    class Add:
        def step(self, params, grads):
            params[0] += grads[0]

    opt, params = allred.distributed(Add(), op=allred.Sum, clip_norm=1.0), [np.zeros(2, np.int32)]
    with pytest.raises(InputError, match=r"the gradient of '0' int32 \(2,\) cannot be scaled"):
        opt.step(params, [np.ones(2, np.int32)])


@pytest.mark.parametrize("limit", [0, -1.0, math.nan, "1"])
def test_a_limit_that_is_none(limit):
    with pytest.raises(InputError, match="clip_norm must be a number > 0"):
        allred.distributed(optim.SGD(), clip_norm=limit)


def test_limits_that_differ(rank, size):
    if size == 1:
        pytest.skip("one rank cannot differ")
    opt, params = allred.distributed(optim.SGD(), clip_norm=1.0 + rank), start()
    with pytest.raises(MismatchError, match=r"clip_norm=1 on rank 0; .*clip_norm=2"):
        opt.step(params, gradients(rank))


# ---- scaling


def scaled(grads, scaler):
    with np.errstate(over="ignore"):
        return {k: np.asarray(scaler.scale(g)) for k, g in grads.items()}


def test_scaled_gradients_give_the_step_of_unscaled_ones(rank, size):
    """Powers of two: to the bit; and in float16 where unscaled ones are lost."""
    plain, params = start(), start()
    allred.distributed(optim.SGD(lr=1.0), clip_norm=0.5).step(plain, gradients(rank))
    scaler = allred.GradScaler()
    opt = allred.distributed(optim.SGD(lr=1.0), clip_norm=0.5, scaler=scaler)
    opt.step(params, scaled(gradients(rank), scaler))
    np.testing.assert_allclose(params["w"], plain["w"], rtol=1e-6)
    assert opt.grad_norm == pytest.approx(norm_of(mean(size)), rel=1e-6)

    tiny, lost, kept = gradients(0, factor=1e-9), start(), start()
    allred.distributed(optim.SGD(lr=1.0), compression=Compression.fp16).step(
        lost, {k: v.copy() for k, v in tiny.items()}
    )
    scaler = allred.GradScaler()
    opt = allred.distributed(optim.SGD(lr=1.0), compression=Compression.fp16, scaler=scaler)
    opt.step(kept, scaled(tiny, scaler))
    if size > 1:
        assert not lost["w"].any()
    np.testing.assert_allclose(kept["w"], -tiny["w"], rtol=2e-3, atol=1e-12)


def test_16_bit_gradients_are_unscaled_in_float32(rank, size):
    params, scaler = {"w": np.ones(4, np.float32)}, allred.GradScaler(init_scale=2.0**20)

    class Remember:
        def step(self, params, grads):
            self.dtype = grads["w"].dtype
            params["w"] -= grads["w"]

    opt = allred.distributed(Remember(), scaler=scaler)
    params["w"] = params["w"].astype(np.float16)
    opt.step(params, {"w": np.full(4, 0.5, np.float16)})  # unscaled it is 5e-7, a few bits of float16
    assert opt.optimizer.dtype == np.float32


@pytest.mark.parametrize("kind", ["local", "sum", "wire"])
def test_an_overflow_on_any_rank_skips_the_step_on_all_and_lowers_the_scale(rank, size, kind, capfd):
    if kind == "sum" and size == 1:
        pytest.skip("nothing is summed")
    scaler = allred.GradScaler(init_scale=1024.0, growth_interval=2)
    options = {"compression": Compression.fp16} if kind == "wire" else {"op": allred.Sum} if kind == "sum" else {}
    opt, params = allred.distributed(optim.SGD(lr=1.0), scaler=scaler, **options), start()
    before = allred.digest(params)
    bad = {"local": np.inf, "sum": 3e38, "wire": 1e5}[kind]
    grads = {k: np.zeros_like(v) for k, v in params.items()}
    if rank == size - 1 or kind == "sum":
        grads["b"][2] = bad
    with np.errstate(over="ignore"):
        opt.step(params, grads)
    assert opt.skipped == 1
    assert scaler.get_scale() == 512
    assert allred.digest(params) == before
    for step in range(4):  # it grows after two good ones, and again
        opt.step(params, {k: np.ones_like(v) for k, v in params.items()})
        assert scaler.get_scale() == 512 * 2 ** ((step + 1) // 2)
    assert opt.skipped == 1
    assert opt.optimizer.global_step == 4
    np.testing.assert_allclose(params["s"], -(2 / 512 + 2 / 1024) * (size if kind == "sum" else 1))
    assert len(set(allred.allgather_object((scaler.state_dict()["_growth_tracker"], allred.digest(params))))) == 1


def test_what_is_never_finite_is_an_error_in_the_end(rank, size):
    scaler = allred.GradScaler(init_scale=2.0**-22)
    opt, params = allred.distributed(optim.SGD(), scaler=scaler), start()
    grads = {k: np.full_like(v, np.nan if rank == 0 else 1) for k, v in params.items()}
    for _ in range(2):
        opt.step(params, grads)
    with pytest.raises(NonFiniteError, match=r"opt.step\(\): gradients are not finite even at a scale of 5.96046e-08"):
        opt.step(params, grads)


def test_accumulated_steps_update_the_scale_once(rank, size):
    scaler = allred.GradScaler(growth_interval=1, init_scale=2.0)
    opt, params = allred.distributed(optim.SGD(lr=1.0), accumulate=2, scaler=scaler), start()
    for micro in range(4):
        bad = micro == 0 and rank == size - 1
        opt.step(params, {k: np.full_like(v, np.inf if bad else scaler.get_scale()) for k, v in params.items()})
        assert scaler.get_scale() == [2, 1, 1, 2][micro]
    assert params["b"].tolist() == [-1] * 5


def test_scales_that_differ_are_an_error_that_names_them(rank, size):
    if size == 1:
        pytest.skip("one rank cannot differ")
    opt, params = allred.distributed(optim.SGD(), scaler=allred.GradScaler(2.0 ** min(rank, 1))), start()
    with pytest.raises(MismatchError, match=r"scale=1 on rank 0; .*scale=2"):
        opt.step(params, gradients(rank))
    opt.broadcast(params)
    opt.step(params, gradients(rank))


def test_one_scaler_for_two_optimizers_and_with_raise(rank):
    scaler = allred.GradScaler()
    first, second = (allred.distributed(optim.SGD(), scaler=scaler, name=name) for name in ("one", "two"))
    first.step(start(), gradients(rank))
    with pytest.raises(InputError, match="two: this GradScaler belongs to another optimizer"):
        second.step(start(), gradients(rank))
    with pytest.raises(InputError, match="nonfinite='raise': a scaler skips"):
        allred.distributed(optim.SGD(), scaler=scaler, nonfinite="raise")
    with pytest.raises(InputError, match=r"scaler=1\.0 must be an allred.GradScaler"):
        allred.distributed(optim.SGD(), scaler=1.0)


def test_checkpoints_have_the_scalers_state(rank, size, tmp_path):
    directory = str(tmp_path)

    def make():
        scaler = allred.GradScaler(init_scale=64.0, growth_interval=3)
        return allred.distributed(optim.SGD(lr=0.1), scaler=scaler), scaler

    opt, scaler = make()
    params = start()
    for _ in range(4):
        opt.step(params, gradients(rank))
    assert scaler.get_scale() == 128
    opt.save(directory, params)
    allred.barrier()
    other, restored = make()
    fresh = start()
    assert other.restore(directory, fresh) == 4
    assert restored.state_dict() == scaler.state_dict()
    plain = allred.distributed(optim.SGD(lr=0.1))
    assert plain.restore_all(directory, start()) == (4, None)
