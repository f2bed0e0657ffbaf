"""Limits BLAS threads while towers run, with threadpoolctl: towers x BLAS threads <= cores of this rank."""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

from allred.cluster import processors, report

_limiting = threading.Lock()


class BlasLimit:
    """The BLAS limit of one `Towers` object. The first use searches for the BLAS libraries."""

    def __init__(self, towers: int) -> None:
        self._towers = towers

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Lower the number of BLAS threads to the share of one tower, and restore it at the end of the block.

        The limit holds for the whole process. A block inside another one, or in another thread meanwhile, changes
        nothing: the first block restores the number. Without threadpoolctl there is no limit, and one warning says so.
        """
        if self._controller is None:
            _warn_once(self._towers)
            yield
        elif not _limiting.acquire(blocking=False):
            yield
        else:
            try:
                with self._lower("blas"):
                    yield
            finally:
                _limiting.release()

    def start_thread(self) -> None:
        """Limit OpenMP in this thread of a tower: OpenMP has a number of threads for each thread that calls it."""
        if self._controller is not None:
            self._lower("openmp")

    @functools.cached_property
    def _controller(self) -> Any:
        try:
            import threadpoolctl
        except ImportError:
            return None
        return threadpoolctl.ThreadpoolController()

    @functools.cached_property
    def _share(self) -> int:
        return max(1, processors.cores_per_rank() // self._towers)

    def _lower(self, kind: str) -> Any:
        libraries = self._controller.select(user_api=kind)
        limits = [{**each, "num_threads": min(each["num_threads"], self._share)} for each in libraries.info()]
        return libraries.limit(limits=limits)


@functools.cache
def _warn_once(towers: int) -> None:
    cores, threads = processors.cores_per_rank(), processors.look().blas_threads
    if towers * threads > max(cores, towers):
        report.warn(
            f"Towers: {towers} towers x {threads} BLAS threads on this rank's {cores} core{'s' * (cores != 1)}: steps "
            "may take many times as long. Install threadpoolctl (pip install threadpoolctl), with which Towers limits "
            f"the threads, or export OMP_NUM_THREADS={max(1, cores // towers)} before the start"
        )
