"""Signatures of the C extension (csrc/). Buffers are C-contiguous unless stated otherwise. Dtype and operator codes are
those of headers: positions in `arrays.DTYPES`, and `CODES` of comm/ops.py."""

from typing import Any, Literal

def pack(tensors: list[Any], buffer: Any, /) -> None: ...
def unpack(tensors: list[Any], buffer: Any, /) -> None: ...
def reduce(
    sources: list[Any], out: Any, dtype_code: int, op_code: int, divisor: int, variant: str = "", into: int = -1, /
) -> None: ...
def narrow(source: Any, out: Any, dtype_code: int, wire_code: int, variant: str = "", /) -> None: ...
def hashes(tensors: list[Any], /) -> list[int]: ...
def crc32(data: Any, value: int = 0, /) -> int: ...
def crc32_is_fast() -> bool: ...
def add_numbers(values: Any, first: int, /, *numbers: float) -> None:
    """Add numbers to the float64 of a buffer, from position `first` on."""

def exceeds(tensors: list[Any], element_bytes: int, limit: int, variant: str = "", /) -> bool: ...
def update(rule: str, arrays: tuple[Any, ...], numbers: tuple[float, ...], variant: str = "", /) -> bool: ...
def update_group(
    array_type: type,
    dtypes: tuple[Any, Any],
    rule: str,
    params: list[Any],
    grads: list[Any],
    slots: list[dict[str, Any]],
    slot_names: tuple[str | None, ...],
    numbers: tuple[float, ...],
    start: int = 0,
    /,
) -> int:
    """Update parameters as update() does, in order, from position `start` up to the first one that it does not support.
    Returns that position. Raises TypeError or ValueError for lists and tuples that do not fit the rule; nothing has
    changed then. dtypes: float32 and float64. slot_names: of csrc/update.h; None for a missing slot."""

def leaves_of(structure: Any, tree: Any, /) -> list[Any] | None: ...
def call_interruptibly(function: Any, /, *arguments: Any) -> Any: ...
def interrupted() -> bool: ...
def xla_last_error() -> BaseException | None: ...
def xla_handlers(run: Any, /) -> tuple[Any, Any]:
    """Return two handlers of custom calls as capsules. The first one calls run(number, arguments, results, operation):
    arguments and results are lists of (memory, dtype of XLA, shape), and operation is a reduction that C has begun, or
    None. It returns None, or (segment, queue, op, name) if C can repeat the call as a reduction. The second handler
    returns its arguments."""

def reads_arrays(array: Any, /) -> bool:
    """Whether the functions with `array_type` support arrays of this type. array: writable, two dimensions or more."""

def match(array_type: type, tensors: list[Any], params: list[Any], grads: list[Any], /) -> bool: ...
def disjoint(array_type: type, arrays: list[Any], /) -> bool: ...
def hash_window(array_type: type, arrays: list[Any], starts: bytes, step: int, /) -> int | None: ...
def variants() -> tuple[str, ...]: ...
def alarm(warn_s: float, limit_s: float, who: str, what: str, rendezvous_fd: int, /) -> bool: ...
def cancel_alarm() -> None: ...
def arm_exit(
    mpi: tuple[int, int, int, int],
    who: str,
    reason: str,
    code: int,
    stuck: bool,
    watcher_fd: int,
    duty: int,
    rendezvous_fd: int,
    grace_s: float,
    status: int,
    /,
) -> bool:
    """Set what this process does at exit (csrc/python/exit.h). mpi: the addresses of MPI_Finalized, MPI_Finalize and
    MPI_Abort, and the handle of the communicator to abort. False if libc has no on_exit()."""

def run_exit_handler(status: int, /) -> None:
    """Run now what arm_exit has set, with this exit status, and disarm it. The process may end here."""

def report_mpi_call(number: int, fd: int, /) -> bool:
    """Before the handler of signal `number` runs, write a line such as "MPI Send" to `fd` if the thread is in MPI."""

def arena_open(numpy_api: Any, fd: int, offset: int, memory: Any, /) -> bool:
    """Make `memory` the arena of this process (csrc/arena.h); once. numpy_api: the capsule _ARRAY_API. memory: a
    mapping of `fd` from `offset`, which is never released. False if this numpy is not known, or there is no memory."""

def arena_serve_sizes(sizes: list[int], /) -> None:
    """Set the sizes in bytes that are served in contexts with the handler: at most 2048; initially none."""

def arena_attach() -> bool:
    """Set the handler of this context, unless it is set, or the program has set its own. Returns whether it is set."""

def arena_pause(on: bool, /) -> None:
    """Serve no sizes in this thread, or serve them again; calls may be nested."""

def arena_serve_torch(on: bool, /) -> None:
    """On: in this thread, the arena serves torch all sizes from IN_PLACE_BYTES. Off: only learned sizes. Calls may be
    nested."""

