"""Checkpoint files: parameters and slots by name, in shards, committed atomically.

The room knows no communicator, no server and no optimizer.

    ROOT/step-00000400/manifest.json                              what is in the shards, and what their bytes must be
    ROOT/step-00000400/shard-00000-of-00002.safetensors           tensors, or pieces of tensors
    ROOT/.step-00000500.5e1f0c.1f2e3d4c.tmp/                      being written

A save: one process calls `begin`, every process that holds parameters `write_shard`, and the first one, with all their
`Shard`s, `commit`, or `abandon` if one of them failed. It takes a file system that all of them share.

A directory named step-... is complete from the moment it has that name: everything in it is on disk before `commit`
renames it. So a process that is killed at any moment leaves the earlier checkpoints as they are.

    directory = checkpoint.begin(root, step=400)
    shards = [checkpoint.write_shard(directory, 0, 1, [checkpoint.whole("w", w), checkpoint.whole("w", m, slot="m")])]
    checkpoint.commit(directory, 400, shards, meta={"lr": 0.1})
    checkpoint.read(checkpoint.newest(root)).params["w"]
"""

from allred.checkpoint.entry import Entry, whole
from allred.checkpoint.manifest import Manifest, load
from allred.checkpoint.own import extra, find_own_state, own_state, take_extra
from allred.checkpoint.restoring import Checkpoint, read, read_newest, verify
from allred.checkpoint.root import has, newest, prune, steps
from allred.checkpoint.saving import abandon, begin, commit, write
from allred.checkpoint.shard import Shard, write_shard

__all__ = [
    "Checkpoint",
    "Entry",
    "Manifest",
    "Shard",
    "abandon",
    "begin",
    "commit",
    "extra",
    "find_own_state",
    "has",
    "load",
    "newest",
    "own_state",
    "prune",
    "read",
    "read_newest",
    "steps",
    "take_extra",
    "verify",
    "whole",
    "write",
    "write_shard",
]
