"""Mode ps with gradients in the arenas of the workers: servers read them from there."""

import pytest
from harness import mpirun

PROGRAM = """
import sys
import numpy as np
import allred

steps, consistency, servers = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
allred.init(mode="ps", num_ps=servers)
rank, size = allred.rank(), allred.size()
shapes = {"small": (7, "f4"), "large": (300_000, "f4"), "middle": (20_000, "f8"), "half": (50_000, "f2")}
shapes["last"] = (3, "f4")
params = {name: np.zeros(*shape) for name, shape in shapes.items()}
opt = allred.distributed(allred.optim.SGD(lr=1.0))
opt.broadcast(params)
total = sum(1 + other + 10 * (step % 3) for other in range(size) for step in range(steps))
for step in range(steps):
    grads = {name: np.zeros_like(param) + (1 + rank + 10 * (step % 3)) for name, param in params.items()}
    opt.step(params, grads)
    for grad in grads.values():
        grad[...] = -999  # the step is complete
expected = total / size if consistency == "sync" else total
print([line for line in opt.summary().splitlines() if line.startswith("gradients: ")], flush=True)
links = opt._get_mode()._client._links
referenced = [None if link.box is None else link.box.referenced for link in links]
try:
    grads["last"][...] = np.nan
    opt.step(params, grads)
    print("no error", flush=True)
except allred.errors.NonFiniteError:
    pass
allred.barrier()
opt.pull(params)  # the gradient with a NaN was not applied to any part
for name, param in params.items():
    assert (param == -expected).all(), (name, set(param.tolist()), expected)
if all(referenced):
    print("read from arenas", flush=True)
elif not any(referenced):
    print("copied", flush=True)
"""


def run(tmp_path, workers, consistency="async", servers=1, mpi="mpich", **settings):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    env = {"ALLRED_BANNER": "0", "ALLRED_WATCHER": "0", "ALLRED_CONSISTENCY": consistency, **settings}
    result = mpirun(workers + servers, path, 6, consistency, servers, mpi=mpi, env=env, timeout_s=60)
    assert result.code == 0, result.text
    lines = result.out.splitlines()
    read = "100 %" if "read from arenas" in lines else "0 %"
    assert lines.count(f"['gradients: 1.56 MB a step; {read} read from the arena by servers']") == workers
    return [line for line in lines if not line.startswith("[")]


@pytest.mark.parametrize(
    ("workers", "consistency", "servers", "mpi"),
    [
        (1, "async", 1, "mpich"),
        pytest.param(2, "sync", 1, "openmpi", marks=pytest.mark.full),
        pytest.param(2, "async", 2, "mpich", marks=pytest.mark.full),
        pytest.param(3, "bounded", 1, "mpich", marks=pytest.mark.full),
        pytest.param(2, "sync", 2, "mpich", marks=pytest.mark.full),
    ],
)
def test_servers_read_gradients_from_arenas(tmp_path, workers, consistency, servers, mpi):
    """Costs 0.8 s per case."""
    assert run(tmp_path, workers, consistency, servers, mpi) == ["read from arenas"] * workers


@pytest.mark.parametrize("setting", ["ALLRED_ARENA", pytest.param("ALLRED_PRETEND_NODES", marks=pytest.mark.full)])
def test_otherwise_gradients_are_copied(tmp_path, setting):
    """Without arenas, and between nodes. Costs 0.8 s per case."""
    value = "0" if setting == "ALLRED_ARENA" else "1,1,1"
    assert run(tmp_path, 2, **{setting: value}) == ["copied"] * 2
