"""Sessions in a world of one: hooks, what is logged, what is refused. tests/integration/test_session.py has ranks."""

import contextlib
import http.server
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest

import allred
from allred import checkpoint
from allred.errors import (
    CheckpointError,
    CollectiveTimeout,
    InputError,
    NonFiniteError,
    NotInitializedError,
    ShutdownError,
)
from allred.session import (
    Averaging,
    Checkpoint,
    EarlyStopping,
    GlobalStepWaiter,
    Hook,
    Logging,
    MovingAverage,
    NanLoss,
    Notify,
    Session,
    StepCounter,
    StopAtStep,
    Summary,
    final_checkpoint,
    state_pickle,
)
from allred.session.coordination import StepMetrics, StopSignals
from allred.session.saver import Saver, SessionState, random_states


@pytest.fixture
def world():
    allred.init(banner=False)
    yield
    allred.shutdown()


class Witness(Hook):
    def __init__(self):
        self.told, self.outcome = [], None

    def after_step(self, session, values):
        self.told.append(values)

    def end(self, session, outcome):
        self.outcome = outcome


class Waits(Hook):
    """After each step, until a Checkpoint hook has written."""

    def __init__(self, hook):
        self.hook = hook

    def after_step(self, session, values):
        if (thread := self.hook._saver._thread) is not None:
            thread.join()


def train(session, losses, params=None, gradient=lambda loss: 1.0, **track):
    """One step for each loss."""
    params = {"w": np.zeros(2)} if params is None else params
    opt = allred.distributed(allred.optim.SGD(lr=1.0))
    session.track(params=params, optimizer=opt, **track)
    for loss in session.steps(losses):
        opt.step(params, {"w": np.full(2, gradient(loss))})
        session.log(loss=loss, examples=4)
    return params


def test_it_trains_without_any_directory(world):
    witness = Witness()
    with Session(hooks=[witness]) as session:
        params = train(session, [3.0, 2.0, np.float32(1.5)])
    assert params["w"].tolist() == [-3, -3]
    assert witness.told == [{"loss": 3.0}, {"loss": 2.0}, {"loss": 1.5}]
    assert (witness.outcome.reason, witness.outcome.failed, witness.outcome.step) == ("end of data", False, 3)
    assert witness.outcome.checkpoint is None


def test_before_init_is_an_error():
    with pytest.raises(NotInitializedError, match=r"allred\.init"), Session():
        pass


def test_what_is_used_wrongly(world, tmp_path):
    opt, params = allred.distributed(allred.optim.SGD(lr=1.0)), [np.zeros(2)]
    with pytest.raises(InputError, match="use the session in a with statement"):
        Session().track(params=params, optimizer=opt)
    with Session() as session:
        with pytest.raises(InputError, match=r"call session\.track"):
            session.should_stop()
        with pytest.raises(InputError, match=r"expected the result of allred\.distributed"):
            session.track(params=params, optimizer=allred.optim.SGD(lr=1.0))
        with pytest.raises(InputError, match=r"session.track\(rng=...\): int has no state_dict"):
            session.track(params=params, optimizer=opt, rng=3)
        session.track(params=params, optimizer=opt)
        with pytest.raises(InputError, match="was called already"):
            session.track(params=params, optimizer=opt)
        with pytest.raises(InputError, match=r"session.log\(loss='a'\): expected a number"):
            session.log(loss="a")
        with pytest.raises(InputError, match="expected a number of at least 0"):
            session.log(examples=-1)
    with pytest.raises(InputError, match="used already"), session:
        pass
    for use in (session.should_stop, session.log, lambda: next(session.steps([1]))):
        with pytest.raises(InputError, match="it has ended"):
            use()
    with pytest.raises(InputError, match="need a checkpoint_dir"), Session(save_secs=5) as session:
        session.track(params=params, optimizer=opt)
    with pytest.raises(InputError, match="checkpoint_dir=3 is not a path"):
        Session(3)
    with pytest.raises(InputError, match="5 is not a hook"):
        Session(hooks=[5])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"save_secs": 5, "save_steps": 5}, "Session: .* by seconds or by steps, but save_secs=5 and save_steps=5"),
        ({"save_secs": -1}, "Session: save_secs must be a positive number of seconds, but is -1"),
        ({"save_steps": 0}, "Session: save_steps must be an integer >= 1, but is 0"),
        ({"keep": 0}, "Session: keep must be an integer >= 1, but is 0"),
        ({"max_steps": 0}, "StopAtStep: last_step must be an integer >= 1, but is 0"),
        ({"max_steps": 2.5}, r"StopAtStep: last_step must be an integer >= 1, but is 2\.5"),
    ],
)
def test_arguments_that_cannot_be(given, words):
    with pytest.raises(InputError, match=words):
        Session("ckpt", **given)


def test_checkpoints_that_are_kept(world, tmp_path):
    waits = Hook()  # for what is being written: else the next one comes later
    waits.before_step = lambda session: session._saver.wait()
    with Session(tmp_path, save_steps=2, keep=2, keep_every=10, hooks=[waits]) as session:
        train(session, range(15))
    assert [path.name for path in checkpoint.list_complete(tmp_path)] == [
        "step-00000010",
        "step-00000014",
        "step-00000015",
    ]


