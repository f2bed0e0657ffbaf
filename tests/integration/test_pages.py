"""The programs in README.md and docs/ run as the pages say."""

import re

import pytest
from harness import ROOT, mpirun, python
from page_blocks import blocks, programs

from allred.cluster.processors import THREAD_VARIABLES

PS = {"ALLRED_MODE": "ps"}


def words(text):
    """Return a text in one line: pages break long lines."""
    return " ".join(text.split())


PAGES = {  # a page, and what its programs print. The program of index.md is that of README.md (unit/test_docs_pages.py)
    "../README.md": ["found [1. 2. 3. 4.]\n"],
    "embeddings.md": ["3 rows\n"],
    "precision.md": ["found [1. 2. 3. 4.]\n"],
    "data.md": ["found [1. 2. 3. 4.]\n", "10000 rows of shape (28, 28)\n"],
}
ALL = """
import runpy, sys
import allred
for file in sys.argv[1:]:
    runpy.run_path(file, run_name="__main__")
    if allred.is_initialized():
        allred.shutdown()
"""


def program_files(directory, pages=PAGES):
    """Write the programs of the pages into files. Return the files and what they print."""
    found = [program for page in pages for program in programs(page)]
    printed = [text for page in pages for text in PAGES[page]]
    files = [directory / f"{number}.py" for number in range(len(printed))]
    for file, program in zip(files, found, strict=True):
        file.write_text(program)
    return files, "".join(printed)


@pytest.mark.parametrize("run", [
    lambda *words, **kwargs: python(*words, **kwargs),
    lambda *words, **kwargs: mpirun(2, *words, **kwargs),
    pytest.param(lambda *words, **kwargs: mpirun(2, *words, mpi="openmpi", **kwargs), marks=pytest.mark.full),
    pytest.param(lambda *words, **kwargs: mpirun(4, *words, **kwargs), marks=pytest.mark.full),
], ids=["alone", "mpich", "openmpi", "4 ranks"])  # fmt: skip
def test_readme_and_precision_and_data(run, tmp_path):
    """All programs in one job."""
    files, printed = program_files(tmp_path)
    result = run("-c", ALL, *files, cwd=tmp_path)
    assert (result.code, result.out) == (0, printed), result.text
    assert len(files[0].read_text().splitlines()) <= 16


FROM_MPI4PY = [
    "distance to the optimum: 0.3",
    "accuracy: 0.995, equal on all ranks: True",
    "centers [[0, 0], [5, 5], [0, 5]]",
    "found [(1+2j), (3-1j)]",
    "best learning rate: 0.1",
    "the loss has fallen: True",
    "as on one rank: True",
]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("mpi", ["mpich", pytest.param("openmpi", marks=pytest.mark.full)])
def test_from_mpi4py(ranks, mpi, tmp_path):
    """All programs of the page in one job. Three of them are examples."""
    found = programs("from-mpi4py.md")
    for name in ("evolution_strategies", "scipy_lockstep", "sweep"):
        assert (ROOT / "examples" / f"{name}.py").read_text() in found
    files = [tmp_path / f"{number}.py" for number in range(len(found))]
    for file, program in zip(files, found, strict=True):
        file.write_text(program)
    result = mpirun(ranks, "-c", ALL, *files, mpi=mpi, env={"OMP_NUM_THREADS": "1"})
    assert (result.code, sorted(result.out.splitlines())) == (0, sorted(FROM_MPI4PY)), result.text


@pytest.mark.parametrize("page", ["../README.md", pytest.param("precision.md", marks=pytest.mark.full)])
def test_the_same_programs_with_a_parameter_server(page, tmp_path):
    [file], printed = program_files(tmp_path, [page])
    result = mpirun(2, file, env=PS)
    assert (result.code, result.out) == (0, printed), result.text


