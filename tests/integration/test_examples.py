"""Every example, run as its first lines say, ends in the lines it promises."""

import concurrent.futures
import contextlib
import os
import pathlib
import re
import runpy
import signal
import struct
import subprocess
import time
import uuid

import numpy as np
import pytest
from harness import BIN, MPIS, OPENMPI, ROOT, full, mpirun, python, run
from ports import reserved_ports

DIGITS = ROOT / "examples/digits_sync.py"
RESUME = ROOT / "examples/resume.py"
DIGITS_PS = ROOT / "examples/digits_ps.py"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # BLAS threads that wait for work use the cores of other ranks


def check_digits(result, ranks):
    assert result.code == 0, result.text
    lines = result.out.strip().split("\n")
    assert f"world: {ranks} rank" in result.out, result.text
    assert re.search(r"backend: \w+ \(.+\)", result.out), result.text
    assert re.search(r"examples/s over all ranks; of a step \d+ % computing, \d+ % waiting, \d+ % comm", result.out), (
        result.text
    )
    assert re.fullmatch(r"parameters equal on all ranks: yes \(hash [0-9a-f]{12}\)", lines[-3]), result.text
    assert re.fullmatch(r"same as one rank on the global batch: yes \(max difference \d\.\de[-+]\d\d\)", lines[-2]), (
        result.text
    )
    accuracy = re.fullmatch(r"test accuracy: (0\.\d{3})", lines[-1])
    assert accuracy, result.text
    assert float(accuracy[1]) >= 0.95
    assert "epoch 30 of 30, loss" in result.out


@pytest.mark.parametrize(
    ("mpi", "ranks"),
    [
        ("mpich", 2),
        pytest.param("openmpi", 2, marks=full),
        pytest.param("mpich", 1, marks=full),
        pytest.param("mpich", 4, marks=full),
        pytest.param("openmpi", 3, marks=full),
    ],
)
def test_digits_under_mpirun(mpi, ranks):
    result = mpirun(ranks, DIGITS, mpi=mpi)
    check_digits(result, ranks)
    lines = [line for line in result.err.splitlines() if "allred: " in line and "BLAS threads on" not in line]
    assert len(lines) == 2, result.text  # the banner and the first step, from the chief alone
    assert f"{ranks} rank{'s' * (ranks > 1)} on " in result.err


def test_examples_without_scikit_learn_say_what_to_install():
    """But scipy_lockstep.py, which is a short block of a page: a comment behind the import says it."""
    names = [path.stem for path in (ROOT / "examples").glob("*.py") if "sklearn" in path.read_text()]
    names.remove("scipy_lockstep")
    assert len(names) > 8
    code = f"""
import ast, pathlib, sys
sys.modules["sklearn"] = None
for name in {names}:
    tree = ast.parse(pathlib.Path({str(ROOT / "examples")!r}, f"{{name}}.py").read_text())
    guards = [node for node in ast.walk(tree) if isinstance(node, ast.Try) and "sklearn" in ast.unparse(node)]
    try:
        exec(compile(ast.Module(guards[:1], []), name, "exec"))
    except SystemExit as end:
        print(end.code)
"""
    result = python("-c", code)
    assert result.out == "this example needs scikit-learn: pip install scikit-learn\n" * len(names), result.text


@full  # test_pages.py runs programs without mpirun
def test_digits_without_mpirun():
    check_digits(python(DIGITS, env=ONE_THREAD), 1)


@full
def test_digits_without_the_extension():
    hide = "import runpy, sys; sys.modules['allred.native._kernels'] = None"
    code = f"{hide}; runpy.run_path({str(DIGITS)!r}, run_name='__main__')"
    result = mpirun(2, "-c", code)
    check_digits(result, 2)
    assert result.err.count("no C extension (") == 1


@full
def test_more_ranks_than_cores():
    check_digits(mpirun(8, DIGITS), 8)


# ---- examples/digits_ps.py: the same script in every mode


def digits_ps(ranks, *arguments, mpi="mpich", variables=(), **settings):
    """What it prints, on stdout, with ALLRED_... set as given; its accuracy is checked."""
    env = {f"ALLRED_{name.upper()}": str(value) for name, value in settings.items()}
    result = mpirun(ranks, DIGITS_PS, *arguments, mpi=mpi, env={**ONE_THREAD, **dict(variables), **env})
    assert result.code == 0, result.text
    accuracy = re.search(r"^test accuracy: (0\.\d{3})\n$", result.out, flags=re.MULTILINE)
    assert accuracy, result.text
    assert float(accuracy[1]) >= 0.95
    return result.out


@full
@pytest.mark.parametrize(("mpi", "ranks"), [("mpich", 1), ("mpich", 2), ("openmpi", 2)])
def test_digits_ps_in_mode_sync(mpi, ranks):
    out = digits_ps(ranks, mpi=mpi)
    assert f"world: {ranks} rank" in out
    assert "staleness" not in out


def check_servers(out, words, servers, bound):
    """bound: the largest staleness that the policy allows."""
    assert re.search(words, out), out
    largest = re.search(r"^staleness \(updates\): .* largest (\d+)$", out, flags=re.MULTILINE)
    assert largest, out
    assert int(largest[1]) <= bound
    assert out.count(" MB in, ") == servers


