"""Mode ps with clipping, gradient scaling and compression: each worker's own affair, or of no effect."""

from harness import mpirun

PROGRAM = """
import numpy as np
import allred
allred.init()
scaler = allred.GradScaler(init_scale=1024.0, growth_interval=2)
opt = allred.distributed(allred.optim.SGD(lr=1.0), clip_norm=1.0, scaler=scaler, compression=allred.Compression.bf16)
params = {"w": np.zeros(2), "b": np.zeros(1, np.float16)}
opt.broadcast(params)
grads = {"w": scaler.scale(np.array([6.0, 0.0])), "b": np.array([8192.0], np.float16)}  # 8, scaled
before = {name: grad.copy() for name, grad in grads.items()}
opt.step(params, grads)
assert all((grads[name] == before[name]).all() for name in grads)
print(opt.grad_norm, [round(float(p[0]), 3) for p in params.values()])
opt.step(params, {"w": np.array([np.inf, 0.0]), "b": np.zeros(1, np.float16)})
print(opt.skipped, scaler.get_scale(), [round(float(p[0]), 3) for p in params.values()])
for _ in range(2):
    opt.step(params, {"w": np.zeros(2), "b": np.zeros(1, np.float16)})
print(scaler.get_scale())
"""


def test_a_worker_clips_scales_and_skips_its_own_gradient():
    result = mpirun(2, "-c", PROGRAM, env={"ALLRED_MODE": "ps"}, timeout_s=60)
    assert result.code == 0, result.text
    assert result.out.splitlines() == ["10.0 [-0.6, -0.8]", "1 512.0 [-0.6, -0.8]", "1024.0"], result.text
    assert result.err.count("opt: compression has no effect in mode ps: gradients are sent uncompressed") == 1