def arena_functions() -> tuple[int, int, int]:
    """The addresses of C functions for torch's allocator (allred/torch/arena_allocator.cpp), in its order."""

def arena_call(function: Any, /, *arguments: Any) -> Any:
    """Call the function; the arena serves all arrays that it makes, of any size. The arena must be open."""

def arena_thaw() -> None:
    """End the freeze: no other process writes into the blocks any more."""

def arena_freeze() -> None:
    """After an abandoned operation: serve no block, and never use one again."""

IN_PLACE_BYTES: int  # size of the smallest array that is reduced in place

def arena_usage() -> tuple[int, int, int, bool, int, int]:
    """(bytes, live bytes, bytes that have pages, whether frozen, full, no_pages); all 0 without an arena. The last two
    are the numbers of requests that were refused: because it was full, and because the system had no pages."""

def network_bytes(local_ranks: int, ranks: int, window_bytes: int, /) -> int: ...
def segment_bytes(ranks: int, chunk_bytes: int, /) -> int: ...

class Operation:
    """A pending operation, made by Segment. It holds its buffers until done() or spin_wait() has returned True."""

    headers_agree: bool  # False if the headers of the ranks differ
    nonfinite: int  # with checks_finite: position of the first array whose result is not finite, or -1
    samples: int  # of all ranks, in a step_allreduce
    waited_ns: int  # for the headers of the other ranks, in a step_allreduce that is complete
    progress_count: int  # steps taken
    waits_for_peers: bool  # whether some ranks have not begun the operation
    needs_all_ranks: bool  # whether it cannot complete if a rank has ended
    def done(self) -> bool:
        """Take the steps that need no waiting. Returns whether the operation is complete."""
    def spin_wait(self) -> bool:
        """The same, until 1 ms passes without progress."""
    def withdraw(self) -> bool:
        """Remove it from the queue, where it has taken no step. Only while an operation before it holds the queue.
        Returns whether it is complete or was removed."""
    def headers(self) -> list[bytes]:
        """The headers of all ranks. ValueError if the operation is not complete."""

