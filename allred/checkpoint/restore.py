"""Reading a checkpoint: its pieces are read into whole tensors, and all bytes are verified meanwhile.

A job with another number of ranks may have written the pieces. modes/load_checkpoint.py restores on the ranks of a job.
Needs memory for the tensors only.
"""

import dataclasses
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from allred.arrays import Array
from allred.checkpoint.directory import check_name, list_committed
from allred.checkpoint.entry import Entry, check_cover
from allred.checkpoint.files import (
    MANIFEST,
    Manifest,
    MissingPackageError,
    check_bytes,
    check_length,
    read_manifest,
    read_shard,
)
from allred.checkpoint.table_rows import check_row_files
from allred.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class SavedTensors:
    """Content of a checkpoint, as whole tensors in new, writable arrays.

    step: the global step. params: the parameters by name. slots: the state of the optimizer: {parameter name: {slot
    name: array}}. pickled: bytes for `unpickle_state` and `unpickle_extra`. meta: the argument `meta` of `commit`.
    checksum: of the manifest, which has the checksums of all tensors: contents with equal checksums are equal.
    """

    step: int
    params: dict[str, Array]
    slots: dict[str, dict[str, Array]]
    pickled: dict[str, Array]
    meta: dict[str, Any]
    checksum: str


def read_checkpoint(path: str | os.PathLike[str]) -> SavedTensors:
    """Read the checkpoint in the directory `path`, written by any number of ranks or servers. Verifies all bytes.

    Raises CheckpointError: a file is missing, damaged or of an unknown version; the message names the file and another
    checkpoint in the same root that is undamaged. Or the checkpoint holds bfloat16, and ml_dtypes is not installed.

    Example: `allred.checkpoint.read_checkpoint("checkpoints/step-00000300").params["w"]`.
    """
    directory = pathlib.Path(path)
    try:
        return _read(directory, read_manifest(directory))
    except MissingPackageError:
        raise
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_alternative(directory)}") from error


def _read(directory: pathlib.Path, manifest: Manifest) -> SavedTensors:
    _check_cover(manifest)
    tensors: dict[tuple[str, str], Array] = {}

    def destination(entry: Entry) -> Array:
        if (key := (entry.name, entry.slot)) not in tensors:
            tensors[key] = np.empty(entry.shape, entry.dtype)
        return tensors[key] if entry.is_whole else tensors[key].reshape(-1)[entry.start : entry.stop]

    for shard in manifest.shards:  # before memory is reserved for all tensors
        check_length("checkpoint", directory, shard)
    for shard in manifest.shards:
        read_shard("checkpoint", directory, shard, destination)
    return _saved_tensors(manifest, tensors)


def read_newest(root: str | os.PathLike[str]) -> tuple[tuple[pathlib.Path, SavedTensors] | None, list[str]]:
    """Read the newest undamaged checkpoint in `root`.

    Returns (path, content), or None if there is none; and one line for each newer checkpoint, which is damaged.
    Raises CheckpointError: `root` cannot be listed, or is a checkpoint itself; or the checkpoint holds bfloat16, and
    ml_dtypes is not installed.
    """
    damaged: list[str] = []
    for path in newest_first(root):
        try:
            return (path, read_committed(path)), damaged
        except MissingPackageError:
            raise
        except CheckpointError as error:
            damaged.append(str(error))
    return None, damaged


def read_committed(path: pathlib.Path) -> SavedTensors:
    """Read a checkpoint that `newest_first` returned. Unlike `read_checkpoint`, the error names no other checkpoint."""
    manifest = read_manifest(path)
    check_name(path, manifest)
    return _read(path, manifest)


def newest_first(root: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Return the committed checkpoints in `root`, the newest first; some may be damaged. Raises CheckpointError: `root`
    cannot be listed, or is a checkpoint itself."""
    if (pathlib.Path(root) / MANIFEST).exists():
        raise CheckpointError(
            f"{root} is a checkpoint, not a directory of checkpoints; pass {pathlib.Path(root).parent}"
        )
    return [*reversed(list_committed(pathlib.Path(root)).values())]


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
        _check_cover(manifest)
    except CheckpointError as error:
        yield error
    for shard in manifest.shards:
        try:
            check_bytes("checkpoint", directory, shard)
        except CheckpointError as error:
            yield error
    yield from check_row_files(directory, manifest.meta, check_bytes)


def _check_cover(manifest: Manifest) -> None:
    check_cover("checkpoint", ((shard.file, entry) for shard in manifest.shards for entry in shard.entries))


def _saved_tensors(manifest: Manifest, tensors: dict[tuple[str, str], Array]) -> SavedTensors:
    content = SavedTensors(manifest.step, {}, {}, {}, manifest.meta, manifest.checksum)
    for entry in (entry for shard in manifest.shards for entry in shard.entries):
        tensor = tensors[entry.name, entry.slot]
        if entry.is_pickled:
            content.pickled[entry.slot] = tensor
        elif entry.slot:
            content.slots.setdefault(entry.name, {})[entry.slot_name] = tensor
        else:
            content.params[entry.name] = tensor
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
