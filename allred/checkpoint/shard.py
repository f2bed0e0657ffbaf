"""A shard: the safetensors file of one process. Also the conversion of file errors to CheckpointError.

The checksum is CRC-32. It protects from accidents, not from attacks: it detects every damage of up to 32 consecutive
bits, and misses other damage once in 4 * 10^9 times. On 100 MB zlib.crc32 took 0.045 s, hashlib.sha256 0.09 s and
hashlib.blake2b 0.18 s; writing and fsync took 0.08 s.

safetensors 0.8 and later write from the arrays without the GIL; earlier versions copy the shard once.
"""

import contextlib
import dataclasses
import errno
import os
import pathlib
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from allred import arrays
from allred.arrays import Array
from allred.checkpoint.entry import Entry
from allred.errors import CheckpointError, InputError

_READ_BYTES = 1 << 20
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
    errno.ENOTDIR: "a file is where a directory is expected: move it, or save to another directory",
}


@contextlib.contextmanager
def file_errors(action: str, path: pathlib.Path) -> Iterator[None]:
    """Convert OSError and SafetensorError to CheckpointError with action, path, reason and advice."""
    from safetensors import SafetensorError

    try:
        yield
    except CheckpointError:
        raise  # a CheckpointError is an OSError too
    except (OSError, SafetensorError) as error:
        number = error.errno if isinstance(error, OSError) else _errno_in(str(error))
        reason = os.strerror(number) if number else str(error)
        advice = _ADVICE.get(number or 0, "check the file system and the kernel's messages (dmesg)")
        raise CheckpointError(f"{action} {path} failed: {reason}{_free_space(number, path)}; {advice}") from error


def _errno_in(text: str) -> int | None:
    """safetensors gives the system's error only as text: '(os error 28)', before 0.6 'Os { code: 28'."""
    found = re.search(r"\b(?:os error|code:) (\d+)", text)
    return int(found[1]) if found else None


def _free_space(number: int | None, path: pathlib.Path) -> str:
    if number == errno.ENOSPC:
        with contextlib.suppress(OSError):
            return f" ({shutil.disk_usage(path.parent).free / 1e6:.1f} MB are free)"
    return ""


@dataclasses.dataclass(frozen=True)
class ShardInfo:
    """Description of a written shard.

    Attributes:
        file: the file name within the directory of the checkpoint.
        nbytes: the length of the file in bytes.
        checksum: CRC-32 of all bytes, as 8 hex digits.
        entries: the entries in the file.
    """

    file: str
    nbytes: int
    checksum: str
    entries: tuple[Entry, ...]

    def to_json(self) -> dict[str, Any]:
        """Return dicts, lists, numbers and text, to be sent to the process that commits, and for the manifest."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "ShardInfo":
        """Return the ShardInfo from the result of `to_json`. Raises ValueError, TypeError or KeyError."""
        entries = tuple(Entry(**entry) for entry in value["entries"])
        if pathlib.PurePath(value["file"]).name != value["file"]:
            raise ValueError(f"{value['file']!r} is not the name of a file in the checkpoint's directory")
        return cls(**{**value, "entries": entries})


def shard_name(index: int, of: int) -> str:
    """Return the file name of shard `index`, counted from 0, out of `of`."""
    return f"shard-{index:05d}-of-{of:05d}.safetensors"


def write_shard(
    directory: str | os.PathLike[str], index: int, of: int, entries: Iterable[tuple[Entry, Array]]
) -> ShardInfo:
    """Write one shard into the directory that `begin` made, and sync it to disk. An error removes the file.

    Several processes, also on several hosts, may write their shards at the same time.

    Arguments:
        directory: the result of `begin`.
        index, of: the number of the shard, 0 <= index < of, and the number of shards.
        entries: pairs of an entry and its array: of the entry's dtype, with stop - start elements, of any shape and
            layout. The arrays must not change during the call. Contiguous arrays are not copied. May be empty.

    Returns:
        The ShardInfo for `commit`.

    Raises:
        InputError: an array does not match its entry, or an entry is given twice. Nothing is written.
        CheckpointError: the file cannot be written, or exists.
    """
    from safetensors.numpy import save_file  # `import allred` does not load safetensors

    if not 0 <= index < of:
        raise InputError(f"write_shard: index={index} of={of} is not possible; expected 0 <= index < of")
    listed: list[Entry] = []
    tensors: dict[str, Array] = {}
    for entry, array in entries:
        if entry.key in tensors:
            raise InputError(f"write_shard: elements {entry.start} to {entry.stop} of {entry.title} are given twice")
        tensors[entry.key] = _stored(entry, array)
        listed.append(entry)
    path = pathlib.Path(directory) / shard_name(index, of)
    with file_errors("write_shard: creating", path), open(path, "xb") as file:
        mode = os.fstat(file.fileno()).st_mode
    try:
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        with file_errors(f"write_shard: writing {nbytes / 1e6:.1f} MB to", path):
            save_file(tensors, path)
            with open(path, "rb") as file:
                os.fchmod(file.fileno(), mode)  # safetensors replaces the file by one that only its owner can read
                os.fsync(file.fileno())
            return ShardInfo(path.name, path.stat().st_size, _checksum(path), tuple(listed))
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def _stored(entry: Entry, array: Any) -> Array:
    """Return the array for safetensors: contiguous, in native byte order, in the stored shape."""
    host = arrays.as_host_array(array)
    if (arrays.name_of(host.dtype), host.size) != (entry.dtype, entry.stop - entry.start):
        raise InputError(
            f"write_shard: the entry of {entry.title} has {entry.stop - entry.start} {entry.dtype}, "
            f"but its array is {arrays.describe(host.shape, host.dtype)}"
        )
    native = host.astype(host.dtype.newbyteorder("="), copy=False)
    return arrays.flat(native).reshape(entry.stored_shape)


def _checksum(path: pathlib.Path) -> str:
    value, buffer = 0, memoryview(bytearray(_READ_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            value = zlib.crc32(buffer[:count], value)
    return f"{value:08x}"


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
    with file_errors(f"{who}: reading", path):
        found = _checksum(path)
    if found != shard.checksum:
        raise CheckpointError(
            f"{who}: {path} is damaged: its checksum (CRC-32) is {found}, but was {shard.checksum} when it was written"
        )


def read_shard(who: str, directory: pathlib.Path, shard: ShardInfo) -> Iterator[tuple[Entry, Array]]:
    """Yield each entry of the shard with its array: a new, writable array."""
    from safetensors import safe_open

    path = directory / shard.file
    if any(entry.dtype == "bfloat16" for entry in shard.entries):
        _register_bfloat16(who, path)
    with file_errors(f"{who}: reading", path), safe_open(path, framework="np") as file:
        for entry in shard.entries:
            array = file.get_tensor(entry.key)
            if (arrays.name_of(array.dtype), array.shape) != (entry.dtype, entry.stored_shape):
                raise CheckpointError(
                    f"{who}: {entry.title} is {arrays.describe(array.shape, array.dtype)} in {path}, "
                    f"but the manifest says {entry.dtype} {entry.stored_shape}"
                )
            yield entry, array


def _register_bfloat16(who: str, path: pathlib.Path) -> None:
    """numpy knows the name bfloat16 only after ml_dtypes has been imported."""
    try:
        import ml_dtypes
    except ImportError as error:
        raise CheckpointError(f"{who}: {path} holds bfloat16, which needs ml_dtypes; pip install ml_dtypes") from error
    np.dtype(ml_dtypes.bfloat16)
