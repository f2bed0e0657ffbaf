"""Checkpoints of a distributed optimizer, on worker 0: what goes along with its state, and how it comes back."""

import os
import pathlib
from typing import Any

from allred import checkpoint, nest
from allred.cluster import report
from allred.errors import CheckpointError
from allred.gpu.device_arrays import fill
from allred.modes.mode import Mode
from allred.modes.scaler import GradScaler

_SCALER, _OTHERS = "the optimizer's scaler", "what else there is"


def with_scaler(extra: Any, scaler: GradScaler | None) -> Any:
    """What goes along with a checkpoint: a session's, and the scaler's state."""
    return extra if scaler is None else {_SCALER: scaler.state_dict(), _OTHERS: extra}


def without_scaler(extra: Any, scaler: GradScaler | None) -> Any:
    """The reverse, on a rank that has restored it: what the session gave. The scaler gets its state."""
    if not isinstance(extra, dict) or _SCALER not in extra:
        return extra
    if scaler is not None:
        scaler.load_state_dict(extra[_SCALER])
    return extra[_OTHERS]


def load(directory: str | os.PathLike[str], params: Any, mode: Mode) -> tuple[int | None, Any]:
    """Parameters and optimizer of the newest complete checkpoint: its step, and what went along; None if there is none.

    Raises CheckpointError.
    """
    if (newest := _newest(directory)) is None:
        return None, None
    path, found = newest
    _fill(nest.leaves(params), found.params, path)
    extra, state = checkpoint.pop_extra(found.slots), found.meta["optimizer"]
    own = checkpoint.unpickle_state(found.slots) if state is None else {**state, "slots": found.slots}
    mode.load_state_dict(own)
    return found.step, extra


def _newest(directory: str | os.PathLike[str]) -> tuple[pathlib.Path, checkpoint.SavedTensors] | None:
    """The checkpoint to restore. Those that are damaged are told of; CheckpointError if there is no other."""
    found, damaged = checkpoint.read_newest(directory)
    if damaged and found is None:
        raise CheckpointError(
            f"{damaged[0]}; no checkpoint in {os.fspath(directory)} is complete. To start anew, move them away"
        )
    for words in damaged:
        report.say(f"a later checkpoint is left out: {words}")
    return found


def _fill(named: list[tuple[str, Any]], values: dict[str, Any], path: Any) -> None:
    """Give parameters the values of a checkpoint."""
    for name, leaf in named:
        if name not in values or values[name].shape != leaf.shape:
            got = f"has shape {values[name].shape} there" if name in values else "is not in it"
            raise CheckpointError(
                f"{path} is of another model: '{name}' {leaf.shape} {got}; pass the directory of this model's"
            )
    if odd := sorted(set(values) - {name for name, _ in named}):
        raise CheckpointError(f"{path} is of another model: it has '{odd[0]}', and this one has not")
    for name, leaf in named:
        fill(leaf, values[name])
