"""Rows of embedding tables in a checkpoint: files beside the shards, and their description in the manifest.

A process that restores reads the file of each writer, and keeps the rows that belong to it. So a checkpoint can be
restored by any number of processes.
"""

import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from allred.arrays import Array
from allred.checkpoint.entry import Entry, whole
from allred.checkpoint.files import ShardInfo, check_bytes, read_shard, write_shard

_KEY = "tables"  # in the manifest's meta, which exists in checkpoints: keep it


def write_rows(
    directory: str | os.PathLike[str], number: int, name: str, index: int, of: int, columns: dict[str, Array]
) -> ShardInfo:
    """Write the rows of a table that writer `index` of `of` holds. number: of the table. Raises as `write_shard`."""
    entries = [whole(name, column, slot) for slot, column in columns.items()]
    return write_shard(directory, index, of, entries, prefix=f"rows-{number:05d}")


def describe_tables(parts: dict[str, list[ShardInfo]], steps: dict[str, int]) -> dict[str, Any]:
    """Return what the manifest contains of tables. parts: the files of each table. steps: its number of updates."""
    tables = {name: {"step": steps[name], "parts": [each.to_json() for each in files]} for name, files in parts.items()}
    return {_KEY: tables} if tables else {}


def tables_in(meta: dict[str, Any]) -> dict[str, Any]:
    """Return {name of a table: its step and files} of a checkpoint."""
    found: dict[str, Any] = meta.get(_KEY, {})
    return found


def read_rows(directory: str | os.PathLike[str], table: dict[str, Any]) -> Iterator[dict[str, Array]]:
    """Yield the columns of each file of a table. table: a value of `tables_in`. Raises CheckpointError."""
    for part in map(ShardInfo.from_json, table["parts"]):
        columns: dict[str, Array] = {}

        def destination(entry: Entry, columns: dict[str, Array] = columns) -> Array:
            return columns.setdefault(entry.slot_name, np.empty(entry.shape, entry.dtype))

        read_shard("restore", pathlib.Path(directory), part, destination)
        yield columns


def check_rows(directory: pathlib.Path, meta: dict[str, Any]) -> Iterator[None]:
    """Verify one file after the other. Raises CheckpointError at a damaged one."""
    for table in tables_in(meta).values():
        for part in map(ShardInfo.from_json, table["parts"]):
            check_bytes("checkpoint", directory, part)
            yield
