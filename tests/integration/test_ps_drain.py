"""Mode ps when ranks are asked to end by SIGTERM: a complete checkpoint, then ShutdownError in all workers."""

import pathlib
import re

import pytest
from harness import MPICH_BY_DEFAULT, MPIS
from ps_jobs import POLICIES, Case, check_end, job, run_cases

from allred import checkpoint

# Three workers and two servers, which are ranks 0 and 1. ASKED: the ranks that get the signal.
TRAINING = """
opt = allred.distributed(allred.optim.SGD(lr=1.0), every=EVERY)
params = {"w": np.zeros(200_000), "b": np.zeros(3, np.float32)}
ones = {"w": np.ones(200_000), "b": np.ones(3, np.float32)}
opt.broadcast(params)

def ask():
    for rank in ASKED:
        os.kill(pid(rank), signal.SIGTERM)

timer = threading.Timer(0.05, ask)
try:
    for step in range(100_000):
        if me == 0 and step == 4:
            timer.start()
        COMPUTES
        time.sleep(0.002)
        opt.step(params, ones)
except allred.ShutdownError as error:
    say("shutdown", error)
    (here / f"ended-{number}-{me}").touch()
if me == 0:
    timer.join()
"""

# Worker 1 computes until the others have left their training loops.
COMPUTES = "while me == 1 and step > 3 and len(list(here.glob(f'ended-{number}-*'))) < 2: time.sleep(0.01)"


def case(directory, asked, policy="async", apart=False, computes="pass", every=1):
    settings = {"CHECKPOINT_DIR": directory, **{name.upper(): value for name, value in POLICIES[policy].items()}}
    env = {f"ALLRED_{name}": str(value) for name, value in settings.items()}
    if apart:
        env["ALLRED_PRETEND_NODES"] = "1,1,1,1,1"
    return Case(f"ASKED, EVERY = {asked}, {every}\n" + TRAINING.replace("COMPUTES", computes), servers=2, env=env)


def check_drained(said, directory, same):
    """Check that all workers were told of one complete checkpoint. same: all elements of a parameter are equal."""
    told = [re.fullmatch(r"shutdown .* was asked to end; the checkpoint is (\S+)\n", said[w]) for w in range(3)]
    assert all(told), said
    [path] = {match[1] for match in told}
    found = checkpoint.read_checkpoint(path)
    assert set(found.params) == {"w", "b"}
    assert [p.name for p in directory.iterdir()] == [pathlib.Path(path).name]
    assert not same or len(set(found.params["w"])) == 1, found.params["w"]


@pytest.mark.parametrize("mpi", MPICH_BY_DEFAULT)
def test_when_any_rank_is_asked_to_end_one_complete_checkpoint_is_written_and_all_workers_end(mpi, tmp_path):
    """With each policy, a server or a worker that is asked, and all ranks at once. With policy sync a step is in the
    checkpoint completely or not at all, and nobody waits for a worker that computes. An error of the checkpoint is
    reported."""
    asked = {
        "server-bounded": ([0], "bounded", True),
        "server-sync": ([1], "sync", False),
        "chief-sync": ([2], "sync", True),
        "worker-backup": ([4], "backup", False),
        "all-sync": (range(5), "sync", False),
        "server-sync-computes": ([0], "sync", False, COMPUTES),
        "rounds-async": ([3], "async", False, "pass", 4),
        "rounds-sync": ([0], "sync", False, "pass", 4),
    }
    cases = {name: case(tmp_path / name, *given) for name, given in asked.items()}
    cases["no directory"] = case("none", [0])
    (tmp_path / "file").write_text("")
    cases["not writable"] = case(tmp_path / "file" / "below", [0])
    pids = tmp_path / "pids"
    pids.mkdir()
    _, said = run_cases(pids, cases, 5, mpi)
    for name, (_, policy, *_) in asked.items():
        check_drained(said[name], tmp_path / name, policy in ("sync", "backup"))
    for worker in range(3):
        assert "no checkpoint_dir is set, so nothing was saved" in said["no directory"][worker]
        assert "no checkpoint was written: " in said["not writable"][worker]


DRAIN = """
try:
    train(100_000, 0.002)
except allred.ShutdownError as error:
    print("shutdown", me, error, flush=True)
    sys.exit(0)
"""


def test_nobody_catches_it(tmp_path):
    """It is an exception like others: the job fails. The checkpoint is complete before."""
    body = "if me == 0: os.kill(pid(0), signal.SIGTERM)\ntrain(100_000)"
    result = job(tmp_path, body, 2, 1, elements=2_000_000, checkpoint_dir=tmp_path / "drained")
    check_end(result, 1)
    assert "allred.errors.ShutdownError: opt.step(): the job was asked to end; the checkpoint is" in result.err
    assert result.err.count("Traceback (most recent call last)") == 1, result.text
    assert checkpoint.newest(tmp_path / "drained") is not None, result.text
    assert len(list((tmp_path / "drained").iterdir())) == 1


@pytest.mark.parametrize("mpi", MPIS)
def test_mpirun_is_asked_to_end(mpi, tmp_path):
    """It passes the signal on, and kills later what has not ended: MPICH's waits, Open MPI's kills after half a second,
    which may be too short for a checkpoint. Then there is none, but no part of one."""
    launcher = "int(open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[1])" if mpi == "mpich" else ""
    body = f"train(3)\nif me == 0: os.kill({launcher or 'os.getppid()'}, signal.SIGTERM)\n" + DRAIN
    result = job(tmp_path, body, 2, 1, mpi=mpi, checkpoint_dir=tmp_path / "drained", consistency="sync")
    assert not result.left, result.text
    newest = checkpoint.newest(tmp_path / "drained")
    assert newest is not None or mpi == "openmpi", result.text
    if newest is not None:
        assert set(checkpoint.read_checkpoint(newest).params) == {"w", "b"}, result.text
