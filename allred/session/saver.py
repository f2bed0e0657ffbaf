"""Checkpoints of a session: the Saver of periodic ones, the hook `Checkpoint`, and the session's part of the content.

The Saver writes in a thread, from a copy, while training continues. If no thread can be started, training waits. One
checkpoint is written at a time; a checkpoint that becomes due meanwhile is made afterwards. An error while writing does
not end training: it is printed, and the next checkpoint is tried. Only the final checkpoint raises errors.

SessionState holds the position in the data, random states, hooks, and the objects given to `track`. Each part is
pickled separately, so that errors name the part. Before training a failure is an error; later the part is left out of
the checkpoint with a warning, because the parameters matter more.
"""

import contextlib
import math
import os
import pickle
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

from allred import checkpoint, log
from allred.cluster import topology
from allred.data.distributed_batch_sampler import DistributedBatchSampler, sampler_of
from allred.errors import AllredError, CheckpointError, CollectiveTimeout, InputError, RemoteRankError
from allred.modes.sync import has_state
from allred.session import state_pickle
from allred.session.hooks import Hook, LoggedValue, Outcome
from allred.validators import integer
from allred.watch import wait

Write = Callable[[str], str]  # writes a checkpoint into the given directory and returns its path
Capture = Callable[[], Write]  # captures the current state

T = TypeVar("T")

_LOG_PERIOD_S = 10.0
_RANDOM = "random states"  # the part of a checkpoint with the `random_states` of each rank
_UNPICKLED_RANDOM = "random generators"  # the same of earlier versions, not pickled; checkpoints have it: keep it


