"""What a kill at any moment of a save leaves on disk.

SIGKILL loses nothing that the process has written to files. So a kill leaves what another process can read at that
moment, and the test reads it during the save: after each Python instruction of allred/checkpoint or shutil that changed
a file.
"""

import os
import pathlib
import shutil
import sys

import numpy as np
import pytest

from allred import checkpoint
from allred.checkpoint import directory

TRACED = (str(pathlib.Path(checkpoint.__file__).parent), shutil.__file__)
COUNT = 64


def save(root, step, value):
    """Save two shards, and delete all checkpoints but the newest two."""
    path = checkpoint.begin(root, step)
    array = np.full(COUNT, value, np.float32)
    pieces = [(checkpoint.Entry("w", "", "float32", array.shape, at, at + 32), array[at : at + 32]) for at in (0, 32)]
    shards = [checkpoint.write_shard(path, index, 2, [piece]) for index, piece in enumerate(pieces)]
    checkpoint.commit(path, step, shards, {"value": value})
    checkpoint.prune(root, keep=2)


def state(root):
    """Path, time and length of each file: different after each change."""
    found = []
    for path in sorted(root.rglob("*")):
        status = path.stat()
        found.append((str(path), status.st_ino, status.st_mtime_ns, status.st_size))
    return found


class Observer:
    """A trace function that calls `check` after each of these instructions that changed a file."""

    def __init__(self, root, check):
        self.root, self.check, self.last = root, check, None
        self.checks, self.errors = 0, []

    def __call__(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(TRACED):
            return None
        frame.f_trace_opcodes = True
        if (now := state(self.root)) != self.last:
            self.last = now
            self.checks += 1
            try:
                self.check()
            except Exception as error:  # raised later: allred/checkpoint handles some errors
                self.errors.append(error)
        return self

    def observe(self, function, *arguments):
        sys.settrace(self)
        try:
            function(*arguments)
        finally:
            sys.settrace(None)
        if self.errors:
            raise self.errors[0]


@pytest.mark.parametrize("replaces", [False, True], ids=["a new step", "a step that exists"])
def test_at_every_moment_of_a_save_each_visible_checkpoint_is_complete_and_right(tmp_path, replaces):
    for step in (1, 2):
        save(tmp_path, step, step)
    step = 2 if replaces else 3
    valid = {1: {1.0}, 2: {2.0}}
    valid.setdefault(step, set()).add(9.0)

    def check():
        committed = directory.list_committed(tmp_path)
        assert set(committed) >= {2}
        assert set(committed) <= set(valid)
        for number, path in committed.items():
            assert checkpoint.verify(path) == []
            back = checkpoint.read_checkpoint(path)
            assert back.meta["value"] in valid[number]
            np.testing.assert_array_equal(back.params["w"], np.full(COUNT, back.meta["value"], np.float32))
        assert os.path.basename(checkpoint.newest(tmp_path)) in {
            "step-00000002",
            "step-00000002.replaced",
            f"step-{step:08d}",
        }

    observer = Observer(tmp_path, check)
    observer.observe(save, tmp_path, step, 9.0)
    assert observer.checks > 10
    assert checkpoint.read_checkpoint(checkpoint.newest(tmp_path)).meta == {"value": 9.0}
