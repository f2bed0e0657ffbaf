"""`python -m allred bench` and benchmarks/bench.py under mpirun: output, restart with malloc tunables, errors."""

import json
import math
import pathlib

import pytest
from harness import MPICH_BY_DEFAULT, MPIS, full, mpirun, python

BENCHMARKS = str(pathlib.Path(__file__).parents[2] / "benchmarks")
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

# Runs several commands in one job, which costs one start of its ranks. Only the last one can be `ps`: its servers end.
# `small` has 1000 tensors, and `mlp` 8 MB: on a busy machine a step takes up to a second.
COMMANDS = """
import json, sys
sys.path.insert(0, "BENCHMARKS")
import allred, bench, overlap
from allred.bench import command, measure, verify
measure.TURN_S, overlap.BUSY_S, overlap.PEER_CALLS = 1e-3, 0.02, 10
verify.SETS["small"] = verify.PS_SETS["small"] = overlap.SETS["mlp"] = lambda: [(256,)] * 10
CHANGE
for words in json.loads(sys.argv[1]):
    if code := command.main(words):
        sys.exit(code)
"""


def bench(ranks, *arguments, **options):
    result = mpirun(ranks, "-m", "allred", "bench", *arguments, **options)
    assert result.code == 0, result.text
    return result


def bench_several(ranks, *commands, change="", **options):
    """One job that runs several commands, with sets of 10 tensors of 256 elements. change: code that comes first."""
    commands = json.dumps([command.split() for command in commands])
    return mpirun(
        ranks, "-c", COMMANDS.replace("BENCHMARKS", BENCHMARKS).replace("CHANGE", change), commands, **options
    )


def records_of(result, *words):
    """The JSON lines of the command with these words."""
    assert result.code == 0, result.text
    records = [json.loads(line) for line in result.out.splitlines() if line.startswith("{")]
    return [record for record in records if " ".join(words) in record["command"]]


def check_arrays(records, ranks, against=True):
    """What is true for all lines of `allreduce` and `fused`."""
    for line in records:
        assert [key for key in line if key in KEYS] == KEYS, line
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
    return records


SIZES = "allreduce --sizes 4,1KiB,1.5MiB --against mpi"


def check_sizes(result, mpi, ranks):
    lines = check_arrays(records_of(result, SIZES), ranks)
    assert [(line["bench"], line["bytes"], line["against"]) for line in lines] == [
        ("allreduce", size, "mpi") for size in (4, 1024, 1572864)
    ]
    first = lines[0]
    assert first["mpi"].startswith({"mpich": "MPICH ", "openmpi": "Open MPI "}[mpi])
    assert first["command"].startswith(f"mpirun -np {ranks} python -m allred bench {SIZES}")
    yields = mpi == "openmpi" and ranks > first["cores"]
    assert (first["mpi_settings"].get("OMPI_MCA_mpi_yield_when_idle") == "1") == yields
    assert not first["tuned"]


def check_fused(result):
    lines = check_arrays(records_of(result, "--set small --against"), 2)
    assert [(line["bench"], line["set"], line["tensors"], line["bytes"]) for line in lines] == [
        ("fused", "small", 10, 10240)
    ] * 2
    assert [line["against"] for line in lines] == ["mpi per tensor", "mpi concatenate + split"]
    assert lines[0]["p50_us"] == lines[1]["p50_us"]


def check_overlap(records):
    *steps, waits, busy = records
    assert [line["backward"] for line in steps] == ["sleep", "numpy", "python"]
    for line in steps:
        hidden = line["compute_us"] + line["communicate_us"] - max(line["compute_us"], line["communicate_us"])
        assert math.isclose(line["share"], (line["after_us"] - line["early_us"]) / hidden, rel_tol=0.05, abs_tol=0.05)
    assert (waits["rank_0"], busy["rank_0"]) == ("waits", "busy")
    assert 0 < busy["p50_us"] <= busy["longest_us"]


