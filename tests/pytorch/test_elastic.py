"""hvd.elastic: the sampler, files of commits, errors; and jobs that are killed, resized and stopped.

In all about 45 s of CPU time, most of it the import of torch in 12 processes.
"""

import copy
import itertools
import pathlib
import re
import sys

import pytest

torch = pytest.importorskip("torch")

import allred.torch as hvd  # noqa: E402
from allred import numbering, testing, world  # noqa: E402
from allred.cluster import topology  # noqa: E402
from allred.errors import CheckpointError, InputError  # noqa: E402
from allred.horovod.horovod_errors import HostsUpdatedInterrupt  # noqa: E402
from allred.torch.elastic import restartable_job  # noqa: E402
from allred.torch.elastic.restartable_job import Commit  # noqa: E402
from allred.world import World  # noqa: E402

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = pathlib.Path(__file__).with_name("elastic_program.py")


# The sampler.


@pytest.fixture
def become():
    """A function that makes this process a rank of several."""
    yield lambda rank, size: world.install(World(topology=numbering.number([0] * size, rank)))
    world.install(None)
    world.install(None)  # also forgets the watcher


@pytest.mark.parametrize(("length", "processed", "by_rank"), [
    (5, 0, [[0, 1, 2, 3, 4]]),
    (5, 3, [[3, 4]]),
    (7, 0, [[0, 2, 4, 6], [1, 3, 5, 0]]),
    (7, 4, [[4, 6], [5, 4]]),
    (7, 0, [[0, 3, 6], [1, 4, 0], [2, 5, 1]]),
    (7, 6, [[6], [6], [6]]),
    (6, 6, [[], [], []]),
    (0, 0, [[], []]),
])  # fmt: skip
def test_samples_that_are_left_are_distributed_over_the_ranks(length, processed, by_rank, become):
    for rank, expected in enumerate(by_rank):
        become(rank, len(by_rank))
        sampler = hvd.elastic.ElasticSampler(range(length), shuffle=False)
        sampler.load_state_dict({"epoch": 0, "processed_num": processed})
        assert list(sampler) == expected
        assert len(sampler) == len(expected)


# range(8) after random.Random(seed).shuffle, by seed
ORDER = {4: [1, 6, 5, 4, 7, 0, 2, 3], 5: [6, 3, 1, 0, 7, 2, 5, 4]}


def test_an_epoch_is_shuffled_by_seed_plus_epoch(become):
    become(0, 2)
    sampler = hvd.elastic.ElasticSampler(range(8), seed=4)
    assert list(sampler) == ORDER[4][::2]
    sampler.record_batch(0, 1)
    sampler.record_batch(1, 1)
    assert list(sampler) == ORDER[4][::2], "a running epoch is not distributed again"
    sampler.reset()
    assert list(sampler) == ORDER[4][4::2]
    kept = sampler.state_dict()
    assert kept == {"epoch": 0, "processed_num": 4}
    sampler.set_epoch(1)
    assert list(sampler) == ORDER[5][::2]
    become(1, 3)
    sampler.load_state_dict(kept)
    assert list(sampler) == [ORDER[4][5], ORDER[4][4]]


def test_the_sampler_needs_the_ranks():
    with pytest.raises(ValueError, match=r"hvd.init\(\)"):
        hvd.elastic.ElasticSampler(range(3))


# Files of commits.


def test_a_commit_file_holds_the_newest_commit(tmp_path):
    file = tmp_path / "new" / "run-1.pt"
    assert restartable_job.read_commit(file) is None
    for number in (1, 2):
        restartable_job.write_commit(
            file, Commit(number, 2, {"w": torch.full((3,), number), "epoch": number, "set": {number}})
        )
    found = restartable_job.read_commit(file)
    assert found[:2] == (2, 2)
    assert found.state["w"].tolist() == [2, 2, 2]
    assert (found.state["epoch"], found.state["set"]) == (2, {2})
    assert file.parent.stat().st_mode & 0o077 == 0
    with pytest.raises(CheckpointError, match=r"commit 3 cannot be written to .*run-1.pt: .*lambda"):
        restartable_job.write_commit(file, Commit(3, 2, lambda: None))
    (file.parent / "run-1.tmp").write_bytes(b"left by a process that was killed")
    assert restartable_job.read_commit(file).number == 2
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"the commit in .*run-1.pt cannot be read: .*delete the file"):
        restartable_job.read_commit(file)


# States and errors, on one rank.


@pytest.fixture
def one_rank(monkeypatch):
    monkeypatch.delenv("ALLRED_ELASTIC_DIR", raising=False)
    hvd.init()
    yield
    hvd.shutdown()


