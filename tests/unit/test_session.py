"""Sessions in a world of one: hooks, what is logged, what is refused. tests/integration/test_session.py has ranks."""

import http.server
import json
import math
import os
import random
import signal
import sys
import threading

import numpy as np
import pytest

import allred
from allred import checkpoint
from allred.errors import CheckpointError, InputError, NonFiniteError, NotInitializedError
from allred.session import EarlyStopping, Hook, Logging, NanLoss, Notify, Session, StepCounter, StopAtStep, Summary
from allred.session.asked import Asked
from allred.session.saver import Saver


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


def train(session, losses, params=None, **track):
    """One step for each loss."""
    params = {"w": np.zeros(2)} if params is None else params
    opt = allred.distributed(allred.optim.SGD(lr=1.0))
    session.track(params=params, optimizer=opt, **track)
    for loss in session.steps(losses):
        opt.step(params, {"w": np.ones(2)})
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


def test_before_init_it_says_so():
    with pytest.raises(NotInitializedError, match=r"allred\.init"), Session():
        pass


def test_what_is_used_wrongly(world, tmp_path):
    opt, params = allred.distributed(allred.optim.SGD(lr=1.0)), [np.zeros(2)]
    with pytest.raises(InputError, match="use the session in a with statement"):
        Session().track(params=params, optimizer=opt)
    with Session() as session:
        with pytest.raises(InputError, match=r"call session\.track"):
            session.should_stop()
        with pytest.raises(InputError, match=r"expected what allred\.distributed returns"):
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
    with pytest.raises(InputError, match="need a checkpoint_dir"):
        Session(save_secs=5)
    with pytest.raises(InputError, match="5 is no hook"):
        Session(hooks=[5])


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


def test_a_second_ctrl_c_interrupts():
    asked = Asked()
    asked.listen()
    try:
        os.kill(os.getpid(), signal.SIGINT)
        assert asked.reason == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        asked.stop()
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_a_break_keeps_the_step(world, tmp_path):
    params, opt = {"w": np.zeros(2)}, allred.distributed(allred.optim.SGD(lr=1.0))
    with Session(tmp_path) as session:
        session.track(params=params, optimizer=opt)
        for number in session.steps(range(10)):
            opt.step(params, {"w": np.ones(2)})
            if number == 2:
                break
    assert session.step == 3
    assert checkpoint.newest(tmp_path).name == "step-00000003"


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


def test_a_checkpoint_of_another_model(world, tmp_path):
    with Session(tmp_path) as session:
        train(session, [1])
    words = r"is of another model: 'w' \(3,\) has shape \(2,\) there"
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
    saver.save(1, lambda: fails, apart=True)
    saver.wait()
    assert "training goes on, but a checkpoint was not written: no room" in capfd.readouterr().err
    assert saver.due(2)
    with pytest.raises(CheckpointError, match="no room"):
        saver.save_last(2, lambda: fails)


def test_when_a_checkpoint_is_due():
    saver = Saver("", None, 10, 5, 0)
    saver.begin(25)
    assert [step for step in range(25, 45) if saver.due(step)] == list(range(30, 45))
    by_time = Saver("", 1e9, None, 5, 0)
    by_time.begin(0)
    assert not by_time.due(5)
    by_time._next_at = 0.0
    assert by_time.due(5)
    assert not by_time.due(0)


def test_notify_runs_a_command(world, tmp_path):
    code = f"import sys; open({str(tmp_path / 'told')!r}, 'w').write(sys.stdin.read())"
    with Session(hooks=[Notify([sys.executable, "-c", code])], max_steps=2) as session:
        train(session, [1, 2, 3])
    told = json.loads((tmp_path / "told").read_text())
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
    assert "Notify could not tell how training ended" in capfd.readouterr().err
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


def test_summaries_go_on_after_a_restore(world, tmp_path):
    for count in (4, 9):
        with Session(tmp_path / "ckpt", hooks=[Summary(str(tmp_path), every_steps=2)], max_steps=count) as session:
            train(session, range(10))
    lines = [json.loads(line) for line in (tmp_path / "scalars.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6, 8]
    assert [line["loss"] for line in lines] == [1, 3, 1, 3]
    assert "examples_per_sec" in lines[-1]


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
