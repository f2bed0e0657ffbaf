"""The group of `dist._reconfigure` in three processes. With torch before 2.14 its methods are called. About 17 s."""

import pathlib
import subprocess
import sys

import pytest

PROGRAM = pathlib.Path(__file__).with_name("reconfigure_program.py")
full = pytest.mark.full
CASES = ["a_killed_process", "alone_and_together", "wrong_calls"]
CASES += [pytest.param(each, marks=full) for each in ("all_again", "without_the_middle_one", "later", "aborted")]


@pytest.mark.parametrize("case", CASES)
def test_reconfigure(case, tmp_path):
    words = [[sys.executable, PROGRAM, str(rank), tmp_path / "store", case] for rank in range(3)]
    processes = [
        subprocess.Popen(each, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path)
        for each in words
    ]
    try:
        found = [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    killed = 1 if case == "a_killed_process" else None
    for rank, (process, text) in enumerate(zip(processes, found, strict=True)):
        assert (process.returncode, text) == ((-9, "") if rank == killed else (0, "done\n")), (rank, "\n".join(found))
