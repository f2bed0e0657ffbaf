"""The example batch script, unmodified, on a real Slurm: two ranks on two nodes and on one, success and failure.

sbatch's options win over the script's own #SBATCH lines, so a test chooses nodes and tasks without editing it. A job
that is not over in JOB_LIMIT_S is cancelled and fails its test; one job takes about a second.
"""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster, Job

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
SCRIPT = ROOT / "examples" / "hpc" / "slurm.sbatch"
DIGITS = ROOT / "examples" / "digits_sync.py"
JOB_LIMIT_S = 30

PLAIN = str(HERE / "rank_program.py")
ALLRED = str(HERE / "allred_program.py")
LAYOUTS = {"2 nodes": (2, 1, "nd0,nd1"), "1 node": (1, 2, "nd0,nd0"), "2 nodes x 2": (2, 2, "nd0,nd0,nd1,nd1")}

Submit = Callable[..., Job]
pytestmark = pytest.mark.slurm
launchers = pytest.mark.parametrize(
    ("mpi", "launcher"), [("mpich", ""), ("mpich", "pmi2"), ("openmpi", ""), ("mpich", "allred")]
)
mpis = pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
layouts = pytest.mark.parametrize("layout", ["2 nodes", "1 node"])


@pytest.fixture
def submit(slurm: Cluster, mpi_env: Callable[[str], dict[str, str]]) -> Submit:
    """Function that runs the example script with a program, an MPI and a layout; returns the ended job."""

    def run(program: list[str], mpi: str, layout: str, launcher: str = "", uses_allred: bool = False) -> Job:
        env = mpi_env(mpi)
        if uses_allred:
            skip_without_allred(env["VENV"])
        if launcher:
            env["LAUNCHER"] = launcher
        nodes, tasks, _ = LAYOUTS[layout]
        options = [f"--nodes={nodes}", f"--ntasks-per-node={tasks}", "--cpus-per-task=1"]
        job = slurm.run([str(SCRIPT), *program], options, env, ROOT, JOB_LIMIT_S)
        slurm.wait_until_idle(10)  # also says that no rank is left
        return job

    return run


def skip_without_allred(venv: str) -> None:
    """Skips when the environment's allred cannot be imported or has no init()."""
    probe = [f"{venv}/bin/python", "-c", "import allred; allred.init"]
    done = subprocess.run(probe, cwd=HERE, capture_output=True, text=True, timeout=30)
    if done.returncode:
        pytest.skip(f"no usable allred in {venv}: {done.stderr.strip().splitlines()[-1]}")


def assert_completed(job: Job) -> None:
    """The job completed and its script said so last."""
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.output
    assert re.search(r"^SUCCESS: job \d+, ", last_line(job)), job.output


def assert_failed(job: Job) -> None:
    """The job failed and its script said so last, with the code that it left with."""
    assert job.state == "FAILED", job.output
    assert job.exit_code != 0, job.output
    assert re.search(rf"^FAILURE: job \d+, .*, exit code {job.exit_code}, \d+ s$", last_line(job)), job.output


def assert_traceback_once(job: Job, end: str) -> None:
    """The traceback that ends with `end` is in the output once. Other ranks may add MPI's words on the lost peer."""
    assert "Traceback (most recent call last)" in job.output, job.output
    assert job.output.count(end) == 1, job.output


def last_line(job: Job) -> str:
    return job.output.rstrip().rsplit("\n", 1)[-1]


@launchers
@layouts
def test_two_ranks_are_one_world(submit: Submit, mpi: str, launcher: str, layout: str) -> None:
    job = submit([PLAIN], mpi, layout, launcher)
    assert_completed(job)
    assert re.findall("world of .*", job.output) == [f"world of 2 ranks on {LAYOUTS[layout][2]}, sum 1"]
    command = {"": "mpirun", "pmi2": "srun --mpi=pmi2 --kill-on-bad-exit=1", "allred": "python -m allred run"}[launcher]
    assert command in job.output.split("\n")[0]


@mpis
def test_ranks_fill_one_node_after_the_other(submit: Submit, mpi: str) -> None:
    job = submit([PLAIN], mpi, "2 nodes x 2")
    assert_completed(job)
    assert re.findall("world of .*", job.output) == ["world of 4 ranks on nd0,nd0,nd1,nd1, sum 6"]


