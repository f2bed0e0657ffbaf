"""`python -m allred bench` under mpirun: output, restart with malloc tunables, wrong arguments and results."""

import json
import math
import pathlib

import pytest
from harness import mpirun, python

KEYS = [
    "ranks",
    "dtype",
    "backend",
    "p50_us",
    "p99_us",
    "algbw_GBps",
    "busbw_GBps",
    "against",
    "against_p50_us",
    "speedup",
]
TINY = ("--seconds", "0", "--json")
# `small` has 1000 tensors, and `mlp` 8 MB: on a busy machine a step takes up to a second.
FEW = """
import sys
from allred.bench import command, measure, overlap, verify
measure.TURN_S, overlap.BUSY_S, overlap.PEER_CALLS = 1e-3, 0.02, 10
verify.SETS["small"] = verify.OVERLAP_SETS["mlp"] = lambda: [(256,)] * 10
sys.exit(command.main(sys.argv[1:]))
"""


def bench(ranks, *arguments, **options):
    result = mpirun(ranks, "-m", "allred", "bench", *arguments, **options)
    assert result.code == 0, result.text
    return result


def bench_few(*arguments, **options):
    """Two ranks with sets of 10 tensors of 256 elements."""
    result = mpirun(2, "-c", FEW, *arguments, **options)
    assert result.code == 0, result.text
    return result


def lines_of(result, ranks, against=True):
    lines = [json.loads(line) for line in result.out.splitlines()]
    for line in lines:
        assert [key for key in line if key in KEYS] == KEYS, result.text
        assert line["ranks"] == ranks
        assert 0 < line["p50_us"] <= line["p99_us"]
        assert math.isclose(line["algbw_GBps"], line["bytes"] / line["p50_us"] / 1e3, rel_tol=0.01)
        assert math.isclose(line["busbw_GBps"], line["algbw_GBps"] * 2 * (ranks - 1) / ranks, rel_tol=0.01)
        if against:
            assert math.isclose(line["speedup"], line["against_p50_us"] / line["p50_us"], rel_tol=0.01)
        assert line["samples"] >= 10
        assert len(line["binding"]) == ranks
        assert line["thread_level"] == "multiple"
        assert line["progress_thread"] is False
    return lines


def test_overlap():
    result = bench_few("overlap", "--set", "mlp", "--progress", "caller", *TINY)
    *steps, waits, busy = [json.loads(line) for line in result.out.splitlines()]
    assert [line["backward"] for line in steps] == ["sleep", "numpy", "python"]
    for line in steps:
        hidden = line["compute_us"] + line["communicate_us"] - max(line["compute_us"], line["communicate_us"])
        assert math.isclose(line["share"], (line["after_us"] - line["early_us"]) / hidden, rel_tol=0.05, abs_tol=0.05)
    assert (waits["rank_0"], busy["rank_0"]) == ("waits", "busy")
    assert 0 < busy["p50_us"] <= busy["longest_us"]


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_allreduce_against_mpi(mpi, ranks):
    result = bench(ranks, "allreduce", "--sizes", "4,1KiB,1.5MiB", "--against", "mpi", *TINY, mpi=mpi)
    lines = lines_of(result, ranks)
    assert [(line["bench"], line["bytes"], line["against"]) for line in lines] == [
        ("allreduce", size, "mpi") for size in (4, 1024, 1572864)
    ]
    first = lines[0]
    assert first["mpi"].startswith({"mpich": "MPICH ", "openmpi": "Open MPI "}[mpi])
    assert first["command"].startswith(
        f"mpirun -np {ranks} python -m allred bench allreduce --sizes 4,1KiB,1.5MiB --ag"
    )
    yields = mpi == "openmpi" and ranks > first["cores"]
    assert (first["mpi_settings"].get("OMPI_MCA_mpi_yield_when_idle") == "1") == yields
    assert not first["tuned"]


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_fused_against_mpi(mpi):
    result = bench_few("fused", "--set", "small", "--against", "mpi", *TINY, mpi=mpi)
    lines = lines_of(result, 2)
    assert [(line["bench"], line["set"], line["tensors"], line["bytes"]) for line in lines] == [
        ("fused", "small", 10, 10240)
    ] * 2
    assert [line["against"] for line in lines] == ["mpi per tensor", "mpi concatenate + split"]
    assert lines[0]["p50_us"] == lines[1]["p50_us"]


