"""allred.testing without MPI: commands that hang or leave processes behind are ended; faults go off at their step."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

import allred
from allred import testing
from allred.testing import job_runner


def alive(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] != "Z"


def gone(pid: int, within_s: float = 2.0) -> bool:
    deadline = time.monotonic() + within_s  # SIGKILL takes a moment to act
    with contextlib.suppress(FileNotFoundError):
        while alive(pid):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
    return True


def test_a_command_and_how_it_ended():
    code = (
        "import os, sys; print(os.environ['GIVEN'], 'TAKEN' in os.environ); print('no', file=sys.stderr); sys.exit(7)"
    )
    os.environ["TAKEN"] = "1"
    try:
        result = testing.run([sys.executable, "-c", code], env={"GIVEN": "yes", "TAKEN": None})
    finally:
        del os.environ["TAKEN"]
    assert (result.code, result.out, result.err, result.left) == (7, "yes False\n", "no\n", [])
    assert re.match(r"exit code 7 after \d+\.\d s\n", result.text)
    assert "--- stdout\nyes False\n\n--- stderr\nno\n" in result.text


IGNORES = """
import signal
from allred import testing
from allred.testing import job_runner
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_IGN)
for name in ("INT", "HUP", "QUIT"):
    print(testing.run(["sh", "-c", f"ulimit -c 0; kill -s {name} $$; echo ignored"]).code)
"""


def test_a_command_can_be_interrupted_where_its_parent_ignores_that():
    assert testing.run([sys.executable, "-c", IGNORES]).out == "-2\n-1\n-3\n"


def test_tests_can_interrupt_programs_where_they_were_started_in_the_background():
    """As `make test &` in a script starts them: with SIGINT ignored, which programs inherit."""
    file = pathlib.Path(__file__).with_name("test_prefetching.py")
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file, "-k", "interrupted and SIGINT"]
    result = testing.run(["sh", "-c", 'trap "" INT; exec "$@"', "sh", *pytest_], timeout_s=100)
    assert result.code == 0, result.text
    assert "2 passed" in result.out, result.text


def test_output_that_is_no_text():
    assert testing.run(["printf", r"\377"]).out == "\ufffd"


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
os.kill(child.pid, signal.SIGSTOP)
print(child.pid, flush=True)
"""


@pytest.mark.parametrize(
    ("after", "what"),
    [
        ("time.sleep(600)", "did not end after 3 s"),
        ("", "ended, but its child processes kept its output open after 3 s"),
    ],
)
def test_a_command_that_is_late_is_ended_with_all_it_started(monkeypatch, after, what):
    monkeypatch.setattr(job_runner, "_TERMINATE_S", 0.3)
    with pytest.raises(TimeoutError, match=what) as error:
        testing.run([sys.executable, "-c", STUBBORN + after], timeout_s=3)
    (child,) = [int(line) for line in str(error.value).splitlines() if line.isdecimal()]
    assert gone(child)
    assert f"still running, killed: {child} {sys.executable} -c import time" in str(error.value)


def test_what_a_command_leaves_behind_is_killed_and_named(monkeypatch):
    monkeypatch.setattr(job_runner, "_EXIT_S", 0.3)
    quiet = STUBBORN.replace("start_new_session=True", "start_new_session=True, stdout=-3, stderr=-3")
    result = testing.run([sys.executable, "-c", quiet])
    child = int(result.out)
    assert [line.split()[0] for line in result.left] == [str(child)]
    assert gone(child)


def test_an_interrupted_wait_ends_the_command(monkeypatch):
    started = []
    communicate = subprocess.Popen.communicate

    def interrupted(process, *arguments, **options):
        started.append(process)
        if len(started) == 1:
            raise KeyboardInterrupt
        return communicate(process, *arguments, **options)

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        testing.run(["sleep", "600"])
    assert started[0].returncode == -signal.SIGTERM


def test_without_any_mpirun(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no mpirun next to this Python or on PATH; pip install"):
        testing.mpirun(2, "train.py")


def test_a_launcher_that_failed_to_start_is_started_once_more(tmp_path):
    script = tmp_path / "mpirun"
    script.write_text(
        "#!/bin/sh\nif [ -e started ]; then echo $*; else touch started\n"
        "echo 'The PMIx server'\"'\"'s listener thread failed to start.' >&2; exit 1; fi\n"
    )
    script.chmod(0o755)
    result = testing.mpirun(2, "train.py", mpirun=[script, "--bind-to", "none"], python="py", cwd=tmp_path)
    assert (result.code, result.out) == (0, "--bind-to none -np 2 py train.py\n")


# ---- faults


class Counting:
    steps = 0

    def step(self, params, grads):
        self.steps += 1


@pytest.fixture
def world():
    allred.init(banner=False)
    yield
    allred.shutdown()


def test_a_fault_happens_before_the_optimizers_step(world):
    optimizer = Counting()
    assert testing.fail_at(0, 3, OSError("disk full")).into(optimizer) is optimizer
    optimizer.step(None, None)
    optimizer.step(None, None)
    with pytest.raises(OSError, match="disk full"):
        optimizer.step(None, None)
    assert optimizer.steps == 2
    optimizer.step(None, None)
    assert optimizer.steps == 3


def test_faults_compose_and_keep_what_an_optimizer_has(world):
    optimizer = allred.optim.SGD(lr=0.1)
    fault, order = testing.fail_at(0, 2), []
    last = testing.Fault("last", 0, None, lambda: order.append("last"))
    first = testing.Fault("first", 0, None, lambda: order.append("first"))
    opt = fault.into(allred.distributed(first.into(last.into(optimizer))))
    params = [allred.broadcast(1.0)]
    opt.broadcast(params)
    opt.step(params, [1.0], samples=1)
    assert order == ["first", "last"]
    assert (params[0], opt.state_dict()["global_step"]) == (0.9, 1)
    with pytest.raises(RuntimeError, match=r"^allred.testing.fail_at\(rank=0, step=2\)$"):
        opt.step(params, [1.0], samples=1)
    assert optimizer.global_step == 1


def test_exit_and_slow(world):
    with pytest.raises(SystemExit) as leaving:
        testing.exit_at(0, 1, 5)()
    assert leaving.value.code == 5
    start = time.monotonic()
    testing.slow(0, 0.05)()
    assert time.monotonic() - start >= 0.05


def test_a_fault_that_could_never_happen_is_an_error(world):
    with pytest.raises(allred.InputError, match="kill_at on rank 1 at step 2: the job has only 1 rank"):
        testing.kill_at(1, 2)()
    for rank, step in ((-1, 1), (0, 0)):
        with pytest.raises(allred.InputError, match="ranks count from 0, steps from 1"):
            testing.stop_at(rank, step)


def test_a_fault_before_init_is_an_error_with_a_remedy():
    with pytest.raises(allred.NotInitializedError):
        testing.slow(0, 0.1)()


def test_importing_it_starts_no_mpi_and_needs_no_pytest():
    code = "import sys, allred.testing; print([m for m in ('mpi4py.MPI', 'pytest', '_pytest') if m in sys.modules])"
    assert testing.run([sys.executable, "-c", code]).out == "[]\n"
