"""Backend allred of torch.distributed. A test runs a program with many cases, because importing torch is slow."""

import pathlib
import re
import sys

import open_mpi
import optimizer_case_runner
import pytest
from ports import reserved_ports

pytest.importorskip("torch")

from allred import testing

LIMIT_S = 300  # of a run; on a quiet machine it takes 10 s
HERE = pathlib.Path(__file__).parent
BIN = pathlib.Path(sys.executable).parent
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "ALLRED_BANNER": "0", "PYTHONWARNINGS": "ignore", "ALLRED_TIMEOUT_S": "60"}


def run(ranks, *arguments, env=None):
    where = {"mpirun": BIN / "mpirun", "python": sys.executable}
    return testing.mpirun(ranks, *arguments, timeout_s=LIMIT_S, env={**ENVIRONMENT, **(env or {})}, **where)


def passed(result):
    assert result.code == 0, result.text
    return [line.split()[1] for line in result.out.splitlines() if line.startswith("passed ")]


def cases_of(program):
    """The names in the list CASES of a program, without importing it."""
    text = (HERE / program).read_text().partition("\nCASES = [")[2].partition("]")[0]
    return text.replace(",", " ").split()


@pytest.mark.limit(LIMIT_S + 10)
@pytest.mark.parametrize(
    ("program", "ranks", "nodes"),
    [
        pytest.param("collectives_program.py", 2, "2", marks=pytest.mark.full),
        pytest.param("collectives_program.py", 3, "3", marks=pytest.mark.full),
        ("collectives_program.py", 3, "2,1"),
        ("ddp_program.py", 2, "2"),
        pytest.param("ddp_program.py", 3, "3", marks=pytest.mark.full),
        pytest.param("fsdp_program.py", 2, "2", marks=pytest.mark.full),
        pytest.param("fsdp_program.py", 3, "3", marks=pytest.mark.full),
        pytest.param("sharding_program.py", 2, "2", marks=pytest.mark.full),
        pytest.param("sharding_program.py", 3, "3", marks=pytest.mark.full),
        pytest.param("sharding_program.py", 4, "4", marks=pytest.mark.full),
    ],
)
def test_cases(program, ranks, nodes):
    """nodes: the numbers of ranks on pretended nodes."""
    env = {"ALLRED_PRETEND_NODES": nodes} if "," in nodes else {}
    assert passed(run(ranks, HERE / program, env=env)) == cases_of(program)


LATE_RANK_PROGRAM = """
import datetime, time, torch, torch.distributed as dist
dist.init_process_group("allred", timeout=datetime.timedelta(seconds=2))
if dist.get_rank() == 1:
    time.sleep(200)
%s
"""


@pytest.mark.full
@pytest.mark.limit(LIMIT_S + 10)
def test_the_paths_of_steady_calls_are_short():
    result = run(2, HERE / "call_paths_program.py", env={"ALLRED_OVERLAP": "never"})
    assert result.out.count("all paths are short") == 2, result.text


@pytest.mark.parametrize(
    "wait",
    [
        pytest.param("dist.all_reduce(torch.ones(3))", marks=pytest.mark.full),
        "torch.futures.wait_all([dist.all_reduce(torch.ones(3), async_op=True).get_future()])",  # waits in C++
    ],
)
def test_group_timeout(wait):
    result = run(2, "-c", LATE_RANK_PROGRAM % wait)
    assert result.code != 0
    words = r"\[allred\] Timed out waiting for allreduce\(Sum\) #\d+ float32 \(3,\): not complete after 2 s"
    assert re.search(words, result.err), result.text
    assert "in Python at <string>:5" in result.err, result.text


def test_a_wait_for_ranks_that_were_not_started_is_reported():
    code = (
        "import torch.distributed as dist, allred.torch.rendezvous as r\nr._REPORT_S = 0.2\n"
        "dist.init_process_group('allred', timeout=__import__('datetime').timedelta(seconds=2))"
    )
    [port] = reserved_ports(1)
    given = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = ENVIRONMENT | {name: str(value) for name, value in given.items()}
    result = testing.run([sys.executable, "-c", code], LIMIT_S, environment)
    words = (
        f"rank 0 has waited 0.2 s for the other ranks; start all 2 ranks with MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"
    )
    assert words in result.err, result.text


TORCHRUN = """
import os, sys
sys.path += sys.argv[1:]
import torch, torch.distributed as dist
import allred.torch
dist.init_process_group("allred")
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
if attempt == "0" and dist.get_rank() == 1:
    sys.exit(3)
dist.all_reduce(tensor := torch.ones(2))
print(f"attempt {attempt}: {tensor.tolist()}", flush=True)
dist.destroy_process_group()
"""


def torchrun(tmp_path, *options, python=sys.executable, arguments=()):
    (tmp_path / "program.py").write_text(TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, *options]
    command += ["--no-python", python, tmp_path / "program.py", *arguments]
    return testing.run(command, LIMIT_S, ENVIRONMENT)


@pytest.mark.full
@pytest.mark.limit(LIMIT_S + 10)
def test_torchrun_restart(tmp_path):
    result = torchrun(tmp_path, "--max-restarts", 1)
    assert result.code == 0, result.text
    assert result.out.count("attempt 1: [2.0, 2.0]") == 2, result.text


