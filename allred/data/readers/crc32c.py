"""CRC-32C (Castagnoli), the checksum in TFRecord files; by google-crc32c if that is installed, else in numpy.

A CRC is linear: with a register that begins as 0, that of a message is the exclusive or of what each of its bytes
alone, followed by zeros, would give. So tables tell for each of the 64 places in a block what a byte there gives, all
blocks are looked up at once, and neighbours are joined two by two: crc(a + b) = shift(crc(a), len(b)) ^ crc(b). Zeros
in front change nothing; the register's true first value, all ones, is the complement of the first four bytes.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from allred.arrays import Array


def _find() -> Callable[[bytes], int] | None:
    """That of google-crc32c, where it is compiled: its fallback in Python is slower than numpy."""
    try:
        package = importlib.import_module("google_crc32c")
    except ImportError:
        return None
    return package.value if package.implementation == "c" else None


_installed = _find()

_POLYNOMIAL = 0x82F63B78  # 0x1EDC6F41, bits reversed
_BLOCK = 64
_SHORT_BYTES = 256  # below it a loop is faster
_MOST_BLOCKS = 1024  # at a time: what fits in the cache
_ONES = 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """The CRC-32C of some bytes.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    return int(_installed(data)) if _installed is not None else in_numpy(data)


def masked(data: bytes) -> int:
    """As it stands in TFRecord files, so that a record may hold records: rotated, and a constant added."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & _ONES


def in_numpy(data: bytes) -> int:
    """The same without google-crc32c."""
    if len(data) < _SHORT_BYTES:
        return _in_a_loop(data)
    blocks = min(1 << (-(-len(data) // _BLOCK) - 1).bit_length(), _MOST_BLOCKS)
    pieces = -(-len(data) // (blocks * _BLOCK))
    padded = np.zeros(pieces * blocks * _BLOCK, np.uint8)
    first = len(padded) - len(data)
    padded[first:] = np.frombuffer(data, np.uint8)
    padded[first : first + 4] ^= 0xFF
    register: Array = np.zeros(1, np.uint32)
    for piece in padded.reshape(pieces, blocks, _BLOCK):
        joined = np.bitwise_xor.reduce(_places().take(piece + _OFFSETS), axis=1)
        level = 0
        while len(joined) > 1:
            joined = _apply(_shift(level), joined[0::2]) ^ joined[1::2]
            level += 1
        register = _apply(_shift(level), register) ^ joined
    return int(register[0]) ^ _ONES


def _in_a_loop(data: bytes) -> int:
    register = _ONES
    for byte in data:
        register = _LIST[(register ^ byte) & 0xFF] ^ register >> 8
    return register ^ _ONES


def _byte_table() -> Array:
    """What one byte gives."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, table >> 1 ^ _POLYNOMIAL, table >> 1).astype(np.uint32)
    return table


_TABLE = _byte_table()
_LIST: list[int] = _TABLE.tolist()
_OFFSETS = np.arange(_BLOCK) * 256


@functools.cache
def _places() -> Array:
    """What a byte gives at each place of a block: uint32, at 256 * place + byte."""
    places = np.empty((_BLOCK, 256), np.uint32)
    places[-1] = _TABLE
    for place in range(_BLOCK - 2, -1, -1):
        places[place] = _TABLE[places[place + 1] & 0xFF] ^ places[place + 1] >> 8
    return places.reshape(-1)


@functools.cache
def _shift(level: int) -> Array:
    """What 64 * 2**level zeros make of each byte of a register: uint32 (4, 256)."""
    if level:
        half = _shift(level - 1)
        return _apply(half, half)
    shifted: Any = np.arange(256, dtype=np.uint32) << np.arange(0, 32, 8, dtype=np.uint32)[:, None]
    for _ in range(_BLOCK):
        shifted = _TABLE[shifted & 0xFF] ^ shifted >> 8
    result: Array = shifted
    return result


def _apply(tables: Array, registers: Array) -> Array:
    result: Array = (
        tables[0][registers & 0xFF]
        ^ tables[1][registers >> 8 & 0xFF]
        ^ tables[2][registers >> 16 & 0xFF]
        ^ tables[3][registers >> 24]
    )
    return result
