"""The manifest: a JSON file that lists the shards of a checkpoint, with a checksum of itself.

    {"format": "allred checkpoint", "version": 1, "step": 400, "time": ..., "meta": {}, "shards": [], "checksum": ""}

The checksum is CRC-32 of the other fields, as JSON with sorted keys and without spaces. Every version of the format
must keep the fields `format`, `version` and `checksum`: then a newer version is not reported as damage.
"""

import dataclasses
import json
import os
import pathlib
import zlib
from typing import Any

from allred.checkpoint.shard import ShardInfo, file_errors
from allred.errors import CheckpointError, InputError

NAME = "manifest.json"
FORMAT = "allred checkpoint"
VERSION = 1


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Content of a manifest.

    Attributes:
        step: the global step of the parameters.
        time: the time of the commit, in seconds since 1970.
        shards: the shards with the tensors.
        meta: the argument `meta` of `commit`.
    """

    step: int
    time: float
    shards: tuple[ShardInfo, ...]
    meta: dict[str, Any]


def encode(manifest: Manifest) -> bytes:
    """Return the content of the file. Raises InputError unless `meta` has only dicts, lists, numbers, text and None."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "time": manifest.time,
        "meta": manifest.meta,
        "shards": [shard.to_json() for shard in manifest.shards],
    }
    try:
        content = json.loads(json.dumps(content))  # before the checksum: tuples become lists, and keys text
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"commit: meta must hold only dicts, lists, numbers, text, booleans and None, but {error}"
        ) from error
    return json.dumps({**content, "checksum": _checksum(content)}, indent=1).encode()


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read the manifest of the checkpoint in the directory `path`. Does not check the shards.

    Raises:
        CheckpointError: the manifest is missing, damaged, or of a version that this allred does not know.
    """
    file = pathlib.Path(path) / NAME
    with file_errors("checkpoint: reading", file):
        raw = file.read_bytes()
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint: {file} is damaged: {error}") from error
    if isinstance(content, dict) and "writer" in content:
        raise CheckpointError(f"checkpoint: {file.parent} is not complete: {content['writer']} has not committed it")
    _check(file, content)
    try:
        shards = tuple(map(ShardInfo.from_json, content["shards"]))
        return Manifest(content["step"], content["time"], shards, content["meta"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint: {file} does not have the fields that allred writes: {error!r}") from error


def _check(file: pathlib.Path, content: Any) -> None:
    """Remove the checksum from `content`. Raises CheckpointError if checksum, format or version are wrong."""
    if not isinstance(content, dict) or "checksum" not in content:
        raise CheckpointError(f"checkpoint: {file} is damaged: expected a JSON object with a checksum")
    written, found = content.pop("checksum"), _checksum(content)
    if written != found:
        raise CheckpointError(
            f"checkpoint: {file} is damaged: its checksum is {found}, but was {written} when it was written"
        )
    if content.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint: the format of {file} is {content.get('format')!r}; expected {FORMAT!r}")
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"checkpoint: {file} has version {content.get('version')!r} of the format, but this allred reads "
            f"version {VERSION}; install the allred that wrote it, or a newer one"
        )


def _checksum(content: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True, separators=(',', ':')).encode()):08x}"
