"""Rows of embedding tables in a checkpoint: files beside the shards, and their description in the manifest.

A process that restores reads the file of each writer, and keeps the rows that belong to it. So a checkpoint can be
restored by any number of processes. A checkpoint may have only the rows that were used since an earlier one, its base,
which has the others.
"""

import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from allred.arrays import Array
from allred.checkpoint.entry import Entry, whole
from allred.checkpoint.files import ShardInfo, is_file_name, read_manifest, read_shard, write_shard
from allred.errors import CheckpointError

_KEY = "tables"  # in the manifest's meta, which exists in checkpoints: keep it


def write_rows(
    directory: str | os.PathLike[str], number: int, name: str, index: int, of: int, columns: dict[str, Array]
) -> ShardInfo:
    """Write the rows of a table that writer `index` of `of` holds. number: of the table. Raises as `write_shard`."""
    entries = [whole(name, column, slot) for slot, column in columns.items()]
    return write_shard(directory, index, of, entries, prefix=f"rows-{number:05d}")


def describe_tables(parts: dict[str, list[ShardInfo]], steps: dict[str, int], bases: dict[str, str]) -> dict[str, Any]:
    """Return the entry of the manifest for the tables. parts: the files of each table. steps: its number of updates.
    bases: the name of the checkpoint that has its other rows; "" if these are all."""
    tables = {
        name: {"step": steps[name], "base": bases[name], "parts": [each.to_json() for each in files]}
        for name, files in parts.items()
    }
    return {_KEY: tables} if tables else {}


def tables_in(meta: dict[str, Any]) -> dict[str, Any]:
    """Return {name of a table: its step, base and files} of a checkpoint. Raises CheckpointError."""
    found: dict[str, Any] = meta.get(_KEY, {})
    try:
        for table in found.values():
            if type(table["step"]) is not int or type(table["parts"]) is not list or not _is_base(table["base"]):
                raise ValueError
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CheckpointError(
            f"checkpoint: the tables of the manifest are not what allred writes: {found!r}"[:300]
        ) from None
    return found


def _is_base(name: Any) -> bool:
    return name == "" or is_file_name(name)


def _table_in(directory: pathlib.Path, name: str) -> dict[str, Any]:
    tables = tables_in(read_manifest(directory).meta)
    if name not in tables:
        raise CheckpointError(f"{directory} has no table {name!r}, only {list(tables)}")
    table: dict[str, Any] = tables[name]
    return table


def checkpoints_of(directory: str | os.PathLike[str], name: str) -> list[pathlib.Path]:
    """Return the checkpoints that have rows of a table of this checkpoint, the oldest first; later rows replace earlier
    ones. Raises CheckpointError: one of them is missing."""
    found = [pathlib.Path(directory)]
    while base := _table_in(found[-1], name)["base"]:
        if base >= found[-1].name:
            raise CheckpointError(f"{found[-1]}: the rows of table {name!r} are based on {base}, which is not older")
        found.append(found[-1].parent / base)
    return found[::-1]


def bases_of(directory: pathlib.Path, meta: dict[str, Any]) -> set[pathlib.Path]:
    """Return the other checkpoints that this one needs. meta: of its manifest. Raises as `checkpoints_of`."""
    return {path for name in tables_in(meta) for path in checkpoints_of(directory, name)} - {directory}


def row_files(directory: pathlib.Path, name: str) -> Iterator[tuple[pathlib.Path, ShardInfo]]:
    """Yield the files of a table with the checkpoint of each, the oldest checkpoint first. Raises as
    `checkpoints_of`."""
    for path in checkpoints_of(directory, name):
        for part in _table_in(path, name)["parts"]:
            try:
                info = ShardInfo.from_json(part)
            except (ValueError, TypeError, KeyError) as error:
                raise CheckpointError(f"checkpoint: table {name!r} of {path} has a wrong file: {error!r}") from None
            yield path, info


def read_rows(directory: pathlib.Path, name: str) -> Iterator[dict[str, Array]]:
    """Yield the columns of each file of a table, those of older checkpoints first. Raises CheckpointError."""
    for path, part in row_files(directory, name):
        columns: dict[str, Array] = {}

        def destination(entry: Entry, columns: dict[str, Array] = columns) -> Array:
            return columns.setdefault(entry.slot_name, np.empty(entry.shape, entry.dtype))

        read_shard("restore", path, part, destination)
        yield columns


def check_row_files(
    directory: pathlib.Path, meta: dict[str, Any], check: Callable[[str, pathlib.Path, ShardInfo], None]
) -> Iterator[CheckpointError]:
    """Yield the damage of all files of the tables, those of bases too. meta: of the manifest. check: raises
    CheckpointError for a file."""
    try:
        for name in tables_in(meta):
            for path, part in row_files(directory, name):
                try:
                    check("checkpoint", path, part)
                except CheckpointError as error:
                    yield error
    except CheckpointError as error:
        yield error