class Segment:
    """One rank's view of the shared memory of its node, and the queue of its operations (csrc/queue.h).

    memory: a writable buffer of segment_bytes(ranks, chunk_bytes) bytes, initially zeros, shared by all ranks.
    chunk_bytes: a multiple of 64. array: a writable numpy array of two dimensions or more, by which C checks whether it
    can read numpy arrays; if not, there is no fast path. dtypes, ops: the numpy dtypes and the operators, by their
    codes.

    A `record` is a header of 64 bytes; or None for a further part of the operation that holds the queue. ValueError and
    TypeError for arguments that do not fit together; then nothing is queued.
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
    nonfinite: int  # as in Operation, of the last call of grouped_allreduce or step_allreduce that returned True
    samples: int  # the same
    waited_ns: int  # for the headers of the other ranks, in the last call of step_allreduce that returned True
    number: int  # of the last operation that was begun, from 1
    pending: bool  # whether an operation is pending
    sent: int  # bytes that this rank has written for allreduces; may be set
    generation: int  # of the world, in the headers of the fast path; may be set
    in_place: int  # bytes of arrays of this rank that were reduced in place
    read_in_place: int  # bytes that this rank has read from arenas, except by allreduces
    outside: list[tuple[int, int]]
    lost_host: int
    """By rank: number and bytes of the arrays that lay in this rank's arena, but not in that rank's; of several such
    ranks the first is counted. [] without arenas."""
    def allreduce(
        self, source: Any, target: Any, op: Any, name: Any, wire: int = 0, /
    ) -> Operation | Literal[True] | None:
        """Reduce by the fast path. True if done; an Operation that takes longer; None if the fast path is not
        possible."""
    def start_allreduce(self, source: Any, target: Any, op: Any, name: Any, wire: int, /) -> Operation | None:
        """Begin the same as an operation of the queue. The caller holds the lock. None if this is not possible."""
    def grouped_allreduce(
        self,
        sources: list[Any],
        targets: list[Any],
        op: Any,
        name: Any,
        wire: int = 0,
        checks_finite: bool = False,
        weight: float | None = None,
        residual: Any = None,
        /,
    ) -> Operation | Literal[True] | None:
        """residual: a buffer of float32, with a number for each element: the errors of encodings (csrc/encode.h)."""

    def step_allreduce(
        self,
        arrays: list[Any],
        op: Any,
        name: Any,
        wire: int,
        checks_finite: bool,
        agreed: int,
        window: int,
        samples: int,
        residual: Any,
        /,
    ) -> Operation | Literal[True] | None:
        """As grouped_allreduce in place. The headers differ if `agreed` or `window`, 0 to 2**64 - 1, differ. An average
        is weighted by `samples` if these differ: only float32 and float64, and less than 2**53 / ranks."""
    def begin_exchange(self, record: bytes | None, holds: bool, /) -> Operation:
        """Begin a barrier. holds: it holds the queue when it is complete, until on_complete()."""
    def begin_allreduce(
        self,
        record: bytes | None,
        sources: list[Any],
        targets: list[Any],
        dtypes: list[int],
        wires: list[int],
        op: int,
        checks_finite: bool = False,
        residual: Any = None,
        /,
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
    ) -> Operation:
        """counts: bytes for each rank, from each rank. largest: the most bytes that any rank sends to any other."""
    def set_network(
        self, memory: Any, window_bytes: int, host: int, slices: int, hosts: list[list[int]], sockets: list[int], /
    ) -> None:
        """From now on, operations except alltoall include the ranks of other hosts (csrc/network.h). memory:
        network_bytes(...) bytes, zeros, shared by the ranks of this host. hosts: the ranks of each host, in order.
        sockets: descriptors by host, nonblocking; of this host -1."""
    def begin_host_exchange(
        self,
        send: Any,
        send_starts: list[int],
        send_counts: list[int],
        receive: Any,
        receive_starts: list[int],
        receive_counts: list[int],
        /,
    ) -> Operation:
        """Begin an exchange of bytes with the same rank of each host, as a part of an operation."""
    def begin_reducescatter(
        self, record: bytes | None, send: Any, receive: Any, counts: list[int], dtype: int, op: int, /
    ) -> Operation: ...
    def headers(self) -> list[bytes]:
        """The headers of all ranks in the last operation. ValueError if it is not complete."""
    def start_progress_thread(self) -> bool:
        """Start a thread that makes progress while no caller waits. False if it cannot start."""
    def let_callers_sleep(self) -> None:
        """Let a caller that waits sleep where another thread uses its core (csrc/operation.h)."""

    def on_complete(self, first: Any, /) -> None:
        """Let the queue go on, if this operation holds it: its headers differ, or it was begun with `holds`."""
    def halt(self) -> None:
        """Stop all progress, for good, and end the thread."""
    def set_arenas(self, arenas: list[Any], /) -> None:
        """From now on, reduce arrays that lie in these writable buffers in place (csrc/allreduce_in_place.h).

        arenas: the memory of each rank, as this process maps it. Called on all ranks between the same operations. The
        arrays of an operation that is given up must not be used again. ValueError if the segment has arenas or is in
        use.
        """
    def set_tracing(self, enabled: bool, /) -> None:
        """Whether to record the calls of the fast path from now on, for the timeline."""
    def take_trace(self) -> tuple[list[str], bytes]:
        """Return and remove the recorded calls: the names, and 32 bytes for each call, struct `<qqqII`: start and end
        in ns of time.perf_counter_ns() (end 0: an Operation was begun); bytes of the arrays; the index of the name;
        whether the call was grouped."""
    def acquire(self, blocking: bool, /) -> bool:
        """Take the lock; False if another thread has it. Never waits."""
    def release(self) -> None: ...
    def close(self) -> None:
        """Release the memory. ValueError if another thread is in an operation."""

def mailbox_bytes(slots: int, slot_bytes: int, /) -> int: ...

class Mailbox:
    """One end of the link between a worker and a parameter server of its node (csrc/mailbox.h).

    memory: a writable buffer of mailbox_bytes(slots, slot_bytes) bytes at an address that is a multiple of 8, initially
    zeros, shared by both ends. slot_bytes: a multiple of 64. doorbell: a writable buffer of 4 bytes or more at a
    multiple of 8, initially zeros, on which the server sleeps: shared by the server and all its workers. None: the
    doorbell of the box; then a server of several boxes polls every 200 us.
    """

    def __init__(self, memory: Any, slots: int, slot_bytes: int, doorbell: Any = None, /) -> None: ...
    closed: bool  # by either end
    def set_arena(self, memory: Any, /) -> None:
        """From now on, the server reads gradients that lie in this memory of the worker from there. memory: the arena
        as the caller maps it. Both ends call it, between requests. The worker must not change gradients before its
        request is complete."""
    # the worker
    referenced: int  # bytes of gradients that the server has read from the arena
    progress_count: int  # steps taken in this request
    waits_for_peers: bool  # False
    pending: bool
    reply: bytes  # the record with which the server ended the request. ValueError if the request is not complete
    def begin(
        self, record: bytes, up: list[Any], up_cells: Any, down: list[Any], shard: Any, down_cells: Any, /
    ) -> bool:
        """Begin a request, and take steps until 1 ms passes without progress. Returns whether it is complete.

        record: at most 192 bytes. up: buffers, sent as one stream in cells of `up_cells` bytes. down: writable buffers,
        filled as one stream from the cells `down_cells` of the shard: rows (offset, bytes) in bytes. Both tables are
        int64, and copied; the buffers are held until the request is complete. After an exception before that
        (KeyboardInterrupt) only close() is possible. ConnectionResetError, also from done() and spin_wait(): the server
        has closed the box.
        """
    def done(self) -> bool:
        """Take the steps that need no waiting. Returns whether the request is complete."""
    def spin_wait(self) -> bool:
        """The same, until 1 ms passes without progress."""
    # the server
    read: int  # cells of the last request that the worker has copied
    def poll(self) -> bytes | None:
        """The record of a new request, or None."""
    def cell(self) -> memoryview | None:
        """The next cell of the ring, valid until it is taken or the request is answered; None if there is none yet.

        ConnectionResetError: the worker has closed the box during its request, and no cell is left.
        """
    def spin_wait_cell(self) -> memoryview | None:
        """The same, waiting up to 1 ms for the cell."""
    def take(self, n: int = 1, /) -> None:
        """Give the slots of the next n cells back to the worker."""
    def give(self, n: int = 1, /) -> None:
        """Let the worker read n more cells of the shard."""
    def answer(self, record: bytes, /) -> None:
        """End the request."""
    @classmethod
    def wait_any(cls, boxes: list[Mailbox], limit_us: int, first: int = 0, /) -> int:
        """The index of a box with a new request, searched from `first` on; -1 after `limit_us`.

        It waits at most 20 ms, whatever the limit, so that Python can handle signals. A box that its worker has closed
        counts as a box without a request: check `closed`.
        """
    # both
    def close(self) -> None:
        """Close the box for both ends, and release the memory. ValueError if another thread uses it."""

class RowTable:
    """A table of rows by id; see csrc/row_table.h. Ids: 8 bytes each. Raises MemoryError; the rows that were made
    before stay."""

    rows: int
    nbytes: int
    def __init__(
        self,
        dim: int,
        half: bool,
        slots: tuple[int, int, int],
        slot_values: tuple[float, float, float],
        init: int,
        a: float,
        b: float,
        seed: int,
        admit_after: int,
        /,
    ) -> None: ...
    def lookup(self, ids: Any, vectors: Any, step: int, /) -> None: ...
    def update(self, ids: Any, gradients: Any, rule: str, numbers: tuple[float, ...], step: int, /) -> int: ...
    def add(self, ids: Any, gradients: Any, weight: float, /) -> None: ...
    def update_mean(
        self, sums: RowTable, divisor: float, rule: str, numbers: tuple[float, ...], step: int, /
    ) -> int: ...
    def clear(self) -> None: ...
    def remove_older(self, step: int, /) -> int: ...
    def select(self, since: int, numbers: Any, /) -> int: ...
    def read(self, numbers: Any, ids: Any, seen: Any, steps: Any, vectors: Any, slots: tuple[Any, ...], /) -> None: ...
    def write(self, ids: Any, seen: Any, steps: Any, vectors: Any, slots: tuple[Any, ...], /) -> None: ...

def distinct_ids(ids: Any, distinct: Any, positions: Any, counts: Any, /) -> int: ...
def spread_rows(
    out: Any, rows: Any, half: bool, positions: Any, dim: int, offsets: Any = None, mean: bool = False, /
) -> None: ...
def sum_gradients(
    out: Any, gradients: Any, positions: Any, dim: int, offsets: Any = None, mean: bool = False, /
) -> None: ...

class StepServer:
    """Steps that a server serves in C; see csrc/step_server.h. cells: for each cell the parameters and the slots of the
    rule, None for a missing one."""

    def __init__(self, rule: str, cells: list[tuple[Any, ...]], /) -> None: ...
    def set_boxes(self, boxes: list[Any], type: type, /) -> None: ...
    def apply(self, box: int, first: int, gives: bool, numbers: tuple[float, ...], /) -> int: ...
    def serve(
        self,
        flags: int,
        version: int,
        updates: int,
        lr: float,
        numbers: tuple[float, ...],
        adam: tuple[float, float, float, float] | None,
        limit_us: int,
        first: int,
        chief: int,
        clocks: list[int] | None,
        largest_lead: int,
        /,
    ) -> tuple[int, int, int, bytes | None]:
        """Serve steps with these flags until another request arrives, or for `limit_us`. clocks: number of steps of the
        worker of each box; None: no bound. largest_lead: how many steps a worker that
        continues may be ahead of the slowest one. If a worker must wait after its step, the step is not served here: it
        is returned as the other request. Returns the version, the number of updates, and
        the box and record of the other request, or -1 and None."""

    def take_counts(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return [(box, number of requests)] and [(staleness, number of requests)] since the last call."""
