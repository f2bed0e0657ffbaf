"""The manifest: what a checkpoint consists of, as a JSON file that carries its own checksum.

    {"format": "allred checkpoint", "version": 1, "step": 400, "time": ..., "meta": {}, "shards": [], "checksum": ""}

The checksum is CRC-32 of all the rest, written by json with sorted keys and without spaces. Every version of the format
has to keep `format`, `version` and `checksum`, so that a newer version is told apart from damage.
"""

import dataclasses
import json
import os
import pathlib
import zlib
from typing import Any

from allred.checkpoint.failure import explained
from allred.checkpoint.shard import Shard
from allred.errors import CheckpointError, InputError

NAME = "manifest.json"
FORMAT = "allred checkpoint"
VERSION = 1


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Attributes:
    step: global step of the parameters.
    time: when it was committed, in seconds since 1970.
    shards: what holds the tensors.
    meta: what the caller of `commit` wants back.
    """

    step: int
    time: float
    shards: tuple[Shard, ...]
    meta: dict[str, Any]


def dump(manifest: Manifest) -> bytes:
    """The content of the file. Raises InputError where `meta` is not of dicts, lists, numbers, text and None."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "time": manifest.time,
        "meta": manifest.meta,
        "shards": [shard.to_json() for shard in manifest.shards],
    }
    try:
        content = json.loads(json.dumps(content))  # tuples become lists, and keys text, before the checksum is formed
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"commit: meta must hold only dicts, lists, numbers, text, booleans and None, but {error}"
        ) from error
    return json.dumps({**content, "checksum": _checksum(content)}, indent=1).encode()


def load(path: str | os.PathLike[str]) -> Manifest:
    """The manifest of the checkpoint in the directory `path`; shards are not looked at.

    Raises:
        CheckpointError: there is none, it is damaged, or of a version that this allred does not know.
    """
    file = pathlib.Path(path) / NAME
    with explained("checkpoint: reading", file):
        raw = file.read_bytes()
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint: {file} is damaged: {error}") from error
    if isinstance(content, dict) and "writer" in content:
        raise CheckpointError(f"checkpoint: {file.parent} is not complete: {content['writer']} has not committed it")
    _check(file, content)
    try:
        shards = tuple(map(Shard.from_json, content["shards"]))
        return Manifest(content["step"], content["time"], shards, content["meta"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint: {file} is not as allred writes it: {error!r}") from error


def _check(file: pathlib.Path, content: Any) -> None:
    """Takes the checksum out of `content`. Raises CheckpointError unless it is right, and format and version known."""
    if not isinstance(content, dict) or "checksum" not in content:
        raise CheckpointError(f"checkpoint: {file} is damaged: expected a JSON object with a checksum")
    written, found = content.pop("checksum"), _checksum(content)
    if written != found:
        raise CheckpointError(
            f"checkpoint: {file} is damaged: its checksum is {found}, but was {written} when it was written"
        )
    if content.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint: {file} is {content.get('format')!r}; expected {FORMAT!r}")
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"checkpoint: {file} is of version {content.get('version')!r} of the format, but this allred reads "
            f"version {VERSION}; install the allred that wrote it, or a newer one"
        )


def _checksum(content: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True, separators=(',', ':')).encode()):08x}"