def check_ps(lines, name, dtype, peers):
    assert [line["against"] for line in lines] == [f"mpi {peer}" for peer in peers]
    for line in lines:
        assert (line["bench"], line["set"], line["servers"], line["workers"]) == ("ps", name, 1, 1)
        assert (line["ranks"], line["dtype"], line["backend"], line["consistency"]) == (2, dtype, "shm", "async")
        assert math.isclose(line["algbw_GBps"], line["bytes"] / line["p50_us"] / 1e3, rel_tol=0.01)
        assert math.isclose(line["speedup"], line["against_p50_us"] / line["p50_us"], rel_tol=0.01)
        assert 0 < line["p50_us"] <= line["p99_us"]
        assert list(line["staleness"]) == ["0"]
        assert "busbw_GBps" not in line
        assert len(line["binding"]) == 2


@full
@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_json_lines_of_all_benchmarks_of_2_ranks(mpi):
    """Costs 7 s of CPU time: one job for seven commands."""
    tiny = " ".join(TINY)
    result = bench_several(
        *(2, f"{SIZES} {tiny}", f"fused --set small --against mpi {tiny}"),
        *(f"fused --set small --compression bf16 {tiny}", f"overlap --set mlp --progress caller {tiny}"),
        f"allreduce --sizes 64 --backend mpi --dtype bfloat16 {tiny}",
        *(f"checkpoint --tensors 1 {tiny}", f"ps --set small --dtype float64 --against mpi {tiny}"),
        mpi=mpi,
    )
    check_sizes(result, mpi, 2)
    check_fused(result)
    [line] = check_arrays(records_of(result, "bf16"), 2)
    assert (line["compression"], line["against"]) == ("bf16", "allred uncompressed")
    check_overlap(records_of(result, "overlap"))
    [line] = check_arrays(records_of(result, "--dtype bfloat16"), 2, against=False)
    assert (line["backend"], line["dtype"]) == ("mpi", "bfloat16")
    assert line["against"] is line["against_p50_us"] is line["speedup"] is None
    check_ps(records_of(result, "ps"), "small", "float64", ["chunks", "all chunks"])
    lines = records_of(result, "checkpoint")
    assert {(line["set"], line["against"]) for line in lines} >= {("save", "raw write"), ("restore", "raw read")}
    assert all(line["bytes"] == 2**23 and line["speedup"] > 0 for line in lines)


@pytest.mark.parametrize("mpi", ["openmpi", pytest.param("mpich", marks=pytest.mark.full)])
def test_a_table_and_more_ranks_than_cores_and_parameter_servers_of_two_workers(mpi):
    commands = (f"{SIZES} --seconds 0 --json", "fused --set small --against mpi --seconds 0")
    consistency = "--servers 2 --consistency sync --seconds 0 --json"
    result = bench_several(4, *commands, f"ps --set tiny {consistency}", mpi=mpi)
    check_sizes(result, mpi, 4)
    _, *table, _ = [line for line in result.out.split("\nfused: ")[-1].splitlines() if not line.startswith("{")]
    assert "\nfused: float32, Sum, in place, blocking; 4 ranks, backend " in result.out, result.text
    settings = "; settings: OMPI_MCA_btl=^ofi" if mpi == "openmpi" else ""
    assert f"thread level multiple{settings}" in result.out, result.text
    assert "allred:" not in result.err, result.text  # no banner
    assert [" small " in line for line in table[-2:]] == [True, True], result.text
    assert "mpi concatenate + split: " in table[-1], result.text
    assert result.out.count("\nprogress thread: not running\n") == 1, result.text
    check_several_servers(result, "sync", "float32")


