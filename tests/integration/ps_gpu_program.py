"""One worker and a parameter server, with parameters on a GPU: a stand-in (tests/parallel/standin_gpu.py), or, with the
argument cupy, a real one. Next to them a copy on the host is trained by the optimizer alone: what comes out must be the
same, bit for bit.
"""

import pathlib
import sys

import numpy as np
import pytest

import allred

REAL = sys.argv[1:] == ["cupy"]
if REAL:
    import cupy

    on_gpu, host, Kind, HALF = cupy.asarray, cupy.asnumpy, cupy.ndarray, np.float16
else:
    sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "parallel"))
    import cuda_stand_in
    import ml_dtypes
    import standin_gpu
    from standin_gpu import DeviceArray as Kind
    from standin_gpu import host, on_gpu

    HALF = ml_dtypes.bfloat16
    standin_gpu.install(setattr)
    kept, pages = [], []
    device = standin_gpu.Device()
    device.keep = lambda event, what, keep=device.keep: kept.append(what) or keep(event, what)
    device.pinned = lambda count, pinned=device.pinned: pages.append(pinned(count)) or pages[-1]
    standin_gpu.attach(lambda: device)

random = np.random.default_rng(0)
SHAPES = {"w": (40, 30), "b": (30,), "scale": (), "none": (0, 3), "half": (7,)}
DTYPES = {"half": HALF, "b": np.float64}


def values():
    return {name: random.normal(size=shape).astype(DTYPES.get(name, np.float32)) for name, shape in SHAPES.items()}


def placed(nest):
    """`w` in columns, `b` stays on the host, everything else in one piece on the GPU."""
    made = {name: on_gpu(value) for name, value in nest.items()}
    return {**made, "w": on_gpu(np.asfortranarray(nest["w"])), "b": nest["b"].copy()}


allred.init()
alone = values()
there = placed(alone)
reference, optimizer = allred.optim.Adam(lr=0.05), allred.distributed(allred.optim.Adam(lr=0.05))
optimizer.broadcast(there)
for step in range(4):
    grads = values()
    if step == 2:
        grads["half"] = None
    given = {name: None if grad is None else on_gpu(grad) for name, grad in grads.items()}
    given["scale"] = float(grads["scale"])  # a number
    optimizer.step(there, given)
    reference.step(alone, grads)
for fresh in (there, placed(values())):
    optimizer.pull(fresh)
    for name, value in alone.items():
        assert type(fresh[name]) is (np.ndarray if name == "b" else Kind)
        np.testing.assert_array_equal(host(fresh[name]), value, err_msg=name)
assert REAL or cuda_stand_in.gpu.copied_down == 3 + 3 * 4 - 1, "w, scale, half; then gradients, but no None or number"
assert REAL or cuda_stand_in.gpu.ordered, "the caller's stream has to wait for the parameters"
if not REAL:
    uploaded = [one for one in kept[-1][1] if any(np.shares_memory(one, page) for page in pages)]
    assert len(uploaded) == 3, "the memory that is copied from is kept: w, scale, half"
with pytest.raises(allred.InputError, match="share memory"):
    optimizer.pull({**there, "scale": there["w"][0, 0:1].reshape(())})
assert REAL or not cuda_stand_in.problems, cuda_stand_in.problems
print("the same")
