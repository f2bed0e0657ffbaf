"""Steps of optimizers with parameters on a real GPU, and the kernels, against the same on the host."""

import copy

import cupy
import numpy as np
import pytest
import torch

import allred
from allred import arrays
from allred.gpu import device_arrays
from allred.optim import SGD, Adagrad, Adam, AdamW, RMSProp

OPTIMIZERS = [SGD(0.1), SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01), Adagrad(0.1), Adam(0.1), AdamW(0.1)]
OPTIMIZERS += [RMSProp(0.1), RMSProp(0.1, centered=True, momentum=0.9)]


def values(seed, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return {"w": rng.normal(size=(64, 33)).astype(dtype), "b": rng.normal(size=33).astype(dtype)}


def on_gpu(nest):
    return {name: cupy.asarray(value) for name, value in nest.items()}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_updates_have_the_bits_of_the_c_kernels(optimizer, dtype):
    here, there = copy.deepcopy(optimizer), copy.deepcopy(optimizer)
    host, device = values(0, dtype), on_gpu(values(0, dtype))
    for step in range(1, 5):
        here.step(host, values(step, dtype))
        there.step(device, on_gpu(values(step, dtype)))
    for name in host:
        np.testing.assert_array_equal(device[name].get(), host[name])


def test_training_gives_what_it_gives_on_the_host():
    host, device = values(0), on_gpu(values(0))
    for params, place in ((host, dict), (device, on_gpu)):
        opt = allred.distributed(Adam(lr=0.01), clip_norm=3.0)
        opt.broadcast(params)
        for step in range(1, 6):
            opt.step(params, place(values([step, allred.rank()])), samples=1 + allred.rank())
    for name in host:
        np.testing.assert_allclose(device[name].get(), host[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("options", [{"accumulate": 3}, {"clip_norm": 0.5}, {"scaler": 1024.0}])
def test_tensors_are_accumulated_clipped_and_unscaled_where_they_are(dtype, options):
    """To the numbers of the host, on the stream that torch works on."""
    results = []
    for place in ("cpu", "cuda"):
        scaler = allred.GradScaler(init_scale=options["scaler"]) if "scaler" in options else None
        opt = allred.distributed(Descent(), **{**options, "scaler": scaler})
        params = {name: torch.zeros(value.shape, device=place) for name, value in values(0).items()}
        with torch.cuda.stream(torch.cuda.Stream()):
            for step in range(6):
                grads = {
                    name: torch.from_numpy(value).to(getattr(torch, dtype)).to(place)
                    for name, value in values([step, allred.rank()]).items()
                }
                opt.step(shared(params), shared(grads), samples=1 + allred.rank())
            results.append({name: value.cpu() for name, value in params.items()})
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-5, atol=1e-5 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize("framework", ["cupy", "torch"])
def test_gradients_that_come_early_give_what_they_give_in_the_step(framework):
    place = cupy.asarray if framework == "cupy" else lambda value: torch.from_numpy(value).cuda()
    results = []
    for names in ([], ["b", "w"]):
        params, opt = {name: place(0 * value) for name, value in values(0).items()}, allred.distributed(Descent())
        for step in range(8):
            grads = {name: place(value) for name, value in values([step, allred.rank()]).items()}
            for name in names:
                opt.reduce(name, grads[name], samples=1 + allred.rank())
            opt.step(params, grads, samples=1 + allred.rank())
        results.append({name: device_arrays.to_host(value) for name, value in params.items()})
    for name, value in results[0].items():
        np.testing.assert_allclose(results[1][name], value, rtol=1e-5, atol=1e-6)


class Descent:
    """An optimizer of tensors, or of arrays on the host."""

    def step(self, params, grads):
        for name, param in params.items():
            param -= grads[name].astype(np.float32) if isinstance(param, np.ndarray) else grads[name]


def shared(tensors):
    return {name: t if t.is_cuda else host(t) for name, t in tensors.items()}


def host(tensor):
    """As a numpy array that shares its memory."""
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(arrays.dtype_of("bfloat16"))
    return tensor.numpy()


def test_checkpoints_pass_between_gpu_and_host(tmp_path):
    directory = allred.broadcast_object(str(tmp_path))
    params = on_gpu(values(0))
    opt = allred.distributed(Adam(lr=0.01))
    opt.step(params, on_gpu(values([1, allred.rank()])))
    opt.save(directory, params)
    allred.barrier()
    again, host = on_gpu(values(5)), values(6)
    for other in (again, host):
        fresh = allred.distributed(Adam(lr=0.01))
        assert fresh.restore(directory, other) == 1
        for name in params:
            np.testing.assert_array_equal(device_arrays.to_host(other[name]), params[name].get())


def test_nan_on_a_gpu_is_found():
    grads = on_gpu(values(1))
    if allred.rank() == allred.size() - 1:
        grads["b"][3] = cupy.nan
    with pytest.raises(allred.NonFiniteError, match="'b'"):
        allred.distributed(SGD(0.1), nonfinite="raise").step(on_gpu(values(0)), grads)
