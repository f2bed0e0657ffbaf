"""Reading a checkpoint: all bytes are verified first; then the pieces are assembled to whole tensors.

Each shard is read twice, for its checksum and for its tensors; the second read comes from the page cache if it fits.
Needs memory for the tensors and for one more piece.
"""

import dataclasses
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from allred.arrays import Array
from allred.checkpoint.directory import damage, list_committed
from allred.checkpoint.entry import check_cover
from allred.checkpoint.files import MANIFEST, Manifest, check_bytes, read_manifest, read_shard
from allred.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class SavedTensors:
    """Content of a checkpoint, as whole tensors in new, writable arrays.

    step: the global step. params: the parameters by name. slots: the state of the optimizer: {parameter name: {slot
    name: array}}. pickled: bytes for `unpickle_state` and `unpickle_extra`. meta: the argument `meta` of `commit`.
    """

    step: int
    params: dict[str, Array]
    slots: dict[str, dict[str, Array]]
    pickled: dict[str, Array]
    meta: dict[str, Any]


def read_checkpoint(path: str | os.PathLike[str]) -> SavedTensors:
    """Read a checkpoint with any number of shards.

    Raises CheckpointError: a file is missing, damaged or of an unknown version; names the file, and another checkpoint
    in the same root that is complete. Or it holds bfloat16, and ml_dtypes is not installed.
    """
    directory = pathlib.Path(path)
    for problem in _problems(directory):
        raise CheckpointError(f"{problem}; {_alternative(directory)}") from problem
    return _assemble(directory, read_manifest(directory))


def read_newest(root: str | os.PathLike[str]) -> tuple[tuple[pathlib.Path, SavedTensors] | None, list[str]]:
    """Read the newest undamaged checkpoint in `root`.

    Returns (path, content), or None if there is none; and the damage of each later checkpoint, one line each.
    Raises CheckpointError: `root` cannot be listed, or is a checkpoint itself; or see `read_checkpoint`.
    """
    path, damaged = find_newest(root)
    return None if path is None else (path, read_verified(path)), damaged


def find_newest(root: str | os.PathLike[str]) -> tuple[pathlib.Path | None, list[str]]:
    """As `read_newest`, but verify its bytes without returning the content: see `read_verified`."""
    if (pathlib.Path(root) / MANIFEST).exists():
        raise CheckpointError(
            f"{root} is a checkpoint, not a directory of checkpoints; pass {pathlib.Path(root).parent}"
        )
    damaged: list[str] = []
    for path in reversed(list_committed(pathlib.Path(root)).values()):
        problem = damage(path) or str(next(_problems(path), ""))
        if not problem:
            return path, damaged
        damaged.append(problem)
    return None, damaged


def read_verified(path: pathlib.Path) -> SavedTensors:
    """As `read_checkpoint`, for a checkpoint whose bytes were verified."""
    return _assemble(path, read_manifest(path))


def verify(path: str | os.PathLike[str]) -> list[str]:
    """Read every byte of a checkpoint and return all damage, one line each; empty if it is complete and undamaged."""
    return list(map(str, _problems(pathlib.Path(path))))


def _problems(directory: pathlib.Path) -> Iterator[CheckpointError]:
    try:
        manifest = read_manifest(directory)
    except CheckpointError as error:
        yield error
        return
    try:
        check_cover("checkpoint", ((shard.file, entry) for shard in manifest.shards for entry in shard.entries))
    except CheckpointError as error:
        yield error
    for shard in manifest.shards:
        try:
            check_bytes("checkpoint", directory, shard)
        except CheckpointError as error:
            yield error


def _assemble(directory: pathlib.Path, manifest: Manifest) -> SavedTensors:
    tensors: dict[tuple[str, str], Array] = {}
    content = SavedTensors(manifest.step, {}, {}, {}, manifest.meta)
    for shard in manifest.shards:
        for entry, array in read_shard("checkpoint", directory, shard):
            if entry.is_whole:
                tensors[entry.name, entry.slot] = array
            else:
                if (entry.name, entry.slot) not in tensors:
                    tensors[entry.name, entry.slot] = np.empty(entry.shape, array.dtype)
                tensors[entry.name, entry.slot].reshape(-1)[entry.start : entry.stop] = array
            if entry.is_pickled:
                content.pickled[entry.slot] = tensors[entry.name, entry.slot]
            elif entry.slot:
                content.slots.setdefault(entry.name, {})[entry.slot_name] = tensors[entry.name, entry.slot]
            else:
                content.params[entry.name] = tensors[entry.name, entry.slot]
    return content


def _alternative(directory: pathlib.Path) -> str:
    try:
        others = [path for path in list_committed(directory.parent).values() if path.name != directory.name]
    except CheckpointError:
        others = []
    for path in reversed(others):
        if not verify(path):
            return f"restore {path}, which is complete and undamaged"
    return f"no other checkpoint in {directory.parent} is complete"