def test_numbers_of_any_kind(world, tmp_path):
    with Session(tmp_path, save_steps=np.int64(2), keep=np.int32(1), max_steps=np.int64(3), hooks=None) as session:
        train(session, [1.0] * 5)
    assert session.step == 3
    assert [path.name for path in checkpoint.list_complete(tmp_path)] == ["step-00000003"]


def test_a_state_that_cannot_be_saved_is_named(world, tmp_path, capfd):
    class Secretive(Hook):
        state = threading.Lock()

        def state_dict(self):
            return self.state

        def load_state_dict(self, state):
            self.state = state

    with (
        pytest.raises(InputError, match="the state of hook Secretive cannot be saved: TypeError: cannot pickle"),
        Session(tmp_path, hooks=[Secretive()]) as session,
    ):
        train(session, [1.0])
    later = Secretive()
    later.state = 5
    with Session(tmp_path, hooks=[later]) as session:
        for loss in (1.0, 2.0):
            if loss == 1.0:
                params, opt = {"w": np.zeros(2)}, allred.distributed(allred.optim.SGD(lr=1.0))
                session.track(params=params, optimizer=opt)
                session.should_stop()
            opt.step(params, {"w": np.ones(2)})
            later.state = threading.Lock()
    assert "a part is left out of the checkpoint: the state of hook Secretive cannot be saved" in capfd.readouterr().err
    again = Secretive()
    again.state = 7
    with Session(tmp_path, hooks=[again]) as session:
        assert train(session, [])["w"].tolist() == [-2, -2]
    assert again.state == 7


def test_a_state_that_cannot_be_saved_later_is_omitted(world, tmp_path, capfd):
    """But an error of the job, which is raised wherever a rank is, stays one."""

    class Moody(Hook):
        error = None

        def state_dict(self):
            return _raise(self.error) if self.error else 5

        def load_state_dict(self, state):
            pass

    def run(directory, error):
        moody = Moody()
        with Session(directory, hooks=[moody], save_steps=2) as session:
            train(session, range(5), gradient=lambda loss: setattr(moody, "error", error) or 1.0)

    run(tmp_path / "moody", RuntimeError("not now"))
    assert checkpoint.newest(tmp_path / "moody").name == "step-00000005"
    assert capfd.readouterr().err.count("the state of hook Moody cannot be saved: RuntimeError: not now") == 1
    with pytest.raises(CollectiveTimeout, match="late"):
        run(tmp_path / "job", CollectiveTimeout("late"))


def test_micro_steps_are_one_step(world):
    witness, calls = Witness(), []
    witness.before_step = lambda session: calls.append(session.step)
    opt, params = allred.distributed(allred.optim.SGD(lr=1.0), accumulate=3), {"w": np.zeros(1)}
    with Session(hooks=[witness]) as session:
        session.track(params=params, optimizer=opt)
        for number in session.steps(range(7)):
            opt.step(params, {"w": np.ones(1)}, samples=number + 1)
            session.log(loss=number, examples=number + 1)
    assert (session.step, params["w"][0], calls) == (2, -2, [0, 1, 2])
    assert witness.told == [{"loss": pytest.approx((0 + 2 + 6) / 6)}, {"loss": pytest.approx((12 + 20 + 30) / 15)}]


def test_a_complete_training_prints_a_line(world, tmp_path, capfd):
    allred.shutdown()
    allred.init()
    for _ in range(2):
        with Session(tmp_path, max_steps=2) as session:
            train(session, [1.0] * 5)
    assert "max_steps=2 is reached already, at step 2: no step is made" in capfd.readouterr().err


def test_a_failure_after_the_update_writes_no_checkpoint(world, tmp_path, capfd):
    witness = Witness()
    session = Session(tmp_path, hooks=[witness])
    session.log = lambda **values: 1 / 0
    with pytest.raises(ZeroDivisionError), session:
        train(session, [1.0, 2.0])
    assert (witness.outcome.step, witness.outcome.checkpoint) == (1, None)
    words = "no checkpoint was written at the end: the current step failed after its update, or in a hook"
    assert words in capfd.readouterr().err


def test_nan_loss_raises_or_stops(world):
    witness = Witness()
    with (
        pytest.raises(NonFiniteError, match="loss is nan after step 2"),
        Session(hooks=[NanLoss(), witness]) as session,
    ):
        train(session, [1.0, math.nan, 1.0])
    assert witness.outcome.reason == "NonFiniteError"
    with Session(hooks=[NanLoss(fail=False), witness]) as session:
        train(session, [1.0, math.inf, 1.0])
    assert witness.outcome.reason == "loss is inf"
    assert session.step == 2


def test_early_stopping_is_remembered(world, tmp_path):
    hook = EarlyStopping(patience=3, min_delta=0.1)
    with Session(tmp_path, hooks=[hook], max_steps=3) as session:
        train(session, [1.0, 0.5, 0.45, 9])
    for _ in range(2):  # the second time it is over already
        again = EarlyStopping(patience=3, min_delta=0.1)
        with Session(tmp_path, hooks=[again]) as session:
            train(session, [0.45, 0.6, 0.2, 0.1])
        assert session.step == 5
        assert (again.best, again.since) == (0.5, 3)
    for wrong in ({"mode": "least"}, {"patience": 0}, {"min_delta": -1}):
        with pytest.raises(InputError, match="expected mode 'min' or 'max'"):
            EarlyStopping(**wrong)
    largest = EarlyStopping(patience=2, mode="max")
    with Session(hooks=[largest]) as session:
        train(session, [1.0, 2.0, 1.5, 2.0, 3.0])
    assert session.step == 4