def check_path(title: str, value: Any) -> str:
    """Return a path as text. Raises InputError, which begins with `title`."""
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
        steps = None if steps is None else integer("Session: save_steps", steps, 1)
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
        self._keep = integer("Session: keep", keep, 1)
        self._keep_every = integer("Session: keep_every", keep_every, 0)
        self._thread: threading.Thread | None = None
        self.error: Exception | None = None
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
        self._thread = self._start_thread(write) if in_thread else None
        if self._thread is None:
            with wait.busy() if in_thread else contextlib.nullcontext():
                self._write(write)
        self.blocked_s += time.monotonic() - start

    def _start_thread(self, write: Write) -> threading.Thread | None:
        """Write in a thread. Return None if this process cannot start one."""
        thread = threading.Thread(target=self._write, args=(write,), name="allred-checkpoint", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return None
        return thread

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
            self.error = error
            self.failures += 1
            log.warning(f"a checkpoint was not written, training continues: {str(error) or type(error).__name__}")
        else:
            self.count += 1
            self._prune()
        self.written_s += time.monotonic() - start

    def wait(self) -> None:
        """Wait until no checkpoint is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self.error is not None:
            self.saved_step, self.error = None, None

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
        """Return the number of checkpoints and the time they took, as text."""
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

    def begin(self, session: Any) -> None:
        self._saver.begin(session.step)

    def after_step(self, session: Any, values: dict[str, float]) -> None:
        if self._value is None:
            due = self._saver.due(session.step)
        else:
            if self._saver.error is not None:
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

    def end(self, session: Any, outcome: Outcome) -> None:
        self._saver.wait()


PickledParts = dict[str, Any]


def random_states() -> bytes:
    """Return the pickled states of Python's `random`, of numpy's global generator, and of torch's if torch is imported:
    about 11 kB. A checkpoint has those of all ranks, so only the own one is unpickled."""
    torch = sys.modules.get("torch")
    state = None if torch is None else torch.get_rng_state().numpy().tobytes()
    return pickle.dumps((random.getstate(), np.random.get_state(), state))


def _set_random_states(python: Any, of_numpy: Any, of_torch: bytes | None = None) -> None:
    random.setstate(python)
    np.random.set_state(of_numpy)
    if of_torch is not None and (torch := sys.modules.get("torch")) is not None:
        torch.set_rng_state(torch.frombuffer(bytearray(of_torch), dtype=torch.uint8))


class SessionState:
    """The state of a session on this rank. hooks: of any type. data, more: the arguments of `track`.

    Raises InputError for an object without state_dict, and for a state that cannot be pickled."""

    def __init__(self, hooks: Iterable[Any], data: Any, more: dict[str, Any]) -> None:
        for name, value in more.items():
            if not has_state(value):
                raise InputError(
                    f"session.track({name}=...): {type(value).__name__} has no state_dict, load_state_dict"
                )
        data = sampler_of(data) or data
        self._data = data if has_state(data) else None
        self._more = {f"'{name}'": value for name, value in more.items()}
        self._hooks = [hook for hook in hooks if has_state(hook)]
        self._position = self._data_position()  # after the last batch that an update used
        self._left_out: set[str] = set()
        self._kept: PickledParts | None = None
        for title, get_state in self._parts(None):
            _pickle(title, get_state)

    @staticmethod
    def follow(batches: Iterable[T]) -> Iterable[T]:
        """Return `batches`; of a loader that uses a DistributedBatchSampler, so that the sampler's position follows
        it."""
        sampler = None if isinstance(batches, DistributedBatchSampler) else sampler_of(batches)
        return batches if sampler is None else sampler.follow(batches)

    def warn_untracked(self, batches: Any) -> None:
        """Warn if `batches`, or the sampler of a torch DataLoader, has a state but was not given to `track`."""
        if self._data is None and has_state(sampler_of(batches) or batches):
            log.warning(
                "session.steps(): training that resumes from a checkpoint starts this data from the beginning, though "
                "it can continue behind the last batch; pass it to session.track(data=...) too"
            )
        samplers = (
            [] if sampler_of(batches) else [getattr(batches, each, None) for each in ("sampler", "batch_sampler")]
        )
        tracked = [self._data, *self._more.values()]
        for sampler in filter(has_state, samplers):
            if not any(each is batches or each is sampler for each in tracked):
                log.warning(
                    f"session.steps(): the state of the loader's {type(sampler).__name__} is not saved, because it may "
                    "be ahead of training; use an allred.data.DistributedBatchSampler, or session.track(sampler=...)"
                )

    def note_position(self) -> None:
        """Record the position in the data: an update has used all batches so far."""
        self._position = self._data_position()

    def _data_position(self) -> Any:
        return None if self._data is None else self._data.state_dict()

    def pickle(self, randoms: dict[int, bytes] | None, uses_saved_position: bool) -> PickledParts:
        """Return all parts, pickled. randoms: the `random_states` by rank; None: only of this rank.
        uses_saved_position: use the position of `note_position`, not the current one: the current batch is repeated
        after a restore."""
        parts: PickledParts = {}
        for title, get_state in self._parts(randoms, uses_saved_position):
            pickles = parts.setdefault(title, [])
            try:
                pickles.append(_pickle(title, get_state))
            except InputError as error:
                pickles.append(None)
                if title not in self._left_out:
                    self._left_out.add(title)
                    log.rank_warning(f"a part is left out of the checkpoint: {error}")
        return parts

    def _parts(
        self, randoms: dict[int, bytes] | None, uses_saved_position: bool = True
    ) -> list[tuple[str, Callable[[], Any]]]:
        """Return titles and functions that return the states."""
        return [
            ("the data", lambda: self._position if uses_saved_position else self._data_position()),
            (_RANDOM, lambda: {topology.rank(): random_states()} if randoms is None else randoms),
            *((title, owner.state_dict) for title, owner in self._owners()),
        ]

    def load(self, parts: PickledParts, where: str | os.PathLike[str]) -> None:
        """Restore the result of `pickle`. The hooks may differ; hooks of the same class are matched by their order.
        A warning names what the checkpoint lacks. Raises CheckpointError for a part that cannot be unpickled."""
        left = {title: list(pickles) for title, pickles in parts.items()}

        def take(title: str) -> Any:
            data = left[title].pop(0) if left.get(title) else None
            try:
                return None if data is None else state_pickle.loads(data)
            except Exception as error:  # unpickling runs code of the user
                raise CheckpointError(
                    f"the state of {title} in {where} cannot be loaded: {type(error).__name__}: {error}"
                ) from error

        lacking = [title for title in self._more if not any(left.get(title, ()))]
        if (position := take("the data")) is not None and self._data is not None:
            self._data.load_state_dict(position)
            self._position = position
        elif self._data is not None:
            lacking.insert(0, "the data")
        if lacking:
            log.warning(f"{where} was saved without the state of {', '.join(lacking)}: training begins with a new one")
        left[_RANDOM] = [(take(_RANDOM) or {}).get(topology.rank())]  # pickled again
        states = take(_RANDOM) or (take(_UNPICKLED_RANDOM) or {}).get(topology.rank())
        if states is not None:
            _set_random_states(*states)
        for title, owner in self._owners():
            if (state := take(title)) is not None:
                owner.load_state_dict(state)

    def receive(self, parts: PickledParts) -> None:
        """Take the result of `pickle` of another rank of this training. The position of `data` itself stays: its loop
        has received it."""
        data, self._data = self._data, None
        try:
            self.load({**parts, _RANDOM: []}, "the state of another rank")
        finally:
            self._data = data
        self._position = state_pickle.loads(parts["the data"][0])

    def keep(self) -> None:
        """Keep the state, for `return_to_kept`."""
        self._kept = self.pickle(None, uses_saved_position=True)

    def return_to_kept(self) -> None:
        """Return to the state of `keep`, if there is one."""
        kept, self._kept = self._kept, None
        if kept is not None:
            self.receive(kept)

    def _owners(self) -> list[tuple[str, Any]]:
        """Return titles and objects with a state. Hooks of the same class have the same title."""
        return [*((f"hook {type(hook).__name__}", hook) for hook in self._hooks), *self._more.items()]


def _pickle(title: str, get_state: Callable[[], Any]) -> bytes:
    try:
        return state_pickle.dumps(get_state())
    except (RemoteRankError, CollectiveTimeout):  # an error of the job, not of this state
        raise
    except Exception as error:  # state_dict is code of the user
        raise InputError(
            f"the state of {title} cannot be saved: {type(error).__name__}: {error}; its state_dict must return "
            "objects that pickle accepts"
        ) from error
