"""The programs in README.md and docs/ run as the pages say."""

import re

import pytest
from harness import ROOT, mpirun, python

PS = {"ALLRED_MODE": "ps"}


def blocks(page, language):
    """Return the code blocks of a page in docs/."""
    text = (ROOT / "docs" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def programs(page):
    return blocks(page, "python")


def words(text):
    """Return a text in one line: pages break long lines."""
    return " ".join(text.split())


@pytest.mark.parametrize("run", [
    lambda file: python(file),
    lambda file: mpirun(2, file),
    lambda file: mpirun(3, file, env=PS),
], ids=["alone", "mpich", "ps"])  # fmt: skip
def test_readme(run, tmp_path):
    file = tmp_path / "train.py"
    [program] = programs("../README.md")
    assert len(program.splitlines()) <= 15
    file.write_text(program)
    result = run(file)
    assert (result.code, result.out) == (0, "found [1. 2. 3. 4.]\n"), result.text


@pytest.mark.parametrize("run", [
    lambda file: python(file),
    pytest.param(lambda file: mpirun(4, file), marks=pytest.mark.full),
    lambda file: mpirun(2, file, mpi="openmpi"),
    pytest.param(lambda file: mpirun(5, file, env=PS), marks=pytest.mark.full),
], ids=["alone", "mpich", "openmpi", "ps"])  # fmt: skip
def test_getting_started(run, tmp_path):
    file = tmp_path / "train.py"
    [program] = programs("index.md")
    file.write_text(program)
    result = run(file)
    assert result.code == 0, result.text
    assert result.out == "found [1. 2. 3. 4.] [5.]\n", result.text


@pytest.mark.parametrize("run", [
    lambda file: python(file),
    pytest.param(lambda file: mpirun(3, file), marks=pytest.mark.full),
    lambda file: mpirun(3, file, env=PS),
], ids=["alone", "mpich", "ps"])  # fmt: skip
def test_precision(run, tmp_path):
    file = tmp_path / "train.py"
    [program] = programs("precision.md")
    file.write_text(program)
    result = run(file)
    assert result.code == 0, result.text
    assert result.out == "found [1. 2. 3. 4.]\n", result.text


def test_the_banner(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(programs("index.md")[0])
    [shown] = blocks("index.md", "text")
    printed = mpirun(4, file, env={"OMP_NUM_THREADS": "1"}).err.splitlines()
    printed = "\n".join(line for line in printed if "warning: 4 ranks with" not in line)  # on fewer cores
    assert re.sub(r"on \S+;|MPICH [\d.]+", "", words(printed)) == re.sub(r"on \S+;|MPICH [\d.]+", "", words(shown))


def test_sessions(tmp_path):
    program, hook, *more = programs("sessions.md")
    assert not more
    file, directory = tmp_path / "train.py", tmp_path / "checkpoints"
    with_hook = program.replace("max_steps=150", "max_steps=150, hooks=[Best()]")
    file.write_text(with_hook.replace("allred.init()", f"{hook}\nallred.init()"))
    first = mpirun(2, file, directory)
    assert first.code == 0, first.text
    lowest = re.fullmatch(
        rf"max_steps at step 150, (lowest loss \S+), {directory}/step-00000150\nstep 150 \[1. 2. 3. 4.\]\n", first.out
    )
    assert lowest, first.text
    for ranks, env in [(3, {}), (2, PS)]:
        again = mpirun(ranks, file, directory, env=env)
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


def test_from_tensorflow(tmp_path):
    replicated, supervised = programs("from-tensorflow.md")
    [ignored] = blocks("from-tensorflow.md", "text")
    file = tmp_path / "train.py"
    file.write_text(replicated.replace("is_chief=", "master=server.target, config=object(), is_chief="))
    for _ in range(2):  # the second time it goes on from the end
        result = mpirun(4, file, cwd=tmp_path)
        assert (result.code, result.out) == (0, "found [1. 2. 3.] 4.0 after 100 steps\n"), result.text
        assert words(result.err).count(words(ignored)) == 1, result.text
    assert "allred: w: /job:ps/task:0/cpu:0\nallred: b: /job:ps/task:1/cpu:0\n" in result.err, result.text
    assert "resumes from step 100" in result.err, result.text
    (other := tmp_path / "other").mkdir()
    file.write_text(supervised)
    result = mpirun(2, file, cwd=other)
    assert (result.code, result.out) == (0, "found [1. 2. 3.] after 100 steps\n"), result.text
    assert (other / "logs/step-00000100").is_dir(), result.text
