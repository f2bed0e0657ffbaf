# ruff: noqa: F811  (fixtures are imported)
"""Training on the stand-in GPU: matching, gradients of the step and before it, checks."""

import cuda_stand_in
import ml_dtypes
import numpy as np
import pytest
import standin_gpu
from gpu_fixtures import comm, connected, world_on_gpus  # noqa: F401
from standin_gpu import DeviceArray, host, on_gpu

import allred
from allred.comm import functions
from allred.errors import InputError
from allred.modes.match import Matcher

pytestmark = pytest.mark.mpi


class Model:
    """A few parameters of several kinds, and gradients that differ between ranks."""

    def __init__(self, place):
        self.place = place
        values = np.random.default_rng(0)
        shapes = {"w": (40, 30), "b": (30,), "scale": (), "v": (7, 3)}
        self.params = {name: place(values.normal(size=shape).astype(np.float32)) for name, shape in shapes.items()}

    def grads(self, step, rank):
        values = np.random.default_rng([step, rank])
        return {name: self.place(values.normal(size=p.shape).astype(np.float32)) for name, p in self.params.items()}


def test_parameters_and_gradients_that_come_again_are_matched_quickly(world_on_gpus, monkeypatch):
    """Wherever they lie now; what has become something else is looked at anew."""
    known, model = Matcher(), Model(on_gpu)
    params, grads = model.params, model.grads(0, 0)
    tensors = known.match(params, grads)[0]
    with monkeypatch.context() as quickly:
        quickly.setattr("allred.modes.match._match_leaves", None)
        again, leaves, values, problem, _ = known.match(params, other := model.grads(1, 0))
    assert (again, problem) == (tensors, "")
    assert again is not tensors  # mode ps takes that for arrays on the host
    assert all(value is other[tensor.name] for value, tensor in zip(values, tensors, strict=True))
    assert all(leaf is params[tensor.name] for leaf, tensor in zip(leaves, tensors, strict=True))
    wide = on_gpu(np.ones((7, 3)))
    for odd in ({"v": wide}, {"v": None}, {"v": host(grads["v"])}, {"v": grads["w"]}, {"w": grads["w"].T}):
        known.match(params, grads)
        found, fresh = (which.match(params, grads | odd) for which in (known, Matcher()))
        assert (found[0], found[3]) == (fresh[0], fresh[3])


@pytest.mark.parametrize("samples", [None, "uneven"])
def test_training_gives_what_it_gives_on_the_host(world_on_gpus, samples):
    comm = world_on_gpus
    there, here = Model(on_gpu), Model(np.array)
    count = None if samples is None else 3 + comm.rank
    optimizers = [allred.distributed(allred.optim.Adam(lr=0.1), clip_norm=3.0) for _ in range(2)]
    for model, optimizer in zip((here, there), optimizers, strict=True):
        model.params["b"] += comm.rank
        optimizer.broadcast(model.params)
        for step in range(4):
            optimizer.step(model.params, model.grads(step, comm.rank), samples=count)
    for name, value in here.params.items():
        assert type(there.params[name]) is DeviceArray
        np.testing.assert_allclose(host(there.params[name]), value, rtol=2e-5, atol=1e-6)


def test_nan_on_a_gpu_is_found_before_the_update(world_on_gpus):
    comm, model = world_on_gpus, Model(on_gpu)
    optimizer = allred.distributed(allred.optim.SGD(lr=0.1), nonfinite="raise")
    grads = model.grads(0, 0)
    if comm.rank == comm.size - 1:
        grads["b"][3] = np.nan
    with pytest.raises(allred.NonFiniteError, match=rf"'b' on rank {comm.size - 1} .*nan at \[3\]"):
        optimizer.step(model.params, grads)
    assert np.isnan(host(grads["b"])[3]) == (comm.rank == comm.size - 1)


