"""allred.compat.tf1 in a world of one: TensorFlow's arguments, what they come to, what is refused or said once."""

import inspect
import json

import numpy as np
import pytest

import allred
from allred.compat import tf1
from allred.compat.tf1 import training_session
from allred.errors import InputError
from allred.session import Hook, Summary

# TensorFlow 1.15's own, in its order.
ARGUMENTS = {
    tf1.SyncReplicasOptimizer: "opt replicas_to_aggregate total_num_replicas variable_averages variables_to_average "
    "use_locking name",
    tf1.SyncReplicasOptimizer.apply_gradients: "self grads_and_vars global_step name",
    tf1.SyncReplicasOptimizer.make_session_run_hook: "self is_chief num_tokens",
    tf1.SyncReplicasOptimizer.get_init_tokens_op: "self num_tokens",
    tf1.Supervisor: "graph ready_op ready_for_local_init_op is_chief init_op init_feed_dict local_init_op logdir "
    "summary_op saver global_step save_summaries_secs save_model_secs recovery_wait_secs stop_grace_secs "
    "checkpoint_basename session_manager summary_writer init_fn local_init_run_options",
    tf1.Supervisor.managed_session: "self master config start_standard_services close_summary_writer",
    tf1.Supervisor.prepare_or_wait_for_session: "self master config wait_for_checkpoint max_wait_secs "
    "start_standard_services",
    tf1.Supervisor.stop: "self threads close_summary_writer ignore_live_threads",
    tf1.MonitoredTrainingSession: "master is_chief checkpoint_dir scaffold hooks chief_only_hooks save_checkpoint_secs "
    "save_summaries_steps save_summaries_secs config stop_grace_period_secs log_step_count_steps max_wait_secs "
    "save_checkpoint_steps summary_dir save_graph_def",
    tf1.StopAtStepHook: "num_steps last_step",
    tf1.Session: "target graph config",
    tf1.replica_device_setter: "ps_tasks ps_device worker_device merge_devices cluster ps_ops ps_strategy",
}


@pytest.mark.parametrize("what", ARGUMENTS, ids=lambda what: what.__qualname__)
def test_arguments_are_tensorflow_s(what):
    found = inspect.signature(what).parameters.values()
    assert " ".join(each.name for each in found if each.kind is not each.KEYWORD_ONLY) == ARGUMENTS[what]


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setattr(training_session, "_warned", set())
    allred.init(banner=False)
    yield
    allred.shutdown()


class Trained:
    """A parameter that each step takes down by 1."""

    def __init__(self):
        self.w = np.zeros(3)
        self.opt = tf1.SyncReplicasOptimizer(allred.optim.SGD(lr=1.0), 1, 1)
        self.given = {"params": {"w": self.w}, "optimizer": self.opt}

    def step(self):
        self.opt.apply_gradients([(np.ones(3), self.w)])
        return float(self.w[0])


def test_a_training_session_ends_by_its_hook_and_goes_on_from_its_checkpoint(world, tmp_path):
    for end in (5.0, 8.0):
        trained = Trained()
        with tf1.MonitoredTrainingSession(
            checkpoint_dir=tmp_path, save_checkpoint_steps=2, save_summaries_steps=1, log_step_count_steps=None,
            hooks=[tf1.StopAtStepHook(num_steps=3 if end > 5 else 5)], **trained.given,
        ) as session:  # fmt: skip
            assert isinstance(session, allred.Session)
            while not session.should_stop():
                session.log(w=session.run(lambda sign, trained=trained: sign * trained.step(), sign=-1))
        assert (session.step, trained.w[0]) == (end, -end)
    lines = [json.loads(line) for line in (tmp_path / "scalars.jsonl").read_text().splitlines()]
    assert [line["w"] for line in lines] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], lines


@pytest.mark.parametrize("none", [None, 0])
def test_none_for_both_leaves_the_last_checkpoint_and_no_summaries(world, tmp_path, none):
    trained = Trained()
    with tf1.MonitoredTrainingSession(
        checkpoint_dir=tmp_path, save_checkpoint_secs=none, save_checkpoint_steps=none, save_summaries_steps=none,
        save_summaries_secs=none, log_step_count_steps=none, hooks=[tf1.StopAtStepHook(last_step=4)], **trained.given,
    ) as session:  # fmt: skip
        while not session.should_stop():
            session.run(trained.step)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


def test_the_chief_s_hooks_are_called(world):
    class Counts(Hook):
        calls = ""

        def begin(self, session):
            self.calls += "b"

        def after_step(self, session, values):
            self.calls += "a"

        def end(self, session, outcome):
            self.calls += "e"

    trained, counts = Trained(), Counts()
    hooks = [tf1.StopAtStepHook(last_step=2)]
    with tf1.MonitoredTrainingSession(hooks=hooks, chief_only_hooks=[counts], **trained.given) as session:
        while not session.should_stop():
            session.run(trained.step)
    assert counts.calls == "baae"


def test_a_supervisor_around_a_loop(world, tmp_path):
    trained = Trained()
    supervisor = tf1.Supervisor(is_chief=True, logdir=tmp_path, **trained.given)
    assert any(isinstance(hook, Summary) for hook in supervisor.managed_session().hooks)
    with supervisor.managed_session(start_standard_services=False) as session:
        assert supervisor.start_queue_runners(session, [trained.opt.get_chief_queue_runner()]) == []
        session.run(trained.opt.get_init_tokens_op())
        while not supervisor.should_stop() and session.step < 3:
            session.run(trained.step)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
    session = supervisor.prepare_or_wait_for_session()
    while not supervisor.should_stop():
        session.run(trained.step)
        supervisor.request_stop()
    supervisor.stop()
    assert (tmp_path / "step-00000004").is_dir()
    with pytest.raises(ZeroDivisionError):
        supervisor.request_stop(ZeroDivisionError())


