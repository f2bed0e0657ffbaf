"""Shards and the manifest of a checkpoint. Also the conversion of file errors to CheckpointError.

A shard is the safetensors file of one process (tensor_file.py). The manifest is a JSON file that lists the shards:

    {"format": "allred checkpoint", "version": 1, "step": 400, "time": ..., "meta": {}, "shards": [], "checksum": ""}

Its checksum is that of the other fields, as JSON with sorted keys and without spaces. Every version of the format must
keep the fields `format`, `version` and `checksum`: then a newer version is not reported as damage.

Checksums are CRC-32, which detects every damage of up to 32 consecutive bits, and misses other damage once in 4 * 10^9
times. On 100 MB in memory csrc/crc.c took 0.014 s, zlib.crc32 0.045 s, hashlib.sha256 0.09 s; writing and fsync 0.08 s.
"""

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from allred import arrays
from allred.arrays import Array
from allred.checkpoint import tensor_file
from allred.checkpoint.entry import Entry
from allred.errors import CheckpointError, InputError

_PERMISSION = "let this user write there, or save to another directory"
_ADVICE = {
    errno.ENOENT: "it is gone, or this host does not see it: use a directory on a file system that all share",
    errno.ENOSPC: "free some space, or keep fewer checkpoints",
    errno.EDQUOT: "the quota is used up: delete something, or keep fewer checkpoints",
    errno.EFBIG: "the limit of file sizes is too low: raise it with `ulimit -f unlimited`",
    errno.EROFS: "the file system is mounted read-only: save to another directory",
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.EEXIST: "another file has this name (it is in the way): move it, or save to another directory",
    errno.EMFILE: "close files that this process does not need, or raise the limit with `ulimit -n`",
    errno.ENOMEM: "use fewer ranks on this host, or smaller batches",
    errno.ENOTDIR: "a file is where a directory is expected: move it, or save to another directory",
}


class MissingPackageError(CheckpointError):
    """The checkpoint is not damaged, but a package is needed to read it."""


@contextlib.contextmanager
def file_errors(action: str, path: pathlib.Path) -> Iterator[None]:
    """Convert OSError to CheckpointError with action, path, reason and advice."""
    try:
        yield
    except CheckpointError:
        raise  # a CheckpointError is an OSError too
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        advice = _ADVICE.get(error.errno or 0, "check the file system and the kernel's messages (dmesg)")
        raise CheckpointError(f"{action} {path} failed: {reason}{_free_space(error.errno, path)}; {advice}") from error


def _free_space(number: int | None, path: pathlib.Path) -> str:
    if number == errno.ENOSPC:
        with contextlib.suppress(OSError):
            return f" ({shutil.disk_usage(path.parent).free / 1e6:.1f} MB are free)"
    return ""


@dataclasses.dataclass(frozen=True)
class ShardInfo:
    """Description of a written shard.

    file: the file name within the directory of the checkpoint. nbytes: the length of the file in bytes. checksum:
    CRC-32 of all bytes, as 8 hex digits. entries: the entries in the file.
    """

    file: str
    nbytes: int
    checksum: str
    entries: tuple[Entry, ...]

    def to_json(self) -> dict[str, Any]:
        """Return dicts, lists, numbers and text, to be sent to the process that commits, and for the manifest."""
        return {**vars(self), "entries": [vars(entry).copy() for entry in self.entries]}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "ShardInfo":
        """Return the ShardInfo from the result of `to_json`. Raises ValueError, TypeError or KeyError."""
        entries = tuple(Entry(**entry) for entry in value["entries"])
        if not is_file_name(value["file"]):
            raise ValueError(f"{value['file']!r} is not the name of a file in the checkpoint's directory")
        if (nbytes := sum(entry.check().nbytes for entry in entries)) > value["nbytes"]:  # arrays of nbytes are made
            raise ValueError(f"{value['file']} has {value['nbytes']} bytes, but its tensors have {nbytes}")
        return cls(**{**value, "entries": entries})