def test_a_signal_ends_the_loop_and_handlers_are_put_back(world, tmp_path):
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    with Session(tmp_path) as session:
        opt, params = allred.distributed(allred.optim.SGD(lr=1.0)), [np.zeros(2)]
        session.track(params=params, optimizer=opt)
        for number in session.steps(range(10)):
            opt.step(params, [np.ones(2)])
            if number == 4:
                os.kill(os.getpid(), signal.SIGUSR1)
    assert session.step == 5
    assert session.asked == "SIGUSR1"
    assert {number: signal.getsignal(number) for number in before} == before
    assert checkpoint.newest(tmp_path).name == "step-00000005"


class SendsSignals:
    """Tracked by a session: the program's handlers run while the last checkpoint is written."""

    def __init__(self):
        self.numbers = ()

    def state_dict(self):
        for number in self.numbers:
            os.kill(os.getpid(), number)
        return {"seen": 1}

    def load_state_dict(self, state): ...


@pytest.mark.parametrize("error", [None, ValueError])
def test_an_exception_of_a_signal_handler_comes_after_the_last_checkpoint(world, tmp_path, error):
    """As torch's handler of SIGCHLD raises one for a DataLoader worker that has died."""
    witness, handled = Witness(), []

    def handler(number, frame):
        handled.append(number)
        raise RuntimeError(f"signal {number}")

    def run():
        with Session(tmp_path, hooks=[witness]) as session:
            train(session, [3.0, 2.0], sender=(sender := SendsSignals()))
            sender.numbers = numbers
            if error:
                raise error

    numbers = signal.SIGCHLD, signal.SIGUSR2
    before = [signal.signal(number, handler) for number in numbers]
    try:
        with pytest.raises(RuntimeError, match="signal"):
            run()
        assert [signal.getsignal(number) for number in numbers] == [handler, handler]
    finally:
        for number, previous in zip(numbers, before, strict=True):
            signal.signal(number, previous)
    assert sorted(handled) == sorted(numbers)
    assert checkpoint.newest(tmp_path).name == "step-00000002"
    assert witness.outcome.checkpoint or error


def test_a_shutdown_error_of_the_users_own_is_a_failure(world):
    witness = Witness()
    with pytest.raises(ShutdownError), Session(hooks=[witness]) as session:
        train(session, (_raise(ShutdownError("mine")) for _ in range(2)))
    assert witness.outcome.reason == "ShutdownError"


def _raise(error):
    raise error


def test_a_second_ctrl_c_interrupts():
    signals = StopSignals()
    signals.install()
    try:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.reason == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signals.restore()
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_a_forked_process_ends_by_a_signal_as_it_would_without():
    signals = StopSignals()
    signals.install()
    reads, writes = os.pipe()
    try:
        child = os.fork()
        if child == 0:
            os.write(writes, b"x")
            time.sleep(10)
            os._exit(0)
        os.read(reads, 1)  # until it runs: Python drops signals that come in the fork
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert not signals.reason
    finally:
        signals.restore()
        os.close(reads)
        os.close(writes)


@pytest.mark.parametrize("error", [None, ValueError])
@pytest.mark.parametrize("updated", [False, True])
def test_a_loop_that_is_left_loses_no_batch_and_repeats_none(world, tmp_path, error, updated):
    """By a break, or by an exception, before the update of batch 2 or after it: then no checkpoint is written, as the
    step has not ended, and training starts again."""

    def run(leaves_at=None):
        params, opt = [np.zeros(1)], allred.distributed(allred.optim.SGD(lr=1.0))
        data = allred.data.batches(np.arange(6), batch_size=1, seed=None)
        with Session(tmp_path) as session:
            session.track(params=params, optimizer=opt, data=data)
            for [number] in session.steps(data):
                if number == leaves_at and not updated:
                    break
                seen.append(int(number))
                opt.step(params, [np.ones(1)])
                if number == leaves_at:
                    break
            if leaves_at and error:
                raise error
        return session.step

    seen = []
    with pytest.raises(error) if error else contextlib.nullcontext():
        assert run(leaves_at=2) == len(seen)
    if updated and error:
        assert checkpoint.newest(tmp_path) is None
        seen.clear()
    else:
        assert checkpoint.newest(tmp_path).name == f"step-{len(seen):08d}"
    assert run() == 6
    assert seen == list(range(6))


class Fault(Hook):
    """Leaves a training at one place of step 5."""

    def __init__(self, place=""):
        self.place = place

    def at(self, place, step):
        if (place, step) == (self.place, 5):
            raise ValueError("boom")

    def before_step(self, session):
        self.at("before_step", session.step + 1)

    def after_step(self, session, values):
        self.at("after_step", session.step)


PLACES = ["before_step", "before the update", "after the update", "after the log", "break", "after_step"]


