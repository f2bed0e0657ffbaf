"""GPU kernels of csrc/fuse.cu and csrc/update.cu: tensor fusion, scans of gradients, optimizer updates.

One launch of a fuse.cu kernel covers all tensors of a bucket. Its arguments are tables on the GPU: the address of each
tensor, and the part for each block. Tables are kept from step to step, because gradients mostly keep their addresses.
NVRTC compiles those of fuse.cu in init(), through cupy, which caches the result on disk. cupy adds -ftz=true: as in all
of its arithmetic, float32 numbers below 1.2e-38 count as 0.
"""

import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

HERE = pathlib.Path(__file__).parent  # .cu and .h files here are links into csrc, and copies in a wheel
SOURCE = HERE / "fuse.cu"
TILE = 8192  # elements per block, as in fuse.cu
_THREADS = 256
_COMBINED = 8  # elements per thread of `combine`, as in fuse.cu
_ALIGN_BYTES = 16
ALIGNED_HALVES = _ALIGN_BYTES // 2  # 16-bit floats
_MAX_TABLES = 4096


def aligned_offsets(counts: Sequence[int], itemsize: int) -> list[int]:
    """Offset of each tensor in the fusion buffer, in elements, aligned for the kernels; last, the size of the buffer.

    >>> aligned_offsets([3, 8, 1], itemsize=4)
    [0, 4, 12, 16]
    """
    step = max(1, _ALIGN_BYTES // itemsize)
    found = [0]
    for count in counts:
        found.append(found[-1] + -(-count // step) * step)
    return found


def pieces_and_tiles(addresses: Sequence[int], offsets: Sequence[int], counts: Sequence[int]) -> tuple[Any, Any]:
    """Pieces, int64 (tensors, 3), and tiles, int64 (blocks, 2), of a launch, as defined in fuse.cu.

    >>> pieces_and_tiles([4096, 8192], [0, 12], [9000, 3])[1].tolist()
    [[0, 0], [0, 1], [1, 0]]
    """
    pieces = np.array([addresses, offsets[: len(counts)], counts], np.int64).T
    each = -(-np.array(counts, np.int64) // TILE)
    first = np.cumsum(each) - each
    tiles = np.stack([np.repeat(np.arange(len(counts)), each), np.arange(each.sum()) - np.repeat(first, each)], axis=1)
    return np.ascontiguousarray(pieces), tiles


class LaunchTable:
    """Addresses of tensors of one dtype and their offsets in a buffer, copied to the GPU at the first launch. It holds
    addresses and keeps no tensor alive. itemsize: of the elements of the buffer, in bytes."""

    def __init__(self, addresses: Sequence[int], counts: Sequence[int], itemsize: int) -> None:
        self.addresses, self.counts, self.itemsize = addresses, counts, itemsize
        self.offsets = aligned_offsets(counts, itemsize)
        self._on_gpu: dict[int, tuple[Any, Any]] = {}

    @property
    def buffer_elements(self) -> int:
        return self.offsets[-1]

    def on_gpu(self, xp: Any, scale: int) -> tuple[Any, Any]:
        """Pieces and tiles as cupy arrays, in units of 1/scale element."""
        if scale not in self._on_gpu:
            offsets, counts = [start * scale for start in self.offsets], [count * scale for count in self.counts]
            pieces, tiles = pieces_and_tiles(self.addresses, offsets, counts)
            self._on_gpu[scale] = xp.asarray(pieces), xp.asarray(tiles)
        return self._on_gpu[scale]


class Kernels:
    """Kernels of fuse.cu on the current GPU, launched on the current stream. Arrays are contiguous cupy arrays,
    bfloat16 as uint16; `name` is the name of their dtype."""

    def __init__(self, xp: Any) -> None:
        self._xp = xp
        self._tables: dict[Any, LaunchTable] = {}
        self._function = functools.cache(lambda name: self._module.get_function(name))  # cupy does not cache it

    @functools.cached_property
    def _module(self) -> Any:
        return self._xp.RawModule(code=SOURCE.read_text(), options=("-fmad=false",))

    def compile(self) -> None:
        """Compile all kernels now."""
        self._module.compile()

    def table(self, parts: Sequence[Any], itemsize: int) -> LaunchTable:
        """Table of tensors of one dtype, for a buffer with elements of `itemsize` bytes; cached by address and size."""
        key = itemsize, tuple([part.data.ptr for part in parts]), tuple([part.size for part in parts])
        if key not in self._tables:
            if len(self._tables) >= _MAX_TABLES:
                self._tables.pop(next(iter(self._tables)))
            self._tables[key] = LaunchTable(key[1], key[2], itemsize)
        return self._tables[key]

    def pack(self, table: LaunchTable, dtype: str, buffer: Any, wire_dtype: str, factor: float | None) -> None:
        """Copy tensors into the buffer, multiplied by `factor` if given.

        dtype, wire_dtype: dtypes of tensors and buffer, by name. 16-bit floats are multiplied only into float32.
        """
        if factor is None and dtype == wire_dtype:
            self._launch("pack_bytes", table, table.itemsize, (buffer,))
        else:
            number = np.float64(1.0 if factor is None else factor)
            self._launch(f"pack_{dtype}_{wire_dtype}", table, 1, (buffer, number))

    def unpack(
        self, buffer: Any, table: LaunchTable, dtype: str, wire_dtype: str, divisor: float | None, flags: Any = None
    ) -> None:
        """Copy the buffer into tensors, divided by `divisor` if given.

        flags: uint32 (tensors,) on the GPU: a result that is not finite is not written, and the flag of its tensor is
        set to 1; None: no check.
        """
        if divisor is None and flags is None and dtype == wire_dtype:
            self._launch("unpack_bytes", table, table.itemsize, (buffer,))
        else:
            numbers = np.float64(1.0 if divisor is None else divisor), np.uintp(0) if flags is None else flags
            self._launch(f"unpack_{dtype}_{wire_dtype}", table, 1, (buffer, *numbers))

    def combine(
        self, name: str, rows: Any, ranks: int, rank: int, own: Any, out: Any, multiplies: bool, divisor: float
    ) -> None:
        """Sum, or multiply, 16-bit floats of all ranks in float32, divide by `divisor`, and round once.

        Arguments:
            rows: uint16 or float16 (ranks * stride,): a row for each rank; row `rank` is not read, `own` is used
                instead.
            own: the elements of this rank, at most `stride`. out: the result; may be `own`.
        """
        blocks = -(-own.size // (_COMBINED * _THREADS))
        stride = np.int64(rows.size // ranks)
        numbers = np.int64(own.size), np.uint32(multiplies), np.float64(divisor)
        function = self._function(f"combine_{name}")
        function((blocks,), (_THREADS,), (rows, stride, np.uint32(ranks), np.uint32(rank), own, out, *numbers))

    def exceeds(self, parts: Sequence[Any], element_bytes: int, limit: int) -> Any:
        """uint32 (1,) on the GPU: 1 if the magnitude bits of any element exceed `limit`, else 0 (see fuse.cu)."""
        flag = self._xp.zeros(1, np.uint32)
        self._launch(f"exceeds_{element_bytes}", self.table(parts, element_bytes), 1, (np.uint32(limit), flag))
        return flag

    def squares(self, parts: Sequence[Any], name: str) -> Any:
        table = self.table(parts, parts[0].itemsize)
        sums = self._xp.zeros(len(table.on_gpu(self._xp, 1)[1]) * _THREADS, np.float64)  # one per thread
        self._launch(f"squares_{name}", table, 1, (sums,))
        return sums.sum()

    def _launch(self, name: str, table: LaunchTable, scale: int, others: tuple[Any, ...]) -> None:
        pieces, tiles = table.on_gpu(self._xp, scale)
        if len(tiles):
            self._function(name)((len(tiles),), (_THREADS,), (pieces, tiles, *others))


_RULE_ARRAYS, _RULE_NUMBERS = 5, 6  # as in csrc/update.h
_MAX_BLOCKS = 4096  # beyond that a thread updates several elements


def update(rule: str, tensors: Sequence[Any], numbers: Sequence[float]) -> bool:
    """Update one tensor in one launch, as native.update does for host arrays. Returns False, and changes nothing,
    unless all tensors are contiguous cupy arrays of one shape and one dtype, float32 or float64."""
    param = tensors[0]
    given = [tensor for tensor in tensors if tensor is not None]
    if param.dtype.char not in "fd" or not param.size:
        return False
    if not all(t.dtype == param.dtype and t.shape == param.shape and t.flags.c_contiguous for t in given):
        return False
    kernel = _update_kernel(f"update_{rule}_{param.dtype.name}")
    pointers = [np.uintp(0) if tensor is None else tensor for tensor in tensors]
    pointers += [np.uintp(0)] * (_RULE_ARRAYS - len(pointers))
    floats = [np.float64(number) for number in numbers] + [np.float64(0)] * (_RULE_NUMBERS - len(numbers))
    blocks = min(_MAX_BLOCKS, -(-param.size // _THREADS))
    kernel((blocks,), (_THREADS,), (*pointers, *floats, np.uint64(param.size)))
    return True


@functools.cache
def _update_kernel(name: str) -> Any:
    return _update_module().get_function(name)


@functools.cache
def _update_module() -> Any:
    import cupy

    source = (HERE / "update.cu").read_text()
    body = (HERE / "update_body.h").read_text()
    return cupy.RawModule(code=source.replace('#include "update_body.h"', body), options=("-fmad=false",))
