"""Runs the commands in the docstrings of the torch examples, and the programs of the pages. Each rank takes about 7 s
of CPU time, the import of torch."""

import pathlib
import re
import sys

import pytest

from allred import testing

pytest.importorskip("torch")

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LIMIT_S = 280
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


def check_accuracy(result):
    assert result.code == 0, result.text
    accuracy = re.fullmatch(r"test accuracy: (0\.\d{3})", result.out.splitlines()[-1])
    assert accuracy, result.text
    assert float(accuracy[1]) > 0.9


@pytest.mark.limit(300)
@pytest.mark.parametrize(
    ("name", "ranks", "mode"),
    [
        ("torch_digits", 2, "sync"),
        ("torch_ddp", 2, "sync"),
        ("torch_ps", 3, "ps"),
        pytest.param("torch_digits", 1, "sync", marks=pytest.mark.full),
        pytest.param("torch_ps", 2, "sync", marks=pytest.mark.full),
    ],
)
def test_it_learns(name, ranks, mode):
    env = {"ALLRED_MODE": mode, **ENVIRONMENT}
    check_accuracy(testing.mpirun(ranks, EXAMPLES / f"{name}.py", env=env, timeout_s=LIMIT_S))


@pytest.mark.full
@pytest.mark.limit(300)
@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]])
def test_ddp_without_mpirun(launcher):
    check_accuracy(testing.run([sys.executable, *launcher, EXAMPLES / "torch_ddp.py"], LIMIT_S, ENVIRONMENT))


# The programs of the pages.

ALL = """
import runpy, sys
import allred
for file in sys.argv[1:]:
    runpy.run_path(file, run_name="__main__")
    allred.shutdown()
"""


def programs(page):
    """The programs with torch on a page."""
    found = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    return [program for program in found if "import torch" in program]


def written(directory, *pages):
    """Write the programs into files."""
    found = [program for page in pages for program in programs(page)]
    files = [directory / f"{number}.py" for number in range(len(found))]
    for file, program in zip(files, found, strict=True):
        file.write_text(program)
    return files


@pytest.mark.limit(300)
@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.full)])
def test_readme_and_from_ddp_and_from_horovod(tmp_path, ranks):
    """All programs in one job."""
    files = written(tmp_path, "README.md", "docs/from-ddp.md", "docs/from-horovod.md")
    result = testing.mpirun(ranks, "-c", ALL, *files, env=ENVIRONMENT, timeout_s=LIMIT_S)
    assert (result.code, result.out) == (0, "found [[1. 2. 3. 4.]]\n" * 4), result.text
    assert len(files[0].read_text().splitlines()) <= 15, "README: the program with torch is as short as that with numpy"


@pytest.mark.full
@pytest.mark.limit(300)
def test_readme_with_a_parameter_server(tmp_path):
    [file] = written(tmp_path, "README.md")
    result = testing.mpirun(2, file, env={**ENVIRONMENT, "ALLRED_MODE": "ps"}, timeout_s=LIMIT_S)
    assert (result.code, result.out) == (0, "found [[1. 2. 3. 4.]]\n"), result.text