@launchers
@layouts
def test_a_raising_rank_fails_the_job(submit: Submit, mpi: str, launcher: str, layout: str) -> None:
    job = submit([PLAIN, "raise"], mpi, layout, launcher)
    assert_failed(job)
    assert_traceback_once(job, "RuntimeError: rank 1 of 2 fails on purpose")


@launchers
def test_a_killed_rank_fails_the_job(submit: Submit, mpi: str, launcher: str) -> None:
    assert_failed(submit([PLAIN, "die"], mpi, "2 nodes", launcher))


def test_an_absent_environment_is_named(slurm: Cluster, mpi_env: Callable[[str], dict[str, str]]) -> None:
    env = {**mpi_env("mpich"), "VENV": "no/such/venv"}
    job = slurm.run([str(SCRIPT)], ["--nodes=1", "--ntasks-per-node=1"], env, ROOT, JOB_LIMIT_S)
    assert (job.state, job.exit_code) == ("FAILED", 2)
    assert last_line(job).startswith("FAILURE: no Python environment at 'no/such/venv'")


@mpis
def test_the_default_program_trains(submit: Submit, mpi: str) -> None:
    if not DIGITS.exists():
        pytest.skip(f"{DIGITS.relative_to(ROOT)} is not there")
    job = submit([], mpi, "2 nodes", uses_allred=True)
    assert_completed(job)
    assert "2 ranks" in job.output.split("\n", 1)[1], job.output
    assert len(re.findall(r"^test accuracy: 0\.9\d*", job.output, re.MULTILINE)) == 1, job.output


@mpis
def test_allred_ends_the_job_when_a_rank_raises(submit: Submit, mpi: str) -> None:
    """With mpirun only: srun may drop the last lines of a failing rank, here the traceback's end (rank_program.py)."""
    job = submit([ALLRED, "fail"], mpi, "2 nodes", uses_allred=True)
    assert_failed(job)
    assert_traceback_once(job, "RuntimeError: rank 1 of 2 fails on purpose")


def test_allred_refuses_worlds_of_one(submit: Submit) -> None:
    """The trap: srun's PMI-2 with Open MPI starts two worlds of size 1; init() says so instead of training twice."""
    job = submit([ALLRED], "openmpi", "2 nodes", launcher="pmi2", uses_allred=True)
    assert_failed(job)
    assert "allred rank" not in job.output
    assert "ConfigError: srun with PMI started 2 processes (PMI_SIZE=2), but mpi4py loads Open MPI" in job.output
    assert "type srun --mpi=pmix python ..." in job.output, job.output


@mpis
def test_the_shell_of_a_batch_job_runs_a_world_of_one(
    slurm: Cluster, mpi_env: Callable[[str], dict[str, str]], tmp_path: Path, mpi: str
) -> None:
    """It has SLURM_NTASKS=2 and SLURM_PROCID, but no launcher has started it."""
    env = mpi_env(mpi)
    skip_without_allred(env["VENV"])
    script = tmp_path / "alone.sh"
    program = "import allred; allred.init(); print(allred.rank(), allred.size())"
    script.write_text(f'#!/bin/sh\n"$VENV/bin/python" -c "{program}"\n')
    job = slurm.run([str(script)], ["--nodes=1", "--ntasks=2"], env, tmp_path, JOB_LIMIT_S)
    assert (job.state, last_line(job)) == ("COMPLETED", "0 1"), job.output


def test_the_ranks_of_an_elastic_job_go_on(
    slurm: Cluster, mpi_env: Callable[[str], dict[str, str]], tmp_path: Path
) -> None:
    """srun starts an agent on the second node. A rank there dies."""
    env = mpi_env("mpich")
    skip_without_allred(env["VENV"])
    given = json.dumps({"directory": str(tmp_path), "kill": [2, 9], "size": 4})
    words = f"-m allred run --elastic --spares 1 {ROOT / 'tests' / 'integration' / 'recover_program.py'}"
    script = tmp_path / "elastic.sh"
    script.write_text(f"#!/bin/sh\nRECOVER_PROGRAM='{given}' exec \"$VENV/bin/python\" {words}\n")
    options = ["--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1"]
    job = slurm.run([str(script)], options, env, tmp_path, JOB_LIMIT_S)
    slurm.wait_until_idle(10)
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.output
    assert re.search(r"rank 2 on nd1 \(pid \d+\) was killed .*; [34] ranks go on", job.output), job.output
    found = [json.loads(path.read_text()) for path in tmp_path.glob("result-*")]
    assert {each["size"] for each in found} == {4}, job.output
    assert len({tuple(each["w"]) for each in found}) == 1, job.output
