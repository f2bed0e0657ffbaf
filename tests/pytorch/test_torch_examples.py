"""Runs the commands in the docstrings of the torch examples, and the programs of the pages. Each rank takes about 7 s
of CPU time, the import of torch."""

import pathlib
import re
import sys

import pytest
from page_blocks import programs

from allred import testing

pytest.importorskip("torch")

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LIMIT_S = 280
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


def check_accuracy(text):
    accuracy = re.fullmatch(r"test accuracy: (0\.\d{3})", text.splitlines()[-1])
    assert accuracy, text
    assert float(accuracy[1]) > 0.9


@pytest.mark.limit(300)
@pytest.mark.parametrize(
    ("name", "ranks", "mode"),
    [
        ("torch_ps", 3, "ps"),
        pytest.param("torch_digits", 1, "sync", marks=pytest.mark.full),
        pytest.param("torch_digits", 2, "sync", marks=pytest.mark.full),  # in the job of all programs by default
        pytest.param("torch_ddp", 2, "sync", marks=pytest.mark.full),
        pytest.param("torch_ps", 2, "sync", marks=pytest.mark.full),
    ],
)
def test_it_learns(name, ranks, mode, request):
    """By default without the import of scikit-learn, 1.6 s of each rank."""
    digits = {} if request.config.getoption("--full") else {"PYTHONPATH": str(ROOT / "tests/quick_digits")}
    env = {"ALLRED_MODE": mode, **ENVIRONMENT, **digits}
    result = testing.mpirun(ranks, EXAMPLES / f"{name}.py", env=env, timeout_s=LIMIT_S)
    assert result.code == 0, result.text
    check_accuracy(result.out)


@pytest.mark.full
@pytest.mark.limit(300)
@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]])
def test_ddp_without_mpirun(launcher):
    result = testing.run([sys.executable, *launcher, EXAMPLES / "torch_ddp.py"], LIMIT_S, ENVIRONMENT)
    assert result.code == 0, result.text
    check_accuracy(result.out)


# The programs of the pages.

ALL = """
import os, runpy, sys
import allred
for words in sys.argv[1:]:
    if os.environ["PMI_RANK"] == "0":
        print("program", words, flush=True)
    sys.argv = words.split()
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
    allred.shutdown()
"""


def written(directory, *pages):
    """Write the programs into files."""
    found = [program for page in pages for program in programs(page, torch=True)]
    files = [directory / f"{number}.py" for number in range(len(found))]
    for file, program in zip(files, found, strict=True):
        file.write_text(program)
    return files


@pytest.mark.limit(300)
@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.full)])
def test_readme_and_pages_for_users_of_others_and_examples(tmp_path, ranks):
    """All programs in one job. On GPUs mnist_torch.py is run by `make test-gpu`."""
    files = written(tmp_path, "../README.md", "from-ddp.md", "from-horovod.md", "from-mpi4py.md", "tutorial.md")
    examples = [EXAMPLES / "torch_digits.py", EXAMPLES / "torch_ddp.py", f"{EXAMPLES}/mnist_torch.py --steps 40"]
    result = testing.mpirun(ranks, "-c", ALL, *files, *examples, env=ENVIRONMENT, timeout_s=LIMIT_S, cwd=tmp_path)
    assert result.code == 0, result.text
    *pages, digits, ddp, mnist = re.split("^program .*\n", result.out, flags=re.MULTILINE)[1:]
    ppo = "more than 0.9 of the actions are good: True\n"
    assert pages == [*["found [[1. 2. 3. 4.]]\n"] * 4, ppo, "above 0.95: True, 360 samples\n"], result.text
    assert len(files[0].read_text().splitlines()) <= 17, "README: the program with torch is as short as that with numpy"
    for text in (digits, ddp):
        check_accuracy(text)
    assert re.search(rf"^\d+ examples/s on {ranks} ranks?, on cpu\nparameters equal on all ranks: yes", mnist, re.M), (
        mnist
    )
    assert float(re.search(r"test accuracy: (\S+)", mnist)[1]) > 0.7, mnist


@pytest.mark.full
@pytest.mark.limit(300)
def test_readme_with_a_parameter_server(tmp_path):
    [file] = written(tmp_path, "../README.md")
    result = testing.mpirun(2, file, env={**ENVIRONMENT, "ALLRED_MODE": "ps"}, timeout_s=LIMIT_S)
    assert (result.code, result.out) == (0, "found [[1. 2. 3. 4.]]\n"), result.text