STEPS = 30 * 15  # epochs, batches of an epoch
GRADIENTS = 3 * STEPS
POLICIES = [
    ("async", 1, rf"async: .*: {GRADIENTS} gradients, {GRADIENTS} updates; dropped 0", GRADIENTS),
    ("bounded", 1, rf"4 clocks .*: {GRADIENTS} gradients, {GRADIENTS} updates; dropped 0", 2 * (2 * 4 + 1)),
    ("sync", 2, rf"sync: .*: {GRADIENTS} gradients, {GRADIENTS // 3} updates; dropped 0", 0),
]


@full  # bounded by default in the next test
@pytest.mark.parametrize(("consistency", "servers", "words", "bound"), POLICIES, ids=["async", "bounded", "sync"])
def test_digits_ps_with_servers(consistency, servers, words, bound):
    check_servers(digits_ps(3 + servers, mode="ps", num_ps=servers, consistency=consistency), words, servers, bound)


@full
def test_digits_ps_with_servers_under_open_mpi():
    assert "staleness (updates): " in digits_ps(3, mpi="openmpi", mode="ps")


@pytest.mark.limit(200)
@pytest.mark.parametrize("jobs", [2, 3])
@full
def test_digits_ps_bounded_and_goes_on_from_its_checkpoint_in_another_mode(jobs, tmp_path, digits):
    steps, outputs = [], []
    first, last = {"mode": "ps", "consistency": "bounded"}, {"mode": "ps", "num_ps": 2, "consistency": "sync"}
    for ranks, settings in [(3, first), (1, {"mpi": "openmpi"}), (4, last)][:jobs]:
        out = digits_ps(ranks, tmp_path, variables=digits, **settings)
        outputs.append(out)
        assert ("staleness (updates): " in out) == ("mode" in settings)
        assert ("goes on from step" in out) == bool(steps)
        assert not steps or f"goes on from step {steps[-1]}\n" in out
        saved = re.search(rf"^checkpoint: {tmp_path}/step-(\d+)$", out, flags=re.MULTILINE)
        assert saved, out
        steps.append(int(saved[1]))
    assert steps == [2 * STEPS, 3 * STEPS, 4 * STEPS][:jobs]  # two workers' updates, then global batches
    words = rf"4 clocks .*: {2 * STEPS} gradients, {2 * STEPS} updates; dropped 0"
    check_servers(outputs[0], words, 1, 2 * 4 + 1)