@open_mpi.needs_open_mpi
@pytest.mark.limit(LIMIT_S + 10)
@pytest.mark.parametrize(
    ("program", "names"),
    [
        ("hooked_program.py", ["sgd_as_one_process", "requires_grad_set_later"]),
        pytest.param("hooked_program.py", [], marks=pytest.mark.full),
        pytest.param("collectives_program.py", [], marks=pytest.mark.full),
        pytest.param("ddp_program.py", [], marks=pytest.mark.full),
    ],
)
def test_open_mpi(program, names):
    env = ENVIRONMENT | {"ALLRED_OVERLAP": "never"}
    result = open_mpi.mpirun(2, HERE / program, *names, timeout_s=LIMIT_S, env=env)
    assert result.code == 0, result.text
    if program != "hooked_program.py":
        assert passed(result) == cases_of(program)
        return
    found = optimizer_case_runner.results(result.out)
    plain = optimizer_case_runner.names(HERE / program)
    overlapped = optimizer_case_runner.names(HERE / program, "case_with_overlap")
    expected = [f"no_overlap {name}" for name in names or plain] + [f"overlap {name}" for name in names or overlapped]
    assert set(found.values()) == {"ok"}, result.text
    assert found.keys() >= set(expected)  # all cases are also those of hooked_edge_cases.py


@pytest.mark.full
@open_mpi.needs_open_mpi
@pytest.mark.limit(LIMIT_S + 10)
def test_torchrun_with_open_mpi(tmp_path):
    result = torchrun(tmp_path, "--max-restarts", 1, python=open_mpi.BIN / "python", arguments=[open_mpi.PACKAGES])
    assert result.code == 0, result.text
    assert result.out.count("attempt 1: [2.0, 2.0]") == 2, result.text


SPAWN = """
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
def main(rank):
    dist.init_process_group("allred", rank=rank, world_size=2)
    dist.all_reduce(tensor := torch.ones(2))
    found = torch.zeros(2)
    messages = [dist.P2POp(dist.isend, tensor, 1 - rank), dist.P2POp(dist.irecv, found, 1 - rank)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    print(found.tolist(), flush=True)
    dist.destroy_process_group()
if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1]}
    mp.spawn(main, nprocs=2)
"""


@pytest.mark.full
@pytest.mark.limit(LIMIT_S + 10)
def test_processes_of_spawn(tmp_path):
    (tmp_path / "program.py").write_text(SPAWN)
    result = testing.run([sys.executable, tmp_path / "program.py", *reserved_ports(1)], LIMIT_S, ENVIRONMENT)
    assert (result.code, result.out) == (0, "[2.0, 2.0]\n" * 2), result.text


full = pytest.mark.full
UNDER_ALLRED_RUN = """
import os, sys
rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
import torch, torch.distributed as dist
dist.init_process_group(sys.argv[1])
dist.all_reduce(tensor := torch.ones(1))
print((rank, local) == (dist.get_rank(), rank), tensor.item() == size, os.environ.get("LOCAL_WORLD_SIZE"), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.limit(LIMIT_S + 10)
@pytest.mark.parametrize(("backend", "local_size"), [("allred", "2"), pytest.param("gloo", None, marks=full)])
def test_a_program_that_reads_torchs_variables_first_runs_under_allred_run(backend, local_size, tmp_path):
    (tmp_path / "program.py").write_text(UNDER_ALLRED_RUN)
    command = [sys.executable, "-m", "allred", "run", "-np", "2", tmp_path / "program.py", backend]
    result = testing.run(command, LIMIT_S, ENVIRONMENT)
    assert (result.code, result.out) == (0, f"True True {local_size}\n" * 2), result.text


def test_without_a_launcher(tmp_path):
    """One rank. The entry point makes the backend known, so `import torch` is enough; it loads nothing of allred."""
    program = """
import sys, torch, torch.distributed as dist
assert not any(name.partition(".")[0] in ("allred", "mpi4py") for name in sys.modules)
assert dist.is_backend_available("allred")
dist.init_process_group("allred")
dist.all_reduce(tensor := torch.ones(2))
print(dist.get_world_size(), tensor.tolist(), dist.get_backend())
assert "torch._dynamo" not in sys.modules, "it takes seconds, and only torch.compile needs it"
import allred
dist.destroy_process_group()
allred.shutdown()
dist.init_process_group("allred")  # again, with the variables of the first time
"""
    result = testing.run([sys.executable, "-c", program], LIMIT_S, {**ENVIRONMENT, "PYTHONPATH": ""})
    assert result.code == 0, result.text
    assert result.out == "1 [1.0, 1.0] allred\n", result.text


def test_ranks_that_are_children_of_multiprocessing(tmp_path, request):
    """As the tutorials of PyTorch start them. A forked child ends by os._exit."""
    ends = {
        "fork:end": "ended [0, 0]",
        "fork:destroy": "ended [0, 0]",
        "fork:fails": "raised True",
        "spawn:destroy": "ended [0, 0]",
    }
    if request.config.getoption("--full"):  # each rank imports torch
        ends |= {"forkserver:end": "ended [0, 0]", "spawn:fails": "raised True"}
    program = [sys.executable, HERE / "children_program.py", tmp_path, *ends]
    result = testing.run(program, LIMIT_S, {**ENVIRONMENT, "PYTHONPATH": ""})
    assert result.out.splitlines() == [" ".join(each) for each in ends.items()], result.text