def test_compressed_beside_uncompressed():
    result = bench_few("fused", "--set", "small", "--compression", "bf16", *TINY)
    [line] = lines_of(result, 2)
    assert (line["compression"], line["against"]) == ("bf16", "allred uncompressed")


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
@pytest.mark.parametrize(("name", "peers"), [("tiny", ["ping-pong"]), ("small", ["chunks", "all chunks"])])
def test_ps_against_mpi(mpi, name, peers):
    result = bench(2, "ps", "--set", name, "--against", "mpi", *TINY, mpi=mpi)
    lines = [json.loads(line) for line in result.out.splitlines()]
    assert [line["against"] for line in lines] == [f"mpi {peer}" for peer in peers]
    for line in lines:
        assert (line["bench"], line["set"], line["servers"], line["workers"]) == ("ps", name, 1, 1)
        assert (line["ranks"], line["dtype"], line["backend"], line["consistency"]) == (2, "float32", "shm", "async")
        assert math.isclose(line["algbw_GBps"], line["bytes"] / line["p50_us"] / 1e3, rel_tol=0.01)
        assert math.isclose(line["speedup"], line["against_p50_us"] / line["p50_us"], rel_tol=0.01)
        assert 0 < line["p50_us"] <= line["p99_us"]
        assert list(line["staleness"]) == ["0"]
        assert "busbw_GBps" not in line
        assert len(line["binding"]) == 2


