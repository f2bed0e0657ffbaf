"""Programs for Horovod: unmodified_program.py with mpirun and with horovodrun, and horovod.run. About 20 s."""

import pathlib
import sys

import pytest

from allred import testing

pytest.importorskip("torch")

PROGRAM = pathlib.Path(__file__).with_name("unmodified_program.py")
ENV = {"OMP_NUM_THREADS": "1", "ALLRED_TIMEOUT_S": "100"}


def printed(method):
    return [f"rank {rank} of 2: {method}, True" for rank in range(2)]


@pytest.mark.limit(200)
def test_a_program_under_mpirun():
    """The worker of a DataLoader imports the program again: method spawn."""
    words = ["-m", "allred.compat.horovod", PROGRAM, "--method", "spawn"]
    result = testing.mpirun(2, *words, env=ENV, timeout_s=150)
    assert (result.code, sorted(result.out.splitlines())) == (0, printed("spawn")), result.text


@pytest.mark.limit(200)
def test_a_shell_script_under_horovodrun(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} {PROGRAM} --exit-code 3\n")
    script.chmod(0o755)
    options = ["-np", 2, "-H", "localhost:2", "--fusion-threshold-mb", 32, "--start-timeout", 60]
    result = testing.run(
        [sys.executable, "-m", "allred.compat.horovodrun", *options, script], env=ENV, timeout_s=150, cwd=tmp_path
    )
    assert (result.code, sorted(result.out.splitlines())) == (3, printed(None)), result.text
    assert result.err.count("horovodrun: without effect in allred: --start-timeout\n") == 1, result.text
    assert (
        result.err.count("these variables have no effect in allred: HOROVOD_FUSION_THRESHOLD (docs/from-horovod.md)\n")
        == 1
    ), result.text


DRIVER = """\
import sys
import allred.compat.horovod
import horovod

def train(rate, failing=None):
    sys.path.append({directory!r})
    import horovod.torch as hvd
    import torch
    from unmodified_program import train
    hvd.init()
    if hvd.rank() == failing:
        raise ValueError(f"rate {{rate}}")
    trained = train()  # if a rank has failed: RemoteRankError
    return hvd.rank(), rate, trained, hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

if __name__ == "__main__":
    print(horovod.run(train, (0.5,), np=2))
    try:
        horovod.run(train, (0.5,), {{"failing": 1}}, np=2)
    except ValueError as error:
        print(repr(error), error.__notes__)
"""


@pytest.mark.full
@pytest.mark.limit(300)
def test_horovod_run_returns_results_and_raises_the_error_of_a_rank(tmp_path):
    (tmp_path / "driver.py").write_text(DRIVER.format(directory=str(PROGRAM.parent)))
    result = testing.run([sys.executable, "driver.py"], env=ENV, timeout_s=250, cwd=tmp_path)
    assert result.code == 0, result.text
    returned, error = result.out.splitlines()
    assert returned == "[(0, 0.5, True, 2.0), (1, 0.5, True, 2.0)]"
    assert error.startswith("""ValueError('rate 0.5') ['on rank 1 ("""), result.text
    assert "in train" in error


INTERRUPTED = """\
import os, signal, sys, time
import allred.compat.horovod
import horovod

def wait():
    os.kill(int(os.environ["DRIVER"]), signal.SIGUSR1)
    time.sleep(60)

if __name__ == "__main__":
    def interrupt(number, frame):
        os.killpg(0, signal.SIGINT)
    signal.signal(signal.SIGUSR1, interrupt)
    try:
        horovod.run(wait, np=1)
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_ctrl_c_of_horovod_run_is_one_signal(tmp_path):
    """A terminal sends SIGINT to the process group; a second signal would end the ranks without a checkpoint."""
    driver = tmp_path / "driver.py"
    driver.write_text(INTERRUPTED)
    shell = 'export DRIVER=$$; exec "$0" driver.py'
    result = testing.run(["sh", "-c", shell, sys.executable], env=ENV, timeout_s=60, cwd=tmp_path)
    assert (result.code, result.out.splitlines()[-1]) == (0, "interrupted"), result.text
    assert "allred run: SIGTERM: the ranks receive it" in result.err, result.text
    assert "allred run: wait-" in result.err, "the name of the function names the job"
    assert "a second signal, " not in result.err, result.text
