"""A Spark job in a thread of its own, so that another thread or Ctrl-C can cancel it.

Ctrl-C cannot cancel a job of the thread that it interrupts: the connection of this thread to the JVM waits for the job.
"""

import re
import uuid
from collections.abc import Callable
from typing import Any

from allred.errors import AllredError

_AGAIN_S = 0.5
_REASONS = (r"ExecutorLostFailure.*", r"(?<=failure reason: ).+", r"(?<=SparkException: ).+", r"\S.*")


class SparkJobFailed(AllredError):  # noqa: N818  (it is not a bug of the driver)
    """Spark has ended the job: an executor is lost, or a task of the job failed."""


class SparkJob:
    """A running job. action: runs it and returns its result. subject: the subject of the job, for errors."""

    def __init__(self, context: Any, subject: str, action: Callable[[], Any]) -> None:
        from pyspark import InheritableThread

        self._context, self._subject, self._action = context, subject, action
        self._tag = f"allred-{uuid.uuid4().hex}"
        self._result: Any = None
        self._error: Exception | None = None
        self._thread = InheritableThread(target=self._run, name="allred-spark-job", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._context.addJobTag(self._tag)
            self._result = self._action()
        except Exception as error:
            self._error = error

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> Any:
        """Return the result. Raises SparkJobFailed if Spark ended the job. Ctrl-C cancels the job."""
        try:
            self._thread.join()
        except BaseException:
            self.cancel()
            raise
        if self._error is not None:
            raise SparkJobFailed(f"Spark ended {self._subject}: {reason_of(self._error)}") from self._error
        return self._result

    def request_cancel(self) -> None:
        """Let Spark cancel the job, if it has begun and the context has not been stopped."""
        if self._context._jsc is not None:
            self._context.cancelJobsWithTag(self._tag)

    def cancel(self, grace_s: float = 0.0) -> None:
        """Wait until the job has ended; cancel it after grace_s seconds."""
        self._thread.join(grace_s)
        while self._thread.is_alive():
            self.request_cancel()
            self._thread.join(_AGAIN_S)


def reason_of(error: Exception) -> str:
    """Return the reason in an exception of Spark, one line: of the last Python traceback in it, if there is one."""
    text, traceback, last = str(error).rpartition("Traceback (most recent call last):")
    patterns = (r"(?m)^\S.*",) if traceback else _REASONS
    found = (re.search(pattern, last) for pattern in patterns)
    return next((match.group() for match in found if match), text)[:500]
