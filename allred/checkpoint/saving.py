"""Saving: a directory under a name that is no checkpoint's, filled, put on disk, and renamed.

The order of `commit`, where each step is done before the next begins:

1  every shard is there with its length (each was put on disk by its `write_shard`), and they make whole tensors
2  manifest.json is written, and put on disk; then the directory
3  a checkpoint of the same step that is there already is renamed to step-N.replaced; something else with that name
   to step-N.was-in-the-way-...
4  the directory is renamed to step-N: from now on it is the checkpoint; then the root is put on disk
5  what was replaced is deleted, and what dead writers have left

A step that exists is replaced, for two saves of one step are no mistake: the last save of a run may follow a periodic
one, and a run that was restored from an older checkpoint comes to the same steps again; an error would end that run,
hours later, for nothing. Two renames are used, not Linux's exchange of two names, which NFS lacks. Killed between
them, step-N.replaced is still found as the checkpoint of step N. Two writers may come to the same step at once, a rank
that fails and the chief: the last one holds.
"""

import contextlib
import errno
import os
import pathlib
import secrets
import time
from collections.abc import Iterable
from typing import Any

from allred.arrays import Array
from allred.checkpoint import manifest, writer
from allred.checkpoint.entry import Entry, check_cover
from allred.checkpoint.failure import explained
from allred.checkpoint.manifest import Manifest
from allred.checkpoint.root import committed_name, discard, sweep, unfinished_name, unfinished_step
from allred.checkpoint.shard import Shard, check_length, shard_name, write_shard
from allred.errors import CheckpointError, InputError

_TRIES = 10  # while another writer puts the same step


def begin(root: str | os.PathLike[str], step: int) -> pathlib.Path:
    """A new directory for the shards of a checkpoint. Goes with one `commit` or `abandon`, in the same process.

    Until then nothing takes it for a checkpoint. If the process dies, a later commit of any other deletes it.

    Arguments:
        root: the directory of all checkpoints of this training; made if it is not there.
        step: global step, >= 0.

    Raises:
        InputError: a negative step.
        CheckpointError: it could not be made.
    """
    if step < 0:
        raise InputError(f"begin: step={step}; expected the number of updates done, >= 0")
    directory = pathlib.Path(root) / unfinished_name(step)
    with explained("begin: creating", directory.parent):
        directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        with explained("begin: creating", directory):
            writer.claim(directory)
    except BaseException:
        abandon(directory)
        raise
    return directory


def write(
    root: str | os.PathLike[str], step: int, entries: Iterable[tuple[Entry, Array]], meta: dict[str, Any] | None = None
) -> pathlib.Path:
    """All three, where one process holds everything: the checkpoint. Arguments and errors are theirs."""
    directory = begin(root, step)
    try:
        return commit(directory, step, [write_shard(directory, 0, 1, entries)], meta)
    except BaseException:
        abandon(directory)
        raise


def commit(
    directory: str | os.PathLike[str], step: int, shards: Iterable[Shard], meta: dict[str, Any] | None = None
) -> pathlib.Path:
    """Make what is in `directory` the checkpoint of this step, at once, on disk. If it fails, `directory` is deleted.

    A complete checkpoint of the same step is replaced.

    Arguments:
        directory: what `begin` returned, for the same step.
        shards: what every `write_shard` returned, in any order.
        meta: what shall come back from `read`: dicts, lists, numbers, text, booleans and None. Tuples come back as
            lists, and keys as text.

    Returns:
        The checkpoint: root/step-00000400.

    Raises:
        InputError: not such a directory, another step, or `meta` cannot be written.
        CheckpointError: a shard is missing, the shards do not make whole tensors, or the file system refuses.
    """
    source = pathlib.Path(directory)
    if unfinished_step(source.name) != step:
        raise InputError(f"commit: expected the directory that begin returned for step {step}, but got {source}")
    target, key = source.parent / committed_name(step), os.path.realpath(source)
    try:
        written = Manifest(step, time.time(), tuple(sorted(shards, key=lambda shard: shard.file)), meta or {})
        _check_shards(source, written)
        content = manifest.dump(written)
        with explained(f"commit: writing {len(content) / 1e6:.1f} MB to", source / manifest.NAME):
            writer.overwrite(source, content)
            now = (source / manifest.NAME).stat().st_mtime
            _sync(source)
        with explained(f"commit: renaming {source} to", target):
            replaced = _put(source, target)
    except BaseException:
        abandon(source)
        raise
    writer.release(key)
    with explained("commit: putting on disk", target.parent):
        _sync(target.parent)
    with contextlib.suppress(OSError):  # the checkpoint is there; what stays is deleted by the next commit
        if replaced.exists():
            discard(replaced)
        sweep(target.parent, now)
    return target


def abandon(directory: str | os.PathLike[str]) -> None:
    """Give up a checkpoint that `begin` began, and delete what is there of it, as far as that can be done.

    A process that is still writing a shard into it gets a CheckpointError.

    Arguments:
        directory: what `begin` returned. One that is not there any more is no error.

    Raises:
        InputError: not such a directory; nothing is deleted.
    """
    source = pathlib.Path(directory)
    if unfinished_step(source.name) is None:
        raise InputError(f"abandon: expected the directory that begin returned, but got {source}")
    key = os.path.realpath(source)
    with contextlib.suppress(OSError):
        discard(source)
    writer.release(key)


def _check_shards(source: pathlib.Path, written: Manifest) -> None:
    files = [shard.file for shard in written.shards]
    expected = [shard_name(index, len(files)) for index in range(len(files))]
    if not files or files != expected:
        raise CheckpointError(
            f"commit: got the shards {files}, but {len(files)} shards are {expected}; pass what every write_shard "
            "returned, each once"
        )
    check_cover("commit", ((shard.file, entry) for shard in written.shards for entry in shard.entries))
    for shard in written.shards:
        check_length("commit", source, shard)


def _put(source: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """Steps 3 and 4; the name of what was replaced, whether there was anything or not."""
    replaced = target.with_name(target.name + ".replaced")
    for tries_left in reversed(range(_TRIES)):
        try:
            if os.path.lexists(target):
                _make_way(target, replaced)
            os.rename(source, target)
            break
        except OSError as error:  # another writer of the same step was quicker
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT) or not tries_left:
                raise
    return replaced


def _make_way(target: pathlib.Path, replaced: pathlib.Path) -> None:
    """Rename an older checkpoint of the same step. What is no checkpoint goes aside for good: it may be of value to
    somebody, and the parameters that wait for its place are."""
    if (target / manifest.NAME).exists():
        if replaced.exists():
            discard(replaced)
        os.rename(target, replaced)
        return
    aside = target.with_name(f"{target.name}.was-in-the-way-{secrets.token_hex(4)}")
    os.rename(target, aside)
    if (aside / manifest.NAME).exists():  # by now another writer had put its checkpoint there
        try:
            os.rename(aside, replaced)
        except OSError:  # one that was replaced is there already
            discard(aside)


def _sync(directory: pathlib.Path) -> None:
    """Put on disk which files a directory holds."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # what file systems say that cannot, or need not
            raise
    finally:
        os.close(handle)
