"""`bench torch`, `hooks`, `groups` and `horovod` with tiny sizes; they verify their variants. A job takes 20 s."""

import json
import pathlib

import pytest

from allred import testing

pytest.importorskip("torch")

BENCH = pathlib.Path(__file__).parents[2] / "benchmarks/bench.py"
SIZES = "--batches 1,2 --width 16 --seconds 0 --json"
VARIANTS = {"ddp gloo", "ddp allred", "ddp in place", "hooked late", "hooked early", "hooked in place", "local"}


@pytest.mark.full
@pytest.mark.limit(300)
def test_the_lines():
    arguments = ["-m", "allred", "bench", "torch", "--against", "ddp", "--tensors", "tiny", *SIZES.split()]
    result = testing.mpirun(2, *arguments, env={"OMP_NUM_THREADS": "1", "ALLRED_TORCH_ARENA": "1"}, timeout_s=280)
    assert result.code == 0, result.text
    lines = [json.loads(line) for line in result.out.splitlines()]
    assert [(line["set"], line.get("batch")) for line in lines] == [
        *(("mlp", 1), ("mlp", 2), ("resnet", 2), ("grouped", None))
    ]
    for line in lines:
        assert (line["bench"], line["ranks"], line["threads_of_torch"]) == ("torch", 2, 1)
        assert line["samples"] > 0
    for line in lines[:3]:
        assert line["auto"] in ("early", "late")
        assert set(line["p50_us"]) == VARIANTS
        assert set(line["speedup"]) == set(line["speedup_q25"]) == VARIANTS - {"ddp gloo"}
    assert set(lines[3]["p50_us"]) == {"gloo per tensor", "allred"}


@pytest.mark.full
@pytest.mark.limit(300)
def test_hooks():
    result = testing.mpirun(2, BENCH, "hooks", *SIZES.split(), env={"OMP_NUM_THREADS": "1"}, timeout_s=280)
    assert result.code == 0, result.text
    host, sleep = [json.loads(line) for line in result.out.splitlines()]
    assert host["tensors"] == 161
    assert host["hooked_us"] > host["local_us"] > 0
    assert sleep.keys() > {"compute_us", "communicate_us", "after_us", "early_us", "share", "share_q25"}


@pytest.mark.full
@pytest.mark.limit(300)
@pytest.mark.parametrize(("ranks", "against"), [(2, ["gloo", "world"]), (4, ["gloo"])])
def test_groups(ranks, against):
    result = testing.mpirun(ranks, BENCH, "groups", "--seconds", "0", "--json", timeout_s=280)
    assert result.code == 0, result.text
    lines = [json.loads(line) for line in result.out.splitlines()]
    sizes = ["16 KiB", "64 KiB", "256 KiB", "1024 KiB"]
    assert [(line["set"], line["against"]) for line in lines] == [(size, each) for size in sizes for each in against]
    assert all(set(line["speedup"]) == {"allred"} for line in lines)


@pytest.mark.full
@pytest.mark.limit(300)
def test_against_horovod(tmp_path):
    """Horovod itself cannot be built here: a package of its name, with the functions of allred.torch, stands for it."""
    package = tmp_path / "horovod"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "torch.py").write_text("from allred.torch import *\ndef init():\n    pass\n")
    arguments = [BENCH, "horovod", *SIZES.split()]
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    result = testing.mpirun(2, *arguments, env=env, timeout_s=280)
    assert result.code == 0, result.text
    lines = [json.loads(line) for line in result.out.splitlines()]
    assert [line["set"] for line in lines] == ["mlp", "mlp", "averages"]
    steps = {"allred.torch DistributedOptimizer", "horovod DistributedOptimizer"}
    assert all(set(line["speedup"]) == steps for line in lines[:2])
    kinds = ("per tensor", "async", "grouped")
    assert set(lines[2]["speedup"]) == {f"{name} {kind}" for name in ("allred.torch", "horovod") for kind in kinds}
