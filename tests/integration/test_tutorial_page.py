"""The programs of the tutorial and of four other pages of docs/, with the output that the pages show. About 9 s."""

import os
import re
import signal
import socket
import subprocess
import threading
import time

import pytest
from harness import BIN, ROOT, environment, full, mpirun, python, run
from page_blocks import blocks, programs
from test_pages import ALL, words

ONE = {"OMP_NUM_THREADS": "1"}
ALLRED_RUN = [BIN["mpich"] / "allred", "run", "-np", 4]


def complete(page):
    """Return the complete programs of a page without torch, and its texts."""
    return programs(page), blocks(page, "text")


TUTORIAL, EVALUATION, LOGGING = complete("tutorial.md"), complete("evaluation.md"), complete("logging.md")


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "model.py").write_text(TUTORIAL[0][0])
    return tmp_path


def write(directory, *programs):
    """Write programs into files of these numbers."""
    files = [directory / f"{number}.py" for number in range(len(programs))]
    for file, program in zip(files, programs, strict=True):
        file.write_text(program)
    return files


def test_all_ranks(directory, digits):
    """All programs without a kill in one job; then those of one process, which read the results."""
    (_, alone, four, data, _, evaluated), shown = TUTORIAL
    (metrics, best, export, predict), results = EVALUATION
    (formatted, summary), (lines, values) = LOGGING
    [accumulated], [_, updates] = complete("batch-size.md")
    files = write(directory, four, data, evaluated, metrics, best, formatted, summary, accumulated)
    (directory / "all.py").write_text(ALL)
    job = run([*ALLRED_RUN, "all.py", *files], env={**ONE, **digits}, cwd=directory)
    expected = [shown[1], shown[2], shown[-2], *results[:2], values, updates]
    assert (job.code, job.out) == (0, "".join(expected)), job.text
    for line in lines.splitlines():
        assert line in job.err.splitlines(), job.text
    files = write(directory, alone, export, predict)
    processes = [python(file, cwd=directory, env={**ONE, **digits}) for file in files]
    assert [each.out for each in processes] == [shown[0], *results[2:]], [each.text for each in processes]
    for command in blocks("evaluation.md", "sh")[-2].splitlines():
        listed = run(["sh", "-ec", command], env={"PATH": f"{BIN['mpich']}:{os.environ['PATH']}"}, cwd=directory)
        assert listed.code == 0, listed.text


@full
def test_kill_and_resume(directory):
    program, shown = TUTORIAL[0][4], TUTORIAL[1]
    (directory / "train.py").write_text(program)
    env = {name: value for name, value in {**os.environ, **environment(ONE)}.items() if value is not None}
    command = [*map(str, ALLRED_RUN), "train.py"]
    with (directory / "err").open("w+") as err:
        job = subprocess.Popen(command, cwd=directory, env=env, text=True, stdout=subprocess.PIPE, stderr=err)
        ranks = {}
        while len(ranks) < 4:
            line = job.stdout.readline()
            ranks |= {int(rank): int(pid) for rank, pid in re.findall(r"rank (\d) is process (\d+)", line)}
        while not list(directory.glob("checkpoints/step-*")):
            assert job.poll() is None
            time.sleep(0.02)
        os.kill(ranks[1], signal.SIGKILL)
        job.communicate(timeout=60)
        text = (directory / "err").read_text()
    assert job.returncode != 0, text
    assert words(shown[3]).replace("node1", os.uname().nodename) in text
    (directory / "train.py").write_text(program.replace("time.sleep(0.02)", "pass"))
    again = run(command, env=ONE, cwd=directory)
    step = re.search(r"allred: resumes from step (\d+) of checkpoints\n", again.err)
    resumes, last = shown[4].splitlines()
    assert step, again.text
    assert resumes == step[0].strip().replace(f"step {step[1]}", "step 100"), again.text
    assert again.out.splitlines()[-1] == last, again.text


def test_notebooks(directory):
    (cell, first, other), (ranks, _, session) = complete("notebooks.md")
    assert python("-c", cell).out == ranks
    (directory / "train.py").write_text(first)
    shell = "printf 'p loss\\nc\\n' | " + blocks("notebooks.md", "sh")[1]
    path = {"PATH": f"{BIN['mpich']}:{os.environ['PATH']}"}
    debugged = run(["sh", "-ec", shell], env={**ONE, **path}, cwd=directory)
    for line in session.replace("(Pdb) p loss\n", "(Pdb) ").replace("(Pdb) c\n", "(Pdb) ").split("\n"):
        assert line in debugged.out, debugged.text
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (directory / "train.py").write_text(other.replace("5678", str(port)))
    client = threading.Thread(target=type_commands, args=(port, said := []))
    client.start()
    result = mpirun(2, "train.py", cwd=directory, env=ONE)
    client.join()
    assert (result.code, result.out) == (0, "mean [0.5]\n"), result.text
    assert "array([1.])" in "".join(said), said


def type_commands(port, said):
    """Connect to pdb when it listens, type commands, and append the answers to `said`."""
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    with connection:
        for command in (b"p loss\n", b"c\n"):
            answer = b""
            while not answer.endswith(b"(Pdb) "):
                answer += (received := connection.recv(1000))
                assert received, said
            said.append(answer.decode())
            connection.sendall(command)


@full
def test_batch_size(directory):
    """The benchmark prints the rows of the table, in its order."""
    page = (ROOT / "docs/batch-size.md").read_text()
    row = r"^\| (\d+) \| ([\d.]+).*\| \d+ \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$"
    rows = [tuple(map(float, found)) for found in re.findall(row, page, flags=re.MULTILINE)]
    result = mpirun(2, ROOT / "benchmarks/batch_size.py", env=ONE, cwd=directory)
    line = r"^batch (\d+), learning rate ([\d.]+).*: (\d+) steps, loss ([\d.]+), accuracy ([\d.]+)$"
    lines = [tuple(map(float, found)) for found in re.findall(line, result.out, flags=re.MULTILINE)]
    assert len(lines) == 9, result.text
    assert [values[:3] for values in lines] == [values[:3] for values in rows], result.text
    assert lines == [pytest.approx(values, abs=0.01) for values in rows], result.text
