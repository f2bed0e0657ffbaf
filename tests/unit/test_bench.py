"""The benchmark without MPI: gradient sets, expected values, interleaving, arguments, settings, the report."""

import contextlib
import importlib.util
import itertools
import json
import math
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest

import allred
from allred import command_line
from allred.bench import command, measure, output, verify

BENCHMARKS = pathlib.Path(allred.__file__).parents[1] / "benchmarks"
REPORT = BENCHMARKS / "report.py"
RESULT_KEYS = {"p50_us", "p99_us", "algbw_GBps", "busbw_GBps", "against", "against_p50_us", "speedup"}


class OneRank:
    """The part of an mpi4py communicator that measure.py uses, for one rank."""

    barriers = 0

    def Get_rank(self):  # noqa: N802
        return 0

    def Get_size(self):  # noqa: N802
        return 1

    def Barrier(self):  # noqa: N802
        self.barriers += 1

    def allgather(self, value):
        return [value]

    def bcast(self, value):
        return value


# ---- sets


@pytest.mark.parametrize(
    ("name", "tensors", "elements", "largest"),
    [
        ("resnet50", 161, 25_557_032, (512, 512, 3, 3)),
        ("transformer", 199, 109_482_240, (30522, 768)),
        ("small", 1000, 256_000, (256,)),
        ("tiny", 1, 256, (256,)),
    ],
)
def test_sets_have_the_models_sizes(name, tensors, elements, largest):
    shapes = verify.PS_SETS[name]()
    assert len(shapes) == tensors
    assert sum(map(math.prod, shapes)) == elements
    assert max(shapes, key=math.prod) == largest


def test_resnet50_in_the_order_of_construction():
    shapes = verify.resnet50()
    assert shapes[:6] == [(64, 3, 7, 7), (64,), (64,), (64, 64, 1, 1), (64,), (64,)]
    assert shapes[12:15] == [(256, 64, 1, 1), (256,), (256,)]  # the first block's downsample comes last in it
    assert shapes[15] == (64, 256, 1, 1)
    assert shapes[-2:] == [(1000, 2048), (1000,)]


# ---- verification


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("dtype", ["int8", "float16", "float32", "int64"])
def test_expected_values_are_the_sums(size, dtype):
    shapes = [(100,), (3, 5), (), (verify._BLOCK + 7,)]
    groups = [[np.empty(shape, dtype) for shape in shapes] for _ in range(size)]
    for rank, group in enumerate(groups):
        verify.fill(group, rank)
    sums = [np.sum([group[i] for group in groups], axis=0, dtype=dtype) for i in range(len(shapes))]
    assert verify.wrong([np.asarray(array) for array in sums], size) == ""
    if size > 1:
        assert verify.wrong(groups[0], size).startswith("element ")


def test_swapped_chunks_are_detected():
    group = [np.empty(4096, np.float32)]
    verify.fill(group, 0)
    group[0][:2048], group[0][2048:] = group[0][2048:].copy(), group[0][:2048].copy()
    assert verify.wrong(group, 1) == "element 0 is 35.0, expected 0.0"


def test_check_raises_or_leaves_zeros():
    group = [np.empty(100, np.float32)]
    verify.check("sum", lambda: None, group, OneRank())
    assert not group[0].any()
    verify.check_zeros("sum", group, OneRank())
    with pytest.raises(verify.WrongResultError, match=r"sum is wrong on rank 0: element 3 is 0.0, expected 3.0"):
        verify.check("sum", lambda: group[0][3:].fill(0), group, OneRank())
    group[0][99] = 1e-45
    with pytest.raises(verify.WrongResultError, match="not zero after timing"):
        verify.check_zeros("sum", group, OneRank())


# ---- measuring


@pytest.mark.parametrize("ours", [1e-7, 1e-6, 40e-6, 1e-3, 0.5])
@pytest.mark.parametrize("theirs", [1e-6, 1e-3, 0.5])
def test_plans_are_bounded(ours, theirs):
    batch, turn = measure.plan([ours, theirs])
    assert 1 <= batch <= measure.MAX_BATCH
    assert 2 <= turn <= measure.MAX_TURN
    assert turn == 2 or batch * turn * max(ours, theirs) < 2 * measure.TURN_S


def test_calls_are_interleaved_with_the_same_number_of_samples():
    calls = []
    comm = OneRank()
    named = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    found = measure.interleave(named, comm, seconds=0)
    assert len(found["a"].seconds) == len(found["b"].seconds) >= 2 * measure.MIN_ROUNDS
    assert found["a"].batch == found["b"].batch
    turns = [name for name, _ in itertools.groupby(calls)]
    assert turns == ["a", "b"] * (1 + measure.MIN_ROUNDS)  # the first of them finds out how long a call takes
    assert comm.barriers >= 2 * len(found["a"].seconds)


