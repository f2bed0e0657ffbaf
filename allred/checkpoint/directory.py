"""The directory of all checkpoints of a training (the root): names, listing, deletion.

step-00000400              a complete checkpoint
step-00000400.replaced     the previous checkpoint of step 400 during its replacement; used only if the first is missing
.step-00000500.xx.xx.tmp   unfinished: being written, or left by a dead writer; boot id and random digits
.step-00000300.xxxx.gone   being deleted, or left by a process that died while it deleted it
"""

import contextlib
import os
import pathlib
import re
import secrets
import shutil

from allred.checkpoint import lock
from allred.checkpoint.manifest import read_manifest
from allred.checkpoint.shard import check_length, file_errors
from allred.errors import CheckpointError, InputError

_COMMITTED = re.compile(r"step-(\d{8,})(\.replaced)?", re.ASCII)
_UNFINISHED = re.compile(r"\.step-(\d{8,})\.([0-9a-f]+)\.[0-9a-f]+\.tmp", re.ASCII)
_DELETED = re.compile(r"\.step-\d{8,}(\.[0-9a-z]+)+\.gone", re.ASCII)


def committed_name(step: int) -> str:
    """Return the name of the directory of a complete checkpoint."""
    return f"step-{step:08d}"


def unfinished_name(step: int) -> str:
    """Return a new, unique name for the directory of an unfinished checkpoint."""
    return f".{committed_name(step)}.{lock.boot_id()}.{secrets.token_hex(4)}.tmp"


def unfinished_step(name: str) -> int | None:
    """Return the step in a result of `unfinished_name`; None for any other name."""
    match = _UNFINISHED.fullmatch(name)
    return int(match[1]) if match else None


def list_committed(root: pathlib.Path) -> dict[int, pathlib.Path]:
    """Return the directories of all committed steps, damaged ones included, by ascending step. Empty without root."""
    found: dict[int, pathlib.Path] = {}
    for name in sorted(_names(root), reverse=True):  # step-N comes after step-N.replaced, and overrides it
        if match := _COMMITTED.fullmatch(name):
            found[int(match[1])] = root / name
    return dict(sorted(found.items()))


def _names(root: pathlib.Path) -> list[str]:
    with file_errors("checkpoint: listing", root):
        try:
            return os.listdir(root)
        except FileNotFoundError:
            return []


def list_unfinished(root: pathlib.Path) -> list[pathlib.Path]:
    """Return the unfinished checkpoints in `root`, also those of dead writers, by ascending name."""
    return [root / name for name in sorted(_names(root)) if _UNFINISHED.fullmatch(name)]


def damage(path: pathlib.Path) -> str:
    """Return why a checkpoint is not complete; "" if its manifest is valid and each shard has its length.

    Does not read the bytes of the shards.
    """
    try:
        manifest = read_manifest(path)
        if (match := _COMMITTED.fullmatch(path.name)) and int(match[1]) != manifest.step:
            return f"checkpoint: {path} holds step {manifest.step}; give it its own name, or move it elsewhere"
        for shard in manifest.shards:
            check_length("checkpoint", path, shard)
    except CheckpointError as error:
        return str(error)
    return ""


def _is_complete(path: pathlib.Path) -> bool:
    return not damage(path)


def list_complete(root: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Return the directories of the complete checkpoints in `root`, by ascending step. Empty without root.

    Reads the manifests and compares the lengths of the shards. `verify` reads the bytes.

    Raises:
        CheckpointError: `root` cannot be listed.
    """
    return [path for path in list_committed(pathlib.Path(root)).values() if _is_complete(path)]


def newest(root: str | os.PathLike[str]) -> pathlib.Path | None:
    """Return the last of `list_complete(root)`; None if there is none. Does not check the earlier ones.

    Raises:
        CheckpointError: `root` cannot be listed.
    """
    return next(filter(_is_complete, reversed(list_committed(pathlib.Path(root)).values())), None)


def has(root: str | os.PathLike[str], step: int) -> bool:
    """Return whether `root` holds a complete checkpoint of that step. Raises CheckpointError: it cannot be listed."""
    path = list_committed(pathlib.Path(root)).get(step)
    return path is not None and _is_complete(path)


def prune(root: str | os.PathLike[str], keep: int, keep_every: int = 0, up_to: int | None = None) -> list[pathlib.Path]:
    """Delete complete checkpoints except the newest `keep`. Damaged ones are not deleted.

    Arguments:
        keep: number of checkpoints, at least 1.
        keep_every: those whose step is a multiple of it are not deleted; 0: none.
        up_to: those of later steps are not deleted, and not counted.

    Returns:
        The deleted directories.

    Raises:
        InputError: keep < 1, or keep_every < 0.
        CheckpointError: a checkpoint cannot be deleted.
    """
    if keep < 1 or keep_every < 0:
        raise InputError(f"prune: keep={keep}, keep_every={keep_every}; expected keep >= 1 and keep_every >= 0")
    deleted = []
    committed = [item for item in list_committed(pathlib.Path(root)).items() if up_to is None or item[0] <= up_to]
    for step, path in [(step, path) for step, path in committed if _is_complete(path)][:-keep]:
        if not (keep_every and step % keep_every == 0):
            with file_errors("prune: deleting", path):
                discard(path)
            deleted.append(path)
    return deleted


def discard(path: pathlib.Path) -> None:
    """Rename a checkpoint, then delete it: a process killed in between leaves no damaged one. Raises OSError."""
    gone = path.with_name(f".{path.name.lstrip('.')}.{secrets.token_hex(4)}.gone")
    os.rename(path, gone)
    shutil.rmtree(gone)


def sweep(root: pathlib.Path, now: float) -> None:
    """Delete files of dead processes; ignores errors. For `now` see `lock.is_dead`."""
    found = [(root / name, _UNFINISHED.fullmatch(name)) for name in _names(root)]
    with lock.exclude_claims(root) as excluded:
        dead = [path for path, match in found if match and lock.is_dead(path, match[2], now, excluded)]
    for path, _ in found:
        with contextlib.suppress(OSError):
            if _DELETED.fullmatch(path.name):
                shutil.rmtree(path)
            elif path in dead or _was_replaced(path):
                discard(path)


def _was_replaced(path: pathlib.Path) -> bool:
    """Return whether it is step-N.replaced, and the new step-N is complete."""
    return bool(_COMMITTED.fullmatch(path.name)) and path.suffix == ".replaced" and _is_complete(path.with_suffix(""))
