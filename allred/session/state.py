"""What a checkpoint has beside parameters and optimizer: the position in the data, random states, hooks, and what else
was given to `track`.

Each part is asked for and pickled alone, so that one that cannot be is named. When training begins that is an error;
later it is left out and told, for the parameters are worth more.
"""

import os
import pickle
from collections.abc import Callable, Iterable
from typing import Any

from allred.cluster import report, topology
from allred.errors import CheckpointError, CollectiveTimeout, InputError, RemoteRankError
from allred.session import random_states
from allred.session.hooks import Hook

Packed = dict[str, Any]


class State:
    """Of this rank. data, more: as given to `track`. Raises InputError for what has no state, or one that cannot be
    pickled."""

    def __init__(self, hooks: Iterable[Hook], data: Any, more: dict[str, Any]) -> None:
        for name, value in more.items():
            if not _keeps(value):
                raise InputError(
                    f"session.track({name}=...): {type(value).__name__} has no state_dict, load_state_dict"
                )
        self._data = data if _keeps(data) else None
        self._more = {f"'{name}'": value for name, value in more.items()}
        self._hooks = [hook for hook in hooks if _keeps(hook)]
        self._position = _of(self._data)  # behind the last batch that an update was made of
        self._left_out: set[str] = set()
        for title, give in self._parts(None):
            _pickle(title, give)

    def tell_of_missing(self, batches: Any) -> None:
        """Warn if these could go on where a checkpoint was made, and no data was given to `track`."""
        if self._data is None and _keeps(batches):
            report.say(
                "session.steps(): a training that goes on from a checkpoint will begin this data anew, though it could "
                "go on behind the last batch; pass it to session.track(data=...) too"
            )

    def note_position(self) -> None:
        """An update was made of all batches so far."""
        self._position = _of(self._data)

    def pack(self, randoms: dict[int, Any] | None, noted: bool) -> Packed:
        """As it is now. randoms: of each rank; None: this one's. noted: the position is the one noted, not that of
        now: the batch at hand comes again."""
        packed: Packed = {}
        for title, give in self._parts(randoms, noted):
            parts = packed.setdefault(title, [])
            try:
                parts.append(_pickle(title, give))
            except InputError as error:
                parts.append(None)
                if title not in self._left_out:
                    self._left_out.add(title)
                    report.say_here(f"the checkpoint is without it: {error}")
        return packed

    def _parts(self, randoms: dict[int, Any] | None, noted: bool = True) -> list[tuple[str, Callable[[], Any]]]:
        """Titles, and what gives the values."""
        return [
            ("the data", lambda: self._position if noted else _of(self._data)),
            ("random generators", lambda: {topology.rank(): random_states.get()} if randoms is None else randoms),
            *((title, owner.state_dict) for title, owner in self._owners()),
        ]

    def load(self, packed: Packed, where: str | os.PathLike[str]) -> None:
        """Go on from what `pack` gave; hooks may have come or gone, those of one class are told apart by their order.
        Raises CheckpointError for what cannot be unpickled."""
        left = {title: list(parts) for title, parts in packed.items()}

        def take(title: str) -> Any:
            part = left[title].pop(0) if left.get(title) else None
            try:
                return None if part is None else pickle.loads(part)
            except Exception as error:  # whatever a class of the user's raises
                raise CheckpointError(
                    f"the state of {title} in {where} cannot be loaded: {type(error).__name__}: {error}"
                ) from error

        if (position := take("the data")) is not None and self._data is not None:
            self._data.load_state_dict(position)
            self._position = position
        if (mine := (take("random generators") or {}).get(topology.rank())) is not None:
            random_states.put(mine)
        for title, value in self._owners():
            if (state := take(title)) is not None:
                value.load_state_dict(state)

    def _owners(self) -> list[tuple[str, Any]]:
        """Titles, and who has the state. Hooks have the same title if they are of one class."""
        return [*((f"hook {type(hook).__name__}", hook) for hook in self._hooks), *self._more.items()]


def _keeps(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _of(value: Any) -> Any:
    return None if value is None else value.state_dict()


def _pickle(title: str, give: Callable[[], Any]) -> bytes:
    try:
        return pickle.dumps(give(), pickle.HIGHEST_PROTOCOL)
    except (RemoteRankError, CollectiveTimeout):  # of the job, come meanwhile
        raise
    except Exception as error:  # whatever a class of the user's raises
        raise InputError(
            f"the state of {title} cannot be saved: {type(error).__name__}: {error}; its state_dict has to return what "
            "pickle takes"
        ) from error
