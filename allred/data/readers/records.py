"""TFRecord files: records one after the other, each between its length and its checksum.

    length  uint64, little-endian
    crc     uint32, masked CRC-32C of the length
    data    length bytes
    crc     uint32, masked CRC-32C of the data

https://www.tensorflow.org/tutorials/load_data/tfrecord
"""

import os
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO

from allred import log
from allred.data.readers.crc32c import masked, warn_if_slow
from allred.errors import DataError, InputError

_POLICIES = ("raise", "skip")
_HEAD = struct.Struct("<QI")
_FOOT = struct.Struct("<I")

Path = str | os.PathLike[str]


class TFRecord:
    """What `tfrecord` returns: iterate over it, more than once if you like.

    skipped: corrupt places in the pass that is under way, or that ended last; 0 with corrupt="raise".
    """

    def __init__(self, paths: list[str], corrupt: str) -> None:
        self.paths, self.corrupt, self.skipped = paths, corrupt, 0
        self._warned = False

    def __iter__(self) -> Iterator[bytes]:
        warn_if_slow()
        self.skipped = 0
        for path in self.paths:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise DataError(f"{path}: expected a regular file, got a pipe or a device")
                yield from self._records(path, file, status.st_size)

    def _records(self, path: str, file: BinaryIO, end: int) -> Iterator[bytes]:
        offset = 0
        while offset < end:
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                return self._rest(path, offset, f"expected {_HEAD.size} bytes of length and CRC, got {len(head)}", end)
            length, crc = _HEAD.unpack(head)
            if (expected := masked(head[:8])) != crc:
                what = f"expected masked CRC {crc:#010x} of the length, got {expected:#010x} of {length}"
                hint = "; it looks compressed with gzip: unpack it first" if head.startswith(b"\x1f\x8b\x08") else ""
                return self._rest(path, offset, what + hint, end)
            left = min(end - offset - _HEAD.size, length + _FOOT.size)
            body = file.read(left)
            if len(body) < length + _FOOT.size:
                what = (
                    f"expected {length} bytes of data and {_FOOT.size} of CRC, got {len(body)}: the file is cut short"
                )
                return self._rest(path, offset, what, end)
            data, (crc,) = body[:length], _FOOT.unpack_from(body, length)
            if (expected := masked(data)) == crc:
                yield data
            else:
                what = f"expected masked CRC {crc:#010x} of {length} bytes of data, got {expected:#010x}"
                self._corrupt(f"{path}: record at offset {offset}: {what}")
            offset += _HEAD.size + length + _FOOT.size
        return None

    def _rest(self, path: str, offset: int, what: str, end: int) -> None:
        """What follows cannot be found."""
        text = f"{path}: record at offset {offset}: {what}"
        if self.corrupt == "raise":
            text += "; where a next record begins is not known"
        else:
            text += f"; the rest of this file, {end - offset} bytes, is skipped"
        self._corrupt(text, always=True)

    def _corrupt(self, text: str, always: bool = False) -> None:
        if self.corrupt == "raise":
            raise DataError(f'{text}. With tfrecord(..., corrupt="skip") such records are left out and counted')
        self.skipped += 1
        if always or not self._warned:
            more = "" if self._warned else ". Corrupt records are left out, and counted in .skipped"
            self._warned = True
            log.runtime_warning(text + more)


def tfrecord(paths: Path | Sequence[Path], corrupt: str = "raise") -> TFRecord:
    """The records of TFRecord files, as bytes, in the order of the files; both checksums of each are checked.

    paths: of one file or several, not compressed. corrupt: what a record does whose checksum is wrong, or that the
    file's end cuts off. "raise": DataError, with file, offset, what was expected and what came. "skip": it is left out,
    counted in `.skipped`, and the first time a warning tells. Behind a wrong length no record can be found: the rest of
    that file is then skipped, and each time a warning tells.

    Reading and checking a record takes about 2 us plus 1 ns per byte with google-crc32c (extra `tfrecord`). Without it
    Python computes the checksums in about 0.1 ms per kilobyte, and one warning says so.

    Raises InputError for another policy or no path, and OSError, when it comes to it, for a file that cannot be opened.
    """
    found = [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    if corrupt not in _POLICIES:
        raise InputError(f"corrupt={corrupt!r} must be one of {', '.join(map(repr, _POLICIES))}")
    if not found:
        raise InputError("tfrecord() needs at least one file")
    return TFRecord(found, corrupt)


def write_tfrecord(path: Path, records: Iterable[bytes]) -> int:
    """Write records into a new TFRecord file, or over an old one; their number. Anybody's reader can read it."""
    warn_if_slow()
    count = 0
    with open(path, "wb") as file:
        for record in records:
            length = struct.pack("<Q", len(record))
            file.write(length + _FOOT.pack(masked(length)) + record + _FOOT.pack(masked(record)))
            count += 1
    return count
