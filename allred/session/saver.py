"""When a checkpoint is due, and its writing: in a thread, from a copy, while training goes on.

One is written at a time; if it is not done when the next is due, that one is made when it is. An error of the writing
does not end the training: it is said, and the next checkpoint is tried. Only the last one, at the end, raises.
"""

import threading
import time
from collections.abc import Callable

from allred import checkpoint
from allred.cluster import report
from allred.errors import AllredError, CollectiveTimeout, InputError, RemoteRankError
from allred.session.checks import whole

_TELL_S = 10.0  # between lines about them


class Saver:
    """The chief's. secs: by its clock; or steps. keep, keep_every: as checkpoint.prune has them."""

    def __init__(self, directory: str, secs: float | None, steps: int | None, keep: int, keep_every: int) -> None:
        steps = None if steps is None else whole("Session: save_steps", steps, 1)
        if secs is not None and not (isinstance(secs, (int, float)) and secs > 0):
            raise InputError(f"Session: save_secs must be a positive number of seconds, but is {secs!r}")
        if secs is not None and steps is not None:
            raise InputError(
                f"Session: checkpoints are written by seconds or by steps, but save_secs={secs!r} and "
                f"save_steps={steps!r} are both given; leave one out"
            )
        self.directory = directory
        self.saved_step: int | None = None  # of the last checkpoint that is complete, or being written
        self.blocked_s, self.written_s, self.count = 0.0, 0.0, 0  # what they have cost
        self._secs, self._steps = (600.0 if secs is None and steps is None else secs), steps
        self._keep, self._keep_every = whole("Session: keep", keep, 1), whole("Session: keep_every", keep_every, 0)
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._next_at, self._told_at = 0.0, -_TELL_S

    def begin(self, step: int) -> None:
        """Training begins at that step, of which there is a checkpoint or nothing to save."""
        self.saved_step = step
        self._next_at = time.monotonic() + (self._secs or 0.0)

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to be made after this step."""
        if step == self.saved_step or self._writes():
            return False
        if self._steps is not None:
            return step // self._steps > (self.saved_step or 0) // self._steps
        return time.monotonic() >= self._next_at

    def _writes(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def save(self, step: int, make: Callable[[], Callable[[str], str]], apart: bool) -> None:
        """make: gives what writes the checkpoint of now. apart: that may be a thread."""
        start = time.monotonic()
        self.wait()
        write = make()
        self.saved_step = step
        self._next_at = start + (self._secs or 0.0)
        if apart:
            self._thread = threading.Thread(target=self._write, args=(write,), name="allred-checkpoint", daemon=True)
            self._thread.start()
        else:
            self._write(write)
        self.blocked_s += time.monotonic() - start
        self.count += 1

    def _write(self, write: Callable[[str], str]) -> None:
        start = time.monotonic()
        try:
            path = write(self.directory)
            if start >= self._told_at + _TELL_S:
                report.inform(f"checkpoint {path}")
                self._told_at = start
        except (RemoteRankError, CollectiveTimeout):
            raise
        except Exception as error:  # whatever it is, it would be seen nowhere else
            self._error = error
            report.say(f"training goes on, but a checkpoint was not written: {str(error) or type(error).__name__}")
        else:
            self._prune()
        self.written_s += time.monotonic() - start

    @property
    def failed(self) -> bool:
        """Whether the last one was not written."""
        return self._error is not None

    def wait(self) -> None:
        """Until nothing is being written any more."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            self.saved_step, self._error = None, None

    def save_last(self, step: int, make: Callable[[], Callable[[str], str]]) -> str | None:
        """At the end, however long it takes; its path, or None if there is one of this step. Raises CheckpointError."""
        self.wait()
        if step == self.saved_step:
            return None
        start = time.monotonic()
        path = make()(self.directory)
        self.saved_step = step
        self.count += 1
        self.blocked_s += time.monotonic() - start
        self.written_s += time.monotonic() - start
        self._prune()
        return path

    def _prune(self) -> None:
        try:
            checkpoint.prune(self.directory, self._keep, self._keep_every, up_to=self.saved_step)
        except AllredError as error:
            report.say(f"an older checkpoint could not be deleted: {error}")

    def text(self) -> str:
        """What they have cost, in words.

        >>> Saver("ckpt", None, 100, 5, 0).text()
        'checkpoints: none'
        """
        if not self.count:
            return "checkpoints: none"
        return (
            f"checkpoints: {self.count} in {self.directory}; training waited {self.blocked_s:.3g} s for them, writing "
            f"took {self.written_s:.3g} s"
        )