def test_slowest_is_the_maximum_over_ranks():
    class TwoRanks(OneRank):
        def allgather(self, value):
            return [value, [3.0, 1.0]]

    assert measure.slowest([2.0, 2.0], TwoRanks()).tolist() == [3.0, 2.0]


def test_result_record():
    ours = measure.CallTimes(np.array([1e-3, 2e-3, 3e-3]), batch=1)
    theirs = measure.CallTimes(np.array([4e-3, 8e-3, 5e-3]), batch=1)
    found = output.result(ours, "mpi", theirs, nbytes=8_000_000, size=4)
    assert found.keys() >= RESULT_KEYS
    assert (found["p50_us"], found["p99_us"], found["against_p50_us"], found["speedup"]) == (2000, 2980, 5000, 2.5)
    assert (found["algbw_GBps"], found["busbw_GBps"]) == (4, 6)
    alone = output.result(ours, None, None, nbytes=4, size=1)
    assert alone.keys() == found.keys()
    assert alone["against"] is alone["against_p50_us"] is alone["speedup"] is None


def test_steps_are_interleaved_with_a_barrier_per_turn():
    calls, comm = [], OneRank()

    @contextlib.contextmanager
    def context(name, count):
        before = len(calls)
        yield
        assert calls[before:] == [name] * count

    named = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    found = measure.interleave_steps(named, comm, 0, context)
    assert len(found["a"].times.seconds) == len(found["b"].times.seconds) >= 2 * measure.MIN_ROUNDS
    assert comm.barriers < len(found["a"].times.seconds)
    assert {name: way.steps for name, way in found.items()} == {name: calls.count(name) for name in named}


def test_steps_per_s_counts_all_workers_and_the_slowest_time():
    class TwoWorkers(OneRank):
        def allgather(self, value):
            times, elapsed = value
            return [value, (times * 3, elapsed * 3)]

    found = measure.interleave_steps(
        {"a": lambda: time.sleep(0.003)}, TwoWorkers(), 0, lambda name, count: contextlib.nullcontext()
    )
    each = found["a"].times.seconds
    assert 0.009 <= each.max() < 0.3
    assert 2 / each.max() <= found["a"].steps_per_s <= 2 / 0.009


# ---- verification of training


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_expected_step_equals_that_of_the_optimizer(dtype, workers):
    params, grads = (verify.random_arrays([(40, 3), ()], dtype, seed) for seed in (0, 1))
    alone, opt = [param.copy() for param in params], allred.optim.SGD(lr=verify.LR)
    for _ in range(workers):
        opt.step(alone, grads)
    assert verify.first_difference(verify.after_one_step(params, grads, workers, averages=False), alone) == ""
    mean = verify.after_one_step(params, grads, workers, averages=True)
    assert (mean[0] == params[0] - grads[0] * verify.LR).mean() > 0.5  # the rest is rounded
    assert np.allclose(mean[0], params[0] - grads[0] * verify.LR)


def test_a_missing_or_additional_update_is_detected():
    shapes = [(100,), (7, 9)]
    start, grads = verify.whole_params(shapes, "float32"), verify.whole_gradients(shapes, "float32")
    params, opt = [param.copy() for param in start], allred.optim.SGD(lr=verify.LR)
    for _ in range(1000):
        opt.step(params, grads)
    assert verify.wrong_after_updates(1000, params, start, grads) == ""
    assert verify.wrong_after_updates(999, params, start, grads) == "element 0 of tensor 0 is 3000.0, expected 2997.0"
    params[1][2, 2] += 3
    assert verify.wrong_after_updates(1000, params, start, grads).startswith("element 20 of tensor 1 is ")
    assert verify.wrong_after_updates(2**23, params, start, grads) == ""  # beyond whole numbers of float32


def test_a_nan_differs_and_so_does_the_sign_of_zero():
    zeros = [np.zeros(2, np.float32)]
    assert (
        verify.first_difference(zeros, [np.array([0, np.nan], np.float32)])
        == "element 1 of tensor 0 is 0.0, expected nan"
    )
    assert verify.first_difference(zeros, [np.array([0.0, -0.0], np.float32)])