def test_a_step_exchanges_one_header_and_waits_for_the_gpu_once(world_on_gpus):
    comm, model = world_on_gpus, Model(on_gpu)
    optimizer = allred.distributed(UserSGD())
    for step in range(CHECKED + 2):
        grads = model.grads(step, comm.rank)
        cuda_stand_in.gpu.synchronized, before = 0, comm.operations
        optimizer.step(model.params, grads)
        made = comm.operations - before
    assert cuda_stand_in.gpu.synchronized == 1
    assert comm.queue.idle
    assert made == 1 or comm.devices.name == "staged"  # whose allreduce on the host exchanges headers too
    expected = np.mean([host(model.grads(CHECKED + 1, rank)["w"]) for rank in range(comm.size)], axis=0)
    np.testing.assert_allclose(host(grads["w"]), expected, rtol=1e-6)


def test_gradients_in_another_memory_order_on_each_rank(world_on_gpus):
    """The header of the step tells the ranks."""
    comm, params = world_on_gpus, {"w": on_gpu(np.zeros((4, 5, 6), np.float32))}
    optimizer = allred.distributed(UserSGD())
    values = np.random.default_rng(0).normal(size=(4, 5, 6)).astype(np.float32)
    for step in range(CHECKED + 4):
        mine = values * (comm.rank + 1)
        grad = on_gpu(np.asfortranarray(mine) if (comm.rank + step) % 2 else mine)
        optimizer.step(params, {"w": grad})
        np.testing.assert_allclose(host(grad), values * (comm.size + 1) / 2, rtol=1e-6)


@pytest.mark.parametrize("is_early", [False, True])
def test_a_rank_may_lack_all_gradients(world_on_gpus, is_early):
    """Its zeros are on the GPU, as its parameters."""
    comm, model, last = world_on_gpus, Model(on_gpu), world_on_gpus.size - 1
    optimizer = allred.distributed(UserSGD())
    for step in range(CHECKED + 3):
        grads = model.grads(step, comm.rank)
        if comm.rank == last > 0:
            grads = dict.fromkeys(grads)
        elif is_early:
            optimizer.reduce("w", grads["w"])
        optimizer.step(model.params, grads)
    if comm.rank < max(1, last):
        present = [host(model.grads(CHECKED + 2, rank)["w"]) for rank in range(max(1, last))]
        np.testing.assert_allclose(host(grads["w"]), np.sum(present, axis=0) / comm.size, rtol=1e-5, atol=1e-6)


def test_ranks_reduce_alike_after_a_step_without_samples(world_on_gpus, monkeypatch):
    """Whether a rank scans its gradients depends on its samples in this step, not in the step before."""
    monkeypatch.setattr("allred.comm.device_buckets.BUCKET_BYTES", 4096)
    comm, model = world_on_gpus, Model(on_gpu)
    optimizer = allred.distributed(UserSGD(), op=allred.Sum)
    for step in range(CHECKED + 3):
        grads = model.grads(step, comm.rank)
        samples = 0 if (step, comm.rank) == (CHECKED, 0) and comm.size > 1 else 2
        optimizer.step(model.params, grads, samples)
        ranks = range(first_rank_with_samples(step, comm.size), comm.size)
        expected = np.sum([host(model.grads(step, rank)["w"]) for rank in ranks], axis=0)
        np.testing.assert_allclose(host(grads["w"]), expected, rtol=1e-5, atol=1e-6)


def first_rank_with_samples(step, size):
    return int(step == CHECKED and size > 1)


def test_a_step_with_an_overflow_is_skipped(world_on_gpus):
    """All gradients are finite, their sum is not; the next step is as any other."""
    comm, model = world_on_gpus, Model(on_gpu)
    optimizer = allred.distributed(UserSGD(), nonfinite="skip", op=allred.Sum)
    for step in range(CHECKED + 3):
        grads = model.grads(step, comm.rank)
        before = {name: host(param).copy() for name, param in model.params.items()}
        if step == CHECKED + 1:
            grads["b"][...] = np.finfo(np.float32).max
        optimizer.step(model.params, grads)
        skipped = all((host(param) == before[name]).all() for name, param in model.params.items())
        assert skipped == (step == CHECKED + 1 and comm.size > 1)
    assert optimizer.skipped == (comm.size > 1)


def test_a_gradient_that_a_rank_lacks_counts_as_zeros(world_on_gpus):
    comm, model = world_on_gpus, Model(on_gpu)
    grads = model.grads(0, 0)
    before = host(model.params["b"]).copy()
    if comm.rank:
        grads["b"] = None
    allred.distributed(allred.optim.SGD(lr=1.0)).step(model.params, grads)
    expected = before - host(model.grads(0, 0)["b"]) / comm.size
    np.testing.assert_allclose(host(model.params["b"]), expected, rtol=1e-6, atol=1e-7)