def test_a_session_that_was_prepared_ends_with_a_with_statement_or_with_shutdown(tmp_path):
    allred.init(banner=False)
    for step, prepared_in_with in ((2, True), (4, False)):
        trained = Trained()
        supervisor = tf1.Supervisor(logdir=tmp_path, save_summaries_secs=0, **trained.given)
        session = supervisor.prepare_or_wait_for_session()
        for _ in range(2):
            assert not supervisor.should_stop()
            trained.step()
        if prepared_in_with:
            with session as same:
                assert same is session
            with pytest.raises(InputError, match="used already"), session:
                pass
            assert (tmp_path / f"step-{step:08d}").is_dir()
    allred.shutdown()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000004"]
    with pytest.raises(InputError, match="it has ended"):
        supervisor.should_stop()


def test_gradients_find_their_variables_in_any_order(world):
    a, b, c = np.zeros(2), np.zeros(2), np.zeros(2)
    opt = tf1.SyncReplicasOptimizer(allred.optim.SGD(lr=1.0), 1)
    opt.broadcast({"a": a, "more": [b, c]})
    opt.apply_gradients([(np.full(2, 2.0), b), (np.ones(2), a), (None, c)])
    assert (a[0], b[0], c[0]) == (-1, -2, 0)
    with pytest.raises(InputError, match="1 of 1 variables are not among the parameters"):
        opt.apply_gradients([(np.ones(2), a.copy())])
    alone = tf1.SyncReplicasOptimizer(allred.optim.SGD(lr=1.0), 1)
    alone.apply_gradients([(np.ones(2), a)])
    assert a[0] == -2


def test_what_has_no_effect_is_said_once(world, capfd):
    for _ in range(2):
        tf1.SyncReplicasOptimizer(allred.optim.SGD(lr=1.0), 1, 1, None, None, True, "sync", replica_id=0)
    trained = Trained()
    tf1.Supervisor(None, 0, is_chief=True, init_op=np.zeros(2), recovery_wait_secs=30.0, **trained.given)
    with tf1.MonitoredTrainingSession("", stop_grace_period_secs=120, log_step_count_steps=None, **trained.given):
        pass
    tf1.replica_device_setter(2, merge_devices=False)
    where = "(docs/from-tensorflow.md)"
    said = [line for line in capfd.readouterr().err.splitlines() if where in line]
    assert said == [
        f"allred: SyncReplicasOptimizer: these arguments have no effect: replica_id {where}",
        f"allred: Supervisor: these arguments have no effect: ready_op, init_op {where}",
        f"allred: replica_device_setter: these arguments have no effect: merge_devices {where}",
    ]


def test_replica_device_setter_in_turn_and_by_a_strategy():
    for strategy, places in ((None, [0, 1]), (lambda _: 1, [1, 1])):
        setter = tf1.replica_device_setter(cluster={"ps": 2, "worker": 1}, ps_strategy=strategy)
        assert [setter.of_variable(None).task for _ in range(2)] == places
    assert tf1.replica_device_setter() is None


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda t: tf1.MonitoredTrainingSession(optimizer=t.opt), "there is no graph to find variables"),
        (lambda t: tf1.Supervisor().managed_session(), "Supervisor: there is no graph to find variables"),
        (lambda t: tf1.MonitoredTrainingSession(is_chief=False, **t.given), "on worker 0: the chief is worker 0"),
        (lambda t: tf1.Supervisor(is_chief=False), "on worker 0: the chief is worker 0"),
        (
            lambda t: tf1.MonitoredTrainingSession(save_checkpoint_secs=1, save_checkpoint_steps=1, **t.given),
            "one of save_checkpoint_secs and save_checkpoint_steps, not both",
        ),
        (
            lambda t: tf1.MonitoredTrainingSession(save_summaries_secs=1, save_summaries_steps=1, **t.given),
            "one of save_summaries_steps and save_summaries_secs, not both",
        ),
        (lambda t: tf1.MonitoredTrainingSession(**t.given).run("train"), "expected a function"),
        (lambda t: tf1.Supervisor(**t.given).should_stop(), "managed_session"),
        (lambda t: tf1.MonitoredTrainingSession(**t.given).should_stop(), "it has not begun; use it in a with"),
        (lambda t: tf1.StopAtStepHook(), "give one of the two"),
        (lambda t: tf1.StopAtStepHook(1, 1), "give one of the two"),
        (lambda t: tf1.SyncReplicasOptimizer(t.opt, 1), "expected an optimizer with step"),
        (lambda t: tf1.SyncReplicasOptimizer(allred.optim.SGD(lr=1.0), 2), r"each step uses all workers \(1\)"),
        (lambda t: tf1.SyncReplicasOptimizer(allred.optim.SGD(lr=1.0), 1, 2), "total_num_replicas=2"),
    ],
)
def test_what_is_refused(world, call, words):
    with pytest.raises(InputError, match=words):
        call(Trained())


def test_a_session_whose_checkpoint_is_of_another_model_lets_go_of_the_signals(world, tmp_path):
    import signal

    before = signal.getsignal(signal.SIGTERM)
    trained = Trained()
    opt = allred.distributed(allred.optim.SGD(lr=1.0))
    opt.step({"other": trained.w}, {"other": np.ones(3)})
    opt.save(tmp_path, {"other": trained.w})
    with (
        pytest.raises(allred.CheckpointError, match="another model"),
        tf1.MonitoredTrainingSession(checkpoint_dir=tmp_path, save_summaries_steps=None, **trained.given),
    ):
        pass
    assert signal.getsignal(signal.SIGTERM) == before