def test_a_parameter_server_in_raw_mpi_is_verified(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from ps_raw_mpi import PING_PONG, RawMpi

    baseline = RawMpi(OneRank(), [(2**19,)], np.float32, lr=0.5)
    assert list(baseline.calls) == ["mpi chunks", "mpi all chunks"]
    assert baseline.wrong("mpi chunks").startswith("element 0 of tensor 0 is ")
    baseline.params[...] = baseline.expected - 0.5 * baseline.gradients
    assert baseline.wrong("mpi chunks") == ""
    assert list(RawMpi(OneRank(), [(256,)], np.float32, lr=0.5).calls) == [PING_PONG]


# ---- arguments


def test_defaults():
    options = command.parse(["allreduce"])
    assert options.items == [4 * 1024**0, 2**10, 2**14, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26, 2**28]
    assert (options.dtype, options.against, options.json) == (np.float32, None, False)
    assert command.parse(["allreduce", "--dtype", "float64"]).items[0] == 8
    assert command.parse(["fused"]).items == ["resnet50", "transformer", "small"]
    assert command.parse(["fused", "--set", "small"]).items == ["small"]
    served = command.parse(["ps"])
    assert (served.set, served.servers, served.consistency, served.against) == ("resnet50", 1, None, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("allreduce --sizes 4,huge", "'huge' is not a size"),
        ("allreduce --sizes 6", "--sizes: expected a positive multiple of 4 bytes (float32), got 6"),
        ("allreduce --sizes 0", "--sizes: expected a positive multiple of 4 bytes (float32), got 0"),
        ("fused --dtype int32 --compression fp16", "--compression needs --dtype float32 or float64, got int32"),
        ("allreduce --dtype bool", "unknown dtype 'bool'; choose from uint8, "),
        ("allreduce --dtype bfloat16 --against mpi", "MPI has no dtype bfloat16"),
        ("allreduce --seconds -1", "--seconds must be a finite number of at least 0, got -1"),
        ("allreduce --seconds nan", "--seconds must be a finite number of at least 0, got nan"),
        ("allreduce --against nccl", "--against: invalid choice: 'nccl' (choose from"),
        ("fused --device cuda --against mpi", "--against mpi needs host arrays, and --device is cuda"),
        ("fused --device cuda --backend shm", "--device cuda needs backend nccl, got --backend shm"),
        ("fused --set resnet", "unknown set 'resnet'; choose from resnet50, transformer, small"),
        ("allreduce --arena yes", "--arena: expected on, off, or on,off; got 'yes'"),
        ("fused --arena on,on", "--arena: expected on, off, or on,off; got 'on,on'"),
        ("fused --arena on,off --compression fp16", "--arena is for arrays of the host without --compression"),
        ("step --dtype int32", "bench step needs --dtype float32 or float64"),
        ("step --momentum 1", "--momentum must be at least 0 and less than 1, got 1"),
        ("ps --set resnet", "unknown set 'resnet'; choose from resnet50, transformer, small, tiny"),
        ("ps --dtype float16", "bench ps needs --dtype float32 or float64"),
        ("ps --servers 0", "--servers must be at least 1, got 0"),
        ("ps --consistency none", "invalid choice: 'none'"),
        ("ps --backend mpi", "unrecognized arguments: --backend mpi"),
        ("torch --width 0", "--width must be at least 1, got 0"),
        ("torch --batches 4,x", "--batches: expected numbers of at least 1, such as 4,32, got '4,x'"),
        ("torch --tensors resnet", "unknown set 'resnet'; choose from resnet50, transformer, small, tiny"),
        ("torch", "bench torch needs PyTorch: pip install torch ml_dtypes (the CPU build: docs/install.md)"),
        ("", "the following arguments are required: allreduce|fused|ps|torch|data|step|start"),
    ],
)
def test_argument_errors_are_one_line_and_exit_code_2(words, message, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # as if torch was not installed
    assert command.main(words.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("allreduce --device cuda", "backend 'nccl': cupy is not installed on rank 0"),
        ("allreduce --arena on,off", "--arena: this job has no arenas: one rank has no other to share memory with"),
        ("allreduce --backend magic", "init(backend='magic') is not available"),
    ],
)
def test_errors_of_init_are_one_line_and_exit_code_2(words, message):
    """In a process of its own, because init() may start MPI. Costs 3 s."""
    command = [sys.executable, "-m", "allred", "bench", *words.split()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("fused --against nccl", "--against nccl needs arrays on GPUs: --device cuda"),
        ("fused --device cuda --against nccl --dtype int16", "NCCL in cupy has no dtype int16"),
        ("ps --servers 2 --against mpi --set tiny", "--against mpi compares one server and one worker"),
        ("overlap --set tiny", "unknown set 'tiny'; choose from resnet50, transformer, small, mlp"),
        ("checkpoint --tensors 0", "--tensors must be at least 1, got 0"),
        ("checkpoint --directory /none", "--directory /none is not a directory"),
    ],
)
def test_argument_errors_of_the_benchmarks_of_developers(words, message):
    """Costs 2 s: a process for each."""
    command = [sys.executable, BENCHMARKS / "bench.py", *words.split()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.startswith("python benchmarks/bench.py")
    assert result.stderr.count("\n") == 1


def test_other_ranks_are_silent(monkeypatch, capfd):
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setattr(command_line, "PRINT_FIRST_S", 0)
    assert command.main(["--help"]) == 0
    assert command.main(["allreduce", "--sizes", "?"]) == 2
    assert capfd.readouterr() == ("", "")


def test_importing_allred_does_not_load_the_benchmark():
    code = "import sys, allred; print([m for m in sys.modules if m.startswith(('allred.bench', 'argparse'))])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


# ---- settings


def test_malloc_is_tuned_once(monkeypatch):
    restarts = []
    monkeypatch.setattr(command, "_restart", restarts.append)
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=1")
    monkeypatch.delenv("PMI_FD", raising=False)
    command.tune_malloc()
    assert restarts[0]["GLIBC_TUNABLES"] == f"glibc.malloc.arena_max=1:{output.TUNABLES}"
    monkeypatch.setenv("GLIBC_TUNABLES", restarts[0]["GLIBC_TUNABLES"])
    assert output.tuned()
    command.tune_malloc()
    assert len(restarts) == 1


@pytest.mark.parametrize(
    ("ranks", "against", "user", "expected"),
    [("4", True, None, "1"), ("4", True, "0", "0"), ("4", False, None, None), ("2", True, None, None)],
)
def test_raw_mpi_yields_where_ranks_share_cores(ranks, against, user, expected, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for variable in [variable for variable in os.environ if variable.startswith("OMPI_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", ranks)
    monkeypatch.setenv("OMPI_MCA_initial_wdir", "the launcher's")
    name = "OMPI_MCA_mpi_yield_when_idle"
    monkeypatch.setenv(name, user or "")
    if user is None:
        monkeypatch.delenv(name)
    found = command.before_mpi(against)
    assert found.get(name) == os.environ.get(name) == expected
    assert "OMPI_MCA_initial_wdir" not in found


# ---- the report


def test_report(tmp_path):
    spec = importlib.util.spec_from_file_location("report", REPORT)
    report = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(report)
    setting_of = {
        "ranks": 2, "dtype": "float32", "backend": "shm", "op": "Sum", "mpi": "MPICH 5.0.2", "allred": "0.1.0",
        "thread_level": "multiple", "mpi_settings": {"OMPI_MCA_btl": "^ofi"}, "binding": ["0-1", "0-1"],
        "glibc_tunables": "", "tuned": False, "p50_us": 12.346, "p99_us": 1234.5, "algbw_GBps": 5.3, "busbw_GBps": 5.3,
        "against_p50_us": 98.7, "speedup": 7.994, "samples": 60, "calls_per_sample": 4,
    }  # fmt: skip
    one = {**setting_of, "bench": "allreduce", "bytes": 65536, "against": "mpi", "command": "mpirun ... allreduce"}
    two = {**setting_of, "bench": "fused", "set": "small", "tensors": 1000, "against": "mpi per tensor", "command": "b"}
    lines = tmp_path / "lines.jsonl"
    three = {
        **setting_of, "bench": "ps", "set": "tiny", "tensors": 1, "against": None, "command": "c", "servers": 1,
        "workers": 1, "consistency": "async", "op": "push", "updates_per_s": 123.4, "staleness": {"10": 1, "2": 3},
    }  # fmt: skip
    del three["busbw_GBps"]
    lines.write_text("".join(json.dumps(line) + "\n" for line in (one, {**one, "bytes": 4}, two, three)))
    four = {**one, "arena": "on", "command": "d", "against": "arena off"}
    with lines.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in (four, {**four, "against": "mpi"}))
    target = tmp_path / "RESULTS.md"
    result = subprocess.run(
        [sys.executable, REPORT, lines, target], capture_output=True, text=True, timeout=60, check=True
    )
    page = target.read_text()
    assert result.stdout == page
    assert page.count("\n## ") == 4
    assert "backend shm, arena on; 2 ranks" in page
    assert "| 64 KiB | 12.3 | 1,234 | 5.3 | 5.3 | arena off | 98.7 | 7.99 |" in page
    assert "| tiny: 1 tensors | 12.3 | 1,234 | 5.3 | 123 | 2: 75 %, 10: 25 % | 60 of 4 |" in page
    assert "2 ranks (servers 1, workers 1, async), float32, push; thread" in page
    assert "## MPICH 5.0.2: allreduce\n\n`mpirun ... allreduce`\n" in page
    assert "| 64 KiB | 12.3 | 1,234 | 5.3 | 5.3 | 98.7 | 7.99 | 60 of 4 |\n| 4 B |" in page
    assert "| small: 1000 tensors | 12.3 | 1,234 | 5.3 | 5.3 | raw MPI, per tensor | 98.7 | 7.99 |" in page
    assert "cores 0-1 on each rank; settings: `OMPI_MCA_btl=^ofi`." in page
    assert f"{os.cpu_count()} cores" in page
    assert str(pathlib.Path.cwd()) not in page