@pytest.mark.parametrize("place", PLACES)
def test_a_training_that_is_left_anywhere_continues_as_if_it_was_not(world, tmp_path, place):
    """Parameters, the position in the data, an average of the parameters, and the decision to stop. Step 4 has
    gradients that are not finite. The hook Checkpoint comes first, but saves what the others have seen."""

    def run(directory, place=""):
        params, opt = {"w": np.zeros(2)}, allred.distributed(allred.optim.SGD(lr=0.5, momentum=0.5), nonfinite="skip")
        average, fault, stopping = MovingAverage(params, 0.5), Fault(place), EarlyStopping(patience=4)
        data = allred.data.batches(np.arange(1, 13), batch_size=1, seed=None)
        hooks = [Checkpoint(directory / "hook", 3), Averaging(average), stopping]
        hooks.insert(1, fault)

        def batches():
            rows = iter(data)
            while not session.should_stop():
                if (row := next(rows, None)) is None:
                    return
                yield row

        with Session(directory / "own", save_steps=2, hooks=hooks, log_steps=None) as session:
            session.track(params=params, optimizer=opt, data=data)
            for [number] in batches():
                fault.at("before the update", number)
                opt.step(params, {"w": np.array([number, math.nan if number == 4 else 1.0])})
                fault.at("after the update", number)
                session.log(loss=20.0 - number if number < 6 else 20.0)
                fault.at("after the log", number)
                if (place, number) == ("break", 5):
                    break
        return session.step, params["w"].tolist(), average.state_dict()["averages"]["w"].tolist(), stopping.state_dict()

    whole = run(tmp_path / "whole")
    with contextlib.nullcontext() if place == "break" else pytest.raises(ValueError, match="boom"):
        run(tmp_path / "parts", place)
    assert run(tmp_path / "parts") == whole
    by_hook = allred.checkpoint.list_complete(tmp_path / "parts" / "hook")[-1].parent
    (tmp_path / "other").mkdir()
    by_hook.rename(tmp_path / "other" / "own")
    assert run(tmp_path / "other") == whole


def test_a_failure_in_the_first_step_leaves_nothing_to_wait_for(world, tmp_path):
    with pytest.raises(ZeroDivisionError), Session(tmp_path) as session:
        train(session, (1 / number for number in [0]))
    assert list(tmp_path.iterdir()) == []


def test_a_commit_leaves_a_rank_that_writes_its_claim(tmp_path):
    """The chief may be writing an earlier step meanwhile. Who fails as well would think that nobody writes, and go."""
    seen = []

    def save_final(step, capture):
        checkpoint.write(tmp_path, step - 1, [])
        seen.extend(path.name for path in tmp_path.glob(".*"))

    saver = types.SimpleNamespace(directory=str(tmp_path), save_final=save_final, wait=lambda: None)
    optimizer = types.SimpleNamespace(
        training_id="this", session_support=types.SimpleNamespace(latest_step=lambda: 6, can_save=True)
    )
    final_checkpoint.write_after_error(ValueError(), False, saver, optimizer, "ab12", lambda: str)
    assert len(seen) == 1
    assert not list(tmp_path.glob(".*"))


def test_hooks_may_differ_between_two_runs(world, tmp_path):
    hooks = [EarlyStopping(patience=9), Checkpoint(tmp_path / "best", best="loss")]
    with Session(tmp_path / "ckpt", hooks=hooks) as session:
        train(session, [3.0, 2.0, 2.5])
    stopping, other = EarlyStopping(patience=9), EarlyStopping("accuracy")
    best = Checkpoint(tmp_path / "best", best="loss", mode="max")
    with Session(tmp_path / "ckpt", hooks=[best, Witness(), stopping, other]) as session:
        train(session, [])
    assert (best.best, stopping.best, stopping.since) == (2.0, 2.0, 1)
    assert (other.best, other.since) == (math.inf, 0)


def test_a_name_that_the_params_use_for_their_buffers_is_refused(world, tmp_path):
    opt, params = allred.distributed(allred.optim.SGD(lr=1.0)), [np.zeros(2)]
    opt.session_parts = lambda params: (params, {"module": EarlyStopping()})  # as of a torch module
    with Session(tmp_path) as session:
        with pytest.raises(InputError, match=r"session.track\(module=...\): the name 'module' is reserved for"):
            session.track(params=params, optimizer=opt, module=EarlyStopping())
        session.track(params=params, optimizer=opt, modules=EarlyStopping())


def test_more_things_are_kept(world, tmp_path):
    class Counter:
        count = 0

        def state_dict(self):
            return {"count": self.count, "array": np.arange(3)}

        def load_state_dict(self, state):
            self.count, self.array = state["count"], state["array"]

    counter = Counter()
    random.seed(3)
    with Session(tmp_path, max_steps=2) as session:
        counter.count = 7
        train(session, [1, 1, 1], counter=counter)
    expected = random.random(), np.random.rand()
    other = Counter()
    with Session(tmp_path) as session:
        train(session, [], counter=other)
    assert (other.count, other.array.tolist()) == (7, [0, 1, 2])
    assert (random.random(), np.random.rand()) == expected


def test_random_states_of_an_earlier_version_are_restored(world):
    random.seed(3)
    np.random.seed(3)
    saved = state_pickle.dumps({0: (random.getstate(), np.random.get_state(), None), 1: "of another rank"})
    expected = random.random(), np.random.rand()
    SessionState([], None, {}).load({"random generators": [saved]}, "a checkpoint")
    assert (random.random(), np.random.rand()) == expected