def without_numbers_of_the_machine(text):
    """Return a text in one line without the node, the version of MPICH, and the threads of a rank."""
    return re.sub(r"on \S+;|MPICH [\d.]+|\d+ threads? per rank", "", words(text))


def test_the_output_that_the_start_page_shows(tmp_path):
    [shown] = blocks("index.md", "text")
    file = tmp_path / "train.py"
    [program] = programs("index.md")
    file.write_text(program)
    result = mpirun(4, file, env=dict.fromkeys(THREAD_VARIABLES))
    lines = [line for line in result.err.splitlines() if "warning: 4 ranks with" not in line]  # on fewer cores
    assert result.code == 0, result.text
    printed = "\n".join([*lines, result.out])
    assert without_numbers_of_the_machine(printed) == without_numbers_of_the_machine(shown)


def test_sessions(tmp_path):
    [program] = programs("sessions.md")
    _, hook = blocks("sessions.md", "python")
    file, directory = tmp_path / "train.py", tmp_path / "checkpoints"
    with_hook = program.replace("max_steps=150", "max_steps=150, hooks=[Best()]")
    file.write_text(with_hook.replace("allred.init()", f"{hook}\nallred.init()"))
    first = mpirun(2, file, directory)
    assert first.code == 0, first.text
    lowest = re.fullmatch(
        rf"max_steps at step 150, (lowest loss \S+), {directory}/step-00000150\nstep 150 \[1. 2. 3. 4.\]\n", first.out
    )
    assert lowest, first.text
    again = mpirun(2, file, directory, env=PS)
    assert again.code == 0, again.text
    assert again.out == first.out, again.text
    file.write_text(file.read_text().replace("max_steps=150", "max_steps=170"))
    later = mpirun(1, file, directory)
    assert "max_steps at step 170" in later.out, later.text
    assert "step 170 [1. 2. 3. 4.]" in later.out, later.text


def test_clusters(tmp_path):
    file = tmp_path / "train.py"
    roles, variables, client = programs("clusters.md")
    file.write_text(roles)
    result = mpirun(3, file)
    assert result.code == 0, result.text
    said = sorted(result.out.splitlines())
    assert said == ["a step of task 0, the chief: True", "a step of task 1, the chief: False"], result.text
    file.write_text(variables)
    result = mpirun(3, file)
    assert (result.code, result.out) == (0, "[-0.1 -0.1] [-0.1 -0.1]\n"), result.text
    assert blocks("clusters.md", "text")[0] in result.err, result.text
    file.write_text(client)
    result = mpirun(3, file)
    assert (result.code, result.out) == (0, "[0. 1. 4. 9.]\n14.0\n"), result.text
    placed = re.findall(r"^square: /job:worker/task:(\d)/cpu:0$", result.err, flags=re.MULTILINE)
    assert placed == ["1", "0", "1"], result.text


def test_from_tensorflow(tmp_path, request):
    replicated, supervised = programs("from-tensorflow.md")
    [ignored] = blocks("from-tensorflow.md", "text")
    file = tmp_path / "train.py"
    file.write_text(replicated.replace("is_chief=", "master=server.target, config=object(), is_chief="))
    for start in range(1 + request.config.getoption("--full")):  # the second time it goes on from the end
        result = mpirun(4, file, cwd=tmp_path)
        assert (result.code, result.out) == (0, "found [1. 2. 3.] 4.0 after 100 steps\n"), result.text
        assert words(result.err).count(words(ignored)) == 1, result.text
        assert "allred: w: /job:ps/task:0/cpu:0\nallred: b: /job:ps/task:1/cpu:0\n" in result.err, result.text
        assert ("resumes from step 100" in result.err) == (start == 1), result.text
    (other := tmp_path / "other").mkdir()
    file.write_text(supervised)
    result = mpirun(2, file, cwd=other)
    assert (result.code, result.out) == (0, "found [1. 2. 3.] after 100 steps\n"), result.text
    assert (other / "logs/step-00000100").is_dir(), result.text
