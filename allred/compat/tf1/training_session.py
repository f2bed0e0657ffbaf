"""Sessions with the arguments of TensorFlow: `tf.Session`, `tf.train.MonitoredTrainingSession`, `tf.train.Supervisor`.

Also their hooks, `tf.ConfigProto`, `tf.train.replica_device_setter`, and the warning of arguments without effect.
"""

import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

from allred import log
from allred.client.client_session import ClientSession, connect
from allred.cluster import topology
from allred.errors import InputError
from allred.ps import variable
from allred.session.hooks import Hook, Outcome, StopAtStep, Summary
from allred.session.session import Session as TrainingSession

_warned: set[str] = set()


def warn_ignored(who: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Warn once, on the chief, of the arguments in `defaults` that differ from their defaults. Ignores other names."""
    names = [name for name, default in defaults.items() if given[name] is not None and given[name] is not default]
    odd = [name for name in names if not (isinstance(given[name], (int, float, str)) and given[name] == defaults[name])]
    line = f"{who}: these arguments have no effect: {', '.join(odd)} (docs/from-tensorflow.md)"
    if odd and line not in _warned:
        _warned.add(line)
        log.warning(line)


def check_chief(who: str, is_chief: bool | None) -> None:
    """Raise InputError if the argument is_chief is wrong for this rank."""
    if is_chief is not None and bool(is_chief) != topology.is_chief():
        raise InputError(
            f"{who}(is_chief={is_chief!r}) on {topology.role()}: the chief is worker 0; leave is_chief out, or give "
            "task_index == 0"
        )


class ConfigProto:
    """Settings of a session.

        config = tf1.ConfigProto(allow_soft_placement=True, log_device_placement=True)
        session = tf1.Session(server.target, config=config)

    allow_soft_placement, log_device_placement: see `allred.connect`. more: TensorFlow's other settings; no effect.
    """

    def __init__(self, *, allow_soft_placement: bool = False, log_device_placement: bool = False, **more: Any) -> None:
        self.allow_soft_placement, self.log_device_placement = allow_soft_placement, log_device_placement
        warn_ignored("ConfigProto", more, dict.fromkeys(more))


def Session(  # noqa: N802  (TensorFlow's name)
    target: str = "", graph: Any = None, config: ConfigProto | None = None
) -> ClientSession:
    """Call `allred.connect` with TensorFlow's arguments. Returns a session that runs functions. `graph` has no effect.

        session = tf1.Session(server.target)
        y = session.run(function, x)

    Raises InputError for a wrong target or config, NotInitializedError in a process that is not a task of a cluster.
    """
    warn_ignored("Session", locals(), {"graph": None})
    if not isinstance(config, ConfigProto | None):
        raise InputError(f"Session(config={config!r}): expected a tf1.ConfigProto or None")
    config = config or ConfigProto()
    return connect(
        target,
        log_device_placement=config.log_device_placement,
        allow_soft_placement=config.allow_soft_placement,
    )


def replica_device_setter(
    ps_tasks: int = 0,
    ps_device: str = "/job:ps",
    worker_device: str = "/job:worker",
    merge_devices: bool = True,
    cluster: Any = None,
    ps_ops: Any = None,
    ps_strategy: Callable[[Any], int] | None = None,
) -> Any:
    """Call `allred.replica_device_setter` with TensorFlow's arguments.

        with allred.device(tf1.replica_device_setter(cluster=cluster)): ...

    ps_strategy: a function that returns the number of the server for a variable; None: round robin. No effect:
    ps_device, which is always job "ps", merge_devices, ps_ops."""
    warn_ignored("replica_device_setter", locals(), {"ps_device": "/job:ps", "merge_devices": True, "ps_ops": None})
    strategy = "round_robin" if ps_strategy is None else ps_strategy
    return variable.replica_device_setter(ps_tasks, worker_device=worker_device, cluster=cluster, ps_strategy=strategy)


_DEFAULT: Any = object()
_IGNORED_TRAINING = {
    "master": "", "scaffold": None, "config": None, "stop_grace_period_secs": 120, "save_graph_def": True,
}  # fmt: skip
_IGNORED_SUPERVISOR = {
    "graph": None, "ready_op": None, "ready_for_local_init_op": None, "init_op": None, "init_feed_dict": None,
    "local_init_op": None, "summary_op": None, "saver": None, "global_step": None, "recovery_wait_secs": 30,
    "stop_grace_secs": 120, "checkpoint_basename": "model.ckpt", "session_manager": None, "summary_writer": None,
    "init_fn": None, "local_init_run_options": None,
}  # fmt: skip


class StopAtStepHook(StopAtStep):
    """Stops after `num_steps` more steps, or at the global step `last_step`.

        hooks=[tf1.StopAtStepHook(last_step=1000)]

    Raises InputError unless one of the two is given.
    """

    def __init__(self, num_steps: int | None = None, last_step: int | None = None) -> None:
        if (num_steps is None) == (last_step is None):
            raise InputError(f"StopAtStepHook(num_steps={num_steps!r}, last_step={last_step!r}): give one of the two")
        self._num_steps = num_steps
        super().__init__(last_step if num_steps is None else num_steps)  # type: ignore[arg-type]

    def begin(self, session: TrainingSession) -> None:
        if self._num_steps is not None:
            self.last_step = session.step + self._num_steps
        super().begin(session)


class _ChiefOnly(Hook):
    """A hook that only the chief calls. Its state is not part of the checkpoints."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    def begin(self, session: TrainingSession) -> None:
        if session.is_chief:
            self._hook.begin(session)

    def before_step(self, session: TrainingSession) -> None:
        if session.is_chief:
            self._hook.before_step(session)

    def after_step(self, session: TrainingSession, values: dict[str, float]) -> None:
        if session.is_chief:
            self._hook.after_step(session, values)

    def end(self, session: TrainingSession, outcome: Outcome) -> None:
        if session.is_chief:
            self._hook.end(session, outcome)


class MonitoredSession(TrainingSession):
    """An `allred.Session` that calls `track` when its with statement begins, and runs functions in this process."""

    def __init__(self, who: str, params: Any, optimizer: Any, data: Any, **arguments: Any) -> None:
        if params is None or optimizer is None:
            raise InputError(
                f"{who}: there is no graph to find variables and optimizer in; give params=, a nest of arrays, and "
                "optimizer=, the result of allred.distributed or SyncReplicasOptimizer"
            )
        super().__init__(**arguments)
        self._tracked = {"params": params, "optimizer": optimizer, "data": data}
        self._begun = False  # whether `begin` was called and no with statement has followed

    def begin(self) -> Self:
        """Begin the session without a with statement, for `Supervisor.prepare_or_wait_for_session`."""
        self.__enter__()
        self._begun = True
        return self

    def __enter__(self) -> Self:
        if self._begun:
            self._begun = False
            return self
        super().__enter__()
        try:
            self.track(**self._tracked)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function in this process and return its result, instead of running an op. `should_stop` ends a step
        and begins the next. Raises InputError for other objects."""
        if not callable(function):
            raise InputError(f"run({function!r}): there is no graph; expected a function and its arguments")
        return function(*args, **kwargs)


def MonitoredTrainingSession(  # noqa: N802  (TensorFlow's name)
    master: str = "",
    is_chief: bool | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    scaffold: Any = None,
    hooks: Iterable[Hook] | None = None,
    chief_only_hooks: Iterable[Hook] | None = None,
    save_checkpoint_secs: float | None = _DEFAULT,
    save_summaries_steps: int | None = _DEFAULT,
    save_summaries_secs: float | None = _DEFAULT,
    config: Any = None,
    stop_grace_period_secs: float = 120,
    log_step_count_steps: int | None = 100,
    max_wait_secs: float = 7200,
    save_checkpoint_steps: int | None = _DEFAULT,
    summary_dir: str | os.PathLike[str] | None = None,
    save_graph_def: bool = True,
    *,
    params: Any = None,
    optimizer: Any = None,
    data: Any = None,
) -> MonitoredSession:
    """Return a session for the training loop, which resumes from the newest checkpoint in checkpoint_dir.

        with tf1.MonitoredTrainingSession(checkpoint_dir="ckpt", params=params, optimizer=opt) as session:
            while not session.should_stop():
                session.run(train_step)

    params, optimizer, data: see `allred.Session.track`. is_chief: may be left out.
    save_checkpoint_secs (600), save_checkpoint_steps: the interval, one of the two; None or 0 for both: only the last
    checkpoint, at the end.
    save_summaries_steps (100), save_summaries_secs: the interval of summaries of the logged values, one of the two,
    into summary_dir, by default checkpoint_dir; None or 0 for both: no summaries.
    log_step_count_steps: steps between lines with step and throughput; None or 0: no lines.
    chief_only_hooks: hooks that only the chief calls.
    max_wait_secs: time limit in seconds for the chief's restore.
    No effect: master, scaffold, config, stop_grace_period_secs, save_graph_def.
    Raises InputError for invalid arguments.
    """
    who = "MonitoredTrainingSession"
    warn_ignored(who, locals(), _IGNORED_TRAINING)
    check_chief(who, is_chief)
    secs, steps = _interval(
        who, 600.0, {"save_checkpoint_secs": save_checkpoint_secs, "save_checkpoint_steps": save_checkpoint_steps}
    )
    summary_steps, summary_secs = _interval(
        who, 100, {"save_summaries_steps": save_summaries_steps, "save_summaries_secs": save_summaries_secs}
    )
    return _new_session(
        who, params, optimizer, data,
        directory=checkpoint_dir, secs=secs, steps=steps, wait_s=max_wait_secs, summaries=summary_dir or checkpoint_dir,
        summary_steps=summary_steps, summary_secs=summary_secs,
        hooks=[*(hooks or ()), *map(_ChiefOnly, chief_only_hooks or ())], log_steps=log_step_count_steps or None,
    )  # fmt: skip


def _interval(who: str, default: float, given: dict[str, Any]) -> tuple[Any, Any]:
    """Return the two values, at least one of them None; `default` for the first if neither was given."""
    first, second = given.values()
    if first is _DEFAULT and second is _DEFAULT:
        return default, None
    first, second = (None if value is _DEFAULT else value or None for value in (first, second))
    if first is not None and second is not None:
        raise InputError(f"{who}: give one of {' and '.join(given)}, not both")
    return first, second


def _new_session(
    who: str, params: Any, optimizer: Any, data: Any, *,
    directory: Any, secs: float | None, steps: int | None, wait_s: float, summaries: Any,
    summary_steps: int | None, summary_secs: float | None, hooks: list[Hook], log_steps: int | None,
) -> MonitoredSession:  # fmt: skip
    if secs is None and steps is None:
        secs = math.inf
    if summaries and (summary_steps or summary_secs):
        hooks = [*hooks, Summary(os.fspath(summaries), summary_steps or 100, every_secs=summary_secs)]
    saving = {"save_secs": secs, "save_steps": steps} if directory else {}
    return MonitoredSession(
        who, params, optimizer, data,
        checkpoint_dir=directory, hooks=hooks, log_steps=log_steps, wait_for_chief_s=wait_s, **saving,
    )  # fmt: skip


class Supervisor:
    """Makes sessions that resume from the newest checkpoint in logdir, and write checkpoints and summaries.

        sv = tf1.Supervisor(is_chief=task_index == 0, logdir="logs", params=params, optimizer=opt)
        with sv.managed_session(server.target) as session:
            while not sv.should_stop() and session.step < 1000:
                session.run(train_step)

    params, optimizer, data: see `allred.Session.track`. is_chief: may be left out.
    logdir: the directory of checkpoints and summaries; None: neither is written. save_model_secs: seconds between
    checkpoints; 0: only the last one, at the end. save_summaries_secs: seconds between summaries of the logged values;
    0: no summaries.

    All other arguments have no effect. Raises InputError for invalid arguments.
    """

    def __init__(
        self,
        graph: Any = None,
        ready_op: Any = None,
        ready_for_local_init_op: Any = None,
        is_chief: bool | None = None,
        init_op: Any = None,
        init_feed_dict: Any = None,
        local_init_op: Any = None,
        logdir: str | os.PathLike[str] | None = None,
        summary_op: Any = None,
        saver: Any = None,
        global_step: Any = None,
        save_summaries_secs: float = 120,
        save_model_secs: float = 600,
        recovery_wait_secs: float = 30,
        stop_grace_secs: float = 120,
        checkpoint_basename: str = "model.ckpt",
        session_manager: Any = None,
        summary_writer: Any = None,
        init_fn: Any = None,
        local_init_run_options: Any = None,
        *,
        params: Any = None,
        optimizer: Any = None,
        data: Any = None,
    ) -> None:
        warn_ignored("Supervisor", locals(), _IGNORED_SUPERVISOR)
        check_chief("Supervisor", is_chief)
        self._tracked = params, optimizer, data
        self._logdir, self._secs = logdir, (save_model_secs, save_summaries_secs)
        self._session: MonitoredSession | None = None

    def managed_session(
        self,
        master: str = "",
        config: Any = None,
        start_standard_services: bool = True,
        close_summary_writer: bool = True,
    ) -> MonitoredSession:
        """Return the session of the training loop, for a with statement. master and config have no effect."""
        warn_ignored("Supervisor.managed_session", locals(), {"master": "", "config": None})
        return self._new(start_standard_services, 7200.0)

    def prepare_or_wait_for_session(
        self,
        master: str = "",
        config: Any = None,
        wait_for_checkpoint: bool = False,
        max_wait_secs: float = 7200,
        start_standard_services: bool = True,
    ) -> MonitoredSession:
        """Return a session that has already begun. It may also be used in a with statement.

        `stop` ends the session, else the end of the program does. The last checkpoint is written in both cases, also
        after an exception, but not if the process is killed."""
        given = {"master": "", "config": None, "wait_for_checkpoint": False}
        warn_ignored("Supervisor.prepare_or_wait_for_session", locals(), given)
        return self._new(start_standard_services, max_wait_secs).begin()

    def _new(self, services: bool, wait_s: float) -> MonitoredSession:
        secs, summary_secs = (seconds if services and seconds > 0 else None for seconds in self._secs)
        self._session = _new_session(
            "Supervisor", *self._tracked,
            directory=self._logdir, secs=secs, steps=None, wait_s=wait_s, summaries=self._logdir, summary_steps=None,
            summary_secs=summary_secs, hooks=[], log_steps=100,
        )  # fmt: skip
        return self._session

    @property
    def session(self) -> MonitoredSession:
        """The last session. Raises InputError before the first."""
        if self._session is None:
            raise InputError("Supervisor: call managed_session() or prepare_or_wait_for_session() first")
        return self._session

    def should_stop(self) -> bool:
        """Return whether the loop ends, and else begin a step: call it once per step. See `allred.Session`."""
        return self.session.should_stop()

    def request_stop(self, ex: BaseException | None = None) -> None:
        """End the loop on all workers. Raises `ex` if it is given."""
        if ex is not None:
            raise ex
        self.session.request_stop()

    def stop(self, threads: Any = None, close_summary_writer: bool = True, ignore_live_threads: bool = False) -> None:
        """End the session that `prepare_or_wait_for_session` began, and write the last checkpoint. In a `finally`
        clause the session ends with the exception that is being handled, if there is one."""
        self.session.end(sys.exc_info()[1])

    def start_queue_runners(self, sess: Any, queue_runners: Iterable[Any] | None = None) -> list[Any]:
        """Return an empty list: there are no queues."""
        return []