def test_a_rank_unpickles_only_its_own_random_states(world):
    state = SessionState([], None, {})
    parts = state.pickle({0: random_states(), 1: b"cannot be unpickled"}, uses_saved_position=True)
    expected = random.random(), np.random.rand()
    state.load(parts, "a checkpoint")
    assert (random.random(), np.random.rand()) == expected


def test_a_checkpoint_of_another_model(world, tmp_path):
    with Session(tmp_path) as session:
        train(session, [1])
    words = r"is of another model: parameter 'w' .* \(3,\), but has shape \(2,\) in it;"
    with pytest.raises(CheckpointError, match=words), Session(tmp_path) as session:
        train(session, [1], {"w": np.zeros(3)})


def test_an_error_of_a_checkpoint_does_not_end_the_training(world, tmp_path, capfd):
    """But that of the last one does."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="listing"), Session(tmp_path / "file" / "ckpt") as session:
        train(session, [1])

    def fails(directory):
        raise CheckpointError("no room")

    saver = Saver(str(tmp_path), None, 1, 5, 0)
    saver.begin(0)
    saver.save(1, lambda: fails, in_thread=True)
    saver.wait()
    assert "a checkpoint was not written, training continues: no room" in capfd.readouterr().err
    assert saver.due(2)
    with pytest.raises(CheckpointError, match="no room"):
        saver.save_final(2, lambda: fails)


def test_a_checkpoint_is_written_without_a_thread_if_none_can_be_started(tmp_path, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    saver = Saver(str(tmp_path), None, 1, 5, 0)
    saver.begin(0)
    saver.save(1, lambda: str, in_thread=True)
    saver.wait()
    assert (saver.count, saver.failures, saver.saved_step) == (1, 0, 1)


def test_the_last_checkpoint_that_cannot_be_written_is_an_error(world, tmp_path):
    def losses():
        yield 1.0
        (tmp_path / "ckpt").rmdir()
        (tmp_path / "ckpt").write_text("in the way")

    witness, words = Witness(), "the last checkpoint was not written: checkpoint: listing .*ckpt.*; there is none"
    with pytest.raises(CheckpointError, match=words), Session(tmp_path / "ckpt", hooks=[witness]) as session:
        train(session, losses())
    assert witness.outcome.reason == "CheckpointError"


def test_a_directory_that_cannot_be_written_is_found_before_training(world, tmp_path):
    """And a hook that tells of the end does so, though training has not begun."""
    (tmp_path / "ckpt").write_text("in the way")
    told = tmp_path / "told"
    hook = Notify(command=["sh", "-c", f"cat > {told}"])
    with pytest.raises(CheckpointError), Session(tmp_path / "ckpt", hooks=[hook]) as session:
        train(session, [1.0])
    assert json.loads(told.read_text())["reason"] == "CheckpointError"


def test_two_sides_may_not_write_into_one_directory(world, tmp_path):
    with (
        pytest.raises(
            InputError,
            match=r"two writers of checkpoints share the directory .*; give each Checkpoint hook its own directory",
        ),
        Session(tmp_path, hooks=[Checkpoint(tmp_path / ".", best="loss")]) as session,
    ):
        train(session, [1.0])


def test_the_line_at_the_end(world, tmp_path, capfd):
    allred.shutdown()
    allred.init()
    with Session(tmp_path, max_steps=3) as session:
        train(session, [1.0, 2.0])
    said = capfd.readouterr().err
    assert f"training ends at step 2 of 3: end of data; the newest checkpoint is {tmp_path}/step-00000002" in said
    assert f"checkpoints: 1 written to {tmp_path}; training waited" in said
    with Session() as session:
        train(session, [])
    assert "session: the data has no batch" in capfd.readouterr().err
    with Session() as session:
        session.track(params=[np.zeros(1)], optimizer=allred.distributed(allred.optim.SGD(lr=1.0)))
        for _ in session.steps(range(5)):
            session.log(loss=1.0)
    assert "session: 5 batches, but no update; call opt.step(...) for each batch" in capfd.readouterr().err


def test_a_value_that_is_never_logged_causes_a_warning(world, tmp_path, capfd):
    hooks = [NanLoss("lsos"), EarlyStopping("lsos"), Checkpoint(tmp_path, best="lsos"), NanLoss()]
    with Session(hooks=hooks) as session:
        train(session, [1.0] * 50)
    said = capfd.readouterr().err
    for who in ("NanLoss", "EarlyStopping", "Checkpoint"):
        assert said.count(f"{who}: 'lsos' was not logged in 20 steps; logged: loss") == 1


def test_without_stderr_training_continues(tmp_path):
    code = (
        "import allred, numpy as np\nfrom allred.session import Session\nallred.init()\nopt = allred.distributed("
        "allred.optim.SGD(lr=1.0))\nwith Session(log_steps=1) as session:\n    session.track(params=[np.zeros(1)], "
        "optimizer=opt)\n    for _ in session.steps(range(3)):\n        opt.step([np.zeros(1)], [np.ones(1)])\n"
        "print(session.step)"
    )
    shell = ["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, code]
    result = subprocess.run(shell, stdout=subprocess.PIPE, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, "3\n")


def test_errors_of_a_checkpoint_in_the_background(world, tmp_path, capfd, monkeypatch):
    def fails(directory):
        raise MemoryError

    saver = Saver(str(tmp_path), None, 1, 5, 0)
    saver.begin(0)
    saver.save(1, lambda: fails, in_thread=True)
    saver.wait()
    assert "a checkpoint was not written, training continues: MemoryError" in capfd.readouterr().err
    assert saver.saved_step is None

    def prune(*_, **__):
        raise CheckpointError("prune: deleting it failed")

    monkeypatch.setattr("allred.session.saver.checkpoint.prune", prune)
    saver.save(2, lambda: str, in_thread=True)
    assert saver.save_final(3, lambda: str) == str(tmp_path)
    told = capfd.readouterr().err
    assert told.count("an older checkpoint could not be deleted: prune: deleting it failed") == 2
    assert "was not written" not in told


def test_ranks_with_and_without_logged_examples_are_distinguished(world, monkeypatch):
    titles = []

    def allreduce(array, op, name):
        titles.append(name)
        return array

    monkeypatch.setattr("allred.session.coordination.functions.allreduce", allreduce)
    for examples in (None, 0, 4):
        metrics = StepMetrics()
        metrics.add({"loss": 1.0}, examples)
        metrics.report_all(stop=False, save=False)
    assert titles == ["session.log(loss)", "session.log(examples, loss)", "session.log(examples, loss)"]


def test_no_worker_waits_for_a_step_behind_the_last_one():
    optimizer = types.SimpleNamespace(session_support=types.SimpleNamespace(is_lockstep=False), global_step=200)
    GlobalStepWaiter(300).begin(types.SimpleNamespace(optimizer=optimizer, max_steps=200, asked=""))


def test_no_worker_waits_forever_for_updates(world, capfd):
    optimizer = types.SimpleNamespace(session_support=types.SimpleNamespace(is_lockstep=False), global_step=0)
    optimizer.pull = lambda params: setattr(optimizer, "global_step", min(optimizer.global_step + 1, 5))
    session = types.SimpleNamespace(optimizer=optimizer, max_steps=None, asked="", params=None)
    GlobalStepWaiter(10, poll_s=0.02, still_s=0.1).begin(session)
    assert "no update since step 5 for 0.1 s, so worker 0 begins" in capfd.readouterr().err


def test_when_a_checkpoint_is_due(tmp_path):
    saver = Saver(str(tmp_path), None, 10, 5, 0)
    saver.begin(25)
    assert [step for step in range(25, 45) if saver.due(step)] == list(range(30, 45))
    written = threading.Event()
    saver.save(30, lambda: lambda directory: str(written.wait(60)), in_thread=True)
    assert not saver.due(40)  # one is written at a time
    written.set()
    saver.wait()
    assert saver.due(40)
    by_time = Saver(str(tmp_path), 1e9, None, 5, 0)
    by_time.begin(0)
    assert not by_time.due(5)
    by_time._next_at = 0.0
    assert by_time.due(5)
    assert not by_time.due(0)
    by_time.save(5, lambda: str, in_thread=False)
    assert not by_time.due(6)


def test_notify_runs_a_command(world, tmp_path):
    code = f"import os, sys; open({str(tmp_path / 'told')!r}, 'w').write(f'{{os.getsid(0)}} {{sys.stdin.read()}}')"
    with Session(hooks=[Notify([sys.executable, "-c", code])], max_steps=2) as session:
        train(session, [1, 2, 3])
    its_session, _, words = (tmp_path / "told").read_text().partition(" ")
    told = json.loads(words)
    assert int(its_session) != os.getsid(0)  # else it would be killed with this rank
    assert (told["reason"], told["failed"], told["step"]) == ("max_steps", False, 2)


def test_notify_calls_a_webhook_and_never_fails(world, capfd):
    told = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/"
        hooks = [Notify(url=url, only_failures=True), NanLoss()]
        with Session(hooks=hooks, max_steps=1) as session:
            train(session, [1])  # no failure, so nothing is told
        with pytest.raises(NonFiniteError), Session(hooks=hooks) as session:
            train(session, [math.nan])
        thread.join()
    assert [(outcome["reason"], outcome["failed"]) for outcome in told] == [("NonFiniteError", True)]
    with Session(hooks=[Notify(url=url, timeout_s=1)], max_steps=1) as session:
        train(session, [1])
    assert "Notify could not send the outcome of training" in capfd.readouterr().err
    for wrong in ({}, {"command": ["a"], "url": "b"}, {"command": "mail"}):
        with pytest.raises(InputError, match="Notify"):
            Notify(**wrong)


def test_lines(world, capfd):
    with Session(hooks=[StepCounter(2)], log_steps=2, max_steps=4) as session:
        train(session, [4.0, 3.0, 2.0, 1.0, 0.0])
    lines = capfd.readouterr().err.splitlines()
    logged = [line for line in lines if line.startswith("step ")]
    assert [line.split(" (")[0] for line in logged] == ["step 2, loss = 3.00", "step 4, loss = 1.00"]
    assert "examples/sec; " in logged[0]
    for wrong in (Logging, StepCounter):
        with pytest.raises(InputError, match="every_steps must be an integer >= 1, but is 0"):
            wrong(0)
    with pytest.raises(InputError, match="last_step must be an integer >= 1"):
        StopAtStep(1.5)


def test_summaries_continue_after_a_restore(world, tmp_path):
    for count in (4, 9):
        with Session(tmp_path / "ckpt", hooks=[Summary(str(tmp_path), every_steps=2)], max_steps=count) as session:
            train(session, range(10))
    lines = [json.loads(line) for line in (tmp_path / "scalars.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6, 8]
    assert [line["loss"] for line in lines] == [1, 3, 1, 3]
    assert "time/examples_per_sec" in lines[-1]
    assert sum(lines[-1][f"time/{name}"] for name in ("computing", "waiting", "communicating")) == pytest.approx(1)


def test_summaries_by_seconds(world, tmp_path):
    for secs, steps in ((1e-9, [1, 2, 3]), (1e9, [])):
        with Session(hooks=[Summary(str(tmp_path / str(secs)), every_secs=secs)], max_steps=3) as session:
            train(session, range(10))
        lines = (tmp_path / str(secs) / "scalars.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == steps
    with pytest.raises(InputError, match="every_secs must be a positive number"):
        Summary(str(tmp_path), every_secs=0)


def test_histograms_of_parameters_and_what_is_watched(world, tmp_path):
    params, opt = {"w": np.arange(4.0)}, allred.distributed(allred.optim.SGD(lr=1.0))
    with Session(hooks=[Summary(str(tmp_path), histogram_steps=2)], max_steps=4) as session:
        session.track(params=params, optimizer=opt)
        for _ in session.steps(range(9)):
            grads = {"w": np.ones(4)}
            opt.step(params, grads)
            session.watch(gradients=grads)
    lines = [json.loads(line) for line in (tmp_path / "histograms.jsonl").read_text().splitlines()]
    names = [(line["step"], line["name"]) for line in lines]
    assert names == [(2, "parameters/w"), (2, "gradients/w"), (4, "parameters/w"), (4, "gradients/w")]


def test_a_moving_average_is_kept_with_the_checkpoints(world, tmp_path):
    averages = []
    for path, counts in ((tmp_path / "whole", [6]), (tmp_path / "parts", [3, 6])):
        for count in counts:
            params = {"w": np.zeros(2)}
            average = MovingAverage(params, decay=0.5)
            with Session(path, hooks=[Averaging(average)], max_steps=count) as session:
                train(session, range(9), params)
        with average.swapped():
            averages.append(params["w"].copy())
        assert params["w"].tolist() == [-6, -6]
    assert (averages[0] == averages[1]).all()
    assert -6 < averages[0][0] < -3


def test_a_moving_average_that_is_new_begins_with_what_was_restored(world, tmp_path):
    with Session(tmp_path) as session:
        train(session, range(5))
    params = {"w": np.full(2, 1e6)}
    average = MovingAverage(params)
    with Session(tmp_path, hooks=[Averaging(average)]) as session:
        train(session, [], params)
    with average.swapped():
        assert params["w"].tolist() == [-5, -5]


def test_the_best_is_kept(world, tmp_path):
    best, some = Checkpoint(tmp_path / "best", best="loss"), Checkpoint(tmp_path / "some", 2, keep=9)
    with Session(hooks=[best, some, Waits(some)]) as session:
        train(session, [3.0, 1.0, 2.0, 0.5, 0.7])
    [best] = checkpoint.list_complete(tmp_path / "best")
    assert checkpoint.read_checkpoint(best).params["w"].tolist() == [-4, -4]
    assert [path.name for path in checkpoint.list_complete(tmp_path / "some")] == ["step-00000002", "step-00000004"]
    params = {"w": np.zeros(2)}
    with Session(tmp_path / "best", max_steps=4) as session:
        train(session, [1], params)
    assert params["w"].tolist() == [-4, -4]
    for wrong in ({}, {"every_steps": 2, "best": "loss"}, {"best": "loss", "mode": "least"}):
        with pytest.raises(InputError, match="give every_steps or best"):
            Checkpoint(tmp_path, **wrong)
    with pytest.raises(InputError, match="Checkpoint: directory=None is not a path"):
        Checkpoint(None, 5)


def test_the_best_beside_those_of_an_earlier_training(world, tmp_path, capfd):
    with Session(hooks=[Checkpoint(tmp_path, 5)]) as session:
        train(session, [1.0] * 6)
    with Session(hooks=[Checkpoint(tmp_path, best="loss")]) as session:
        train(session, [3.0, 1.0, 2.0])
    assert [path.name for path in checkpoint.list_complete(tmp_path)] == ["step-00000002"]
    assert "step-00000005 was written by another training, and is newer than step 1, which" in capfd.readouterr().err


@pytest.mark.parametrize("damaged", ["shard", "manifest", "length"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_damaged_checkpoint_is_not_the_final_one(world, tmp_path, damaged, fails):
    """Of the same step, or of a later one: a later training does not restore it, even if it can be read again."""

    def run(steps, fails=False):
        losses = (float(step) if step < steps - fails else _raise(ValueError("boom")) for step in range(steps))
        with (
            pytest.raises(ValueError, match="boom") if fails else contextlib.nullcontext(),
            Session(tmp_path, save_steps=4) as session,
        ):
            train(session, losses)

    run(4)
    run(3)
    newest = checkpoint.newest(tmp_path)
    assert newest.name == "step-00000007"
    file = newest / "manifest.json" if damaged == "manifest" else next(newest.glob("shard*"))
    content = file.read_bytes()
    file.write_bytes(content[:-1] if damaged == "length" else content[:-1] + bytes([content[-1] ^ 1]))
    run(3 + fails, fails)  # from step 4
    path = checkpoint.newest(tmp_path)
    assert (path.name, checkpoint.verify(path)) == ("step-00000007", [])
    assert checkpoint.read_checkpoint(path).params["w"].tolist() == [-7, -7]


def test_a_best_that_was_not_written_is_not_the_best(world, tmp_path, monkeypatch):
    hook, write = Checkpoint(tmp_path, best="loss"), checkpoint.write

    def fails_once(*given):
        monkeypatch.setattr(checkpoint, "write", write)
        raise CheckpointError("full")

    monkeypatch.setattr(checkpoint, "write", fails_once)
    with Session(hooks=[hook, Waits(hook)]) as session:
        train(session, [1.0, 2.0, 3.0])
    assert [path.name for path in checkpoint.list_complete(tmp_path)] == ["step-00000002"]
    assert hook.best == 2.0


def test_a_loss_that_is_not_finite_leaves_the_earlier_checkpoint(world, tmp_path):
    """Its parameters would fail again after each restart. But a gradient that is not finite has changed nothing."""
    with pytest.raises(NonFiniteError), Session(tmp_path, hooks=[NanLoss()]) as session:
        train(session, [1.0, math.nan])
    assert checkpoint.newest(tmp_path) is None
    with pytest.raises(NonFiniteError), Session(tmp_path) as session:
        train(session, range(5), gradient=lambda loss: math.nan if loss == 3 else 1.0)
    assert checkpoint.newest(tmp_path).name == "step-00000003"


def test_the_end_waits_for_a_checkpoint_being_written(world, tmp_path, monkeypatch):
    def slow(*given, write=checkpoint.write):
        time.sleep(0.5)
        return write(*given)

    monkeypatch.setattr(checkpoint, "write", slow)
    with pytest.raises(NonFiniteError), Session(tmp_path, save_steps=2, hooks=[NanLoss()]) as session:
        train(session, [1.0, 1.0, math.nan])
    assert checkpoint.newest(tmp_path).name == "step-00000002"


def test_one_call_of_steps_is_for_all_epochs(world):
    with Session() as session:
        train(session, [1, 2])
        with pytest.raises(InputError, match="one call is for all epochs"):
            next(session.steps([1, 2]))


def test_end_is_called_for_all_hooks(world):
    class Bad(Hook):
        def end(self, session, outcome):
            raise RuntimeError("bad hook")

    witness = Witness()
    with pytest.raises(RuntimeError, match="bad hook"), Session(hooks=[Bad(), witness]) as session:
        train(session, [1])
    assert not witness.outcome.failed
    with pytest.raises(ZeroDivisionError), Session(hooks=[Bad(), witness]) as session:
        train(session, [1, 0], gradient=lambda loss: 1 / loss)
    assert witness.outcome.reason == "ZeroDivisionError"


def test_signals_that_are_ignored_stay_so():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        signals = StopSignals()
        signals.install()
        os.kill(os.getpid(), signal.SIGINT)
        assert not signals.reason
        signals.restore()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("damage", [lambda data: data[:50], lambda data: data[:-1] + bytes([data[-1] ^ 1])])
def test_damaged_checkpoints_are_named(world, tmp_path, capfd, damage):
    with Session(tmp_path, save_steps=1, max_steps=2) as session:
        train(session, [1, 1])
    with Session(tmp_path, max_steps=4) as session:
        train(session, [1, 1])
    older, newest = checkpoint.list_complete(tmp_path)[-2:]
    [shard] = newest.glob("shard-*")
    shard.write_bytes(damage(shard.read_bytes()))
    with Session(tmp_path) as session:
        train(session, [])
    assert session.step == int(older.name[5:])
    assert f"a newer checkpoint, which is damaged, is skipped: checkpoint: {shard}" in capfd.readouterr().err
    for shard in tmp_path.glob("*/shard-*"):
        shard.write_bytes(b"")
    with (
        pytest.raises(CheckpointError, match=r"^no checkpoint in .* can be read; the newest one: .* To start without"),
        Session(tmp_path) as session,
    ):
        train(session, [1])


def test_the_last_checkpoint_of_a_failure_before_a_later_one_that_is_damaged(world, tmp_path):
    for steps in (1, 5):
        with Session(tmp_path, max_steps=steps) as session:
            train(session, [1] * 5)
    [shard] = tmp_path.glob("step-00000005/shard-*")
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(ZeroDivisionError), Session(tmp_path) as session:
        train(session, [1, 1, 0], gradient=lambda loss: 1 / loss)
    assert [path.name for path in checkpoint.list_complete(tmp_path)] == ["step-00000001", "step-00000003"]


@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("saves", [True, False])
def test_data_that_would_start_again_causes_a_warning(world, tmp_path, capfd, tracked, saves):
    params, opt = [np.zeros(1)], allred.distributed(allred.optim.SGD(lr=1.0))
    data = allred.data.batches(np.arange(6), batch_size=1, seed=None)
    with Session(tmp_path if saves else None, max_steps=2) as session:
        session.track(params=params, optimizer=opt, data=data if tracked else None)
        for _ in session.steps(data):
            opt.step(params, [np.ones(1)])
    told = capfd.readouterr().err.count(
        "starts this data from the beginning, though it can continue behind the last batch; pass"
    )
    assert told == (saves and not tracked)
