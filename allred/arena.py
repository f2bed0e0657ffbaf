"""The arena of this process: shared memory for arrays, which the other ranks of the node map (csrc/arena.h).

It is made at its first use after `init`, once per process, and never closed: arrays may outlive `shutdown`. It serves
the arrays of `empty` and `empty_like`, and arrays of the sizes in `learn` in contexts that have its handler
(`native.arena_attach`). If it cannot serve an array, numpy allocates it as usual.
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

from allred import arrays, native
from allred.cluster.processors import limits
from allred.native import arena_attach, arena_call, arena_open, arena_pause, arena_serve_sizes, arena_usage

MIN_BYTES = native.in_place_bytes  # of sizes that are served
MAX_SIZES = 2048
_DEFAULT, _HANDLERS = "default_allocator", ("allred_arena", "allred_empty")  # names of numpy's allocators
NONCE_BYTES = 16  # at the start of the file, on a page of its own; see comm/backends/segment.py

_lock = threading.Lock()
_nbytes = 0  # the size of the arena that may be made; 0: none
_source = ""  # where this size comes from
_refusal = "allred.init() was not called"  # why arrays are not reduced in place; "" if they may be
_process = 0  # the process that may use it, not a fork
_learned: set[int] = set()  # sizes that are served
_holds_torch = False  # whether torch's memory of the sizes that are served is in the arena
_memory: tuple[mmap.mmap, int] | None = None  # the mapping, and the descriptor of its file


def enable(setting: str, ranks: int) -> None:
    """Let this process have an arena. setting: `Config.arena`. ranks: the number of ranks on this node."""
    global _nbytes, _process, _source, _refusal
    _nbytes, _process = 0, os.getpid()
    if setting == "0":
        _refusal = "ALLRED_ARENA=0"
        return
    wanted, _source = _size(setting, ranks)
    _nbytes, _refusal = wanted - wanted % mmap.PAGESIZE, ""
    _serve()


def _size(setting: str, ranks: int) -> tuple[int, str]:
    """Return the size of the arena in bytes, and where it comes from. setting: auto, or a number of bytes."""
    limit, of = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE, "memory of this machine"
    cgroup = limits().memory_bytes
    if cgroup is not None and cgroup < limit:
        limit, of = cgroup, "memory limit of the cgroup"
    if setting == "auto":
        return limit // (2 * ranks), f"ALLRED_ARENA=auto: 1/{2 * ranks} of the {of}, {arrays.amount(limit)}"
    if int(setting) > limit:
        return limit, f"ALLRED_ARENA={setting}, but this is the {of}"
    return int(setting), f"ALLRED_ARENA={setting}"


def disable(reason: str = "allred.shutdown() was called") -> None:
    """Let arrays be allocated by numpy only. Those in the arena remain valid. reason: for `refusal`."""
    global _nbytes, _refusal
    _nbytes, _refusal = 0, reason
    if _memory is not None:
        arena_serve_sizes([])


def note_failure(reason: str) -> None:
    """Note why the ranks of a communicator cannot use their arenas, for `refusal`."""
    global _refusal
    _refusal = _refusal or reason


def refusal() -> str:
    """Return why no array is reduced in place; "" if nothing prevents it."""
    if not _refusal and _memory is not None and arena_usage()[3]:
        return "an operation was given up, after which no array is reduced in place"
    return _refusal


def description() -> str:
    """Return the size limit of this process's arena and its source, or why there is none."""
    if reason := refusal():
        return f"none: {reason}"
    nbytes = _nbytes if _memory is None else len(_memory[0])
    return f"at most {arrays.amount(nbytes)} on this rank ({_source}){_overcommit()}"


def _overcommit() -> str:
    with contextlib.suppress(OSError), open("/proc/sys/vm/overcommit_memory") as file:
        if file.read().strip() == "2":
            return "; less if the system commits no more memory (vm.overcommit_memory=2)"
    return ""


def memory() -> tuple[mmap.mmap, int] | None:
    """Return the mapping of this process's arena, and the descriptor of its file, in which the mapping starts at the
    second page. None if there is no arena: it is disabled, or cannot be made."""
    global _memory, _nbytes
    if not _nbytes or _process != os.getpid():
        return None
    with _lock:
        if _memory is None and _nbytes:
            _memory = _create(_nbytes)
            _nbytes = 0 if _memory is None else _nbytes
        return _memory