def check_several_servers(result, consistency, dtype):
    (line,) = records_of(result, "bench ps")
    assert (line["ranks"], line["servers"], line["workers"]) == (4, 2, 2)
    assert (line["consistency"], line["dtype"], line["bytes"]) == (consistency, dtype, 1024 * int(dtype[5:]) // 32)
    assert line["against"] is line["speedup"] is None
    assert line["updates_per_s"] > 0
    assert sum(line["staleness"].values()) >= line["samples"] * line["calls_per_sample"]
    assert consistency != "sync" or set(line["staleness"]) == {"0"}


@full
def test_the_start_of_jobs():
    result = python("-m", "allred", "bench", "start", "--runs", 1, "--json")
    assert result.code == 0, result.text
    *parts, bare, with_numpy = map(json.loads, result.out.splitlines())
    assert [part["part"] for part in parts] == ["import numpy", "import allred", "init", "first step"]
    assert all(part["wall_ms"] > 0 and part["cpu_ms"] > 0 for part in parts)
    assert (bare["against"], with_numpy["against"]) == ("mpi4py", "mpi4py and numpy")
    assert sum(part["wall_ms"] for part in parts) < bare["wall_ms"] == with_numpy["wall_ms"]
    for job in (bare, with_numpy):
        assert math.isclose(job["ratio"], job["wall_ms"] / job["against_wall_ms"], rel_tol=0.01)
    table = python("-m", "allred", "bench", "start", "--runs", 1, "--ranks", 1)
    assert (table.code, table.out.count("ms wall")) == (0, 6), table.text
    result = mpirun(2, "-m", "allred", "bench", "start")
    assert result.code == 2, result.text
    assert "bench start runs mpirun itself: call it without mpirun" in result.err


def test_arenas_on_and_off():
    """Costs 2 s: one job for three commands."""
    tiny = " ".join(TINY)
    commands = ("allreduce --sizes 64KiB --arena on,off --against mpi", "fused --set small --arena off,on")
    environment = {"ALLRED_ARENA": "auto", "ALLRED_BACKEND": "shm"}
    step = "step --set small --arena on,off --sharded --momentum 0.9"
    result = bench_several(2, *(f"{words} {tiny}" for words in (*commands, step)), env=environment)
    lines = check_arrays(records_of(result, "--sizes 64KiB"), 2)
    assert [(line["arena"], line["against"]) for line in lines] == [("on", "arena off"), ("on", "mpi")]
    (line,) = check_arrays(records_of(result, "--arena off,on"), 2)
    assert (line["arena"], line["against"]) == ("off", "arena on")
    lines = records_of(result, step)
    assert [line["against"] for line in lines] == [
        "no check",
        "sharded",
        "sharded, one copy",
        "arena off",
        "arena off, no check",
    ]
    assert {(line["bench"], line["set"], line["arena"]) for line in lines} == {("step", "small", "on")}
    assert all(line["p50_us"] > 0 and line["speedup"] > 0 for line in lines)


@pytest.mark.full  # sync by default in the test above
@pytest.mark.parametrize(
    ("mpi", "consistency", "dtype"),
    [("mpich", "async", "float64"), ("mpich", "bounded", "float32"), ("openmpi", "async", "float32")],
)
def test_ps_of_several(mpi, consistency, dtype):
    arguments = ("--servers", "2", "--consistency", consistency, "--dtype", dtype)
    check_several_servers(bench(4, "ps", "--set", "tiny", *arguments, *TINY, mpi=mpi), consistency, dtype)


@pytest.mark.parametrize("mpi", MPIS)
def test_malloc_tuned_starts_itself_again_and_ps_prints_a_table(mpi):
    tuned = "allreduce --sizes 4MiB --against mpi --malloc-tuned --seconds 0 --json"
    result = bench_several(2, tuned, "ps --set tiny --against mpi --seconds 0", mpi=mpi)
    (line,) = check_arrays(records_of(result, "4MiB"), 2)
    assert line["tuned"]
    assert "glibc.malloc.hugetlb=1:" in line["glibc_tunables"]
    assert line["command"].endswith("--malloc-tuned --seconds 0 --json")
    table = result.out.partition("\n")[2]
    assert table.startswith("ps: float32, push, SGD, pull, in place, blocking; 2 ranks: servers 1, workers 1, async")
    assert "updates/s" in table
    assert "mpi ping-pong" in table
    assert table.splitlines()[-1].strip().startswith("staleness: 0: ")


@full
def test_data():
    """Costs 2 s: two ranks, each with four processes of prefetch. Rank 0 alone prints, JSON and a table."""
    result = bench_several(2, f"data {' '.join(TINY)}", "data --seconds 0")
    lines = records_of(result)
    assert [line["what"].split(":")[0] for line in lines] == [
        *("npy", "idx", "tfrecord", "shuffled(tfrecord)", "example", "example", "example"),
        *("stream", "prefetch(stream)", "prefetch(stream, workers=2)"),
    ]
    assert all(line["records_per_s"] > 0 and line["crc32c"] == "c" for line in lines)
    table = result.out.splitlines()[len(lines) :]
    assert table[0].startswith("data: google-crc32c: c; protobuf "), result.text
    assert len(table) == 12, result.text


WRONG = """
right, right_update = allred.allreduce_, allred.optim.SGD.update
def wrong(array, op):
    right(array, op)
    array[5] += allred.rank()
def wrong_update(self, param, *rest):
    right_update(self, param, *rest)
    param[5] = 7
allred.allreduce_, allred.optim.SGD.update = wrong, wrong_update
allred.native.StepServer = None  # so that Python makes the update
if (code := command.main(["allreduce", "--sizes", "64", "--against", "mpi", "--json"])) != 1:
    sys.exit(f"exit code {code}")
allred.shutdown()
"""


@pytest.mark.parametrize("mpi", MPICH_BY_DEFAULT)
def test_a_wrong_sum_and_a_wrong_step_are_errors_on_all_ranks(mpi):
    result = bench_several(2, "ps --set tiny --json", change=WRONG, mpi=mpi)
    assert (result.code, result.out) == (1, ""), result.text
    for message in (
        "allreduce 64 by allred is wrong on rank 1: element 5 is 12.0, expected 11.0",
        "ps tiny: a step is wrong on worker 0: element 5 of tensor 0 is 7.0, expected",
    ):
        assert result.err.count(message) == 1, result.text


def test_one_rank_without_mpirun():
    result = python("-m", "allred", "bench", "allreduce", "--sizes", "4", "--against", "mpi", *TINY)
    (line,) = check_arrays(records_of(result), 1)
    assert (line["backend"], line["busbw_GBps"]) == ("single", 0)
    assert line["command"].startswith("python -m allred bench allreduce")


@full
def test_arrays_on_gpus_against_nccl():
    """With a simulated GPU: the measured times mean nothing."""
    program = pathlib.Path(__file__).with_name("gpu_bench_program.py")
    common = "--device cuda --against nccl --seconds 0 --json"
    commands = [f"allreduce --sizes 64,4KiB {common}", f"fused --set small {common}"]
    result = mpirun(2, program, json.dumps([command.split() for command in commands]))
    lines = check_arrays(records_of(result, "allreduce"), 2)
    assert [(line["bytes"], line["against"], line["backend"]) for line in lines] == [
        (64, "nccl", "nccl"),
        (4096, "nccl", "nccl"),
    ]
    assert {(line["device"], line["gpu"], line["nccl"]) for line in lines} == {("cuda", "stand-in", 23000)}
    lines = check_arrays(records_of(result, "fused"), 2)
    assert [line["against"] for line in lines] == ["nccl per tensor", "nccl concatenate + split"]
    for line in lines:
        rates = ("enqueue_us", "copy_GBps", "pack_GBps", "unpack_GBps", "pack_scaled_GBps", "unpack_divided_GBps")
        assert all(line[name] > 0 for name in rates)


@pytest.mark.full  # by default the first in tests/unit/test_bench.py, the second in test_ps_lifecycle.py
@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("fused --set resnet", "unknown set 'resnet'"),
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