class UserSGD:
    """An optimizer that is the user's own, for arrays of one kind."""

    def step(self, params, grads):
        for name, grad in grads.items():
            if grad is not None:
                assert type(grad) is type(params[name])
                array = host(grad)
                host(params[name])[...] -= array if array.dtype.kind == "c" else array.astype(np.float32)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32, np.complex64])
@pytest.mark.parametrize("place", [on_gpu, standin_gpu.Tensor])
@pytest.mark.parametrize(
    "options",
    [{"accumulate": 3}, {"clip_norm": 0.5}, {"scaler": 1024.0}, {"accumulate": 2, "clip_norm": 0.5, "scaler": 8}],
)
def test_gradients_are_accumulated_clipped_and_unscaled_on_their_gpu(world_on_gpus, place, dtype, options):
    """Of any framework's arrays, and to the numbers that it gives on the host."""
    comm, params, norms = world_on_gpus, {}, {}
    shapes = {"w": (40, 30), "b": (30,), "s": (), "e": (0,)}
    for kind in (place, np.array):
        scaler = allred.GradScaler(init_scale=options["scaler"]) if "scaler" in options else None
        opt = allred.distributed(UserSGD(), **{**options, "scaler": scaler})
        params[kind] = {name: kind(np.zeros(shape, dtype)) for name, shape in shapes.items()}
        for step in range(4):
            rng = np.random.default_rng([step, comm.rank])
            imaginary = 1j if dtype is np.complex64 else 0
            values = {
                name: rng.normal(size=shape) + imaginary * rng.normal(size=shape) for name, shape in shapes.items()
            }
            grads = {name: kind(np.asarray(value).astype(dtype)) for name, value in values.items()}
            before = {name: host(grad).copy() for name, grad in grads.items()}
            opt.step(params[kind], grads, samples=1 + (step + comm.rank) % 2)
            if "accumulate" in options:
                assert all((host(grads[name]) == before[name]).all() for name in grads)
        norms[kind] = opt.grad_norm
    if "clip_norm" in options:
        assert norms[place] == pytest.approx(norms[np.array], rel=1e-2 if dtype is ml_dtypes.bfloat16 else 1e-6)
    for name, value in params[np.array].items():
        there = host(params[place][name])
        assert there.dtype == dtype
        assert there.any() == (name != "e")
        near = 2e-2 if dtype is ml_dtypes.bfloat16 else 1e-6
        np.testing.assert_allclose(there.astype(np.complex128), value.astype(np.complex128), rtol=1e-5, atol=near)


CHECKED = 3  # steps, which communicate in step() (modes/detect)


def train_with_overlap(place, names, steps, change=lambda step, grads: grads, samples=None):
    """Train with opt.reduce for the gradients in `names`. Return the parameters and the optimizer."""
    params, rank = {name: place(np.zeros(shape, np.float32)) for name, shape in SHAPES.items()}, allred.rank()
    opt = allred.distributed(UserSGD(), bucket_bytes=4096)
    for step in range(steps):
        rng = np.random.default_rng([step, rank])
        grads = {name: place(rng.normal(size=shape).astype(np.float32)) for name, shape in SHAPES.items()}
        grads = change(step, grads)
        for name in names:
            opt.reduce(name, grads[name], samples)
        opt.step(params, grads, samples)
    return {name: host(param) for name, param in params.items()}, opt


SHAPES = {"w": (40, 30), "b": (30,), "s": (), "v": (7, 3), "x": (500,), "e": (0,)}


def on_both(value):
    """The larger ones on the GPU."""
    return on_gpu(value) if value.size > 10 else value


class Caller:
    """A stream that gradients are computed on."""

    def __init__(self, ptr):
        self.ptr, self.waited_events = ptr, []

    def record(self):
        return self.ptr

    def wait_event(self, event):
        self.waited_events.append(event)


