"""The threads of BLAS, OpenMP and torch in this process. If several ranks run on a node, `init()` limits each rank to
its share of the cores, unless the user has set the number; `shutdown()` restores it.

Loaded libraries are limited by a call. `OMP_NUM_THREADS` limits libraries that are loaded later, and child processes:
OpenBLAS, MKL, BLIS and torch read it. The call limits the pool of the whole process, except in MKL and OpenMP, which
have a number for each thread that calls them.
"""

import dataclasses
import functools
import os
import pathlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

import threadpoolctl

from allred.world import Slot

_VARIABLE = "OMP_NUM_THREADS"


@dataclasses.dataclass(frozen=True)
class Pool:
    """The threads of one library. kind: "blas", "openmp" or "torch". get, set: return and set their number. MKL and
    OpenMP have a number for each calling thread."""

    name: str
    kind: str
    get: Callable[[], int]
    set: Callable[[int], object]

    @property
    def is_chosen(self) -> bool:
        """Whether the program has set the number: it is not a default. BLAS: False, because its default is not known
        (OpenBLAS starts at most as many threads as it was built for)."""
        return self.kind != "blas" and not _is_default(self.get())


def pools() -> list[Pool]:
    """Return the pools of the libraries that are loaded. torch is before its OpenMP, whose number it sets."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about two kinds of OpenMP in one process
        libraries = threadpoolctl.ThreadpoolController().lib_controllers
    found = [
        Pool(each.internal_api, each.user_api, each.get_num_threads, functools.partial(_set_threads, each))
        for each in libraries
        if each.get_num_threads() is not None  # the library lacks the function
    ]
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "set_num_threads"):
        found.insert(0, Pool("torch", "torch", torch.get_num_threads, torch.set_num_threads))
    return found


def _set_threads(library: Any, threads: int) -> None:
    library.set_num_threads(threads)
    if hasattr(library, "clear_controlling_thread"):  # else threadpoolctl lets no other thread change OpenBLAS's number
        library.clear_controlling_thread()


def _is_default(threads: int) -> bool:
    """Return whether a library may start this number of threads by default: one per core, also without the second
    hardware thread of each core (MKL, and so torch), of this process or of the machine."""
    allowed, of_machine = frozenset(os.sched_getaffinity(0)), frozenset(range(os.cpu_count() or 1))
    return threads in (len(allowed), len(of_machine)) or threads in (_physical(allowed), _physical(of_machine))


@functools.cache
def _physical(cores: frozenset[int]) -> int:
    """Return the number of cores without the second hardware thread of each."""
    siblings = (pathlib.Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list") for core in cores)
    try:
        return len({path.read_text() for path in siblings})
    except OSError:
        return len(cores)


class ThreadLimit:
    """Lowers the numbers of threads of this process until `restore`. Lower numbers stay, and so do numbers that the
    program has set, except for BLAS alone, whose default is not known."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._lowered: list[tuple[Pool, int]] = []
        found = pools()
        chosen = {pool.get() for pool in found if pool.is_chosen}  # torch sets its MKL too
        for pool in found:
            if (before := pool.get()) > threads and before not in chosen:
                pool.set(threads)
                self._lowered.append((pool, before))
        os.environ[_VARIABLE] = str(threads)

    def restore(self) -> None:
        """Restore the numbers that the program has not changed meanwhile."""
        for pool, before in self._lowered:
            if pool.get() == self._threads:
                pool.set(before)
        if os.environ.get(_VARIABLE) == str(self._threads):
            del os.environ[_VARIABLE]


LIMIT = Slot[ThreadLimit | None](lambda: None)
