"""The file that holds the newest commit. Rank 0 writes it; a process that is killed leaves the commit before intact.

The file is a pickle: reading it can run any code, so the directory is created for its owner only.
"""

import os
import pathlib
from typing import Any, NamedTuple

import torch

from allred.errors import CheckpointError


class Commit(NamedTuple):
    """number: how many commits the training has made. ranks: the number of ranks that made it. state: any objects."""

    number: int
    ranks: int
    state: Any


def write(path: pathlib.Path, commit: Commit) -> None:
    """Replace the file. Raises CheckpointError."""
    unfinished = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(unfinished, "wb") as file:
            torch.save(tuple(commit), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        _sync_directory(path.parent)
    except Exception as error:  # an object that cannot be pickled raises anything
        raise CheckpointError(
            f"commit {commit.number} cannot be written to {path}: {type(error).__name__}: {error}"
        ) from error


def _sync_directory(directory: pathlib.Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: pathlib.Path) -> Commit | None:
    """Return the commit, with its tensors on the host; None without a file. Raises CheckpointError."""
    try:
        with open(path, "rb") as file:
            return Commit(*torch.load(file, map_location="cpu", weights_only=False))
    except FileNotFoundError:
        return None
    except Exception as error:  # unpickling runs code of the user
        raise CheckpointError(
            f"the commit in {path} cannot be read: {type(error).__name__}: {error}; delete the file to train from the "
            "beginning"
        ) from error
