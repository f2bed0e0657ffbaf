"""The session's part of a checkpoint: position in the data, random states, hooks, and the objects given to `track`.

Each part is pickled separately, so that errors name the part. Before training a failure is an error; later the part is
left out of the checkpoint with a warning, because the parameters matter more.
"""

import os
import pickle
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from allred import log
from allred.cluster import topology
from allred.errors import CheckpointError, CollectiveTimeout, InputError, RemoteRankError

PickledParts = dict[str, Any]


def random_states() -> Any:
    """Return the states of Python's `random` and of numpy's global generator."""
    return random.getstate(), np.random.get_state()


def _set_random_states(states: Any) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


class SessionState:
    """The state of a session on this rank. hooks: of any type. data, more: the arguments of `track`.

    Raises InputError for an object without state_dict, and for a state that cannot be pickled."""

    def __init__(self, hooks: Iterable[Any], data: Any, more: dict[str, Any]) -> None:
        for name, value in more.items():
            if not _has_state(value):
                raise InputError(
                    f"session.track({name}=...): {type(value).__name__} has no state_dict, load_state_dict"
                )
        self._data = data if _has_state(data) else None
        self._more = {f"'{name}'": value for name, value in more.items()}
        self._hooks = [hook for hook in hooks if _has_state(hook)]
        self._position = self._data_position()  # behind the last batch that an update used
        self._left_out: set[str] = set()
        for title, get_state in self._parts(None):
            _pickle(title, get_state)

    def warn_untracked(self, batches: Any) -> None:
        """Warn if `batches` can be resumed but was not given to `track`."""
        if self._data is None and _has_state(batches):
            log.warning(
                "session.steps(): training that resumes from a checkpoint starts this data from the beginning, though "
                "it can continue behind the last batch; pass it to session.track(data=...) too"
            )

    def note_position(self) -> None:
        """Record the position in the data: an update has used all batches so far."""
        self._position = self._data_position()

    def _data_position(self) -> Any:
        return None if self._data is None else self._data.state_dict()

    def pickle(self, randoms: dict[int, Any] | None, noted: bool) -> PickledParts:
        """Return all parts, pickled. randoms: the random states by rank; None: only of this rank. noted: use the
        position of `note_position`, not the current one: the current batch is repeated after a restore."""
        parts: PickledParts = {}
        for title, get_state in self._parts(randoms, noted):
            pickles = parts.setdefault(title, [])
            try:
                pickles.append(_pickle(title, get_state))
            except InputError as error:
                pickles.append(None)
                if title not in self._left_out:
                    self._left_out.add(title)
                    log.rank_warning(f"a part is left out of the checkpoint: {error}")
        return parts

    def _parts(self, randoms: dict[int, Any] | None, noted: bool = True) -> list[tuple[str, Callable[[], Any]]]:
        """Return titles and functions that return the states."""
        return [
            ("the data", lambda: self._position if noted else self._data_position()),
            ("random generators", lambda: {topology.rank(): random_states()} if randoms is None else randoms),
            *((title, owner.state_dict) for title, owner in self._owners()),
        ]

    def load(self, parts: PickledParts, where: str | os.PathLike[str]) -> None:
        """Restore the result of `pickle`. The hooks may differ; hooks of the same class are matched by their order.
        Raises CheckpointError for a part that cannot be unpickled."""
        left = {title: list(pickles) for title, pickles in parts.items()}

        def take(title: str) -> Any:
            data = left[title].pop(0) if left.get(title) else None
            try:
                return None if data is None else pickle.loads(data)
            except Exception as error:  # unpickling runs code of the user
                raise CheckpointError(
                    f"the state of {title} in {where} cannot be loaded: {type(error).__name__}: {error}"
                ) from error

        if (position := take("the data")) is not None and self._data is not None:
            self._data.load_state_dict(position)
            self._position = position
        if (mine := (take("random generators") or {}).get(topology.rank())) is not None:
            _set_random_states(mine)
        for title, owner in self._owners():
            if (state := take(title)) is not None:
                owner.load_state_dict(state)

    def _owners(self) -> list[tuple[str, Any]]:
        """Return titles and objects with a state. Hooks of the same class have the same title."""
        return [*((f"hook {type(hook).__name__}", hook) for hook in self._hooks), *self._more.items()]


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _pickle(title: str, get_state: Callable[[], Any]) -> bytes:
    try:
        return pickle.dumps(get_state(), pickle.HIGHEST_PROTOCOL)
    except (RemoteRankError, CollectiveTimeout):  # an error of the job, not of this state
        raise
    except Exception as error:  # state_dict is code of the user
        raise InputError(
            f"the state of {title} cannot be saved: {type(error).__name__}: {error}; its state_dict must return "
            "objects that pickle accepts"
        ) from error
