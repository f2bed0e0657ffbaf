"""Checkpoint files: parameters and optimizer slots by name, in shards, committed atomically.

The package knows no communicator, server or optimizer. All processes must share the file system.

    ROOT/step-00000400/manifest.json                              the list of shards and tensors, with checksums
    ROOT/step-00000400/shard-00000-of-00002.safetensors           tensors, or pieces of tensors
    ROOT/.step-00000500.5e1f0c.1f2e3d4c.tmp/                      unfinished

To save, one process calls `begin`; every process that holds parameters calls `write_shard`; then the first process
calls `commit` with all ShardInfos, or `abandon` after an error. `commit` syncs all files to disk and then renames the
directory to step-...: a process that is killed at any moment leaves the earlier checkpoints unchanged.

    directory = checkpoint.begin(root, step=400)
    shards = [checkpoint.write_shard(directory, 0, 1, [checkpoint.whole("w", w), checkpoint.whole("w", m, slot="m")])]
    checkpoint.commit(directory, 400, shards, meta={"lr": 0.1})
    checkpoint.read_checkpoint(checkpoint.newest(root)).params["w"]
"""

from allred.checkpoint.directory import has, list_complete, newest, prune
from allred.checkpoint.entry import (
    Entry,
    pickled_extra,
    pickled_state,
    stored_slot,
    unpickle_extra,
    unpickle_state,
    whole,
)
from allred.checkpoint.files import MANIFEST, Manifest, MissingPackageError, ShardInfo, read_manifest, write_shard
from allred.checkpoint.restore import SavedTensors, newest_first, read_checkpoint, read_committed, read_newest, verify
from allred.checkpoint.writing import abandon, begin, commit, write

__all__ = [
    "MANIFEST", "Entry", "Manifest", "MissingPackageError", "SavedTensors", "ShardInfo", "abandon", "begin", "commit",
    "has", "list_complete", "newest", "newest_first", "pickled_extra", "pickled_state", "prune", "read_checkpoint",
    "read_committed", "read_manifest", "read_newest", "stored_slot", "unpickle_extra", "unpickle_state", "verify",
    "whole", "write", "write_shard",
]  # fmt: skip
