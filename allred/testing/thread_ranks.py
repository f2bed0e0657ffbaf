"""Ranks as threads of one process, for tests: each thread has a World of its own, on backend shm."""

import contextlib
import mmap
import os
import socket
import threading
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from allred import native, numbering, world
from allred.cluster import processors
from allred.comm.backends.shm import MAX_RANKS
from allred.comm.bootstrap import SingleBootstrap
from allred.comm.communicator import Communicator
from allred.comm.process_set import PROCESS_SETS, ProcessSets
from allred.comm.select import TransportFacts
from allred.comm.work import Steps
from allred.config import Config, explicit_settings, settle
from allred.errors import AllredError, ConfigError, InputError, RemoteRankError
from allred.validators import integer
from allred.world import World

T = TypeVar("T")


def threads(n: int, function: Callable[..., T], *args: Any, timeout_s: float | None = None) -> list[T]:
    """Run `function(*args)` as `n` ranks, each of them a thread of this process. Returns the results in rank order.

    Inside the function allred is initialized: mode sync, backend shm, without MPI, watcher and signals. It calls
    neither init() nor shutdown(). Threads that it starts itself are not ranks.

    n: the number of ranks, at least 1. timeout_s: as for `allred.init`. Other settings come from the environment.

    If a rank raises an exception, the next wait of every other rank raises RemoteRankError; then `threads` raises that
    exception, with the number of the rank as a note. It returns or raises after all threads have ended.

    Raises InputError if n < 1 or n > 1024; ConfigError if a setting cannot be used, or without the C extension;
    AllredError inside `threads`, and between init() and shutdown().

    >>> import allred
    >>> threads(3, lambda: float(allred.allreduce(allred.rank(), allred.Sum)))
    [3.0, 3.0, 3.0]
    """
    n = integer("threads: n", n, 1, "it is the number of ranks")
    if n > MAX_RANKS:
        raise InputError(f"threads: n must be at most {MAX_RANKS}, the limit of backend shm, but is {n}")
    if world.is_initialized() or not _running.acquire(blocking=False):
        raise AllredError(
            "allred.testing.threads: this process has ranks already; call it outside of init() and threads"
        )
    try:
        return _Ranks(n, timeout_s).run(lambda: function(*args))
    finally:
        _running.release()


_running = threading.Lock()


class _Ranks:
    def __init__(self, size: int, timeout_s: float | None) -> None:
        if not native.available:
            raise ConfigError(
                "allred.testing.threads requires the C extension; python -m allred.native shows the problem"
            )
        fixed = {"mode": "sync", "backend": "shm", "watcher": False, "timeline": "none", "banner": False}
        self.size = size
        self.config: Config = settle([explicit_settings(os.environ, {"timeout_s": timeout_s, **fixed})])
        self._lock = threading.Lock()
        self._files: dict[object, tuple[int, int]] = {}  # descriptor of memory, and how many ranks have not mapped it
        self._worlds: dict[int, World] = {}
        self._error: BaseException | None = None  # the first one
        self._failed: int | None = None  # the rank that raised it
        self._results: dict[int, Any] = {}

    def run(self, function: Callable[[], T]) -> list[T]:
        overrides = threading.local()
        ranks = [
            threading.Thread(target=self._run, args=(rank, function, overrides), name=f"allred-rank-{rank}")
            for rank in range(self.size)
        ]
        world.override(overrides)
        try:
            for thread in ranks:
                thread.start()
            for thread in ranks:
                thread.join()
        except BaseException as error:  # Ctrl-C, or no thread can be started
            self._fail(None, error)
            for thread in ranks:
                if thread.ident is not None:
                    thread.join()
            raise
        finally:
            world.override(None)
            for here in self._worlds.values():
                _close(here)
            for file, _ in self._files.values():
                os.close(file)
        if self._error is not None:
            raise self._error
        return [self._results[rank] for rank in range(self.size)]

    def _run(self, rank: int, function: Callable[[], Any], overrides: threading.local) -> None:
        try:
            overrides.world = self._world(rank)
            self._results[rank] = function()
            overrides.world.communicator.check("shutdown", "the end of the function").wait()
        except BaseException as error:
            self._fail(rank, error)

    def _fail(self, rank: int | None, error: BaseException) -> None:
        """Keep the first error, and let the other ranks raise. rank: None for the thread that called `threads`."""
        with self._lock:
            if self._error is not None:
                return
            self._error, self._failed = error, rank
            if rank is not None:
                error.add_note(f"allred.testing.threads: raised on rank {rank} of {self.size}")
            for other, here in self._worlds.items():
                if other != rank:
                    here.failure = self._failure(error)

    def _failure(self, error: BaseException) -> RemoteRankError:
        """Return the error of the ranks that did not fail themselves."""
        who = "the caller of threads()" if self._failed is None else f"rank {self._failed}"
        trace = "".join(traceback.format_exception(error))
        text = f"{who} failed: {type(error).__name__}: {error}"
        return RemoteRankError(text, -1 if self._failed is None else self._failed, socket.gethostname(), 1, trace)

    def _world(self, rank: int) -> World:
        communicator = self.communicator(rank, tuple(range(self.size)), "all ranks")
        communicator.checks_places = self.config.check == "full"
        nodes = [0] * self.size
        here = World(
            topology=numbering.number(nodes, rank),
            communicator=communicator,
            config=self.config,
            reason="threads of one process",
            cores=max(1, processors.usable_cores([processors.own_cores()]) // self.size),
        )
        PROCESS_SETS.set(here, _ThreadProcessSets(self, communicator, nodes))
        here.queues.add(communicator.queue)
        with self._lock:
            self._worlds[rank] = here
            if self._error is not None:
                here.failure = self._failure(self._error)
        return here

    def communicator(self, rank: int, ranks: tuple[int, ...], title: str) -> Communicator:
        """Create this rank's communicator of some ranks."""
        from allred.comm.backends.shm import CHUNK_BYTES, ShmBackend  # requires the C extension
        from allred.native._kernels import segment_bytes

        memory = self._memory((ranks, title), segment_bytes(len(ranks), CHUNK_BYTES), len(ranks))
        return Communicator(ShmBackend(ranks.index(rank), len(ranks), memory), self.config.timeout_s)

    def _memory(self, key: object, nbytes: int, ranks: int) -> mmap.mmap:
        """Map the memory that `ranks` ranks share under this key."""
        with self._lock:
            if key not in self._files:
                file = os.memfd_create("allred-threads", os.MFD_CLOEXEC)
                os.posix_fallocate(file, 0, nbytes)
                self._files[key] = file, ranks
            file, left = self._files[key]
            memory = mmap.mmap(file, nbytes)
            self._files[key] = file, left - 1
            if left == 1:
                del self._files[key]
                os.close(file)
            return memory


class _ThreadProcessSets(ProcessSets):
    """The process sets of a rank that is a thread."""

    def __init__(self, ranks: _Ranks, everyone: Communicator, nodes: list[int]) -> None:
        super().__init__(SingleBootstrap(), 0, everyone, [TransportFacts(node) for node in nodes], ranks.config)
        self._ranks = ranks

    def create(self, ranks: tuple[int, ...], title: str, parent: Communicator | None = None) -> Steps[Communicator]:
        yield from ()
        communicator = self._ranks.communicator(self.everyone.rank, ranks, title)
        communicator.queue.members, communicator.ranks = list(ranks), ranks
        return communicator


def _close(here: World) -> None:
    """Release the resources of a rank whose thread has ended."""
    with contextlib.suppress(AllredError):
        sets = PROCESS_SETS.of(here)
        assert sets is not None
        sets.close()
        here.communicator.close()
