"""The interface of a backend: primitives over flat, contiguous host arrays, and nothing else.

Arguments are already checked and the ranks already agree when a primitive is called (communicator.py, group.py). A
primitive is a generator that yields whenever it has to wait (work.py). Counts are elements; for byte arrays, bytes.
Each backend documents whether results are reproducible from run to run.
"""

from abc import ABC, abstractmethod
from typing import Any, Protocol

import numpy as np

from allred.arrays import Array
from allred.comm.ops import ReduceOp
from allred.comm.work import Engine, Pending, Steps
from allred.timeline.track import Track


class CheckedOperation(Pending, Protocol):
    """A started operation that exchanges headers first, and moves bytes only if they agree."""

    @property
    def headers_agree(self) -> bool:
        """Whether the headers of all ranks agree. Known once the operation is complete."""


class FastPath(Protocol):
    """A blocking allreduce of contiguous numpy arrays in one call: checks arguments, exchanges headers, reduces.

    The calls return True if the operation is complete, the started operation if it takes more than a millisecond, and
    None if the arguments need the general path. wire: the code of the 16-bit dtype to send, 0 for none.
    """

    @property
    def pending(self) -> bool:
        """Whether an operation is under way."""

    def allreduce(self, source: Any, target: Any, op: Any, name: Any, wire: int = 0, /) -> Any: ...
    def grouped_allreduce(
        self, sources: list[Any], targets: list[Any], op: Any, name: Any, wire: int = 0, /
    ) -> Any: ...


class WithHeader(Protocol):
    """Primitives that exchange headers and move bytes as one operation, which can complete without Python.

    record: this rank's header, header.BYTES bytes.
    """

    @property
    def number(self) -> int:
        """The number of the operation under way, as shown in messages."""

    def begin_exchange(self, record: bytes) -> CheckedOperation: ...
    def begin_allreduce(
        self, record: bytes, sources: list[Array], targets: list[Array], op: ReduceOp, wire: int
    ) -> CheckedOperation: ...
    def begin_broadcast(self, record: bytes, data: Array, root: int) -> CheckedOperation: ...
    def begin_reducescatter(
        self, record: bytes, flat: Array, out: Array, counts: list[int], op: ReduceOp
    ) -> CheckedOperation: ...


class Backend(ABC):
    """Moves arrays between `size` ranks; this process is number `rank`."""

    name: str
    fuses = False  # whether a group of arrays passes as one stream, without a fusion buffer
    engine: Engine | None = None  # what runs several started operations at once; None: the caller runs one at a time
    fast_path: FastPath | None = None
    with_header: WithHeader | None = None

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._sent_bytes = 0

    @abstractmethod
    def exchange(self, record: bytes) -> Steps[list[bytes]]:
        """Return the records of all ranks in rank order, header.BYTES bytes each."""

    @abstractmethod
    def allreduce(self, flat: Array, op: ReduceOp, wire: int = 0) -> Steps[None]:
        """Reduce `flat` in place. wire: the code of the 16-bit dtype that float32 and float64 are sent as; 0: none."""

    @abstractmethod
    def broadcast(self, data: Array, root: int) -> Steps[None]:
        """Copy the root's bytes into `data` on every rank."""

    @abstractmethod
    def allgather(self, send: Array, recv: Array, counts: list[int]) -> Steps[None]:
        """Concatenate the bytes of all ranks in `recv`; counts[r] bytes come from rank r."""

    @abstractmethod
    def alltoall(self, send: Array, recv: Array, counts: Array) -> Steps[None]:
        """Send bytes to each rank in rank order and receive from each; counts[i, j] bytes go from rank i to rank j."""

    @abstractmethod
    def reducescatter(self, flat: Array, out: Array, counts: list[int], op: ReduceOp) -> Steps[None]:
        """Reduce `flat`; rank r receives part r, counts[r] elements, in `out`."""

    def allocate(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Zeros that live as long as the backend; it may reduce them without a copy."""
        return np.zeros(count, dtype)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has contributed to allreduces so far, in their wire dtype.

        On several nodes, only what crosses between nodes counts; backend single sends nothing.
        """
        return self._sent_bytes

    def start_progress_thread(self) -> None:  # noqa: B027  (optional)
        """Start a thread that runs operations while the program computes, if the backend has one. Idempotent."""

    def record(self, track: Track) -> None:  # noqa: B027  (optional)
        """Record operations of the fast path for the timeline."""

    def close(self, sound: bool) -> None:  # noqa: B027  (optional)
        """Release all resources; collective. sound: every operation is complete, so that MPI objects can be freed."""
