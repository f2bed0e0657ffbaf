"""What a file system refuses is one CheckpointError, and nothing is lost."""

import concurrent.futures
import contextlib
import errno
import os
import resource
import subprocess

import numpy as np
import pytest
from checkpoints import W, names_in, same, save, save_one

import allred
from allred import checkpoint
from allred.checkpoint import directory as directories
from allred.checkpoint import whole
from allred.checkpoint.files import file_errors
from allred.errors import CheckpointError


@contextlib.contextmanager
def tmpfs(where, options):
    """A small file system of its own; only root can have one."""
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", where], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mount.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", where], check=True)  # a failed test may have left a file open


@pytest.fixture
def mounted(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can mount a tmpfs")
    with tmpfs(tmp_path, "size=1m"):
        yield tmp_path


BIG = np.ones(300_000, np.uint8)


def test_a_full_disk(mounted):
    older = [save(mounted, step, [whole("w", BIG)]) for step in (1, 2)]
    two = [whole("w", BIG), whole("v", BIG)]
    directory = checkpoint.begin(mounted, 3)
    with pytest.raises(CheckpointError, match=r"writing 0.6 MB to .*shard-0.*No space left.*MB are free\); free some"):
        checkpoint.write_shard(directory, 0, 1, two)
    assert names_in(directory) == ["manifest.json"]
    checkpoint.abandon(directory)
    assert (names_in(mounted), checkpoint.newest(mounted)) == ([path.name for path in older], older[1])
    same(checkpoint.read_checkpoint(older[1]).params["w"], BIG)
    assert checkpoint.prune(mounted, 1) == older[:1]
    save(mounted, 3, two)


def test_too_many_open_files_are_not_a_fault_of_the_file_system(tmp_path):
    with pytest.raises(CheckpointError, match=r"Too many open files; close files .* `ulimit -n`"):  # noqa: SIM117
        with file_errors("begin: creating", tmp_path):
            raise OSError(errno.EMFILE, "")


def fill(path):
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


def test_a_disk_that_is_full_when_the_manifest_is_written(mounted):
    older = save(mounted, 1, [whole("w", BIG)])
    directory = checkpoint.begin(mounted, 2)
    shard = checkpoint.write_shard(directory, 0, 1, [])
    fill(mounted / "other")
    with pytest.raises(CheckpointError, match=r"^commit: writing .*manifest\.json failed: No space left"):
        checkpoint.commit(directory, 2, [shard], {"log": "x" * 100_000})
    fill(mounted / "another")
    with pytest.raises(CheckpointError, match=r"^begin: creating .* failed: No space left"):
        checkpoint.begin(mounted, 3)
    assert names_in(mounted) == ["another", "other", older.name]
    assert checkpoint.verify(older) == []


def test_a_limit_of_file_sizes(tmp_path):
    directory = checkpoint.begin(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"File too large; .* `ulimit -f unlimited`"):
            checkpoint.write_shard(directory, 0, 1, [whole("w", BIG)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names_in(directory) == ["manifest.json"]
    checkpoint.abandon(directory)


@contextlib.contextmanager
def read_only(directory):
    """Root may write whatever the modes of files are, so for root it is the mount that refuses."""
    if os.geteuid() == 0:
        subprocess.run(["mount", "-o", "remount,ro", directory], check=True)
    else:
        directory.chmod(0o555)
    try:
        yield
    finally:
        if os.geteuid() == 0:
            subprocess.run(["mount", "-o", "remount,rw", directory], check=True)
        else:
            directory.chmod(0o755)


def test_a_read_only_directory(tmp_path):
    with tmpfs(tmp_path, "size=1m") if os.geteuid() == 0 else contextlib.nullcontext():
        older = [save_one(tmp_path, step) for step in (0, 1)]
        directory = checkpoint.begin(tmp_path, 2)
        shard = checkpoint.write_shard(directory, 0, 2, [])
        refused = "failed: (Permission denied|Read-only file system); .*save to another directory"
        directories.release(os.path.realpath(directory))  # an open file would keep the mount from becoming read-only
        with (
            read_only(tmp_path if os.geteuid() == 0 else directory),
            pytest.raises(CheckpointError, match=f"^write_shard: creating .* {refused}"),
        ):
            checkpoint.write_shard(directory, 1, 2, [])
        with read_only(tmp_path):
            with pytest.raises(CheckpointError, match=f"^begin: creating .* {refused}"):
                checkpoint.begin(tmp_path, 3)
            with pytest.raises(CheckpointError, match=f"^prune: deleting .* {refused}"):
                checkpoint.prune(tmp_path, 1)
        assert [checkpoint.verify(path) for path in older] == [[], []]
        assert checkpoint.list_complete(tmp_path) == older
        assert (directory / shard.file).exists()
        checkpoint.abandon(directory)


def test_a_directory_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"No such file or directory; it is gone, or this host does not see it"):
        checkpoint.write_shard(tmp_path / "nowhere", 0, 1, [])


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "root").write_text("mine")
    with pytest.raises(
        CheckpointError, match=f"^begin: creating {tmp_path / 'root'} failed: File exists; .*in the way"
    ):
        checkpoint.begin(tmp_path / "root", 1)
    with pytest.raises(CheckpointError, match="Not a directory; a file is where a directory is expected"):
        checkpoint.newest(tmp_path / "root")
    assert (tmp_path / "root").read_text() == "mine"


def test_a_file_with_the_name_of_a_checkpoint_is_renamed(tmp_path):
    (tmp_path / "step-00000001").write_text("mine")
    (tmp_path / "step-00000002").mkdir()
    for step in (1, 2):
        save_one(tmp_path, step)
    assert [path.name for path in checkpoint.list_complete(tmp_path)] == ["step-00000001", "step-00000002"]
    moved = sorted(tmp_path.glob("*.was-in-the-way-*"))
    assert len(moved) == 2
    assert moved[0].read_text() == "mine"


def test_two_writers_of_one_step(tmp_path):
    def write(value):
        for _ in range(30):
            checkpoint.write(tmp_path, 7, [checkpoint.whole("w", np.full(3, value))])

    with concurrent.futures.ThreadPoolExecutor() as threads:
        list(threads.map(write, [1.0, 2.0, 3.0]))
    assert checkpoint.read_checkpoint(tmp_path / "step-00000007").params["w"][0] in (1, 2, 3)
    assert os.listdir(tmp_path) == ["step-00000007"]


def test_two_writers_of_one_shard(tmp_path):
    directory = checkpoint.begin(tmp_path, 1)
    shard = checkpoint.write_shard(directory, 0, 1, [whole("w", W)])
    with pytest.raises(CheckpointError, match=r"creating .*shard-00000-of-00001.* failed: File exists"):
        checkpoint.write_shard(directory, 0, 1, [])
    same(checkpoint.read_checkpoint(checkpoint.commit(directory, 1, [shard])).params["w"], W)


def test_an_interrupted_shard_leaves_no_file(tmp_path, monkeypatch):
    def interrupt(handle):
        raise KeyboardInterrupt

    directory = checkpoint.begin(tmp_path, 1)
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.write_shard(directory, 0, 1, [whole("w", W)])
    assert names_in(directory) == ["manifest.json"]
    checkpoint.abandon(directory)


def test_the_error_is_public_and_of_its_kinds():
    assert allred.CheckpointError is CheckpointError
    assert {allred.AllredError, OSError} < set(CheckpointError.__mro__)
