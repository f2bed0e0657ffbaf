"""Prefetching of batches by a thread, alone or with processes that call `Loader.load`.

1. The thread iterates over the specifications in order and puts each with its batch into a queue of `depth` entries.
2. With processes it gives each specification to the next process in turn, and takes the batches back in the same
   order. Each process has one specification at a time.
3. The iteration takes them out of the queue. An error passes through the queue too, after the batches before it.
4. When the iteration ends for any reason, it sets the stop event, empties the queue, so that a thread that waits for a
   free entry continues, ends the processes, and joins the thread.

After step 4 has begun the thread puts at most one more entry into the queue: it checks the event before each.
"""

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from allred.data.loader import BatchSpec, Fetched, Load, Loader
from allred.data.prefetch_processes import ProcessPool
from allred.errors import InputError
from allred.validators import integer

_JOIN_S = 10.0  # for a batch that the thread is making when the iteration ends


class Prefetch:
    """Iterable of prefetched batches, returned by `prefetch`. Batches, length and state are those of the loader."""

    def __init__(self, loader: Loader, depth: int, workers: int) -> None:
        self._loader, self._depth, self._workers = loader, depth, workers

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # raises TypeError for a Stream

    @property
    def batch_size(self) -> int:
        """Samples of a batch over all ranks."""
        return self._loader.batch_size

    @property
    def epochs(self) -> int:
        """Passes over the data."""
        return self._loader.epochs

    @property
    def loader(self) -> Loader:
        """The loader whose batches are prefetched."""
        return self._loader

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch. Raises AttributeError for a stream."""
        return int(self._loader.steps_per_epoch)  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Any]:
        return self._loader.iterate(self._fetch)

    def state_dict(self) -> dict[str, Any]:
        """Position after the latest batch of the iteration, without the batches that were fetched ahead."""
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the next iteration at the position in `state`, as `Batches.load_state_dict`."""
        self._loader.load_state_dict(state)

    def _fetch(self, specs: Iterable[BatchSpec], load: Load) -> Fetched:
        pool = ProcessPool(load, self._workers) if self._workers else None
        fetched = pool.fetch(specs) if pool else ((spec, load(spec.input)) for spec in specs)
        filled: queue.Queue[_Entry] = queue.Queue(self._depth)
        stop = threading.Event()
        thread = threading.Thread(target=_fill, args=(filled, fetched, stop), name="allred-prefetch", daemon=True)
        try:
            thread.start()
            while True:
                item = filled.get()
                if item is None:
                    return
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            item = None  # the traceback of an error refers to this frame
            stop.set()
            while not filled.empty():
                filled.get()
            if pool:
                pool.end()
            thread.join(_JOIN_S)


_Entry = tuple[BatchSpec, Any] | BaseException | None  # None: there are no more batches


def _fill(filled: "queue.Queue[_Entry]", fetched: Iterable[tuple[BatchSpec, Any]], stop: threading.Event) -> None:
    end: BaseException | None = None
    try:
        for item in fetched:
            if stop.is_set():
                return
            filled.put(item)
    except BaseException as error:
        end = error
    if not stop.is_set():
        filled.put(end)


def prefetch(batches: Loader, depth: int = 2, workers: int = 0) -> Prefetch:
    """Fetch batches ahead while the program computes.

    A batch made by a process is copied through a socket, at a few hundred MB/s. Thread and processes end with the
    iteration, also after a `break`, an exception or Ctrl-C. Processes also end if this process is killed.

    Arguments:
        batches: result of `allred.data.batches` or `allred.data.stream`; both objects share one position.
        depth: batches that wait at most, >= 1. One more is being made, or `workers` more.
        workers: 0 uses a thread, which is enough for files and for code that releases the GIL. A number > 0 uses that
            many processes, for datasets and decoders in Python. They start with each iteration, in about half a second,
            and receive the data once: mapped files by name, arrays in memory as a copy for each process. What they call
            must be importable. They import the script, so its main part must be under `if __name__ == "__main__":`.

    Returns:
        A `Prefetch` object, which yields the same batches. `state_dict` and the samples of a step refer to the latest
        batch that it yielded. An error in fetching is raised after the batches before it; a killed process raises
        DataError with its number and signal.

    Raises:
        InputError: `batches` is another iterable, or depth or workers is out of range.

    >>> import allred
    >>> batches = allred.data.batches([1, 2, 3], batch_size=2, seed=None, rank=0, size=1)
    >>> [x.tolist() for x in allred.data.prefetch(batches)]
    [[1, 2], [3]]
    """
    if not isinstance(batches, Loader):
        raise InputError(
            f"prefetch() takes the result of allred.data.batches or allred.data.stream, got {type(batches).__name__}; "
            "put processing of samples into the dataset or into decode="
        )
    return Prefetch(batches, integer("prefetch: depth", depth, 1), integer("prefetch: workers", workers, 0))
