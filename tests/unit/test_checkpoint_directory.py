"""The directory of checkpoints: steps, replacement, pruning; what killed writers have left."""

import errno
import fcntl
import os
import pathlib
import subprocess
import sys

import pytest
from checkpoints import names_in, save_one

from allred import checkpoint
from allred.checkpoint import directory
from allred.errors import CheckpointError, InputError


def test_steps_newest_and_prune(tmp_path):
    root = tmp_path / "run" / "checkpoints"
    assert (checkpoint.list_complete(root), checkpoint.newest(root)) == ([], None)
    paths = {step: save_one(root, step) for step in (300, 5, 100, 10**9, 200, 0)}
    for other in ("step-5", "step-00000007x", "best", ".step-00000900.5e1f.0123abcd.tmp", "step-00000006"):
        (root / other).mkdir()
    living = checkpoint.begin(root, 2 * 10**9)
    ordered = [paths[step] for step in sorted(paths)]
    assert checkpoint.list_complete(root) == ordered
    assert checkpoint.newest(root) == paths[10**9] == root / "step-1000000000"
    assert checkpoint.prune(root, keep=2, keep_every=100) == [paths[5]]
    assert checkpoint.prune(root, keep=9) == []
    assert checkpoint.prune(root, keep=2) == [paths[0], paths[100], paths[200]]
    assert checkpoint.list_complete(root) == [paths[300], paths[10**9]]
    assert {"step-5", "best", "step-00000006", living.name} < set(names_in(root))
    for keep, every in ((0, 0), (-1, 0), (1, -1)):
        with pytest.raises(InputError, match="expected keep >= 1"):
            checkpoint.prune(root, keep, every)
    checkpoint.abandon(living)


def test_a_damaged_checkpoint_does_not_count_among_those_kept(tmp_path):
    older, newer = save_one(tmp_path, 1), save_one(tmp_path, 2)
    (newer / "manifest.json").unlink()
    assert checkpoint.prune(tmp_path, keep=1) == []
    assert names_in(tmp_path) == [older.name, newer.name]


def test_a_step_that_exists_is_replaced(tmp_path):
    save_one(tmp_path, 7, 1)
    path = save_one(tmp_path, 7, 2)
    assert checkpoint.read_checkpoint(path).params["w"][0] == 2
    assert names_in(tmp_path) == ["step-00000007"]


def test_between_the_two_renames_of_a_replacement_the_old_one_is_found(tmp_path, monkeypatch):
    save_one(tmp_path, 7, 1)
    rename = os.rename

    def failing(source, target):
        if pathlib.Path(target).name == "step-00000007":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    for _ in range(2):
        monkeypatch.setattr(os, "rename", failing)
        with pytest.raises(CheckpointError, match="Input/output error"):
            save_one(tmp_path, 7, 2)
        monkeypatch.undo()
        assert names_in(tmp_path) == ["step-00000007.replaced"]
        newest = checkpoint.newest(tmp_path)
        assert checkpoint.read_checkpoint(newest).params["w"][0] == 1
        save_one(tmp_path, 5)  # its sweep must not take it
        assert checkpoint.newest(tmp_path) == newest
        checkpoint.prune(tmp_path, 1)
    assert checkpoint.read_checkpoint(save_one(tmp_path, 7, 3)).params["w"][0] == 3
    assert names_in(tmp_path) == ["step-00000007"]


def test_after_the_second_rename_the_new_one_is_found(tmp_path):
    replaced = save_one(tmp_path, 7, 1).rename(tmp_path / "step-00000007.replaced")
    path = save_one(tmp_path / "elsewhere", 7, 2).rename(tmp_path / "step-00000007")
    assert checkpoint.list_complete(tmp_path) == [path]
    save_one(tmp_path, 5)
    assert not replaced.exists()


def test_everything_is_on_disk_before_the_name_is(tmp_path, monkeypatch):
    fsync, rename, done = os.fsync, os.rename, []

    def noting_fsync(handle):
        done.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def noting_rename(source, target):
        done.append((os.path.basename(source), os.path.basename(target)))
        rename(source, target)

    directory = checkpoint.begin(tmp_path, 1)
    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "rename", noting_rename)
    shards = [checkpoint.write_shard(directory, i, 2, []) for i in range(2)]
    checkpoint.commit(directory, 1, shards)
    name = directory.name
    assert done == [shards[0].file, shards[1].file, "manifest.json", name, (name, "step-00000001"), tmp_path.name]


