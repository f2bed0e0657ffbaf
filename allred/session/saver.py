"""Writes periodic checkpoints: in a thread, from a copy, while training continues. Also the hook `Checkpoint`.

One checkpoint is written at a time; a checkpoint that becomes due meanwhile is made afterwards. An error while writing
does not end training: it is printed, and the next checkpoint is tried. Only the final checkpoint raises errors.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from allred import checkpoint, log
from allred.errors import AllredError, CollectiveTimeout, InputError, RemoteRankError
from allred.session.hooks import Hook, LoggedValue, Outcome, SessionView, check_integer

Write = Callable[[str], str]  # writes a checkpoint into the given directory and returns its path
Capture = Callable[[], Write]  # captures the current state

_LOG_PERIOD_S = 10.0


def check_path(title: str, value: Any) -> str:
    """Return a path as text. Raises InputError, which begins with `title`.

    >>> check_path("Session: checkpoint_dir", "ckpt")
    'ckpt'
    """
    try:
        path = os.fspath(value)
    except TypeError:
        path = ""
    if not path or not isinstance(path, str):
        raise InputError(f"{title}={value!r} is not a path")
    return path


class Saver:
    """Writes checkpoints on the chief. secs, steps: the interval; one of them, or neither for 600 s. keep, keep_every:
    see checkpoint.prune. Raises InputError."""

    def __init__(self, directory: str, secs: float | None, steps: int | None, keep: int, keep_every: int) -> None:
        steps = None if steps is None else check_integer("Session: save_steps", steps, 1)
        if secs is not None and not (isinstance(secs, (int, float)) and secs > 0):
            raise InputError(f"Session: save_secs must be a positive number of seconds, but is {secs!r}")
        if secs is not None and steps is not None:
            raise InputError(
                f"Session: checkpoints are written by seconds or by steps, but save_secs={secs!r} and "
                f"save_steps={steps!r} are both given; leave one out"
            )
        self.directory = directory
        self.saved_step: int | None = None  # of the last checkpoint that is complete or being written
        self.count = self.failures = 0
        self.blocked_s, self.written_s = 0.0, 0.0  # seconds that training waited; seconds of writing
        self._secs, self._steps = (600.0 if secs is None and steps is None else secs), steps
        self._keep = check_integer("Session: keep", keep, 1)
        self._keep_every = check_integer("Session: keep_every", keep_every, 0)
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._next_at, self._logged_at = 0.0, -_LOG_PERIOD_S

    def begin(self, step: int) -> None:
        """Start the interval at `step`, which is restored or needs no checkpoint."""
        self.saved_step = step
        self._next_at = time.monotonic() + (self._secs or 0.0)

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due after this step."""
        if step == self.saved_step or (self._thread is not None and self._thread.is_alive()):
            return False
        if self._steps is not None:
            return step // self._steps > (self.saved_step or 0) // self._steps
        return time.monotonic() >= self._next_at

    def save(self, step: int, capture: Capture, in_thread: bool) -> None:
        """Capture the current state, and write it in a thread or now."""
        start = time.monotonic()
        self.wait()
        write = capture()
        self.saved_step = step
        self._next_at = start + (self._secs or 0.0)
        if in_thread:
            self._thread = threading.Thread(target=self._write, args=(write,), name="allred-checkpoint", daemon=True)
            self._thread.start()
        else:
            self._write(write)
        self.blocked_s += time.monotonic() - start

    def _write(self, write: Write) -> None:
        start = time.monotonic()
        try:
            path = write(self.directory)
            if start >= self._logged_at + _LOG_PERIOD_S:
                log.info(f"checkpoint {path}")
                self._logged_at = start
        except (RemoteRankError, CollectiveTimeout):
            raise
        except Exception as error:  # nothing else would show an error of this thread
            self._error = error
            self.failures += 1
            log.warning(f"a checkpoint was not written, training continues: {str(error) or type(error).__name__}")
        else:
            self.count += 1
            self._prune()
        self.written_s += time.monotonic() - start

    @property
    def failed(self) -> bool:
        """Whether the last checkpoint was not written."""
        return self._error is not None

    def wait(self) -> None:
        """Wait until no checkpoint is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            self.saved_step, self._error = None, None

    def save_final(self, step: int, capture: Capture) -> str | None:
        """Write now, without a time limit. Returns the path, or None if this step is saved. Raises CheckpointError."""
        self.wait()
        if step == self.saved_step:
            return None
        start = time.monotonic()
        try:
            path = capture()(self.directory)
        except BaseException:
            self.failures += 1
            raise
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
            log.warning(f"an older checkpoint could not be deleted: {error}")

    def summary(self) -> str:
        """Return the number of checkpoints and the time they took, as text.

        >>> Saver("ckpt", None, 100, 5, 0).summary()
        'checkpoints: none'
        """
        if not self.count and not self.failures:
            return "checkpoints: none"
        failed = f", {self.failures} failed" if self.failures else ""
        return (
            f"checkpoints: {self.count} written to {self.directory}{failed}; training waited {self.blocked_s:.3g} s "
            f"for them, writing took {self.written_s:.3g} s"
        )


def check_directories(hooks: Iterable[Hook], directory: str) -> None:
    """Raise InputError if two writers of checkpoints share a directory. directory: that of the session, or ""."""
    used = [hook.directory for hook in hooks if isinstance(hook, Checkpoint)]
    used = [os.path.realpath(path) for path in [*used, directory] if path]
    if shared := next((path for path in used if used.count(path) > 1), None):
        raise InputError(
            f"Session: two writers of checkpoints share the directory {shared}, and would delete each other's "
            "checkpoints; give each Checkpoint hook its own directory"
        )


class Checkpoint(Hook):
    """Writes checkpoints into its own directory: every `every_steps` steps, or when a logged value is the best so far.

    every_steps: steps between checkpoints. best: the name of the logged value; mode: "min" or "max" is better. Give
    every_steps or best. keep: the number of checkpoints to keep. The chief writes. Any session can restore them.
    Raises InputError for other arguments.

        hooks=[Checkpoint("best", best="accuracy", mode="max")]
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        every_steps: int | None = None,
        best: str | None = None,
        mode: str = "min",
        keep: int = 1,
    ) -> None:
        if (every_steps is None) == (best is None) or mode not in ("min", "max"):
            raise InputError(
                f"Checkpoint(every_steps={every_steps!r}, best={best!r}, mode={mode!r}): give every_steps or best; "
                "mode is 'min' or 'max'"
            )
        self.directory = check_path("Checkpoint: directory", directory)
        self._saver = Saver(self.directory, None, 1 if every_steps is None else every_steps, keep, 0)
        self._value = None if best is None else LoggedValue("Checkpoint", best)
        self._sign = 1 if mode == "min" else -1
        self.best = self._previous_best = math.inf  # times the sign

    def begin(self, session: SessionView) -> None:
        self._saver.begin(session.step)
        newest = checkpoint.newest(self.directory) if session.is_chief else None
        if newest is not None and checkpoint.read_manifest(newest).step > session.step:
            log.warning(
                f"Checkpoint: {newest} is of a later step than this training, which begins at step {session.step}; it "
                "is not deleted, and a restore from this directory uses it"
            )

    def after_step(self, session: SessionView, values: dict[str, float]) -> None:
        if self._value is None:
            due = self._saver.due(session.step)
        else:
            if self._saver.failed:
                self.best = self._previous_best
            found = self._value.of(values)
            value = math.inf if found is None else self._sign * found
            if due := value < self.best:
                self._previous_best, self.best = self.best, value
        if due and session.is_chief:
            session.save_by(self._saver)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value so far."""
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.best = state["best"]

    def end(self, session: SessionView, outcome: Outcome) -> None:
        self._saver.wait()
