"""The script that is queued again before the time limit, on a real Slurm: signal, checkpoint, requeue, resume.

The signal that Slurm sends before the time limit is sent by scancel: limits have whole minutes.
"""

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster, Job

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/hpc/slurm_requeue.sbatch"
PROGRAM = Path(__file__).parent / "requeue_program.py"
LIMIT_S = 60

pytestmark = pytest.mark.slurm


def submit(slurm: Cluster, env: dict[str, str], directory: Path, options: list[str], signal: str = "") -> Job:
    """Run the script with two ranks on two nodes. signal: sent to its shell when the program has made some steps."""
    ready = directory / "ready"
    own = {**env, "CHECKPOINTS": str(directory / "checkpoints"), "READY": str(ready)}
    job = slurm.submit([str(SCRIPT), str(PROGRAM)], ["--nodes=2", "--ntasks-per-node=1", *options], own, directory)
    if signal:
        deadline = time.monotonic() + LIMIT_S
        while not ready.exists():
            assert time.monotonic() < deadline, job.output.read_text()
            time.sleep(0.05)
        slurm.command(["scancel", f"--signal={signal}", "--batch", job.number])
        slurm.start_without_delay(job.number, LIMIT_S)
    return slurm.wait(job, LIMIT_S)


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_a_job_that_is_queued_again_has_the_same_result(
    mpi: str, slurm: Cluster, mpi_env: Callable[[str], dict[str, str]], tmp_path: Path
) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "requeued").mkdir()
    whole = submit(slurm, mpi_env(mpi), tmp_path / "whole", [])
    assert whole.state == "COMPLETED", whole.output
    requeued = submit(slurm, mpi_env(mpi), tmp_path / "requeued", [], "USR1")
    assert requeued.state == "COMPLETED", requeued.output
    results = [re.findall(r"start (\d), steps (\d+) to (\d+): (\w+)", job.output) for job in (whole, requeued)]
    [(_, _, _, expected)] = results[0]
    first, second = results[1]
    assert (first[0], first[1], second[0], second[2]) == ("1", "0", "2", "100"), requeued.output
    assert 20 <= int(first[2]) == int(second[1]) < 100
    assert second[3] == expected
    assert re.search(r"^job \d+, start 2: 2 ranks on nd\[0-1\]$", requeued.output, re.MULTILINE), requeued.output
    assert "checkpoint in" in requeued.output
    assert requeued.output.rstrip().splitlines()[-1].startswith("SUCCESS: job "), requeued.output
    slurm.wait_until_idle(10)
