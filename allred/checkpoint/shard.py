"""A shard: the file in which one process writes what it holds, in the safetensors format.

The checksum is CRC-32. It is against accidents, not against malice: it finds every damage of up to 32 bits in a row,
and misses other ones once in 4 * 10^9 times. On 100 MB zlib.crc32 took 0.045 s, hashlib.sha256 0.09 s and
hashlib.blake2b 0.18 s, where writing them and fsync took 0.08 s.

safetensors from 0.8 on writes straight from the arrays, with the GIL released; before, it copies the shard once.
"""

import contextlib
import dataclasses
import os
import pathlib
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from allred import arrays
from allred.arrays import Array
from allred.checkpoint.entry import Entry
from allred.checkpoint.failure import explained
from allred.errors import CheckpointError, InputError

READ_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Shard:
    """A written shard.

    Attributes:
        file: its name within the checkpoint's directory.
        nbytes: its length.
        checksum: CRC-32 of all of its bytes, as 8 hex digits.
        entries: what is in it.
    """

    file: str
    nbytes: int
    checksum: str
    entries: tuple[Entry, ...]

    def to_json(self) -> dict[str, Any]:
        """The same as dicts, lists, numbers and text, for the way to the process that commits, and for the manifest."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Shard":
        """What `to_json` was called on, also after json. Raises ValueError, TypeError or KeyError for anything else."""
        entries = tuple(Entry(**entry) for entry in value["entries"])
        if pathlib.PurePath(value["file"]).name != value["file"]:
            raise ValueError(f"{value['file']!r} is not the name of a file in the checkpoint's directory")
        return cls(**{**value, "entries": entries})


def shard_name(index: int, of: int) -> str:
    """The file of the shard `index`, counted from 0, out of `of`."""
    return f"shard-{index:05d}-of-{of:05d}.safetensors"


def write_shard(
    directory: str | os.PathLike[str], index: int, of: int, entries: Iterable[tuple[Entry, Array]]
) -> Shard:
    """Write one shard into the directory that `begin` made; it is on disk when this returns.

    Any number of processes, on any hosts, may write theirs at the same time. If it fails, the file is removed.

    Arguments:
        directory: what `begin` returned.
        index, of: this is shard `index` out of `of`; 0 <= index < of.
        entries: what to write: for each entry an array of its dtype, with stop - start elements, of any shape and
            layout. Must not change meanwhile. Contiguous arrays are not copied. May be none.

    Returns:
        What `commit` has to be given.

    Raises:
        InputError: an array does not fit its entry, or an entry is there twice. Nothing is written then.
        CheckpointError: it could not be written, or this shard is there already.
    """
    from safetensors.numpy import save_file  # not before it is needed: importing allred must be cheap

    if not 0 <= index < of:
        raise InputError(f"write_shard: index={index} of={of} cannot be; shards count from 0")
    listed: list[Entry] = []
    tensors: dict[str, Array] = {}
    for entry, array in entries:
        if entry.key in tensors:
            raise InputError(f"write_shard: elements {entry.start} to {entry.stop} of {entry.title} are given twice")
        tensors[entry.key] = _stored(entry, array)
        listed.append(entry)
    path = pathlib.Path(directory) / shard_name(index, of)
    with explained("write_shard: creating", path), open(path, "xb") as file:
        mode = os.fstat(file.fileno()).st_mode
    try:
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        with explained(f"write_shard: writing {nbytes / 1e6:.1f} MB to", path):
            save_file(tensors, path)
            with open(path, "rb") as file:
                os.fchmod(file.fileno(), mode)  # safetensors replaces the file by one that only its owner may read
                os.fsync(file.fileno())
            return Shard(path.name, path.stat().st_size, checksum(path), tuple(listed))
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def _stored(entry: Entry, array: Any) -> Array:
    """The array as safetensors takes it: contiguous, native, in the shape that the entry says."""
    host = arrays.as_host_array(array)
    if (arrays.name_of(host.dtype), host.size) != (entry.dtype, entry.stop - entry.start):
        raise InputError(
            f"write_shard: the entry of {entry.title} is of {entry.stop - entry.start} {entry.dtype}, "
            f"but its array is {arrays.describe(host.shape, host.dtype)}"
        )
    native = host.astype(host.dtype.newbyteorder("="), copy=False)
    return arrays.flat(native).reshape(entry.stored_shape)


def checksum(path: pathlib.Path) -> str:
    """CRC-32 of a file, as 8 hex digits. Raises OSError."""
    value, buffer = 0, memoryview(bytearray(READ_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            value = zlib.crc32(buffer[:count], value)
    return f"{value:08x}"


def check_length(who: str, directory: pathlib.Path, shard: Shard) -> None:
    """Raise CheckpointError unless the shard's file is there, and of its length."""
    path = directory / shard.file
    with explained(f"{who}: looking at", path):
        nbytes = path.stat().st_size
    if nbytes != shard.nbytes:
        raise CheckpointError(f"{who}: {path} has {nbytes} bytes, but {shard.nbytes} were written")


def check_bytes(who: str, directory: pathlib.Path, shard: Shard) -> None:
    """Raise CheckpointError unless the shard's file is, byte for byte, what was written."""
    check_length(who, directory, shard)
    path = directory / shard.file
    with explained(f"{who}: reading", path):
        found = checksum(path)
    if found != shard.checksum:
        raise CheckpointError(
            f"{who}: {path} is damaged: its checksum (CRC-32) is {found}, but was {shard.checksum} when it was written"
        )


def read_shard(who: str, directory: pathlib.Path, shard: Shard) -> Iterator[tuple[Entry, Array]]:
    """Every entry of the shard with its array, one at a time: new arrays that may be written to."""
    from safetensors import safe_open

    path = directory / shard.file
    if any(entry.dtype == "bfloat16" for entry in shard.entries):
        _register_bfloat16(who, path)
    with explained(f"{who}: reading", path), safe_open(path, framework="np") as file:
        for entry in shard.entries:
            array = file.get_tensor(entry.key)
            if (arrays.name_of(array.dtype), array.shape) != (entry.dtype, entry.stored_shape):
                raise CheckpointError(
                    f"{who}: {entry.title} is {arrays.describe(array.shape, array.dtype)} in {path}, "
                    f"but the manifest says {entry.dtype} {entry.stored_shape}"
                )
            yield entry, array


def _register_bfloat16(who: str, path: pathlib.Path) -> None:
    """numpy knows bfloat16 by its name only once ml_dtypes has been imported."""
    try:
        import ml_dtypes
    except ImportError as error:
        raise CheckpointError(f"{who}: {path} holds bfloat16, which needs ml_dtypes; pip install ml_dtypes") from error
    np.dtype(ml_dtypes.bfloat16)
