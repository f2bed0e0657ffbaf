"""The directory of all checkpoints of a training (the root): names, listing, deletion, and locks of writers.

step-00000400              a complete checkpoint
step-00000400.replaced     the previous checkpoint of step 400 during its replacement; used only if the first is missing
step-00000600.outdated-xx  a later step that another training wrote; renamed so that it is not restored; never deleted
.step-00000500.xx.xx.tmp   unfinished: being written, or left by a dead writer; boot id and random digits
.step-00000300.xxxx.gone   being deleted, or left by a process that died while it deleted it

Files of a dead writer may be deleted. Whether a writer is dead is known by locks:

1  `claim` creates manifest.json in the unfinished directory, locks it (flock), and then writes the name of the writer
   into it. The kernel releases the lock when the process ends, or, after a fork, when both processes have ended.
   `commit` writes the manifest into the same file, so the lock is held until after the rename.
2  The directory is claimed with a shared lock of the root. With the exclusive lock of the root, a directory of this
   boot that has no claim is dead.
3  The writer is dead if the file is not empty, has no lock, and is from this boot of this host (flock is reliable).
4  For other hosts and boots, and file systems without flock, it is dead only if nothing in the directory has changed
   for a day, by the clock of the file system.
"""

import contextlib
import errno
import fcntl
import functools
import json
import os
import pathlib
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from typing import BinaryIO

from allred import log
from allred.checkpoint.files import MANIFEST, Manifest, check_length, file_errors, read_manifest
from allred.checkpoint.table_rows import bases_of, check_row_files
from allred.errors import CheckpointError, InputError

_COMMITTED = re.compile(r"step-(\d{8,})(\.replaced)?", re.ASCII)
_UNFINISHED = re.compile(r"\.step-(\d{8,})\.([0-9a-f]+)\.[0-9a-f]+\.tmp", re.ASCII)
_DELETED = re.compile(r"\.step-\d{8,}(\.[0-9a-z]+)+\.gone", re.ASCII)
ABANDONED_S = 24 * 3600.0

_claimed: dict[str, BinaryIO] = {}  # real path of each directory that this process writes: its locked manifest


def claim(directory: pathlib.Path) -> None:
    """Create `directory` and lock it for this process. Raises OSError."""
    with _lock_root(directory.parent, fcntl.LOCK_SH):
        directory.mkdir()
        file = open(directory / MANIFEST, "x+b")  # noqa: SIM115  (open until `release`: closing it releases the lock)
        try:
            with contextlib.suppress(OSError):  # a file system without locks: then the age decides
                fcntl.flock(file, fcntl.LOCK_EX)
            writer = f"process {os.getpid()} on {socket.gethostname()}"
            file.write(json.dumps({"writer": writer}).encode())
            file.flush()
        except BaseException:
            with contextlib.suppress(OSError):  # close() tries the failed write again
                file.close()
            raise
        _claimed[os.path.realpath(directory)] = file


@contextlib.contextmanager
def _lock_root(root: pathlib.Path, operation: int) -> Iterator[bool]:
    """Lock the directory of all checkpoints, and yield whether that succeeded."""
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        locked = False
        with contextlib.suppress(OSError):  # another process holds the lock, or the file system has no such locks
            fcntl.flock(descriptor, operation)
            locked = True
        yield locked
    finally:
        os.close(descriptor)


def overwrite(directory: pathlib.Path, content: bytes) -> None:
    """Replace the content of the claimed manifest, sync it to disk, and keep the lock. Raises OSError."""
    file = _claimed.get(os.path.realpath(directory))
    with contextlib.nullcontext(file) if file else open(directory / MANIFEST, "r+b") as manifest:
        manifest.seek(0)
        manifest.write(content)
        manifest.truncate()  # not earlier: an empty manifest counts as not claimed
        manifest.flush()
        os.fsync(manifest.fileno())


def release(directory: str) -> None:
    """Release the lock of a committed or abandoned checkpoint. `directory`: a real path, which need not exist."""
    if file := _claimed.pop(directory, None):
        with contextlib.suppress(OSError):
            file.close()