def test_gradients_of_a_step_may_come_on_several_streams(world_on_gpus, monkeypatch):
    """A bucket goes out in the last one's call, or in the step."""
    _, opt = train_with_overlap(on_gpu, list(SHAPES), CHECKED + 1)
    for _ in range(2):
        grads = {name: on_gpu(np.ones(shape, np.float32)) for name, shape in SHAPES.items()}
        callers = [Caller(ptr) for ptr in range(len(grads) + 1)]
        for (name, grad), caller in zip(grads.items(), callers, strict=False):
            monkeypatch.setattr("allred.gpu.device_arrays.current_stream", lambda _, caller=caller: caller)
            opt.reduce(name, grad)
        monkeypatch.setattr("allred.gpu.device_arrays.current_stream", lambda _, last=callers[-1]: last)
        opt.step({name: on_gpu(np.zeros(shape, np.float32)) for name, shape in SHAPES.items()}, grads)
        assert [caller.waited_events for caller in callers] == [[], *[[ptr] for ptr in range(len(grads))]]


@pytest.mark.parametrize("place", [on_gpu, standin_gpu.Tensor, on_both])
@pytest.mark.parametrize("samples", [None, "uneven"])
def test_early_gradients_give_the_result_of_the_step(world_on_gpus, place, samples):
    """Also if the last rank lacks one, and if all ranks lack another until step 5."""
    last = world_on_gpus.rank == world_on_gpus.size - 1
    samples = None if samples is None else 3 + world_on_gpus.rank

    def change(step, grads):
        return grads | {"b": None if last else grads["b"], "x": None if step < 5 else grads["x"]}

    def given(names):
        return train_with_overlap(place, names, CHECKED + 4, change, samples)[0]

    expected = given([])
    for names in (["w", "v"], ["v", "e", "s", "w"]):
        for name, value in given(names).items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6)


def test_gradients_on_a_gpu_go_out_before_the_step(world_on_gpus):
    """The host waits for none of them."""
    _, opt = train_with_overlap(on_gpu, list(SHAPES), CHECKED + 1)
    grads = {name: on_gpu(np.full(shape, 1.0 + allred.rank(), np.float32)) for name, shape in SHAPES.items()}
    cuda_stand_in.gpu.synchronized = 0
    for name, grad in grads.items():
        opt.reduce(name, grad)
    opt._get_mode()._overlap._opening.wait()
    opt._get_mode()._overlap._advance(functions.current())
    running = [work for work, _ in opt._get_mode()._overlap._sent]
    assert len(running) == len(opt._get_mode()._overlap._buckets) > 1
    while not all(work.end is not None for work in running):
        opt._get_mode()._overlap._advance(functions.current())
    assert cuda_stand_in.gpu.synchronized == 0
    opt.step({name: on_gpu(np.zeros(shape, np.float32)) for name, shape in SHAPES.items()}, grads)
    assert cuda_stand_in.gpu.synchronized == 1
    np.testing.assert_allclose(host(grads["w"]), (1 + allred.size()) / 2)


MISTAKES = {  # a wrong gradient, and the expected error
    "elsewhere": (lambda grads: {"w": host(grads["w"])}, "'w' is on the host, and was on a GPU when"),
    "elsewhere in step": (lambda grads: {"v": host(grads["v"])}, "'v' is on the host, and was on a GPU when"),
    "shape": (lambda grads: {"w": grads["w"][:3]}, r"the gradient of 'w' float32 \(40, 30\) has shape \(3, 30\)"),
    "one memory": (lambda grads: {"v": grads["w"].reshape(-1)[:21].reshape(7, 3)}, "'v' and 'w' share memory"),
    "nan": (lambda grads: {"w": grads["w"] * np.float32(np.nan)}, "'w' on rank 0 .*is nan"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes_in_early_gradients_are_raised_on_all_ranks_in_step(world_on_gpus, what):
    mistake, words = MISTAKES[what]

    def change(step, grads):
        return grads | mistake(grads) if step == CHECKED + 1 and world_on_gpus.rank == 0 else grads

    with pytest.raises((InputError, allred.NonFiniteError), match=words) as error:
        train_with_overlap(on_gpu, ["w", "b"], CHECKED + 2, change)
    assert len(set(allred.allgather_object(str(error.value)))) == 1
    train_with_overlap(on_gpu, ["w", "b"], CHECKED + 2)
