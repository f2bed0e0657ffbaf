from typing import Any, Literal

def pack(tensors: list[Any], buffer: Any, /) -> None: ...
def unpack(tensors: list[Any], buffer: Any, /) -> None: ...
def reduce(
    sources: list[Any], out: Any, dtype_code: int, op_code: int, divisor: int, variant: str = "", into: int = -1, /
) -> None: ...
def narrow(source: Any, out: Any, dtype_code: int, wire_code: int, variant: str = "", /) -> None: ...
def hashes(tensors: list[Any], /) -> list[int]: ...
def exceeds(tensors: list[Any], element_bytes: int, limit: int, variant: str = "", /) -> bool: ...
def update(rule: str, arrays: tuple[Any, ...], numbers: tuple[float, ...], variant: str = "", /) -> bool: ...
def reads_arrays(array: Any, /) -> bool: ...
def alike(array_type: type, tensors: list[Any], params: list[Any], grads: list[Any], /) -> bool: ...
def variants() -> tuple[str, ...]: ...
def alarm(warn_s: float, limit_s: float, who: str, what: str, life: int, /) -> bool: ...
def cancel_alarm() -> None: ...
def arm_exit(
    mpi: tuple[int, int, int, int], who: str, words: str, code: int, stuck: bool, line: int, owed: int, life: int, /
) -> bool: ...
def segment_bytes(ranks: int, chunk_bytes: int, /) -> int: ...

class Operation:
    """One that is under way on a Segment. Buffers are held until somebody has seen that it is complete."""

    agreed: bool  # whether the ranks' headers do
    moves: int
    peers: bool
    def done(self) -> bool: ...
    def linger(self) -> bool: ...
    def headers(self) -> list[bytes]: ...

class Segment:
    """A rank's view of its node's shared memory, and the queue of its operations (csrc/queue.h).

    array: a C-contiguous writable numpy array of two dimensions or more, from which is seen whether C can read arrays
    here; if not, none takes the short way. dtypes, ops: by their codes.
    A `record` is a header of 64 bytes; or None for what is a part of the operation that holds up those behind it.
    """

    def __init__(
        self,
        memory: Any,
        rank: int,
        ranks: int,
        chunk_bytes: int,
        array: Any,
        dtypes: tuple[Any, ...],
        ops: tuple[Any, ...],
        /,
    ) -> None: ...
    has_progress_thread: bool
    number: int
    pending: bool
    sent: int
    def allreduce(
        self, source: Any, target: Any, op: Any, name: Any, wire: int = 0, /
    ) -> Operation | Literal[True] | None:
        """True when it is done; what was begun, if that takes longer; None if it must go the long way."""
    def grouped_allreduce(
        self, sources: list[Any], targets: list[Any], op: Any, name: Any, wire: int = 0, /
    ) -> Operation | Literal[True] | None: ...
    def begin_exchange(self, record: bytes | None, holds: bool, /) -> Operation: ...
    def begin_allreduce(
        self, record: bytes | None, sources: list[Any], targets: list[Any], dtypes: list[int], op: int, wire: int = 0, /
    ) -> Operation: ...
    def begin_allgather(self, record: bytes | None, send: Any, receive: Any, counts: list[int], /) -> Operation: ...
    def begin_broadcast(self, record: bytes | None, data: Any, root: int, /) -> Operation: ...
    def begin_alltoall(
        self,
        record: bytes | None,
        send: Any,
        receive: Any,
        send_counts: list[int],
        receive_counts: list[int],
        largest: int,
        /,
    ) -> Operation: ...
    def begin_reducescatter(
        self, record: bytes | None, send: Any, receive: Any, counts: list[int], dtype: int, op: int, /
    ) -> Operation: ...
    def headers(self) -> list[bytes]: ...
    def start_progress_thread(self) -> bool:
        """Start a thread that makes progress; False if it cannot be started."""
    def on_complete(self, first: Any, /) -> None:
        """Nothing more belongs to that operation: if it holds up those behind it (its headers differ, or it was begun
        with `holds`), they go on."""
    def halt(self) -> None: ...
    def note(self, wanted: bool, /) -> None:
        """Whether from now on what passes the short way is noted, for a timeline."""
    def noted(self) -> tuple[list[str], bytes]:
        """What has come since the last time: the names, and 32 bytes for each call, struct `<qqqII`: start and end, ns
        of time.perf_counter_ns() (end 0: what it has begun is under way); bytes of its arrays; the index of its name;
        whether it was of a group."""
    def acquire(self, blocking: bool, /) -> bool: ...
    def release(self) -> None: ...
    def close(self) -> None: ...

def mailbox_bytes(slots: int, slot_bytes: int, /) -> int: ...

class Mailbox:
    """One end of the link between a worker and a parameter server of its node (csrc/mailbox.h).

    memory: a writable buffer of mailbox_bytes(slots, slot_bytes) bytes at an address that is a multiple of 8; zeros
    before either end is made, shared by the two, kept alive by both. slot_bytes: a multiple of 64. bell: the bytes on
    which a server sleeps, 4 or more, zeros at first, the same for all its boxes: a writable buffer at a multiple of 8
    that server and workers share; None: the box's own, and then a server of several boxes takes naps of 200 us.
    """

    def __init__(self, memory: Any, slots: int, slot_bytes: int, bell: Any = None, /) -> None: ...
    closed: bool  # by either end
    # the worker
    moves: int
    peers: bool
    pending: bool
    reply: bytes  # of the request that is complete; else ValueError
    def begin(
        self, record: bytes, up: list[Any], up_cells: Any, down: list[Any], shard: Any, down_cells: Any, /
    ) -> bool:
        """Start a request, and go on with it until a millisecond passes without progress. Whether it is complete.

        record: at most 192 bytes. up: contiguous buffers, sent as one stream in cells of `up_cells` bytes.
        down: writable ones, filled as one stream from the shard's cells `down_cells`: rows (offset, bytes) in bytes.
        Both tables are int64, and copied; buffers are held until the request is complete. After an exception in between
        (KeyboardInterrupt) there is nothing but close().
        ConnectionResetError, also from done() and linger(): the server has closed the box.
        """
    def done(self) -> bool: ...
    def linger(self) -> bool: ...
    # the server
    read: int
    def poll(self) -> bytes | None: ...
    def cell(self) -> memoryview | None:
        """The next cell of the ring, to be used until it is taken or the request answered.

        ConnectionResetError: the worker has closed the box within its request, and no cell is left.
        """
    def linger_cell(self) -> memoryview | None: ...
    def take(self, n: int = 1, /) -> None: ...
    def give(self, n: int = 1, /) -> None: ...
    def answer(self, record: bytes, /) -> None: ...
    @classmethod
    def wait_any(cls, boxes: list[Mailbox], limit_us: int, first: int = 0, /) -> int:
        """The index of a box with a request that was not polled, looked for from `first` on; -1 after `limit_us`.

        It waits at most 20 ms, whatever the limit, so that Python can look at signals. A box that its worker has
        closed counts as one without a request: look at `closed`.
        """
    # both
    def close(self) -> None: ...