def test_a_state_returns_to_its_commit(one_rank):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    seen = []

    def step():
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    step()
    state = hvd.elastic.TorchState(model, optimizer, epoch=1, seen=seen)
    assert state.seen is seen
    weight, moments = model.weight.detach().clone(), copy.deepcopy(optimizer.state_dict()["state"][0])
    state.epoch = 2
    state.seen.append(0)
    state.commit()
    model.weight.data += 1
    optimizer.param_groups[0]["lr"] = 0.1
    state.epoch = 3
    state.seen.append(1)
    for _ in range(2):
        step()
        state.restore()
        assert (model.weight == weight).all()
        restored = optimizer.state_dict()["state"][0]
        assert all((restored[name] == moments[name]).all() for name in ("step", "exp_avg", "exp_avg_sq"))
        assert model.weight.grad is None
        assert (optimizer.param_groups[0]["lr"], state.epoch, state.seen) == (0.5, 2, [0])
        state.seen.append(2)
    state.model = other = torch.nn.Linear(2, 1)
    kept = other.weight.detach().clone()
    other.weight.data += 1
    state.restore()
    assert (other.weight == kept).all()


def test_handlers_can_be_registered(one_rank):
    from allred.torch.elastic import elastic_states as handlers

    class Counter:
        count = 0

    class CounterHandler(handlers.StateHandler):
        def save(self):
            self.saved = self.value.count

        def restore(self):
            self.value.count = self.saved

        def sync(self):
            self.value.count = hvd.broadcast_object(self.value.count)

    before = handlers.get_handler_registry()
    handlers.set_handler_registry([(Counter, CounterHandler), *before])
    try:
        state = hvd.elastic.TorchState(counter=Counter())
    finally:
        handlers.set_handler_registry(before)
    state.counter.count = 5
    state.commit()
    state.counter.count = 6
    state.restore()
    assert state.counter.count == 5
    with pytest.raises(InputError, match=r"Counter cannot be written to a file.*CounterHandler does not define"):
        state.committed_state()


class Events(hvd.elastic.ObjectState):
    """A state that records what is done with it."""

    def __init__(self):
        super().__init__(hvd.broadcast_object, hvd.rank, step=0)
        self.events = []
        self.register_reset_callbacks([lambda: self.events.append("callback")])

    def sync(self):
        super().sync()
        self.events.append("sync")

    def restore(self):
        super().restore()
        self.events.append(f"restore {self.step}")


def test_the_function_is_called_again_after_an_error(one_rank):
    state, failures = Events(), [4, 2]

    @hvd.elastic.run
    def train(state, *, until):
        state.events.append(f"begin {state.step}")
        while state.step < until:
            if state.step in failures[-1:]:
                raise hvd.HorovodInternalError(f"failed at {failures.pop()}")
            state.step += 1
            if state.step % 2:
                state.commit()
        return state.step

    assert train(state, until=6) == 6
    again = ["callback", "sync"]
    expected = ["sync", "begin 0", "restore 1", *again, "begin 1", "restore 3", *again, "begin 3"]
    assert state.events == expected
    assert train.__name__ == "train"


@pytest.mark.parametrize("commits", [False, True])
def test_an_error_that_repeats_is_raised(commits, one_rank):
    state, calls = Events(), []

    @hvd.elastic.run
    def train(state):
        calls.append(1)
        if commits:
            state.commit()
        raise hvd.HorovodInternalError("always" if commits else f"failure {len(calls)}")

    with pytest.raises(hvd.HorovodInternalError, match="always" if commits else "failure 2"):
        train(state)
    assert len(calls) == 2


def test_operations_of_the_call_that_failed_are_forgotten(one_rank):
    """They hold tensors, and names that the next call uses again."""
    handles = []

    @hvd.elastic.run
    def train(state):
        handles.append(hvd.allreduce_async(torch.ones(1), name="a"))
        if len(handles) == 1:
            raise hvd.HorovodInternalError("before synchronize")
        with pytest.raises(ValueError, match="there is no such handle"):
            hvd.poll(handles[0])
        return hvd.synchronize(handles[1]).item()

    assert train(Events()) == 1


def test_changed_hosts(one_rank):
    """HostsUpdatedInterrupt of the program: the reset callbacks, and no synchronization if it is not needed."""
    state = Events()

    @hvd.elastic.run
    def train(state):
        if len(state.events) < 4:
            raise HostsUpdatedInterrupt(skip_sync="callback" in state.events)

    train(state)
    assert state.events == ["sync", "callback", "sync", "callback"]


def test_the_failure_of_another_rank_is_raised():
    """The job ends, so that `allred run` starts it again."""
    states = []

    @hvd.elastic.run
    def train(state):
        states.append(state)
        hvd.barrier()
        if topology.rank() == 1:
            raise KeyError("broken")
        hvd.allreduce(torch.ones(1), name="x")

    with pytest.raises(KeyError):
        testing.threads(2, lambda: train(Events()))
    assert [state.events for state in states] == [["sync"], ["sync"]], "nothing was restored"


