"""The arena of this process: shared memory for arrays, which the other ranks of the node map (csrc/arena.h).

It is made at its first use after `init`, once per process, and never closed: arrays may outlive `shutdown`. It serves
the arrays of `empty` and `empty_like`, and arrays of the sizes in `learn` in contexts that have its handler (`attach`).
If it cannot serve an array, numpy allocates it as usual.
"""

import contextlib
import fcntl
import importlib
import mmap
import os
import secrets
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allred import native
from allred.cluster.processors import limits
from allred.native import arena_attach, arena_call, arena_open, arena_pause, arena_serve_sizes

MIN_BYTES = 2**14  # of sizes that are served; smaller arrays are not reduced in place (csrc/segment.h)
MAX_SIZES = 2048
_NONCE_BYTES = 16  # at the start of the file, on a page of its own; see comm/backends/segment.py

_lock = threading.Lock()
_nbytes = 0  # the size of the arena that may be made; 0: none
_process = 0  # the process that may use it, not a fork
_learned: set[int] = set()  # sizes that are served
_memory: tuple[mmap.mmap, int] | None = None  # the mapping, and the descriptor of its file


def enable(setting: str, ranks: int) -> None:
    """Let this process have an arena. setting: `Config.arena`. ranks: the number of ranks on this node."""
    global _nbytes, _process
    _nbytes, _process = 0, os.getpid()
    if setting == "0":
        return
    limit = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    with contextlib.suppress(OSError):  # /proc or the files of the cgroup cannot be read
        limit = min(limit, limits().memory_bytes or limit)
    wanted = limit // (2 * ranks) if setting == "auto" else min(int(setting), limit)
    _nbytes = wanted - wanted % mmap.PAGESIZE
    _serve()


def disable() -> None:
    """Let arrays be allocated by numpy only. Those in the arena remain valid."""
    global _nbytes
    _nbytes = 0
    if _memory is not None:
        arena_serve_sizes([])


def memory() -> tuple[mmap.mmap, int] | None:
    """Return the mapping of this process's arena, and the descriptor of its file, in which the mapping starts at the
    second page. None if there is no arena: it is disabled, or cannot be made."""
    global _memory, _nbytes
    if not _nbytes or _process != os.getpid():
        return None
    with _lock:
        if _memory is None and _nbytes:
            _memory = _create(_nbytes) if native.available else None
            _nbytes = 0 if _memory is None else _nbytes
        return _memory


def _create(nbytes: int) -> tuple[mmap.mmap, int] | None:
    """Make the arena, or return None. Its file is sealed: if it could shrink, its size would have to be checked at each
    access."""
    fd = -1
    try:
        fd = os.memfd_create("arena.allred", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, mmap.PAGESIZE + nbytes)
        os.pwrite(fd, secrets.token_bytes(_NONCE_BYTES), 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        mapped = mmap.mmap(fd, nbytes, offset=mmap.PAGESIZE)
        mapped.madvise(mmap.MADV_DONTDUMP)  # a core dump would allocate all of it
        if arena_open(_numpy_api(), fd, mmap.PAGESIZE, mapped):
            return mapped, fd
    except (OSError, ImportError, AttributeError):  # the last two: an unknown numpy
        pass
    if fd >= 0:
        os.close(fd)
    return None


def _numpy_api() -> Any:
    """Return numpy's C API, a capsule."""
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.import_module("numpy._core._multiarray_umath")._ARRAY_API
    return importlib.import_module("numpy.core._multiarray_umath")._ARRAY_API  # before numpy 1.26


def learn(sizes: Iterable[int]) -> None:
    """From now on, serve arrays of these sizes, in bytes, in contexts that have the handler, and attach this context.

    The sizes are those of gradients: then data and most other arrays stay out of the arena. Sizes below MIN_BYTES are
    ignored.
    """
    new = {size for size in sizes if size >= MIN_BYTES} - _learned
    if new:
        _learned.update(new)
        _serve()
        attach()


def _serve() -> None:
    if _learned and memory() is not None:
        arena_serve_sizes(sorted(_learned, reverse=True)[:MAX_SIZES])


def attach() -> None:
    """Let numpy allocate arrays of the learned sizes in the arena, in this context: threads have their own."""
    if _learned and _memory is not None:
        arena_attach()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Inside of this block the arena does not serve learned sizes in this thread. Arrays of the size of gradients that
    are not reduced, such as the state of optimizers, would only make forks slower."""
    if _memory is None:
        yield
        return
    arena_pause(True)
    try:
        yield
    finally:
        arena_pause(False)


def empty(shape: int | tuple[int, ...], dtype: Any = np.float64) -> NDArray[Any]:
    """Return a new array like `numpy.empty`, in memory that the other ranks of the node share.

    On one node, `allreduce_`, `grouped_allreduce_` and the `step` of distributed optimizers reduce such arrays in
    place, without a copy through a buffer, from 16 KiB and without compression. The array is an ordinary numpy array
    otherwise: it may be kept after shutdown(), saved, pickled, and used in a child of fork(), which gets a copy. Its
    memory has whole pages.

    numpy allocates the array as usual before init(), with `ALLRED_ARENA=0`, if no other rank is on the node, without
    the C extension, and if the arena is full.

    shape, dtype: as in numpy.empty. Raises what numpy.empty raises.

    Example: `gradient = allred.empty((784, 100), "float32")`, then `np.matmul(x.T, error, out=gradient)`.
    """
    return _call(np.empty, shape, dtype)


def empty_like(array: Any) -> NDArray[Any]:
    """Return a new array with the shape, dtype and layout of `array`, like `numpy.empty_like`, in the memory of
    `allred.empty`.

    Example: `grads = {name: allred.empty_like(param) for name, param in params.items()}`.
    """
    return _call(np.empty_like, array)


def _call(function: Any, *arguments: Any) -> NDArray[Any]:
    array: NDArray[Any] = function(*arguments) if memory() is None else arena_call(function, *arguments)
    return array
