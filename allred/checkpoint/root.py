"""The directory that holds the checkpoints of a training: what is in it, and what may go.

step-00000400              a complete checkpoint
step-00000400.replaced     what was step 400 before, while it is being replaced; counts only if the first is missing
.step-00000500.xx.xx.tmp   being written, or left by a writer that died; boot id and random digits
.step-00000300.xxxx.gone   being deleted, or left by who was deleting it
"""

import contextlib
import os
import pathlib
import re
import secrets
import shutil

from allred.checkpoint import writer
from allred.checkpoint.failure import explained
from allred.checkpoint.manifest import load
from allred.checkpoint.shard import check_length
from allred.errors import CheckpointError, InputError

_COMMITTED = re.compile(r"step-(\d{8,})(\.replaced)?", re.ASCII)
_UNFINISHED = re.compile(r"\.step-(\d{8,})\.([0-9a-f]+)\.[0-9a-f]+\.tmp", re.ASCII)
_DELETED = re.compile(r"\.step-\d{8,}(\.[0-9a-z]+)+\.gone", re.ASCII)


def committed_name(step: int) -> str:
    """The name of the directory of a complete checkpoint."""
    return f"step-{step:08d}"


def unfinished_name(step: int) -> str:
    """A new name for a directory that is being written."""
    return f".{committed_name(step)}.{writer.boot_id()}.{secrets.token_hex(4)}.tmp"


def unfinished_step(name: str) -> int | None:
    """The step of what `unfinished_name` gave; None for any other name."""
    match = _UNFINISHED.fullmatch(name)
    return int(match[1]) if match else None


def present(root: pathlib.Path) -> dict[int, pathlib.Path]:
    """The directory of every step that was committed, damaged or not, by ascending step. Empty if there is no root."""
    found: dict[int, pathlib.Path] = {}
    for name in sorted(_names(root), reverse=True):  # step-N comes after step-N.replaced, and takes its place
        if match := _COMMITTED.fullmatch(name):
            found[int(match[1])] = root / name
    return dict(sorted(found.items()))


def _names(root: pathlib.Path) -> list[str]:
    with explained("checkpoint: listing", root):
        try:
            return os.listdir(root)
        except FileNotFoundError:
            return []


def unfinished(root: pathlib.Path) -> list[pathlib.Path]:
    """What is being written in `root`, or was left by a writer that died, by ascending name."""
    return [root / name for name in sorted(_names(root)) if _UNFINISHED.fullmatch(name)]


def damage(path: pathlib.Path) -> str:
    """Why a checkpoint is not complete; empty if its manifest is right, and each shard there with its length.

    Their bytes are not read.
    """
    try:
        manifest = load(path)
        if (match := _COMMITTED.fullmatch(path.name)) and int(match[1]) != manifest.step:
            return f"checkpoint: {path} holds step {manifest.step}; give it its own name, or move it elsewhere"
        for shard in manifest.shards:
            check_length("checkpoint", path, shard)
    except CheckpointError as error:
        return str(error)
    return ""


def _is_complete(path: pathlib.Path) -> bool:
    return not damage(path)


def steps(root: str | os.PathLike[str]) -> list[pathlib.Path]:
    """The complete checkpoints in `root`, by ascending step. Empty if there is no such directory.

    The manifest of each is read, and its shards' lengths compared; their bytes are not read, `verify` does that. A
    checkpoint that is damaged is left out.

    Raises:
        CheckpointError: `root` cannot be listed.
    """
    return [path for path in present(pathlib.Path(root)).values() if _is_complete(path)]


def newest(root: str | os.PathLike[str]) -> pathlib.Path | None:
    """The last of `steps(root)`, without looking at the earlier ones; None if there is none.

    Raises:
        CheckpointError: `root` cannot be listed.
    """
    return next(filter(_is_complete, reversed(present(pathlib.Path(root)).values())), None)


def has(root: str | os.PathLike[str], step: int) -> bool:
    """Whether there is a complete checkpoint of that step. Raises CheckpointError: `root` cannot be listed."""
    path = present(pathlib.Path(root)).get(step)
    return path is not None and _is_complete(path)


def prune(root: str | os.PathLike[str], keep: int, keep_every: int = 0, up_to: int | None = None) -> list[pathlib.Path]:
    """Delete complete checkpoints except the newest `keep`. Those that are not complete are left to be looked at.

    Arguments:
        keep: at least 1.
        keep_every: those whose step is a multiple of it stay as well; 0: none.
        up_to: those of later steps stay, and do not count.

    Returns:
        What was deleted.

    Raises:
        InputError: a number that cannot be.
        CheckpointError: one could not be deleted.
    """
    if keep < 1 or keep_every < 0:
        raise InputError(f"prune: keep={keep}, keep_every={keep_every}; expected keep >= 1 and keep_every >= 0")
    gone = []
    numbers = [(_step_of(path), path) for path in steps(root)]
    for step, path in [each for each in numbers if up_to is None or each[0] <= up_to][:-keep]:
        if not (keep_every and step % keep_every == 0):
            with explained("prune: deleting", path):
                discard(path)
            gone.append(path)
    return gone


def _step_of(path: pathlib.Path) -> int:
    match = _COMMITTED.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def discard(path: pathlib.Path) -> None:
    """Delete a checkpoint, under another name: killed in the middle, no damaged one is left. Raises OSError."""
    gone = path.with_name(f".{path.name.lstrip('.')}.{secrets.token_hex(4)}.gone")
    os.rename(path, gone)
    shutil.rmtree(gone)


def sweep(root: pathlib.Path, now: float) -> None:
    """Delete what killed processes have left, as far as that can be done. For `now` see `writer.is_dead`."""
    found = [(root / name, _UNFINISHED.fullmatch(name)) for name in _names(root)]
    with writer.nobody_begins(root) as alone:
        dead = [path for path, match in found if match and writer.is_dead(path, match[2], now, alone)]
    for path, _ in found:
        with contextlib.suppress(OSError):
            if _DELETED.fullmatch(path.name):
                shutil.rmtree(path)
            elif path in dead or _was_replaced(path):
                discard(path)


def _was_replaced(path: pathlib.Path) -> bool:
    """Whether it is step-N.replaced, and the new step-N is complete."""
    return bool(_COMMITTED.fullmatch(path.name)) and path.suffix == ".replaced" and _is_complete(path.with_suffix(""))
