"""Batches fetched ahead: by a thread, which alone or with processes does what `Loader.load` does.

1. The thread goes through the jobs, in order, and puts each with its batch into a queue of `depth` places.
2. With processes it gives every job to the next of them in turn, and takes the batches back in the same order; each
   process has one job at a time.
3. The iteration takes them out of the queue. An error comes the same way, in its place among the batches.
4. When the iteration ends, however it ends, the thread is told to stop, the queue is emptied, so that a thread that
   waits for a place goes on, the processes are ended, and the thread is joined.

After step 4 has begun the thread puts at most one thing more into the queue: it looks before each.
"""

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from allred.data.loader import Fetched, Job, Load, Loader, check_numbers
from allred.data.processes import Pool
from allred.errors import InputError

_JOIN_S = 10.0  # for a batch that is being made in the thread when the iteration ends


class Prefetch:
    """What `prefetch` returns: the same batches, and the same state."""

    def __init__(self, loader: Loader, depth: int, workers: int) -> None:
        self._loader, self._depth, self._workers = loader, depth, workers

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # a Stream has none, and says so

    @property
    def batch_size(self) -> int:
        """That of the batches."""
        return self._loader.batch_size

    @property
    def epochs(self) -> int:
        """That of the batches."""
        return self._loader.epochs

    @property
    def loader(self) -> Loader:
        """The loader whose batches are fetched ahead."""
        return self._loader

    @property
    def steps_per_epoch(self) -> int:
        """That of the batches. AttributeError if they have none."""
        return int(self._loader.steps_per_epoch)  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Any]:
        return self._loader.iterate(self._fetch)

    def state_dict(self) -> dict[str, Any]:
        """That of the batches: where the iteration is, not what was fetched ahead of it."""
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """That of the batches."""
        self._loader.load_state_dict(state)

    def _fetch(self, jobs: Iterable[Job], load: Load) -> Fetched:
        pool = Pool(load, self._workers) if self._workers else None
        fetched = pool.fetch(jobs) if pool else ((job, load(job.task)) for job in jobs)
        filled: queue.Queue[_Filled] = queue.Queue(self._depth)
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
            item = None  # an error's traceback leads to this frame
            stop.set()
            while not filled.empty():
                filled.get()
            if pool:
                pool.end()
            thread.join(_JOIN_S)


_Filled = tuple[Job, Any] | BaseException | None  # None: there are no more


def _fill(filled: "queue.Queue[_Filled]", fetched: Iterable[tuple[Job, Any]], stop: threading.Event) -> None:
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
    """The same batches, fetched ahead while the program computes.

    batches: what `allred.data.batches` or `allred.data.stream` returned. Its state and this one's are one.
    depth: so many batches wait at most; one more is being made, or `workers` more.
    workers: 0 for a thread, which is enough for files and for what leaves the interpreter lock alone; else so many
    processes, for datasets and decoders in Python. They start anew with each iteration, in about half a second, and get
    the data once: mapped files by name, arrays in memory as a copy each. What they call must be importable, and the
    script must have its main part under `if __name__ == "__main__":`, since they import it.

    A batch of a process is copied through a socket, at a few hundred MB/s. `state_dict`, and the samples of a step, are
    those of the batch that came last, whatever was fetched. An error in fetching is raised by the iteration, after the
    batches before it. A process that was killed is a DataError with its number and signal. The thread and the processes
    end with the iteration, also after a `break`, an exception and Ctrl-C; processes end if this one is killed, too.

    Raises InputError if `batches` is something else: what goes through it would have been fetched before it is used.

    >>> import allred
    >>> batches = allred.data.batches([1, 2, 3], batch_size=2, seed=None, rank=0, size=1)
    >>> [x.tolist() for x in allred.data.prefetch(batches)]
    [[1, 2], [3]]
    """
    if not isinstance(batches, Loader):
        raise InputError(
            f"prefetch() takes what allred.data.batches or allred.data.stream returned, got {type(batches).__name__}; "
            "put what is done to each sample into the dataset, or into decode="
        )
    check_numbers(depth=(depth, 1), workers=(workers, 0))
    return Prefetch(batches, int(depth), int(workers))