def _create(nbytes: int) -> tuple[mmap.mmap, int] | None:
    """Make the arena, or note why that is not possible and return None. Its file is sealed: if it could shrink, its
    size would have to be checked at each access."""
    fd = -1
    if not native.available:
        note_failure("the C extension is missing")
        return None
    try:
        fd = os.memfd_create("arena.allred", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, mmap.PAGESIZE + nbytes)
        os.pwrite(fd, secrets.token_bytes(NONCE_BYTES), 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        mapped = mmap.mmap(fd, nbytes, offset=mmap.PAGESIZE)
        mapped.madvise(mmap.MADV_DONTDUMP)  # a core dump would allocate all of it
        if arena_open(_numpy_api(), fd, mmap.PAGESIZE, mapped):
            return mapped, fd
        note_failure(f"numpy {np.__version__} has an unknown C API")
    except (ImportError, AttributeError):
        note_failure(f"numpy {np.__version__} has an unknown C API")
    except OSError as error:
        note_failure(f"{arrays.amount(nbytes)} of shared memory cannot be mapped: {error.strerror}")
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
    if new and len(_learned) < MAX_SIZES:
        _learned.update(new)
        _serve()
        arena_attach()


def _serve() -> None:
    if _learned and memory() is not None:
        arena_serve_sizes(sorted(_learned, reverse=True)[:MAX_SIZES])


def note_torch() -> None:
    """Note that torch allocates memory of the learned sizes in the arena (allred/torch/arena_allocator.py)."""
    global _holds_torch
    _holds_torch = True


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


def contains(array: NDArray[Any]) -> bool:
    """Whether the array begins in the arena of this process."""
    if _memory is None:
        return False
    base = np.frombuffer(_memory[0], np.uint8, 1).__array_interface__["data"][0]
    return bool(base <= array.__array_interface__["data"][0] < base + len(_memory[0]))


def why_outside(array: NDArray[Any]) -> str:
    """Return why the memory of an array is not in the arena; "" if it is."""
    if contains(array):
        return ""
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    if not (owner.flags.owndata or _holds_torch):
        return "memory that numpy did not allocate (torch without ALLRED_TORCH_ARENA=1, np.frombuffer, unpickled)"
    if owner.nbytes not in _learned:
        return "part of a larger array" if owner.nbytes > array.nbytes else "of a size that is not served"
    handler = _handler_of(owner) if owner.flags.owndata else _HANDLERS[0]
    if handler == _DEFAULT:
        return "allocated before the sizes were known, or in another thread"
    if handler not in _HANDLERS:
        return f"allocated by {handler}, a numpy allocator of the program"
    full, no_pages = arena_usage()[4:]
    if no_pages:
        return "allocated when the system had no more memory for the arena"
    return "allocated when the arena was full" if full else "allocated before the sizes were known"


def _handler_of(array: NDArray[Any]) -> str:
    """Return the name of the allocator of an array that owns its memory."""
    try:
        module = importlib.import_module("numpy._core.multiarray")
    except ModuleNotFoundError:  # before numpy 1.26
        module = importlib.import_module("numpy.core.multiarray")
    return str(module.get_handler_name(array))


def empty(shape: int | tuple[int, ...], dtype: Any = np.float64) -> NDArray[Any]:
    """Return a new array like `numpy.empty`, in memory that the other ranks of the node share.

    On one node, `allreduce_`, `grouped_allreduce_` and the `step` of distributed optimizers reduce such arrays in
    place, without a copy through a buffer, from 16 KiB and without compression; `allgather`, `reducescatter`,
    `broadcast` and parameter servers read them without a copy. The array is an ordinary numpy array otherwise: it may
    be kept after shutdown(), saved, pickled, and used in a child of fork(), which gets a copy. Its memory has whole
    pages.

    numpy allocates the array as usual before init(), with `ALLRED_ARENA=0`, with one rank, with ranks on several nodes,
    on backend mpi (mode ps: without a server on the node), without the C extension, and if the arena is full. `python
    -m allred info` shows which applies.

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