def test_an_unfinished_directory_without_a_claim_is_deleted(tmp_path):
    """Left by writers that were killed between making the directory and saying whose it is."""
    save_one(tmp_path, 1)
    ours, other = (directory.unfinished_name(2) for _ in range(2))
    for name in (ours, other, ".step-00000002.5e1f.0123abcd.tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / other / "manifest.json").touch()
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)  # another one begins: it could be one of these
    save_one(tmp_path, 3)
    assert {ours, other} < set(names_in(tmp_path))
    os.close(descriptor)
    save_one(tmp_path, 4)  # that of another boot may be another host's
    assert names_in(tmp_path) == [".step-00000002.5e1f.0123abcd.tmp", *(f"step-0000000{n}" for n in (1, 3, 4))]


def test_the_modes_of_files_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        path = save_one(tmp_path, 1)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o750
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o640}


# Leftovers


def test_what_a_living_writer_writes_is_left_alone_and_what_a_dead_one_left_is_removed(tmp_path):
    code = f"from allred import checkpoint; print(checkpoint.begin({str(tmp_path)!r}, 9), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, stderr=-3, text=True) as other:
        theirs = pathlib.Path(other.stdout.readline().strip())
        mine = checkpoint.begin(tmp_path, 8)
        for path in (theirs, mine):
            os.utime(path, (0, 0))  # age does not matter where the lock tells
            os.utime(path / "manifest.json", (0, 0))
        with pytest.raises(CheckpointError, match=f"is not complete: process {other.pid} on "):
            checkpoint.read_checkpoint(theirs)
        save_one(tmp_path, 1)
        assert names_in(tmp_path) == sorted([theirs.name, mine.name, "step-00000001"])
        other.kill()
        other.wait()
    save_one(tmp_path, 2)
    assert names_in(tmp_path) == sorted([mine.name, "step-00000001", "step-00000002"])
    checkpoint.abandon(mine)


@pytest.mark.parametrize("record", [b"{}", b"", None])
def test_files_of_unknown_writers_are_deleted_after_a_day(tmp_path, record):
    left = tmp_path / ".step-00000009.5e1f.0123abcd.tmp"
    left.mkdir()
    (left / "shard-00000-of-00001.safetensors").write_bytes(b"x")
    if record is not None:
        (left / "manifest.json").write_bytes(record)
    path = save_one(tmp_path, 1)
    assert left.exists()
    ago = path.stat().st_mtime - directory.ABANDONED_S
    for old in left.iterdir():
        os.utime(old, (ago - 60, ago - 60))
    os.utime(left, (ago + 60, ago + 60))  # less than a day
    save_one(tmp_path, 1)
    assert left.exists()
    os.utime(left, (ago - 60, ago - 60))
    save_one(tmp_path, 1)
    assert not left.exists()


def test_where_a_process_cannot_see_its_own_locks_its_writes_are_left_alone(tmp_path, monkeypatch):
    """NFS makes flock a POSIX lock, which the process that holds it can take again."""
    mine = checkpoint.begin(tmp_path, 8)
    monkeypatch.setattr(directory.fcntl, "flock", lambda file, operation: None)
    save_one(tmp_path, 1)
    assert mine.exists()
    checkpoint.abandon(mine)
    assert names_in(tmp_path) == ["step-00000001"]


def test_without_locks_only_age_decides(tmp_path, monkeypatch):
    def unsupported(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(directory.fcntl, "flock", unsupported)
    mine = checkpoint.begin(tmp_path, 8)
    monkeypatch.setattr(directory, "_claimed", {})  # as another process sees it
    save_one(tmp_path, 1)
    assert mine.exists()
    for path in (*mine.iterdir(), mine):
        os.utime(path, (0, 0))
    save_one(tmp_path, 1)
    assert not mine.exists()
    monkeypatch.undo()
    checkpoint.abandon(mine)  # closes its manifest


def test_half_deleted_ones_are_removed(tmp_path):
    save_one(tmp_path, 1)
    for name in (".step-00000003.0123abcd.gone", "step-00000001.replaced", ".step-00000003.replaced.0123abcd.gone"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_bytes(b"")
    save_one(tmp_path, 2)
    assert names_in(tmp_path) == ["step-00000001", "step-00000002"]