@pytest.mark.parametrize(
    ("mpi", "consistency", "dtype"),
    [
        ("mpich", "async", "float64"),
        pytest.param("mpich", "bounded", "float32", marks=pytest.mark.full),
        ("openmpi", "sync", "float32"),
        pytest.param("openmpi", "async", "float32", marks=pytest.mark.full),
    ],
)
def test_ps_of_several(mpi, consistency, dtype):
    arguments = ("--servers", "2", "--consistency", consistency, "--dtype", dtype)
    result = bench(4, "ps", "--set", "tiny", *arguments, *TINY, mpi=mpi)
    (line,) = [json.loads(line) for line in result.out.splitlines()]
    assert (line["ranks"], line["servers"], line["workers"]) == (4, 2, 2)
    assert (line["consistency"], line["dtype"], line["bytes"]) == (consistency, dtype, 1024 * int(dtype[5:]) // 32)
    assert line["against"] is line["speedup"] is None
    assert line["updates_per_s"] > 0
    assert sum(line["staleness"].values()) >= line["samples"] * line["calls_per_sample"]
    assert consistency != "sync" or set(line["staleness"]) == {"0"}


def test_ps_table_for_people():
    out = bench(2, "ps", "--set", "tiny", "--against", "mpi", "--seconds", "0").out
    assert out.startswith("ps: float32, push, SGD, pull, in place, blocking; 2 ranks: servers 1, workers 1, async")
    assert "updates/s" in out
    assert "mpi ping-pong" in out
    assert out.splitlines()[-1].strip().startswith("staleness: 0: ")


def test_data():
    """Costs 3 s: two jobs, each with two processes of prefetch."""
    lines = [json.loads(line) for line in python("-m", "allred", "bench", "data", *TINY).out.splitlines()]
    assert [line["what"].split(":")[0] for line in lines] == [
        *("npy", "idx", "tfrecord", "shuffled(tfrecord)", "example", "example", "example"),
        *("stream", "prefetch(stream)", "prefetch(stream, workers=2)"),
    ]
    assert all(line["records_per_s"] > 0 and line["crc32c"] == "c" for line in lines)
    out = bench(2, "data", "--seconds", "0").out
    assert out.startswith("data: google-crc32c: c; protobuf ")
    assert len(out.splitlines()) == 12, out  # of rank 0 alone


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_a_wrong_step_is_an_error_on_all_ranks(mpi):
    code = (
        "import sys, allred; from allred.bench import command; right = allred.optim.SGD.update\n"
        "def wrong(self, param, *rest):\n"
        "    right(self, param, *rest)\n"
        "    param[5] = 7\n"
        "allred.optim.SGD.update = wrong\n"
        "sys.exit(command.main(['ps', '--set', 'tiny', '--json']))"
    )
    result = mpirun(2, "-c", code, mpi=mpi)
    assert result.code == 1, result.text
    assert result.err.count("ps tiny: a step is wrong on worker 0: element 5 of tensor 0 is 7.0, expected") == 1, (
        result.text
    )
    assert result.out == ""


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_malloc_tuned_starts_itself_again(mpi):
    result = bench(2, "allreduce", "--sizes", "4MiB", "--against", "mpi", "--malloc-tuned", *TINY, mpi=mpi)
    (line,) = lines_of(result, 2)
    assert line["tuned"]
    assert "glibc.malloc.hugetlb=1:" in line["glibc_tunables"]
    assert line["command"].endswith("--malloc-tuned --seconds 0 --json")


def test_backend_and_dtype():
    result = bench(2, "allreduce", "--sizes", "64", "--backend", "mpi", "--dtype", "bfloat16", *TINY)
    (line,) = lines_of(result, 2, against=False)
    assert (line["backend"], line["dtype"]) == ("mpi", "bfloat16")
    assert line["against"] is line["against_p50_us"] is line["speedup"] is None


def test_one_rank_without_mpirun():
    result = python("-m", "allred", "bench", "allreduce", "--sizes", "4", "--against", "mpi", *TINY)
    (line,) = lines_of(result, 1)
    assert (line["backend"], line["busbw_GBps"]) == ("single", 0)
    assert line["command"].startswith("python -m allred bench allreduce")


def test_table_for_people():
    result = bench_few("fused", "--set", "small", "--against", "mpi", "--seconds", "0", mpi="openmpi")
    assert result.out.startswith("fused: float32, Sum, in place, blocking; 2 ranks, backend "), result.text
    assert "thread level multiple; settings: OMPI_MCA_btl=^ofi" in result.out, result.text
    assert "allred:" not in result.err, result.text  # no banner
    assert result.out.count(" small ") == 2
    *_, last_row, note = result.out.splitlines()
    assert ("mpi concatenate + split: " in last_row, note) == (True, "progress thread: not running"), result.text


def test_arrays_on_gpus_against_nccl():
    """With a simulated GPU: the measured times mean nothing."""
    program = pathlib.Path(__file__).with_name("gpu_bench_program.py")
    result = mpirun(2, program, "allreduce", "--device", "cuda", "--against", "nccl", "--sizes", "64,4KiB", *TINY)
    assert result.code == 0, result.text
    lines = lines_of(result, 2)
    assert [(line["bytes"], line["against"], line["backend"]) for line in lines] == [
        (64, "nccl", "nccl"),
        (4096, "nccl", "nccl"),
    ]
    assert {(line["device"], line["gpu"], line["nccl"]) for line in lines} == {("cuda", "stand-in", 23000)}
    result = mpirun(2, program, "fused", "--device", "cuda", "--against", "nccl", "--set", "small", *TINY)
    assert result.code == 0, result.text
    lines = lines_of(result, 2)
    assert [line["against"] for line in lines] == ["nccl per tensor", "nccl concatenate + split"]
    for line in lines:
        rates = ("enqueue_us", "copy_GBps", "pack_GBps", "unpack_GBps", "pack_scaled_GBps", "unpack_divided_GBps")
        assert all(line[name] > 0 for name in rates)


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param("fused --set resnet", "unknown set 'resnet'", marks=pytest.mark.full),
        ("ps --servers 2", "mode ps with 2 parameter servers and no worker: 2 ranks in all"),
    ],
)
def test_wrong_arguments(mpi, arguments, message):
    """Before MPI starts, and in allred.init(); tests/unit/test_bench.py has all messages."""
    result = mpirun(2, "-m", "allred", "bench", *arguments.split(), mpi=mpi)
    assert result.code == 2, result.text
    assert result.err.count(message) == 1, result.text
    assert "Traceback" not in result.err, result.text
    assert result.out == ""


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_help_is_printed_once(mpi):
    assert bench(2, "--help", mpi=mpi).out.count("usage:") == 1


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_wrong_sums_are_an_error_on_all_ranks(mpi):
    code = (
        "import sys, allred; from allred.bench import command; right = allred.allreduce_\n"
        "def wrong(array, op):\n"
        "    right(array, op)\n"
        "    array[5] += allred.rank()\n"
        "allred.allreduce_ = wrong\n"
        "sys.exit(command.main(['allreduce', '--sizes', '64', '--against', 'mpi', '--json']))"
    )
    result = mpirun(2, "-c", code, mpi=mpi)
    assert result.code == 1, result.text
    message = "allreduce 64 by allred is wrong on rank 1: element 5 is 12.0, expected 11.0"
    assert result.err.count(message) == 1, result.text
    assert result.out == ""