def killed_at(step, ranks, directory, digits):
    """One rank of examples/resume.py is killed some time after this step."""
    command = [BIN["mpich"] / "mpirun", "-np", ranks, BIN["mpich"] / "python", RESUME, directory, "0.01"]
    mark = {"RESUME_TEST": uuid.uuid4().hex}
    launched = subprocess.Popen(
        list(map(str, command)), env={**os.environ, **OPENMPI, **ONE_THREAD, **digits, **mark}, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not any(int(path.name[5:]) >= step for path in directory.glob("step-*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    [(name, value)] = mark.items()
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words, variables = ((entry / file).read_bytes().split(b"\0") for file in ("cmdline", "environ"))
            rank = words[0].endswith(b"python") and str(RESUME).encode() in words  # and not the watcher
            if rank and f"{name}={value}".encode() in variables:
                os.kill(int(entry.name), signal.SIGKILL)
                break
    assert launched.wait(30) != 0


@pytest.mark.limit(180)
@pytest.mark.parametrize(("kills", "ranks"), [([(100, 2)], 1), pytest.param([(10, 2), (100, 3)], 4, marks=full)])
def test_resume_is_killed_and_goes_on_with_another_number_of_ranks(kills, ranks, tmp_path, digits):
    """Under MPICH, and on with one rank; test_ledger.py goes on with several, with --full also under Open MPI."""
    for step, before in kills:
        killed_at(step, before, tmp_path, digits)
    result = mpirun(ranks, RESUME, tmp_path, env={**ONE_THREAD, **digits})
    assert result.code == 0, result.text
    starts = len(kills) + 1
    found = re.search(rf"^started {starts} times, the last time at step (\d+) of 540$", result.out, flags=re.M)
    assert found, result.text
    assert 100 <= int(found[1]) < 540, result.text
    assert "same loss as if it had never been killed: yes" in result.out, result.text


# ---- examples/click_through.py


@pytest.mark.parametrize(("ranks", "mode"), [(2, "sync"), (3, "ps"), pytest.param(1, "sync", marks=full)])
def test_click_through(ranks, mode):
    result = mpirun(ranks, ROOT / "examples/click_through.py", env={**ONE_THREAD, "ALLRED_MODE": mode})
    assert result.code == 0, result.text
    found = re.fullmatch(r"AUC (0\.\d{3}) with (\d+) rows in 8 tables, after 150 steps of \d workers\n", result.out)
    assert found, result.text
    assert float(found[1]) > 0.83, result.text  # 0.5 by chance
    assert int(found[2]) > 20_000, result.text


# ---- examples/mnist_ps.py, local_cluster.py and linear_regression.py: by hand, and under mpirun


def by_hand(program, tasks, *arguments):
    """How each of these tasks, of which each is given as its arguments, has ended."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        command = [BIN["mpich"] / "python", ROOT / "examples" / program, *arguments]
        found = list(pool.map(lambda task: run([*command, *task], 100, ONE_THREAD), tasks))
    assert [result.code for result in found] == [0] * len(tasks), "\n".join(result.text for result in found)
    return [result.out for result in found]


def check_mnist(worker_0, worker_1):
    for task, out in enumerate((worker_0, worker_1)):
        assert [line for line in out.splitlines() if line.startswith("Step")] == [
            f"Step {step} in task {task}" for step in (100, 200, 300)
        ]
    accuracy = re.search(r"^test accuracy: (0\.\d{3})\n\Z", worker_0, flags=re.MULTILINE)
    assert accuracy, worker_0
    assert float(accuracy[1]) >= 0.9
    assert "accuracy" not in worker_1


@full  # by default under mpirun, and linear_regression.py by hand
def test_mnist_ps_by_hand():
    found = reserved_ports(4)
    hosts = [f"localhost:{port}" for port in found]
    where = ["--ps_hosts", ",".join(hosts[:2]), "--worker_hosts", ",".join(hosts[2:]), "--steps=300"]
    tasks = [[f"--job_name={job}", f"--task_index={index}"] for job in ("worker", "ps") for index in (1, 0)]
    worker_1, worker_0, ps_1, ps_0 = by_hand("mnist_ps.py", tasks, *where)
    check_mnist(worker_0, worker_1)
    assert (ps_0, ps_1) == ("", "")


@pytest.mark.parametrize("mpi", MPIS)
def test_mnist_ps_under_mpirun_in_sync_from_files(mpi, tmp_path):
    load_digits = runpy.run_path(ROOT / "tests/quick_digits/sklearn/datasets.py")["load_digits"]
    images, labels = load_digits(return_X_y=True)
    pixels = (images.reshape(-1, 8, 8) * 15).astype(np.uint8)
    for name, of in (("train", slice(0, 1400)), ("t10k", slice(1400, None))):
        for kind, array in (("images-idx3", pixels[of]), ("labels-idx1", labels[of].astype(np.uint8))):
            head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            (tmp_path / f"{name}-{kind}-ubyte").write_bytes(head + array.tobytes())
    result = mpirun(
        4, ROOT / "examples/mnist_ps.py", "--issync=1", "--data_dir", tmp_path, "--steps=100", mpi=mpi, env=ONE_THREAD
    )
    assert result.code == 0, result.text
    assert sorted(result.out.splitlines())[:2] == ["Step 100 in task 0", "Step 100 in task 1"], result.text
    assert re.search(r"^test accuracy: 0\.[89]\d\d$", result.out, flags=re.MULTILINE), result.text
    assert "200 gradients, 100 updates; dropped 0" in result.err, result.text


def test_local_cluster():
    hosts = [f"localhost:{port}" for port in reserved_ports(2)]
    lines = by_hand("local_cluster.py", [["--task_index=0"], ["--task_index=1"]], f"--hosts={','.join(hosts)}")
    for task, line in enumerate(lines):
        hello = f"hello from /job:local/task:{task} at {hosts[task]}, one of 2; the sum of their numbers is 1\n"
        assert line == hello
    assert mpirun(2, ROOT / "examples/local_cluster.py").out.count("the sum of their numbers is 1\n") == 2


LINE = r"w = (1\.9[89]|2\.0[012]), b = (9\.9\d|10\.0\d|10\.10): within 1 % of 2 and 10\n"


def test_linear_regression_by_hand():
    hosts = [f"localhost:{port}" for port in reserved_ports(3)]
    where = [f"--worker_hosts={hosts[0]},{hosts[1]}", f"--client_hosts={hosts[2]}"]
    tasks = [["--job_name=client", "--task_index=0"], *(["--job_name=worker", f"--task_index={i}"] for i in (1, 0))]
    client, *workers = by_hand("linear_regression.py", tasks, *where)
    assert re.fullmatch(LINE, client), client
    assert workers == ["", ""]


@pytest.mark.parametrize(
    ("ranks", "arguments", "mpi"),
    [
        pytest.param(3, [], "openmpi", marks=full),
        pytest.param(3, ["--ps_hosts=localhost:1"], "mpich", marks=full),
        (4, ["--ps_hosts=localhost:1,localhost:2"], "mpich"),
    ],
)
def test_linear_regression_under_mpirun(ranks, arguments, mpi):
    result = mpirun(ranks, ROOT / "examples/linear_regression.py", *arguments, mpi=mpi, env=ONE_THREAD)
    assert result.code == 0, result.text
    assert re.fullmatch(LINE, result.out), result.text
    for name, task in (("w", 0), ("b", ranks - 3)):
        assert (f"allred: {name}: /job:ps/task:{task}/cpu:0\n" in result.err) == bool(arguments), result.text
