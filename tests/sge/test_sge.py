"""The Grid Engine script: it gets the signal before its limit, is queued again, and has the same result. About 20 s."""

import os
import re
from pathlib import Path

import pytest
from cell import Cell
from harness import BIN, OPENMPI

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/hpc/sge.sh"
PROGRAM = ROOT / "tests/slurm/requeue_program.py"
LIMIT_S = 90


def submit(cell: Cell, mpi: str, directory: Path, *options: object, **more: str) -> str:
    """Run the script with two ranks. Return its output."""
    directory.mkdir()
    env = {**OPENMPI, "VENV": str(BIN[mpi].parent), "CHECKPOINTS": str(directory / "checkpoints"), **more}
    env |= {"READY": str(directory / "ready"), "HOME": os.environ["HOME"]}
    names = ",".join(f"{name}={value}" for name, value in env.items() if ":" not in value)
    output = directory / "output"
    words = ["qsub", "-terse", "-pe", "mpi", 2, "-o", output, "-v", names, *options, SCRIPT, PROGRAM]
    cell.wait_for_end(cell.command(*words, cwd=directory).strip(), LIMIT_S)
    return output.read_text()


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_a_job_that_is_queued_again_has_the_same_result(mpi: str, grid_engine: Cell, tmp_path: Path) -> None:
    whole = submit(grid_engine, mpi, tmp_path / "whole")
    requeued = submit(grid_engine, mpi, tmp_path / "requeued", "-l", "s_rt=0:0:8,h_rt=0:1:0", WAITS_AT="20")
    results = [re.findall(r"start (\d), steps (\d+) to (\d+): (\w+)", output) for output in (whole, requeued)]
    assert len(results[0]) == 1, whole
    assert len(results[1]) == 2, requeued
    first, second = results[1]
    assert (first[:3], second[:3]) == (("1", "0", "21"), ("2", "21", "100")), requeued
    assert second[3] == results[0][0][3]
    assert re.search(r"^job \d+, restarted 1: 2 ranks$", requeued, re.MULTILINE), requeued
    assert requeued.rstrip().splitlines()[-1].startswith("SUCCESS: job "), requeued
