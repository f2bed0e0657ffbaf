"""CRC-32C (Castagnoli), the checksum in TFRecord files.

The package google-crc32c (extra `tfrecord`) computes it in C. Without that package a Python loop over the bytes does,
and the first reader or writer issues a warning.
"""

import functools
import importlib
from typing import Any

from allred import log

try:
    _installed: Any = importlib.import_module("google_crc32c")
except ImportError:
    _installed = None

implementation: str = "none" if _installed is None else _installed.implementation  # "none", "c" or "python"

_POLYNOMIAL = 0x82F63B78  # 0x1EDC6F41, bits reversed
_ONES = 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """The CRC-32C of some bytes.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    return int(_installed.value(data)) if _installed is not None else in_python(data)


def masked(data: bytes) -> int:
    """The masked CRC-32C of TFRecord files: rotated, plus a constant. The mask allows records that contain records."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & _ONES


def in_python(data: bytes) -> int:
    """The CRC-32C of some bytes, computed without google-crc32c."""
    table = _table()
    register = _ONES
    for byte in data:
        register = table[(register ^ byte) & 0xFF] ^ register >> 8
    return register ^ _ONES


@functools.cache
def warn_if_slow() -> None:
    """Warn if no compiled google-crc32c is installed: once in a process, and only on the chief."""
    if implementation != "c":
        log.runtime_warning(
            "TFRecord checksums are computed in Python, in about 0.1 ms per kilobyte, because google-crc32c is not "
            "installed or not compiled: pip install 'allred[tfrecord]'"
        )


@functools.cache
def _table() -> list[int]:
    table = []
    for register in range(256):
        for _ in range(8):
            register = register >> 1 ^ _POLYNOMIAL * (register & 1)
        table.append(register)
    return table
