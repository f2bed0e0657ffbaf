"""Reading a checkpoint: every byte is checked before any of it is used, and pieces are put together to whole tensors.

Each shard is read twice, once for its checksum and once for its tensors; the second time it comes from memory as far as
it fits. Beside the tensors themselves one piece at a time is held.
"""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from allred.arrays import Array
from allred.checkpoint.entry import check_cover
from allred.checkpoint.manifest import Manifest, load
from allred.checkpoint.root import present
from allred.checkpoint.shard import check_bytes, read_shard
from allred.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What was saved, in whole tensors: new arrays, which may be changed.

    Attributes:
        step: global step.
        params: the parameters by name.
        slots: the optimizer's state: for each name, arrays by the name of the slot.
        meta: as given to `commit`.
    """

    step: int
    params: dict[str, Array]
    slots: dict[str, dict[str, Array]]
    meta: dict[str, Any]


def read(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint, whatever number of shards it has.

    Raises:
        CheckpointError: something is missing, damaged or of an unknown version; says which file, and which other
            checkpoint beside it is complete. Or it holds bfloat16, and ml_dtypes is not installed.
    """
    directory = pathlib.Path(path)
    for problem in _problems(directory):
        raise CheckpointError(f"{problem}; {_instead(directory)}") from problem
    return _assembled(directory, load(directory))


def read_newest(root: str | os.PathLike[str]) -> tuple[tuple[pathlib.Path, Checkpoint] | None, list[str]]:
    """The last checkpoint in `root` that is complete and undamaged, with its path; None if there is none. And what is
    wrong with those that are later, a line each.

    Raises:
        CheckpointError: `root` cannot be listed; or see `read`.
    """
    wrong: list[str] = []
    for path in reversed(present(pathlib.Path(root)).values()):
        problem = next(_problems(path), None)
        if problem is None:
            return (path, _assembled(path, load(path))), wrong
        wrong.append(str(problem))
    return None, wrong


def verify(path: str | os.PathLike[str]) -> list[str]:
    """All that is wrong with a checkpoint, a line each; reads every byte of it. Empty: it is complete and undamaged."""
    return list(map(str, _problems(pathlib.Path(path))))


def _problems(directory: pathlib.Path) -> Iterator[CheckpointError]:
    try:
        manifest = load(directory)
    except CheckpointError as error:
        yield error
        return
    checks = [functools.partial(check_bytes, "checkpoint", directory, shard) for shard in manifest.shards]
    for check in (functools.partial(_check_cover, manifest), *checks):
        try:
            check()
        except CheckpointError as error:
            yield error


def _check_cover(manifest: Manifest) -> None:
    check_cover("checkpoint", ((shard.file, entry) for shard in manifest.shards for entry in shard.entries))


def _assembled(directory: pathlib.Path, manifest: Manifest) -> Checkpoint:
    tensors: dict[tuple[str, str], Array] = {}
    for shard in manifest.shards:
        for entry, array in read_shard("checkpoint", directory, shard):
            if entry.is_whole:
                tensors[entry.name, entry.slot] = array
            else:
                if (entry.name, entry.slot) not in tensors:
                    tensors[entry.name, entry.slot] = np.empty(entry.shape, array.dtype)
                tensors[entry.name, entry.slot].reshape(-1)[entry.start : entry.stop] = array
    params = {name: array for (name, slot), array in tensors.items() if not slot}
    slots: dict[str, dict[str, Array]] = {}
    for (name, slot), array in tensors.items():
        if slot:
            slots.setdefault(name, {})[slot] = array
    return Checkpoint(manifest.step, params, slots, manifest.meta)


def _instead(directory: pathlib.Path) -> str:
    """What to restore where this cannot be."""
    try:
        others = [path for path in present(directory.parent).values() if path.name != directory.name]
    except CheckpointError:
        others = []
    for path in reversed(others):
        if not verify(path):
            return f"restore {path}, which is complete and undamaged"
    return f"no other checkpoint in {directory.parent} is complete"
