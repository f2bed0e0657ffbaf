"""`tf.train.MonitoredTrainingSession`: an `allred.Session` under its arguments."""

import math
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, Self

from allred.compat.tf1 import ignored
from allred.compat.tf1.hooks import OnChief
from allred.errors import InputError
from allred.session.hooks import Hook
from allred.session.session import Session
from allred.session.telling import Summary

_DEFAULT: Any = object()
_IGNORED = {"master": "", "scaffold": None, "config": None, "stop_grace_period_secs": 120, "save_graph_def": True}


class MonitoredSession(Session):
    """An `allred.Session` that has tracked what is trained when its with statement begins, and runs functions here."""

    def __init__(self, who: str, params: Any, optimizer: Any, data: Any, **arguments: Any) -> None:
        if params is None or optimizer is None:
            raise InputError(
                f"{who}: there is no graph to find variables and optimizer in; give params=, a nest of arrays, and "
                "optimizer=, what allred.distributed or SyncReplicasOptimizer gives"
            )
        super().__init__(**arguments)
        self._trained = {"params": params, "optimizer": optimizer, "data": data}
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
            self.track(**self._trained)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function, here: what TensorFlow calls an op. `should_stop` ends a step and begins the next."""
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
    """A session for the training loop, which goes on from the newest checkpoint in checkpoint_dir.

        with tf1.MonitoredTrainingSession(checkpoint_dir="ckpt", params=params, optimizer=opt) as session:
            while not session.should_stop():
                session.run(train_step)

    params, optimizer, data: what is trained; see `allred.Session.track`. is_chief: may be left out.
    save_checkpoint_secs (600), save_checkpoint_steps: one of the two; without both only the last one, at the end.
    save_summaries_steps (100), save_summaries_secs: between summaries of what `session.log` was given, into
    summary_dir, or else checkpoint_dir; without both there are none.
    log_step_count_steps: between lines with step and pace; None or 0 is "without", here as above.
    chief_only_hooks: hooks that the chief calls.
    max_wait_secs: how long the workers wait for the chief to restore.
    Of no effect: master, scaffold, config, stop_grace_period_secs, save_graph_def.
    Raises InputError for what cannot be.
    """
    who = "MonitoredTrainingSession"
    ignored.tell(who, locals(), _IGNORED)
    ignored.check_chief(who, is_chief)
    secs, steps = _one(
        who, 600.0, {"save_checkpoint_secs": save_checkpoint_secs, "save_checkpoint_steps": save_checkpoint_steps}
    )
    summary_steps, summary_secs = _one(
        who, 100, {"save_summaries_steps": save_summaries_steps, "save_summaries_secs": save_summaries_secs}
    )
    return start(
        who, params, optimizer, data,
        directory=checkpoint_dir, secs=secs, steps=steps, wait_s=max_wait_secs, summaries=summary_dir or checkpoint_dir,
        summary_steps=summary_steps, summary_secs=summary_secs,
        hooks=[*(hooks or ()), *map(OnChief, chief_only_hooks or ())], log_steps=log_step_count_steps or None,
    )  # fmt: skip


def _one(who: str, default: float, given: dict[str, Any]) -> tuple[Any, Any]:
    """The two values, of which one is None at least; the default for the first one if neither was given."""
    first, second = given.values()
    if first is _DEFAULT and second is _DEFAULT:
        return default, None
    first, second = (None if value is _DEFAULT else value or None for value in (first, second))
    if first is not None and second is not None:
        raise InputError(f"{who}: give one of {' and '.join(given)}, not both")
    return first, second


def start(
    who: str, params: Any, optimizer: Any, data: Any, *,
    directory: Any, secs: float | None, steps: int | None, wait_s: float, summaries: Any,
    summary_steps: int | None, summary_secs: float | None, hooks: list[Hook], log_steps: int | None,
) -> MonitoredSession:  # fmt: skip
    """The session, for all of TensorFlow's ways to one."""
    if secs is None and steps is None:
        secs = math.inf
    if summaries and (summary_steps or summary_secs):
        hooks = [*hooks, Summary(os.fspath(summaries), summary_steps or 100, every_secs=summary_secs)]
    saving = {"save_secs": secs, "save_steps": steps} if directory else {}
    return MonitoredSession(
        who, params, optimizer, data,
        checkpoint_dir=directory, hooks=hooks, log_steps=log_steps, wait_for_chief_s=wait_s, **saving,
    )  # fmt: skip
