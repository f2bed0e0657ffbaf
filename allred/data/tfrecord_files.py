"""TFRecord files: a sequence of records, each with its length and checksums.

    length  uint64, little-endian
    crc     uint32, masked CRC-32C of the length
    data    length bytes
    crc     uint32, masked CRC-32C of the data

https://www.tensorflow.org/tutorials/load_data/tfrecord

The package google-crc32c (extra `tfrecord`) computes CRC-32C (Castagnoli) in C. Without that package a Python loop over
the bytes does, and the first reader or writer issues a warning.
"""

import functools
import importlib
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO

from allred import log
from allred.errors import DataError, InputError

try:
    _google_crc32c: Any = importlib.import_module("google_crc32c")
except ImportError:
    _google_crc32c = None

crc_implementation: str = "none" if _google_crc32c is None else _google_crc32c.implementation  # or "c", "python"

_POLYNOMIAL = 0x82F63B78  # 0x1EDC6F41, bits reversed
_ONES = 0xFFFFFFFF
_POLICIES = ("raise", "skip")
_HEAD = struct.Struct("<QI")
_FOOT = struct.Struct("<I")

Path = str | os.PathLike[str]


def crc32c(data: bytes) -> int:
    """CRC-32C of bytes.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    return int(_google_crc32c.value(data)) if _google_crc32c is not None else crc32c_in_python(data)


def crc32c_in_python(data: bytes) -> int:
    """CRC-32C of bytes, computed without google-crc32c."""
    table = _crc_table()
    register = _ONES
    for byte in data:
        register = table[(register ^ byte) & 0xFF] ^ register >> 8
    return register ^ _ONES


@functools.cache
def _crc_table() -> list[int]:
    table = []
    for register in range(256):
        for _ in range(8):
            register = register >> 1 ^ _POLYNOMIAL * (register & 1)
        table.append(register)
    return table


def masked_crc32c(data: bytes) -> int:
    """Masked CRC-32C of TFRecord files: rotated, plus a constant. The mask allows records that contain records."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & _ONES


@functools.cache
def _warn_if_slow() -> None:
    """Warn if no compiled google-crc32c is installed: once in a process, and only on the chief."""
    if crc_implementation != "c":
        log.runtime_warning(
            "TFRecord checksums are computed in Python, in about 0.1 ms per kilobyte, because google-crc32c is not "
            "installed or not compiled: pip install 'allred[tfrecord]'"
        )


class TFRecord:
    """Iterable of records as bytes, returned by `tfrecord`; it can be iterated several times.

    skipped: number of corrupt records or file ends that the current or latest pass skipped; 0 with corrupt="raise".
    """

    def __init__(self, paths: list[str], corrupt: str) -> None:
        self.paths, self.corrupt, self.skipped = paths, corrupt, 0
        self._warned = False

    def __iter__(self) -> Iterator[bytes]:
        _warn_if_slow()
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
            if (expected := masked_crc32c(head[:8])) != crc:
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
            if (expected := masked_crc32c(data)) == crc:
                yield data
            else:
                what = f"expected masked CRC {crc:#010x} of {length} bytes of data, got {expected:#010x}"
                self._corrupt(f"{path}: record at offset {offset}: {what}")
            offset += _HEAD.size + length + _FOOT.size
        return None

    def _rest(self, path: str, offset: int, what: str, end: int) -> None:
        """Report a corrupt length: the following records cannot be located."""
        text = f"{path}: record at offset {offset}: {what}"
        if self.corrupt == "raise":
            text += "; the following records cannot be located"
        else:
            text += f"; the rest of this file, {end - offset} bytes, is skipped"
        self._corrupt(text, always=True)

    def _corrupt(self, text: str, always: bool = False) -> None:
        if self.corrupt == "raise":
            raise DataError(f'{text}. tfrecord(..., corrupt="skip") skips and counts corrupt records')
        self.skipped += 1
        if always or not self._warned:
            more = "" if self._warned else ". Corrupt records are skipped and counted in .skipped"
            self._warned = True
            log.runtime_warning(text + more)


def tfrecord(paths: Path | Sequence[Path], corrupt: str = "raise") -> TFRecord:
    """Read the records of TFRecord files in the order of the files, and check both checksums of each record.

    A record takes about 2 us plus 1 ns per byte with google-crc32c (extra `tfrecord`), and about 0.1 ms per kilobyte
    without it; then one warning is printed.

    Arguments:
        paths: one file or several, not compressed.
        corrupt: what to do with a record that has a wrong checksum or is cut off by the end of the file. "raise" raises
            DataError with the file, the offset, and the expected and actual values. "skip" skips the record and counts
            it in `.skipped`; the first one in a pass prints a warning. After a corrupt length the following records
            cannot be located: the rest of that file is skipped, with a warning each time.

    Returns:
        A `TFRecord` object, which yields each record as bytes.

    Raises:
        InputError: no path, or another value of `corrupt`.
        OSError: during iteration, if a file cannot be opened.

    >>> list(tfrecord("numbers.tfrecord"))    # doctest: +SKIP
    [b'one', b'two']
    """
    found = [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    if corrupt not in _POLICIES:
        raise InputError(f"tfrecord: corrupt={corrupt!r} must be one of {', '.join(map(repr, _POLICIES))}")
    if not found:
        raise InputError("tfrecord() needs at least one file")
    return TFRecord(found, corrupt)


def write_tfrecord(path: Path, records: Iterable[bytes]) -> int:
    """Write records to a TFRecord file, replacing an existing file, and return their number.

    Raises OSError if the file cannot be written.

    >>> write_tfrecord("numbers.tfrecord", [b"one", b"two"])    # doctest: +SKIP
    2
    """
    _warn_if_slow()
    count = 0
    with open(path, "wb") as file:
        for record in records:
            length = struct.pack("<Q", len(record))
            file.write(length + _FOOT.pack(masked_crc32c(length)) + record + _FOOT.pack(masked_crc32c(record)))
            count += 1
    return count
