"""Writing a checkpoint: into a directory with a temporary name, which `commit` syncs to disk and renames.

The order of `commit`; each step is complete before the next begins:

1  every shard exists with its length (`write_shard` has synced it), and the shards form whole tensors
2  manifest.json is written and synced; then the directory is synced
3  an existing checkpoint of the same step is renamed to step-N.replaced; any other file with that name to
   step-N.was-in-the-way-...
4  the directory is renamed to step-N, which makes it the checkpoint; then the root is synced
5  checkpoints of later steps that other trainings wrote are renamed to step-N.outdated-... (meta["training"])
6  the replaced checkpoint and the files of dead writers are deleted

An existing step is replaced, because two saves of one step are valid: the last save of a run may follow a periodic one,
and a run that was restored from an older checkpoint reaches the same steps again. The replacement uses two renames, not
Linux's atomic exchange, which NFS lacks. If the process is killed between them, step-N.replaced is the checkpoint of
step N. If two writers commit the same step at once (a failing rank and the chief), the later one wins.
"""

import contextlib
import errno
import os
import pathlib
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any

from allred.arrays import Array
from allred.checkpoint.directory import (
    claim,
    discard,
    move_outdated,
    name_of_step,
    overwrite,
    release,
    sweep,
    unfinished_name,
    unfinished_step,
)
from allred.checkpoint.entry import Entry, check_cover
from allred.checkpoint.files import MANIFEST, Manifest, ShardInfo, check_length, file_errors, shard_name, write_shard
from allred.errors import CheckpointError, InputError

_TRIES = 10  # renames, while another writer renames the same step


def begin(root: str | os.PathLike[str], step: int) -> pathlib.Path:
    """Create the directory for the shards of a checkpoint. The same process must call `commit` or `abandon`.

    Readers ignore the directory until `commit`. If the process dies, a later commit of any process deletes it.

    root: the directory of all checkpoints of this training; created if missing. step: the global step, >= 0.
    Raises InputError: a negative step. Raises CheckpointError: the directory cannot be created.
    """
    if step < 0:
        raise InputError(f"begin: step={step}; expected the number of updates done, >= 0")
    directory = pathlib.Path(root) / unfinished_name(step)
    with file_errors("begin: creating", directory.parent):
        directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        with file_errors("begin: creating", directory):
            claim(directory)
    except BaseException:
        abandon(directory)
        raise
    return directory


def write(
    root: str | os.PathLike[str],
    step: int,
    entries: Iterable[tuple[Entry, Array]],
    meta: dict[str, Any] | None = None,
    write_more: Callable[[pathlib.Path], dict[str, Any]] = lambda directory: {},
) -> pathlib.Path:
    """Call `begin`, `write_shard` and `commit` for a single shard. See these for arguments and errors. write_more:
    writes other files into the directory, and returns what to add to `meta`."""
    directory = begin(root, step)
    try:
        meta = {**(meta or {}), **write_more(directory)}
        return commit(directory, step, [write_shard(directory, 0, 1, entries)], meta)
    except BaseException:
        abandon(directory)
        raise


def commit(
    directory: str | os.PathLike[str], step: int, shards: Iterable[ShardInfo], meta: dict[str, Any] | None = None
) -> pathlib.Path:
    """Make `directory` the checkpoint of this step, atomically and on disk. An error deletes `directory`.

    Replaces a complete checkpoint of the same step. If `meta` has "training", which identifies a training,
    checkpoints of later steps with another value are renamed, for example after a restore of an older step.

    directory: the result of `begin` for the same step. shards: the results of all `write_shard` calls, in any order.
    meta: dicts, lists, numbers, text, booleans and None, for `read_checkpoint`. Tuples become lists, keys text.
    Returns the checkpoint: root/step-00000400.
    Raises InputError: another directory or step, or `meta` cannot be written as JSON. Raises CheckpointError: a shard
    is missing, the shards do not form whole tensors, or a file operation fails.
    """
    source = pathlib.Path(directory)
    if unfinished_step(source.name) != step:
        raise InputError(f"commit: expected the directory that begin returned for step {step}, but got {source}")
    target, key = source.parent / name_of_step(step), os.path.realpath(source)
    try:
        written = Manifest(step, time.time(), tuple(sorted(shards, key=lambda shard: shard.file)), meta or {})
        _check_shards(source, written)
        content = written.encode()
        with file_errors(f"commit: writing {len(content) / 1e6:.1f} MB to", source / MANIFEST):
            overwrite(source, content)
            now = (source / MANIFEST).stat().st_mtime
            sync_directory(source)
        with file_errors(f"commit: renaming {source} to", target):
            replaced = _rename(source, target)
    except BaseException:
        abandon(source)
        raise
    release(key)
    with file_errors("commit: syncing", target.parent):
        sync_directory(target.parent)
    if "training" in written.meta:
        with file_errors(f"commit: {target} is written; renaming later checkpoints in", target.parent):
            move_outdated(target.parent, step, written.meta["training"])
    with contextlib.suppress(OSError):  # the next commit deletes the rest
        if replaced.exists():
            discard(replaced)
        sweep(target.parent, now)
    return target


def abandon(directory: str | os.PathLike[str]) -> None:
    """Delete an unfinished checkpoint; ignores file errors. Another process that writes a shard gets CheckpointError.

    directory: the result of `begin`; it need not exist.
    Raises InputError: another directory; nothing is deleted.
    """
    source = pathlib.Path(directory)
    if unfinished_step(source.name) is None:
        raise InputError(f"abandon: expected the directory that begin returned, but got {source}")
    key = os.path.realpath(source)
    with contextlib.suppress(OSError):
        discard(source)
    release(key)


def _check_shards(source: pathlib.Path, written: Manifest) -> None:
    files = [shard.file for shard in written.shards]
    expected = [shard_name(index, len(files)) for index in range(len(files))]
    if not files or files != expected:
        raise CheckpointError(
            f"commit: got the shards {files}, but {len(files)} shards are {expected}; pass the result of every "
            "write_shard, each once"
        )
    check_cover("commit", ((shard.file, entry) for shard in written.shards for entry in shard.entries))
    for shard in written.shards:
        check_length("commit", source, shard)


def _rename(source: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """Steps 3 and 4. Returns the path step-N.replaced, which may not exist."""
    replaced = target.with_name(target.name + ".replaced")
    for tries_left in reversed(range(_TRIES)):
        try:
            if os.path.lexists(target):
                _move_aside(target, replaced)
            os.rename(source, target)
            break
        except OSError as error:  # another writer has renamed the same step
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT) or not tries_left:
                raise
    return replaced


def _move_aside(target: pathlib.Path, replaced: pathlib.Path) -> None:
    """Rename an older checkpoint of the same step. Files that are no checkpoint are renamed and never deleted."""
    if (target / MANIFEST).exists():
        if replaced.exists():
            discard(replaced)
        os.rename(target, replaced)
        return
    aside = target.with_name(f"{target.name}.was-in-the-way-{secrets.token_hex(4)}")
    os.rename(target, aside)
    if (aside / MANIFEST).exists():  # another writer has put its checkpoint there since the first check
        try:
            os.rename(aside, replaced)
        except OSError:  # step-N.replaced exists
            discard(aside)


def sync_directory(directory: pathlib.Path) -> None:
    """Sync the list of files of a directory to disk."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # file systems that do not support it, or do not need it
            raise
    finally:
        os.close(handle)
