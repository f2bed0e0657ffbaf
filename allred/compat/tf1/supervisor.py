"""`tf.train.Supervisor`: what came before MonitoredTrainingSession."""

import os
import sys
from collections.abc import Iterable
from typing import Any

from allred.compat.tf1 import ignored
from allred.compat.tf1.training_session import MonitoredSession, start
from allred.errors import InputError

_IGNORED = {
    "graph": None, "ready_op": None, "ready_for_local_init_op": None, "init_op": None, "init_feed_dict": None,
    "local_init_op": None, "summary_op": None, "saver": None, "global_step": None, "recovery_wait_secs": 30,
    "stop_grace_secs": 120, "checkpoint_basename": "model.ckpt", "session_manager": None, "summary_writer": None,
    "init_fn": None, "local_init_run_options": None,
}  # fmt: skip


class Supervisor:
    """Around a training loop: it goes on from the newest checkpoint in logdir, and writes checkpoints and summaries.

        sv = tf1.Supervisor(is_chief=task_index == 0, logdir="logs", params=params, optimizer=opt)
        with sv.managed_session(server.target) as session:
            while not sv.should_stop() and session.step < 1000:
                session.run(train_step)

    params, optimizer, data: what is trained; see `allred.Session.track`. is_chief: may be left out.
    logdir: of checkpoints and summaries; None: none of both. save_model_secs: between checkpoints; 0: only the last
    one, at the end. save_summaries_secs: between summaries of what `session.log` was given; 0: none.
    All other arguments have no effect. Raises InputError for what cannot be.
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
        ignored.tell("Supervisor", locals(), _IGNORED)
        ignored.check_chief("Supervisor", is_chief)
        self._trained = params, optimizer, data
        self._logdir, self._secs = logdir, (save_model_secs, save_summaries_secs)
        self._session: MonitoredSession | None = None

    def managed_session(
        self,
        master: str = "",
        config: Any = None,
        start_standard_services: bool = True,
        close_summary_writer: bool = True,
    ) -> MonitoredSession:
        """The session of the training loop, for a with statement. master and config have no effect."""
        ignored.tell("Supervisor.managed_session", locals(), {"master": "", "config": None})
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
        ignored.tell("Supervisor.prepare_or_wait_for_session", locals(), given)
        return self._new(start_standard_services, max_wait_secs).begin()

    def _new(self, services: bool, wait_s: float) -> MonitoredSession:
        secs, summary_secs = (seconds if services and seconds > 0 else None for seconds in self._secs)
        self._session = start(
            "Supervisor", *self._trained,
            directory=self._logdir, secs=secs, steps=None, wait_s=wait_s, summaries=self._logdir, summary_steps=None,
            summary_secs=summary_secs, hooks=[], log_steps=100,
        )  # fmt: skip
        return self._session

    @property
    def session(self) -> MonitoredSession:
        """The one that was made last. Raises InputError before."""
        if self._session is None:
            raise InputError("Supervisor: call managed_session() or prepare_or_wait_for_session() first")
        return self._session

    def should_stop(self) -> bool:
        """Whether the loop ends; else a step begins, so call it once for each: `allred.Session.should_stop`."""
        return self.session.should_stop()

    def request_stop(self, ex: BaseException | None = None) -> None:
        """Have the loop end on all workers. An exception is raised here."""
        if ex is not None:
            raise ex
        self.session.request_stop()

    def stop(self, threads: Any = None, close_summary_writer: bool = True, ignore_live_threads: bool = False) -> None:
        """End the session that `prepare_or_wait_for_session` began, and write the last checkpoint. In a `finally`
        clause the session ends with the exception that is being handled, if there is one."""
        self.session.end(sys.exc_info()[1])

    def start_queue_runners(self, sess: Any, queue_runners: Iterable[Any] | None = None) -> list[Any]:
        """Nothing: there are no queues."""
        return []
