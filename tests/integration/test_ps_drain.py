"""Mode ps when ranks are asked to end by SIGTERM: a complete checkpoint, then ShutdownError in all workers."""

import pathlib
import re

import pytest
from ps_jobs import MPIS, POLICIES, check_end, job

from allred import checkpoint

FULL = pytest.mark.full  # runs with --full only

DRAIN = """
try:
    train(100_000, 0.002)
except allred.ShutdownError as error:
    print("shutdown", me, error, flush=True)
    sys.exit(0)
"""


def check_drained(result, tmp_path, workers, mpi="mpich", code=0):
    check_end(result, code, mpi)
    said = re.findall(r"^shutdown (\d) .* was asked to end; the checkpoint is (\S+)$", result.out, re.M)
    assert {int(worker) for worker, _ in said} == set(range(workers)), result.text
    [path] = {path for _, path in said}
    found = checkpoint.read_checkpoint(path)
    assert set(found.params) == {"w", "b"}, result.text
    assert [p.name for p in (tmp_path / "drained").iterdir()] == [pathlib.Path(path).name]
    return found


@pytest.mark.parametrize(
    ("who", "policy", "apart"),
    [
        (0, "async", False),
        (0, "bounded", True),
        (1, "sync", False),
        (2, "sync", True),
        (4, "backup", False),
        pytest.param(0, "sync", False, marks=FULL),
        pytest.param(0, "backup", True, marks=FULL),
        pytest.param(1, "async", True, marks=FULL),
        pytest.param(1, "backup", False, marks=FULL),
        pytest.param(2, "bounded", False, marks=FULL),
    ],
)
def test_one_rank_is_asked_to_end(who, policy, apart, tmp_path):
    """Two servers, three workers; 0 and 1 are servers."""
    body = f"train(3)\nif me == 0: threading.Timer(0.3, os.kill, (pid({who}), signal.SIGTERM)).start()\n" + DRAIN
    result = job(tmp_path, body, 3, 2, apart, checkpoint_dir=tmp_path / "drained", **POLICIES[policy])
    found = check_drained(result, tmp_path, 3)
    if policy == "sync":  # a step is complete or not at all
        assert len(set(found.params["w"])) == 1, found.params["w"]


@pytest.mark.parametrize("mpi", MPIS)
def test_all_ranks_are_asked_at_once(mpi, tmp_path):
    body = "train(3)\nif me == 0: threading.Timer(0.3, lambda: [os.kill(pid(r), 15) for r in range(5)]).start()" + DRAIN
    result = job(tmp_path, body, 3, 2, mpi=mpi, checkpoint_dir=tmp_path / "drained", consistency="sync")
    check_drained(result, tmp_path, 3, mpi)


def test_those_that_wait_for_a_worker_which_computes_do_not_wait_for_it_any_more(tmp_path):
    body = "train(3)\nif me == 1: os.kill(pid(0), signal.SIGTERM); time.sleep(3)\n" + DRAIN
    body = body.replace('print("shutdown"', 'print(round(time.monotonic()), "\\nshutdown"')
    result = job(tmp_path, body, 3, 1, checkpoint_dir=tmp_path / "drained", consistency="sync")
    times = [int(t) for t in re.findall(r"^(\d+) $", result.out, re.M)]
    assert max(times) - min(times) >= 2, result.text


def test_nobody_catches_it(tmp_path):
    """It is an exception like others: the job fails. The checkpoint is complete before."""
    body = "if me == 0: os.kill(pid(0), signal.SIGTERM)\ntrain(100_000)"
    result = job(tmp_path, body, 3, 2, elements=5_000_000, checkpoint_dir=tmp_path / "drained")
    check_end(result, 1)
    assert "allred.errors.ShutdownError: opt.step(): the job was asked to end; the checkpoint is" in result.err
    assert result.err.count("Traceback (most recent call last)") == 1, result.text
    assert checkpoint.newest(tmp_path / "drained") is not None, result.text
    assert len(list((tmp_path / "drained").iterdir())) == 1


def test_without_a_directory_nothing_is_saved(tmp_path):
    result = job(tmp_path, "if me == 0: os.kill(pid(0), signal.SIGTERM)\n" + DRAIN)
    check_end(result, 0)
    assert result.out.count("no checkpoint_dir is set, so nothing was saved") == 3, result.text


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    body = "if me == 0: os.kill(pid(0), signal.SIGTERM)\n" + DRAIN
    result = job(tmp_path, body, checkpoint_dir=tmp_path / "file" / "below")
    check_end(result, 0)
    assert result.out.count("no checkpoint was written: ") == 3, result.text


@pytest.mark.parametrize("mpi", MPIS)
def test_mpirun_is_asked_to_end(mpi, tmp_path):
    """It passes the signal on, and kills later what has not ended: MPICH's waits, Open MPI's kills after half a second,
    which may be too short for a checkpoint. Then there is none, but no part of one."""
    launcher = "int(open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[1])" if mpi == "mpich" else ""
    body = f"train(3)\nif me == 0: os.kill({launcher or 'os.getppid()'}, signal.SIGTERM)\n" + DRAIN
    result = job(tmp_path, body, 3, 2, mpi=mpi, checkpoint_dir=tmp_path / "drained", consistency="sync")
    assert not result.left, result.text
    newest = checkpoint.newest(tmp_path / "drained")
    assert newest is not None or mpi == "openmpi", result.text
    if newest is not None:
        assert set(checkpoint.read_checkpoint(newest).params) == {"w", "b"}, result.text