def is_file_name(name: str) -> bool:
    """Return whether a text of a manifest is the name of a file in a directory. Raises TypeError for another type."""
    return pathlib.PurePath(name).name == name and name.isprintable()


def shard_name(index: int, of: int, prefix: str = "shard") -> str:
    """Return the file name of shard `index`, counted from 0, out of `of`."""
    return f"{prefix}-{index:05d}-of-{of:05d}.safetensors"


def write_shard(
    directory: str | os.PathLike[str],
    index: int,
    of: int,
    entries: Iterable[tuple[Entry, Array]],
    prefix: str = "shard",
) -> ShardInfo:
    """Write one shard into the directory that `begin` made, and sync it to disk. An error removes the file.

    Several processes, also on several hosts, may write their shards at the same time.

    directory: the result of `begin`. index, of: the number of the shard, 0 <= index < of, and the number of shards.
    entries: pairs of an entry and its array: of the entry's dtype, with stop - start elements, of any shape and layout.
    The arrays must not change during the call. Contiguous arrays are not copied. May be empty. prefix: of the file.
    Returns the ShardInfo for `commit`.
    Raises InputError: an array does not match its entry, or an entry is given twice. Nothing is written. Raises
    CheckpointError: the file cannot be written, or exists.
    """
    if not 0 <= index < of:
        raise InputError(f"write_shard: index={index} of={of} is not possible; expected 0 <= index < of")
    listed: list[Entry] = []
    tensors: dict[str, Array] = {}
    for entry, array in entries:
        if entry.key in tensors:
            raise InputError(f"write_shard: elements {entry.start} to {entry.stop} of {entry.title} are given twice")
        tensors[entry.key] = _stored(entry, array)
        listed.append(entry)
    path = pathlib.Path(directory) / shard_name(index, of, prefix)
    with file_errors("write_shard: creating", path):
        file = open(path, "xb", buffering=0)  # noqa: SIM115
    try:
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        with file_errors(f"write_shard: writing {nbytes / 1e6:.1f} MB to", path), file:
            checksum = tensor_file.write(file, tensors)
            os.fsync(file.fileno())
            return ShardInfo(path.name, file.tell(), f"{checksum:08x}", tuple(listed))
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def _stored(entry: Entry, array: Any) -> Array:
    """Return the array for tensor_file.write: contiguous, in native byte order, in the stored shape."""
    host = arrays.as_host_array(array)
    if (arrays.name_of(host.dtype), host.size) != (entry.dtype, entry.stop - entry.start):
        raise InputError(
            f"write_shard: the entry of {entry.title} has {entry.stop - entry.start} {entry.dtype}, "
            f"but its array is {arrays.describe(host.shape, host.dtype)}"
        )
    native = host.astype(host.dtype.newbyteorder("="), copy=False)
    return arrays.flat(native).reshape(entry.stored_shape)


def check_length(who: str, directory: pathlib.Path, shard: ShardInfo) -> None:
    """Raise CheckpointError unless the file of the shard exists and has its length."""
    path = directory / shard.file
    with file_errors(f"{who}: reading the length of", path):
        nbytes = path.stat().st_size
    if nbytes != shard.nbytes:
        raise CheckpointError(f"{who}: {path} has {nbytes} bytes, but {shard.nbytes} were written")


def check_bytes(who: str, directory: pathlib.Path, shard: ShardInfo) -> None:
    """Raise CheckpointError unless length and checksum of the file of the shard are right. Reads the file."""
    check_length(who, directory, shard)
    path = directory / shard.file
    with file_errors(f"{who}: reading", path), open(path, "rb", buffering=0) as file:
        reader = tensor_file.Reader(file)
        reader.read_rest()
    _check_checksum(who, path, shard, reader.checksum)


def _check_checksum(who: str, path: pathlib.Path, shard: ShardInfo, checksum: int) -> None:
    if (found := f"{checksum:08x}") != shard.checksum:
        raise CheckpointError(
            f"{who}: {path} is damaged: its checksum (CRC-32) is {found}, but was {shard.checksum} when it was written"
        )