def is_dead(directory: pathlib.Path, boot: str, now: float, excluded: bool) -> bool:
    """Return whether the writer of the unfinished checkpoint in `directory` is dead.

    boot: the `boot_id` of the writer. now: st_mtime of a file just written to the same file system. excluded: whether
    this process has the exclusive lock of the root.
    """
    if os.path.realpath(directory) in _claimed:
        return False
    same_boot = boot == boot_id()
    try:
        with open(directory / MANIFEST, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if same_boot and (excluded or file.read(1)):
                return True
    except FileNotFoundError:
        if same_boot and excluded:
            return True
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
    return now - _last_change(directory) > ABANDONED_S


def _last_change(directory: pathlib.Path) -> float:
    try:
        return max(path.stat().st_mtime for path in [directory, *directory.iterdir()])
    except OSError:
        return float("inf")  # unknown: do not delete it


@functools.cache
def boot_id() -> str:
    """Return hex digits that identify this boot of this host."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    except OSError:
        return secrets.token_hex(16)  # then the age decides


def name_of_step(step: int) -> str:
    """Return the name of the directory of a checkpoint."""
    return f"step-{step:08d}"


def unfinished_name(step: int) -> str:
    """Return a new, unique name for the directory of an unfinished checkpoint."""
    return f".step-{step:08d}.{boot_id()}.{secrets.token_hex(4)}.tmp"


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


def examine(path: pathlib.Path) -> tuple[Manifest | None, str]:
    """Return the manifest of a checkpoint, None if it cannot be read, and why the checkpoint is not complete; "" if the
    manifest is valid and each shard has its length.

    Does not read the bytes of the shards.
    """
    manifest = None
    try:
        manifest = read_manifest(path)
        check_name(path, manifest)
        for shard in manifest.shards:
            check_length("checkpoint", path, shard)
        for error in check_row_files(path, manifest.meta, check_length):
            raise error
    except CheckpointError as error:
        return manifest, str(error)
    return manifest, ""


def check_name(path: pathlib.Path, manifest: Manifest) -> None:
    """Raise CheckpointError if the name of the directory has another step than the manifest."""
    if (match := _COMMITTED.fullmatch(path.name)) and int(match[1]) != manifest.step:
        raise CheckpointError(
            f"checkpoint: {path} holds step {manifest.step}; give it its own name, or move it elsewhere"
        )


def _is_complete(path: pathlib.Path) -> bool:
    return not examine(path)[1]


def list_complete(root: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Return the directories of the complete checkpoints in `root`, by ascending step. Empty without root.

    Reads the manifests and compares the lengths of the shards. `verify` reads the bytes.
    Raises CheckpointError: `root` cannot be listed.
    """
    return [path for path in list_committed(pathlib.Path(root)).values() if _is_complete(path)]


def newest(root: str | os.PathLike[str]) -> pathlib.Path | None:
    """Return the path of the newest complete checkpoint in the directory `root`; None if there is none.

    Raises CheckpointError: `root` cannot be listed.

    Example: `allred.checkpoint.read_checkpoint(allred.checkpoint.newest("checkpoints"))`.
    """
    return next(filter(_is_complete, reversed(list_committed(pathlib.Path(root)).values())), None)


def has(root: str | os.PathLike[str], step: int, training: str) -> bool:
    """Return whether `root` holds a complete checkpoint of that step and training (meta["training"]).

    Raises CheckpointError: it cannot be listed."""
    if (path := list_committed(pathlib.Path(root)).get(step)) is None:
        return False
    manifest, problem = examine(path)
    return manifest is not None and not problem and manifest.meta.get("training") == training


def _training_of(path: pathlib.Path) -> str | None:
    """Return meta["training"] of a checkpoint; None if it has none, or is damaged."""
    try:
        return read_manifest(path).meta.get("training")
    except CheckpointError:
        return None


def move_outdated(root: pathlib.Path, step: int, training: str) -> None:
    """Rename the checkpoints of steps after `step` that other trainings wrote, damaged ones included: a restore would
    choose them and not that of `step`, which was just saved. Prints a line for each. Raises OSError."""
    for name in _names(root):
        match = _COMMITTED.fullmatch(name)
        if match and int(match[1]) > step and _training_of(root / name) != training:
            outdated = f"{name}.outdated-{secrets.token_hex(4)}"
            with contextlib.suppress(FileNotFoundError):  # another writer has renamed it
                os.rename(root / name, root / outdated)
                log.rank_warning(
                    f"checkpoint {root / name} was written by another training, and is newer than step {step}, which "
                    f"was just saved; renamed to {outdated}, so that a restore does not choose it"
                )


def prune(root: str | os.PathLike[str], keep: int, keep_every: int = 0, up_to: int | None = None) -> list[pathlib.Path]:
    """Delete complete checkpoints except the newest `keep`, and their bases (`bases_of`). Damaged ones are not deleted.

    keep: number of checkpoints, at least 1. keep_every: those whose step is a multiple of it are not deleted; 0: none.
    up_to: those of later steps are not deleted, and not counted.
    Returns the deleted directories.
    Raises InputError: keep < 1, or keep_every < 0. Raises CheckpointError: a checkpoint cannot be deleted.
    """
    if keep < 1 or keep_every < 0:
        raise InputError(f"prune: keep={keep}, keep_every={keep_every}; expected keep >= 1 and keep_every >= 0")
    deleted = []
    listed = list_committed(pathlib.Path(root)).items()
    committed = [item for item in listed if up_to is None or item[0] <= up_to]
    examined = {path: examine(path) for _, path in listed}
    complete = {path: manifest.meta for path, (manifest, problem) in examined.items() if manifest and not problem}
    old = [(step, path) for step, path in committed if path in complete][:-keep]
    old = [(step, path) for step, path in old if not (keep_every and step % keep_every == 0)]
    kept = complete.keys() - {path for _, path in old}
    needed = {base for path in kept for base in bases_of(path, complete[path])}
    for _, path in old:
        if path not in needed:
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
    """Delete files of dead processes; ignores errors. For `now` see `is_dead`."""
    found = [(root / name, _UNFINISHED.fullmatch(name)) for name in _names(root)]
    with _lock_root(root, fcntl.LOCK_EX | fcntl.LOCK_NB) as excluded:
        dead = [path for path, match in found if match and is_dead(path, match[2], now, excluded)]
    for path, _ in found:
        with contextlib.suppress(OSError):
            if _DELETED.fullmatch(path.name):
                shutil.rmtree(path)
            elif path in dead or _was_replaced(path):
                discard(path)


def _was_replaced(path: pathlib.Path) -> bool:
    """Return whether it is step-N.replaced, and the new step-N is complete."""
    return bool(_COMMITTED.fullmatch(path.name)) and path.suffix == ".replaced" and _is_complete(path.with_suffix(""))