# Commits in files, on one rank.


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("ALLRED_ELASTIC_DIR", str(tmp_path / "commits"))
    monkeypatch.setattr(restartable_job, "_calls", itertools.count(1))
    hvd.init()
    yield tmp_path / "commits"
    hvd.shutdown()


def stop_in_step_3(state):
    while state.step < 10:
        if state.step == 3:
            state.elastic_job.signals.stop("SIGTERM")
        state.check_host_updates()
        state.step += 1


def test_a_stop_request_ends_the_program_after_a_commit(directory):
    with pytest.raises(SystemExit) as end:
        hvd.elastic.run(stop_in_step_3)(Events())
    assert end.value.code == 0
    file = directory / "run-1.pt"
    assert restartable_job.read_commit(file) == Commit(1, 1, {"step": 3})
    file.rename(directory / "run-2.pt")
    assert hvd.elastic.run(lambda state: state.step)(Events()) == 3
    (directory / "run-2.pt").rename(directory / "run-3.pt")
    with pytest.raises(CheckpointError, match=r"run-3.pt is not of this program's state"):
        hvd.elastic.run(lambda state: state)(hvd.elastic.TorchState(step=0))
    (directory / "run-4.pt").touch()
    with pytest.raises(CheckpointError, match=r"run-4.pt cannot be read"):
        hvd.elastic.run(lambda state: state)(Events())


def test_a_commit_that_cannot_be_written(directory, capfd):
    """Training continues, but it is an error at the end of the program."""

    def train(state):
        directory.touch()
        state.commit()
        stop_in_step_3(state)

    with pytest.raises(CheckpointError, match=r"commit 2 cannot be written to .*FileExistsError"):
        hvd.elastic.run(train)(Events())
    assert "elastic: commit 1 cannot be written to " in capfd.readouterr().err


def test_a_state_that_has_no_state_for_the_file_is_an_error_on_all_ranks(tmp_path, monkeypatch):
    class Own(hvd.elastic.State):
        def save(self):
            pass

        def sync(self):
            pass

    def commit():
        with pytest.raises(InputError, match=r"Own has no committed_state .*ALLRED_ELASTIC_DIR=none"):
            hvd.elastic.run(lambda state: state.commit())(Own(hvd.broadcast_object, hvd.rank))

    monkeypatch.setenv("ALLRED_ELASTIC_DIR", str(tmp_path))
    monkeypatch.setattr(restartable_job, "_calls", itertools.repeat(1))
    testing.threads(2, commit)


# Jobs.

LINES = """\
start 1: 2 ranks, epoch 0, batch 0, resets []
start 1: 2 ranks, epoch 0, batch 4, resets [(2, 0)]
start 2: 2 ranks, epoch 1, batch 4, resets []
equal True 45
start 3: 3 ranks, epoch 3, batch 9, resets [(3, 3)]
"""


def allred_run(directory, *words, **env):
    """Run `allred run`. The file `pid` has its process id."""
    script = 'echo $$ > pid; exec "$0" -m allred run --name tested "$@"'
    env = {"XDG_RUNTIME_DIR": str(directory), **env}
    return testing.run(["sh", "-c", script, sys.executable, *words], 200, env, cwd=directory)


@pytest.mark.limit(300)
def test_a_training_that_is_killed_resized_and_stopped(tmp_path):
    first = allred_run(tmp_path, "-np", 2, "--max-np", 3, "--restarts", 1, PROGRAM, tmp_path)
    lines = [line for line in first.out.splitlines(True) if line.startswith(("start ", "equal "))]
    assert (first.code, "".join(lines), first.left) == (0, LINES, []), first.text
    assert f"allred run: ALLRED_ELASTIC_DIR={tmp_path}/tested.commits continues from the last commit" in first.err
    (tmp_path / "tested.commits").rename(tmp_path / "kept")
    last = allred_run(tmp_path, "-np", 1, PROGRAM, tmp_path, ALLRED_ELASTIC_DIR="kept")
    expected = "start 1: 1 ranks, epoch 4, batch 6, resets [(1, 4)]\ntrained [6.0]\n"
    assert (last.code, last.out) == (0, expected), last.text
    assert (tmp_path / "kept/run-1.pt").exists()


@pytest.mark.full
@pytest.mark.limit(300)
def test_the_example(tmp_path):
    """A rank is killed. The directory of the commits is the default, and is deleted at the end."""
    program = ROOT / "examples/horovod_elastic.py", 5
    result = allred_run(tmp_path, "-np", 2, "--restarts", 1, *program)
    assert result.code == 0, result.text
    assert "2 ranks, from epoch 5\n" in result.out, result.text
    accuracy = re.fullmatch(r"test accuracy: (0\.\d{3})", result.out.splitlines()[-1])
    assert accuracy, result.text
    assert float(accuracy[1]) > 0.9
    assert "tested.commits/run-1.pt" in result.err, result.text
    assert not list(tmp_path.glob("*.commits"))
