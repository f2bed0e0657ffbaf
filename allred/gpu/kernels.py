"""The kernels of csrc/fuse.cu: tensors packed into a buffer, unpacked, and looked at for NaN, one launch for all.

They are compiled at their first use, by NVRTC through cupy, which keeps the result on disk. It adds -ftz=true: here, as
in all of cupy's arithmetic, float32 numbers below 1.2e-38 count as 0. What a launch has to know (where the tensors are,
which block does which part) lies on the GPU as tables, kept from step to step: gradients mostly stay where they are.
"""

import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

HERE = pathlib.Path(__file__).parent  # its .cu and .h are links to those of csrc, and copies in a wheel
SOURCE = HERE / "fuse.cu"
TILE = 8192  # as in it
_THREADS = 256
_ALIGN_BYTES = 16
_KEPT = 256  # tables


def starts(counts: Sequence[int], itemsize: int) -> list[int]:
    """Where in a buffer each tensor starts, in elements, aligned for the kernels; and, last, how many it takes in all.

    >>> starts([3, 8, 1], itemsize=4)
    [0, 4, 12, 16]
    """
    step = max(1, _ALIGN_BYTES // itemsize)
    found = [0]
    for count in counts:
        found.append(found[-1] + -(-count // step) * step)
    return found


def tables(addresses: Sequence[int], begin: Sequence[int], counts: Sequence[int]) -> tuple[Any, Any]:
    """The pieces and the tiles of a launch, as fuse.cu has them; int64 arrays.

    >>> tables([4096, 8192], [0, 12], [9000, 3])[1].tolist()
    [[0, 0], [0, 1], [1, 0]]
    """
    pieces = np.array([addresses, begin[: len(counts)], counts], np.int64).T
    each = -(-np.array(counts, np.int64) // TILE)
    first = np.cumsum(each) - each
    tiles = np.stack([np.repeat(np.arange(len(counts)), each), np.arange(each.sum()) - np.repeat(first, each)], axis=1)
    return np.ascontiguousarray(pieces), tiles


class Table:
    """Where tensors of a dtype lie, and from where on in a buffer of elements of `itemsize`: what launches read, on the
    GPU from the first of them on. It holds addresses, and none of the tensors."""

    def __init__(self, addresses: Sequence[int], counts: Sequence[int], itemsize: int) -> None:
        self.addresses, self.counts, self.itemsize = addresses, counts, itemsize
        self.begin = starts(counts, itemsize)
        self._made: dict[int, tuple[Any, Any]] = {}

    @property
    def room(self) -> int:
        """Elements that the buffer has to have."""
        return self.begin[-1]

    def read(self, xp: Any, scale: int) -> tuple[Any, Any]:
        """Its pieces and tiles, counted in parts of an element, of which it has `scale`."""
        if scale not in self._made:
            begin, counts = [start * scale for start in self.begin], [count * scale for count in self.counts]
            pieces, tiles = tables(self.addresses, begin, counts)
            self._made[scale] = xp.asarray(pieces), xp.asarray(tiles)
        return self._made[scale]


class Kernels:
    """Of the current GPU. Arrays are contiguous cupy arrays, bfloat16 as uint16 with its name; all goes to the current
    stream."""

    def __init__(self, xp: Any) -> None:
        self._xp = xp
        self._tables: dict[Any, Table] = {}
        self._function = functools.cache(lambda name: self._module.get_function(name))  # cupy's own is not cached

    @functools.cached_property
    def _module(self) -> Any:
        return self._xp.RawModule(code=SOURCE.read_text(), options=("-fmad=false",))

    def table(self, parts: Sequence[Any], itemsize: int) -> Table:
        """Of tensors of a dtype, for a buffer of elements of that size; found again where they are the same."""
        key = itemsize, tuple([part.data.ptr for part in parts]), tuple([part.size for part in parts])
        if key not in self._tables:
            if len(self._tables) >= _KEPT:
                self._tables.pop(next(iter(self._tables)))
            self._tables[key] = Table(key[1], key[2], itemsize)
        return self._tables[key]

    def pack(self, table: Table, name: str, buffer: Any, factor: float | None) -> None:
        """Tensors of a dtype, by its name, into the buffer; multiplied by a factor, or as they are. 16-bit floats are
        float32 in the buffer if there is a factor."""
        self._fuse("pack", table, name, buffer, factor)

    def unpack(self, buffer: Any, table: Table, name: str, divisor: float | None) -> None:
        """The reverse, divided by the divisor. 16-bit floats are float32 in the buffer if there is one."""
        self._fuse("unpack", table, name, buffer, divisor)

    def _fuse(self, way: str, table: Table, name: str, buffer: Any, number: float | None) -> None:
        if number is None:
            self._launch(f"{way}_bytes", table, table.itemsize, (buffer,))
        else:
            self._launch(f"{way}_{name}", table, 1, (buffer, np.float64(number)))

    def exceeds(self, parts: Sequence[Any], element_bytes: int, limit: int) -> Any:
        """A uint32 on the GPU: whether some element's magnitude, by its bits, is beyond the limit (see fuse.cu)."""
        flag = self._xp.zeros(1, np.uint32)
        self._launch(f"exceeds_{element_bytes}", self.table(parts, element_bytes), 1, (np.uint32(limit), flag))
        return flag

    def squares(self, parts: Sequence[Any], name: str) -> Any:
        """A float64 on the GPU: the sum of all elements' squares, of floats of a dtype, by its name."""
        table = self.table(parts, parts[0].itemsize)
        sums = self._xp.zeros(len(table.read(self._xp, 1)[1]) * _THREADS, np.float64)  # each thread's
        self._launch(f"squares_{name}", table, 1, (sums,))
        return sums.sum()

    def _launch(self, name: str, table: Table, scale: int, others: tuple[Any, ...]) -> None:
        pieces, tiles = table.read(self._xp, scale)
        if len(tiles):
            self._function(name)((len(tiles),), (_THREADS,), (pieces, tiles, *others))


_RULE_ARRAYS, _RULE_NUMBERS = 5, 6  # as in csrc/update.h
_BLOCKS = 4096  # the most; a thread takes several elements then


def update(rule: str, tensors: Sequence[Any], numbers: Sequence[float]) -> bool:
    """An optimizer's update of one tensor in one launch, as native.update does it for host arrays: False if these are
    not contiguous cupy arrays of one dtype, float32 or float64, and one shape; nothing has changed then."""
    param = tensors[0]
    given = [tensor for tensor in tensors if tensor is not None]
    if param.dtype.char not in "fd" or not param.size:
        return False
    if not all(t.dtype == param.dtype and t.shape == param.shape and t.flags.c_contiguous for t in given):
        return False
    kernel = _update(f"update_{rule}_{param.dtype.name}")
    pointers = [np.uintp(0) if tensor is None else tensor for tensor in tensors]
    pointers += [np.uintp(0)] * (_RULE_ARRAYS - len(pointers))
    floats = [np.float64(number) for number in numbers] + [np.float64(0)] * (_RULE_NUMBERS - len(numbers))
    blocks = min(_BLOCKS, -(-param.size // _THREADS))
    kernel((blocks,), (_THREADS,), (*pointers, *floats, np.uint64(param.size)))
    return True


@functools.cache
def _update(name: str) -> Any:
    return _updates().get_function(name)


@functools.cache
def _updates() -> Any:
    import cupy

    source = (HERE / "update.cu").read_text()
    body = (HERE / "update_body.h").read_text()
    return cupy.RawModule(code=source.replace('#include "update_body.h"', body), options=("-fmad=false",))