def read_shard(who: str, directory: pathlib.Path, shard: ShardInfo, destination: Callable[[Entry], Array]) -> None:
    """Read the tensors of a shard, and verify its length and checksum in the same pass. After a CheckpointError the
    arrays have undefined values.

    destination: returns the array to fill for an entry: contiguous, of the entry's dtype and stored shape, writable.
    """
    path = directory / shard.file
    check_length(who, directory, shard)
    if any(entry.dtype == "bfloat16" for entry in shard.entries):
        _register_bfloat16(who, path)
    entries = {entry.key: entry for entry in shard.entries}
    expected = {key: tensor_file.described(entry.dtype, entry.stored_shape) for key, entry in entries.items()}
    with file_errors(f"{who}: reading", path), open(path, "rb", buffering=0) as file:
        reader = tensor_file.Reader(file)
        problem = reader.read(expected, lambda key: destination(entries[key]))
        reader.read_rest()
    _check_checksum(who, path, shard, reader.checksum)
    if problem:  # the file is undamaged, so the manifest was changed together with its checksum
        raise CheckpointError(f"{who}: {path} differs from its manifest: {problem}")


def _register_bfloat16(who: str, path: pathlib.Path) -> None:
    """numpy knows the name bfloat16 only after ml_dtypes has been imported."""
    try:
        import ml_dtypes
    except ImportError as error:
        text = f"{who}: {path} holds bfloat16, which needs ml_dtypes; pip install ml_dtypes"
        raise MissingPackageError(text) from error
    np.dtype(ml_dtypes.bfloat16)


MANIFEST = "manifest.json"
FORMAT = "allred checkpoint"
VERSION = 1


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Content of a manifest.

    step: the global step of the parameters. time: the time of the commit, in seconds since 1970. shards: the shards
    with the tensors. meta: the argument `meta` of `commit`. checksum: of all these; "" before it is written.
    """

    step: int
    time: float
    shards: tuple[ShardInfo, ...]
    meta: dict[str, Any]
    checksum: str = ""

    def encode(self) -> bytes:
        """Return the content of the file. Raises InputError unless `meta` consists of JSON types."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "time": self.time,
            "meta": self.meta,
            "shards": [shard.to_json() for shard in self.shards],
        }
        try:
            content["meta"] = json.loads(json.dumps(self.meta))  # before the checksum: keys become text
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(
                f"commit: meta must hold only dicts, lists, numbers, text, booleans and None, but {error}"
            ) from error
        content["checksum"] = _content_checksum(content)
        lines = ",\n".join(f'"{name}": {json.dumps(value)}' for name, value in content.items())  # `indent` is slow
        return f"{{\n{lines}\n}}".encode()


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read the manifest of the checkpoint in the directory `path`. Does not check the shards.

    Raises CheckpointError: the manifest is missing, damaged, or of a version that this allred does not know.
    """
    file = pathlib.Path(path) / MANIFEST
    with file_errors("checkpoint: reading", file):
        raw = file.read_bytes()
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint: {file} is damaged: {error}") from error
    if isinstance(content, dict) and "writer" in content:
        raise CheckpointError(f"checkpoint: {file.parent} is not complete: {content['writer']} has not committed it")
    try:
        checksum = _check(file, content)
        shards = tuple(map(ShardInfo.from_json, content["shards"]))
        if type(content["step"]) is not int or not isinstance(content["meta"], dict):
            raise TypeError("step is not a number, or meta is not an object")
        return Manifest(content["step"], float(content["time"]), shards, content["meta"], checksum)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"checkpoint: {file} does not have the fields that allred writes: {error!r}") from error


def _check(file: pathlib.Path, content: Any) -> str:
    """Remove the checksum from `content`, and return it. Raises CheckpointError if checksum, format or version are
    wrong."""
    if not isinstance(content, dict) or "checksum" not in content:
        raise CheckpointError(f"checkpoint: {file} is damaged: expected a JSON object with a checksum")
    written, found = content.pop("checksum"), _content_checksum(content)
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
    return str(found)


def _content_checksum(content: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True, separators=(',', ':')).encode()):08x}"
