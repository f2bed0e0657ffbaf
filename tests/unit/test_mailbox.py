"""The C type that links a worker and a parameter server of one node: both ends in one process, a thread for each."""

import itertools
import mmap
import os
import signal
import struct
import threading
import time

import numpy as np
import pytest

from allred import native

if not native.available:
    pytest.skip(f"C extension: {native.reason}", allow_module_level=True)

from allred.native._kernels import Mailbox, mailbox_bytes

SLOTS, SLOT = 3, 256
NONE = b""
LIMIT_S = 60
ASKED, REPLY, SENT, TAKEN, GIVEN = (at * 128 for at in (0, 2, 4, 7, 8))  # where mailbox.c has them
FIRST_SLOT = 16 * 128


@pytest.fixture
def memory():
    return mmap.mmap(-1, mailbox_bytes(SLOTS, SLOT))


@pytest.fixture
def ends(memory):
    """The worker's and the server's."""
    pair = Mailbox(memory, SLOTS, SLOT), Mailbox(memory, SLOTS, SLOT)
    yield pair
    for end in pair:
        end.close()


def cells_of(nbytes, cell_bytes=SLOT):
    return np.array([min(cell_bytes, nbytes - at) for at in range(0, nbytes, cell_bytes)], np.int64)


def rows_of(nbytes, cell_bytes=SLOT):
    sizes = cells_of(nbytes, cell_bytes)
    return np.stack([np.cumsum(sizes) - sizes, sizes], axis=1) if len(sizes) else np.empty((0, 2), np.int64)


def push(worker, record, buffers):
    nbytes = sum(memoryview(buffer).nbytes for buffer in buffers)
    return worker.begin(record, buffers, cells_of(nbytes), [], None, NONE)


def pull(worker, record, targets, shard):
    return worker.begin(record, [], NONE, targets, shard, rows_of(memoryview(shard).nbytes))


def finish(worker):
    until = time.monotonic() + LIMIT_S
    while not worker.spin_wait():
        assert time.monotonic() < until
    return worker.reply


def next_cell(server):
    until = time.monotonic() + LIMIT_S
    while (cell := server.spin_wait_cell()) is None:
        assert time.monotonic() < until
    return cell


def next_request(server):
    until = time.monotonic() + LIMIT_S
    while Mailbox.wait_any([server], 20_000) < 0:
        assert time.monotonic() < until
    return server.poll()


def flag(memory, place, number, count):
    struct.pack_into("<Q", memory, place, number << 24 | count)


@pytest.fixture
def arena_ends():
    """A worker's and a server's end with slots of 8 KiB, the memory of the worker's arena, and that of the mailbox."""
    memory, arena = mmap.mmap(-1, mailbox_bytes(SLOTS, 8192)), mmap.mmap(-1, 65536)
    pair = Mailbox(memory, SLOTS, 8192), Mailbox(memory, SLOTS, 8192)
    for end in pair:
        end.set_arena(arena)
    yield *pair, arena, memory
    for end in pair:
        end.close()


def test_gradients_in_the_arena_are_not_copied(arena_ends):
    worker, server, arena, _ = arena_ends
    large, small = np.frombuffer(arena, np.uint8, 16_000, offset=100), np.arange(100, dtype=np.uint8)
    large[...] = np.arange(16_000) % 251
    cells = cells_of(16_200, 8192)
    worker.begin(b"up", [small, large, small], cells, [], None, NONE)
    next_request(server)
    server.poll()
    gathered = bytes(next_cell(server))
    assert bytes(server.cell()) == gathered  # it is not gathered twice
    large[0] = 255  # the first cell has two parts, and was gathered
    assert bytes(server.cell()) == gathered == bytes(small) + bytes([0]) + bytes(large[1:8092])
    server.take()
    second = next_cell(server)
    assert bytes(second) == bytes(large[8092:]) + bytes(small)
    server.take()
    server.answer(b"")
    finish(worker)
    assert worker.referenced == 16_000
    worker.begin(b"up", [large[:8192]], np.array([8192]), [], None, NONE)
    next_request(server)
    server.poll()
    cell = np.frombuffer(next_cell(server), np.uint8)
    assert cell.__array_interface__["data"][0] == large.__array_interface__["data"][0]
    server.take()
    server.answer(b"")
    finish(worker)


@pytest.mark.parametrize(
    "table",
    [(10**6, 1, 8192), (1, 0, 8192), (1, 65537, 1), (1, 65536 - 4095, 8192), (1, 1, 8193), (2, 1, 4096), (1, 1, 4096)],
)
def test_a_wrong_table_of_places_is_an_error(arena_ends, table):
    """The worker wrote nonsense: the server reads no other memory. table: count, place and bytes of the first entry."""
    worker, server, arena, memory = arena_ends
    data = np.frombuffer(arena, np.uint8, 8192)
    worker.begin(b"up", [data], np.array([8192]), [], None, NONE)
    next_request(server)
    server.poll()
    struct.pack_into("3Q", memory, FIRST_SLOT, *table)
    with pytest.raises(ValueError, match="the worker states a wrong size or place of a cell: 8192 bytes"):
        server.cell()


def test_a_request_and_its_reply(ends):
    worker, server = ends
    assert server.poll() is None
    assert Mailbox.wait_any([server], 0) == -1
    for number in range(3):
        record = b"r" * (number * 96)
        assert not worker.begin(record, [], NONE, [], None, NONE)
        assert worker.pending
        assert Mailbox.wait_any([server], 0) == 0
        assert server.poll() == record
        assert server.poll() is None
        server.answer(record[1:])
        assert worker.done()
        assert not worker.pending
        assert worker.reply == record[1:]


def test_up_in_cells_from_many_tensors(ends):
    worker, server = ends
    rng = np.random.default_rng(0)
    tensors = [rng.integers(0, 255, n, np.uint8) for n in (1, 0, 300, 256, 3, 0, 5, 1000, 7)]
    stream = b"".join(bytes(tensor) for tensor in tensors)
    assert not push(worker, b"up", tensors)
    assert worker.progress_count == SLOTS  # no more before one was taken
    assert server.poll() == b"up"
    got = b""
    while len(got) < len(stream):
        cell = server.cell()
        assert cell is not None
        assert cell.nbytes == min(SLOT, len(stream) - len(got))
        assert server.cell() is cell  # until it is taken
        got += bytes(cell)
        server.take()
        assert not worker.done()
    assert got == stream
    assert server.cell() is None
    server.answer(b"")
    assert worker.done()


def test_the_worker_reads_only_given_cells(ends):
    worker, server = ends
    shard = np.arange(1000, dtype=np.uint16).view(np.uint8)
    targets = [np.zeros(n, np.uint8) for n in (700, 0, 1, 1299)]
    assert not pull(worker, b"down", targets, shard)
    server.poll()
    assert not any(target.any() for target in targets)
    server.give(3)
    assert not worker.done()
    assert server.read == 3
    assert b"".join(map(bytes, targets)) == bytes(shard[:768]) + bytes(2000 - 768)
    server.give(5)
    server.answer(b"ok")
    assert worker.done()
    assert b"".join(map(bytes, targets)) == bytes(shard)
    assert server.read == 8  # also after the answer


def test_cells_of_the_shard_in_any_order(ends):
    worker, server = ends
    shard, target = np.arange(100, dtype=np.uint8), np.zeros(30, np.uint8)
    rows = np.array([[90, 10], [0, 0], [5, 20]], np.int64)
    worker.begin(b"", [], NONE, [target], shard, rows)
    server.poll()
    server.give(3)
    server.answer(b"")
    assert worker.done()
    assert target.tolist() == [*range(90, 100), *range(5, 25)]


@pytest.mark.parametrize("nbytes", [2**24, 2**24 + 1])
def test_large_pulls_with_streaming_stores_are_exact(ends, nbytes):
    """Pieces of all kinds: of too few bytes for that, at odd places, across cells."""
    worker, server = ends
    shard = np.random.default_rng(0).integers(0, 255, nbytes, np.uint8)
    sizes = [1, 0, 15, 31, 33, 255, 256, 257, 287, 288, 289, 5000, 2**20 + 7]
    memory = np.zeros(nbytes + 64, np.uint8)
    places = np.cumsum([3, *sizes, nbytes - sum(sizes)])
    targets = [memory[a:b] for a, b in itertools.pairwise(places)]
    rows = rows_of(nbytes, 2**19 + 13)
    assert not worker.begin(b"", [], NONE, targets, shard, rows)
    server.poll()
    server.give(len(rows))
    server.answer(b"")
    finish(worker)
    assert (memory[3 : nbytes + 3] == shard).all()
    assert not memory[:3].any()
    assert not memory[nbytes + 3 :].any()


def test_the_reply_ends_a_request_whatever_is_left(ends):
    worker, server = ends
    shard, target = np.ones(1024, np.uint8), np.zeros(1024, np.uint8)
    for _ in range(2):
        target[:] = 0
        gradient = np.full(10 * SLOT, 7, np.uint8)
        worker.begin(b"", [gradient], cells_of(gradient.nbytes), [target], shard, rows_of(1024))
        server.poll()
        server.take(2)
        server.give(1)
        server.answer(b"dropped")
        assert worker.done()
        assert worker.reply == b"dropped"
        assert target.sum() == SLOT  # what was given before
    assert not worker.begin(b"next", [np.full(5, 9, np.uint8)], cells_of(5), [], None, NONE)
    assert server.read == 1  # of the request polled last
    assert server.poll() == b"next"
    assert server.read == 0
    assert bytes(server.cell()) == b"\t" * 5  # none of the cells that were left
    server.take()
    assert server.cell() is None


def test_refused_arguments_do_not_change_the_mailbox(ends):
    worker, server = ends
    data, read_only = bytearray(SLOT), bytes(SLOT)
    cells, rows = cells_of(SLOT), rows_of(SLOT)
    wrong = [
        (b"r" * 193, [], NONE, [], None, NONE),
        ("text", [], NONE, [], None, NONE),
        (b"", (data,), cells, [], None, NONE),
        (b"", [data], cells_of(SLOT - 1), [], None, NONE),
        (b"", [data], NONE, [], None, NONE),
        (b"", [], cells, [], None, NONE),
        (b"", [data, data], np.array([2 * SLOT]), [], None, NONE),
        (b"", [data], np.array([-1, SLOT + 1]), [], None, NONE),
        (b"", [data], b"seven b", [], None, NONE),
        (b"", [data, 3], cells, [], None, NONE),
        (b"", [np.ones((4, 4))[:, ::2]], NONE, [], None, NONE),
        (b"", [], NONE, [data], None, rows),
        (b"", [], NONE, [data], data, NONE),
        (b"", [], NONE, [read_only], data, rows),
        (b"", [], NONE, [data], data, rows + np.array([1, 0])),
        (b"", [], NONE, [data], data, rows - np.array([1, 0])),
        (b"", [], NONE, [data], data, np.array([[-(2**62) * 2, SLOT]])),
        (b"", [], NONE, [data], data, np.array([[0, -1], [0, SLOT + 1]])),
    ]
    for arguments in wrong:
        with pytest.raises((ValueError, TypeError, BufferError)):
            worker.begin(*arguments)
    data.append(0)  # held by nobody
    with pytest.raises(ValueError, match="no request was begun"):
        worker.done()
    with pytest.raises(ValueError, match="no request is complete"):
        _ = worker.reply
    for call in (server.cell, server.spin_wait_cell, server.take, server.give, lambda: server.answer(b"")):
        with pytest.raises(ValueError, match="no request is being served"):
            call()
    push(worker, b"", [read_only])
    with pytest.raises(ValueError, match="pending"):
        push(worker, b"", [read_only])
    server.poll()
    with pytest.raises(ValueError, match=r"take\(2\), but 1"):
        server.take(2)
    for n in (-1, 2**63, 2**24):
        with pytest.raises((ValueError, OverflowError)):
            server.give(n)
    with pytest.raises(ValueError, match="at most 192"):
        server.answer(b"r" * 193)
    server.take()
    server.answer(b"")
    assert worker.done()


@pytest.mark.parametrize("sizes", [(0, 64), (63, 64), (1, 0), (1, 65), (1, -64), (1, 2**40)])
def test_sizes_that_cannot_be(memory, sizes):
    for make in (mailbox_bytes, lambda *sizes: Mailbox(memory, *sizes)):
        with pytest.raises(ValueError, match="slots"):
            make(*sizes)
    with pytest.raises(ValueError, match="it takes"):
        Mailbox(memory, 62, 65536)
    with pytest.raises(ValueError, match="it takes"):
        Mailbox(memory, SLOTS, SLOT, bytearray(3))


def test_buffers_are_held_until_the_end(ends):
    worker, server = ends
    data = bytearray(10 * SLOT)
    push(worker, b"", [data])
    with pytest.raises(BufferError):
        data.append(0)
    server.poll()
    server.answer(b"")
    assert worker.done()
    data.append(0)


def test_each_end_detects_that_the_other_has_closed(memory):
    worker, server = Mailbox(memory, SLOTS, SLOT), Mailbox(memory, SLOTS, SLOT)
    data = bytearray(10 * SLOT)
    push(worker, b"", [data])
    server.poll()
    server.take()
    worker.close()
    data.append(0)
    assert server.closed
    server.take(2)  # what was sent before
    for call in (server.cell, server.spin_wait_cell):
        with pytest.raises(ConnectionResetError, match="worker"):
            call()
    with pytest.raises(ValueError, match="closed"):
        worker.done()
    server.close()
    memory.close()  # nobody holds it


def test_a_worker_detects_a_closed_server_but_keeps_its_reply(memory):
    for answers in (True, False):
        memory[:] = bytes(len(memory))
        worker, server = Mailbox(memory, SLOTS, SLOT), Mailbox(memory, SLOTS, SLOT)
        worker.begin(b"", [], NONE, [], None, NONE)
        server.poll()
        if answers:
            server.answer(b"last")
        server.close()
        if answers:
            assert worker.done()
            assert worker.reply == b"last"
        else:
            with pytest.raises(ConnectionResetError, match="server"):
                worker.spin_wait()
        with pytest.raises(ConnectionResetError, match="server"):
            worker.begin(b"", [], NONE, [], None, NONE)
        worker.close()


def test_a_cell_outlives_its_mailbox(ends, memory):
    worker, server = ends
    push(worker, b"", [b"abc"])
    server.poll()
    cell = server.cell()
    server.close()
    assert bytes(cell) == b"abc"
    with pytest.raises(BufferError):
        memory.close()


HUGE = 2**24 - 1


def test_a_mad_server_is_not_believed(ends, memory):
    worker, server = ends
    shard, target = np.arange(512, dtype=np.uint16).view(np.uint8), np.zeros(1024, np.uint8)
    data = np.ones(5 * SLOT, np.uint8)
    worker.begin(b"", [data], cells_of(data.nbytes), [target], shard, rows_of(1024))
    flag(memory, TAKEN, 1, HUGE)
    flag(memory, GIVEN, 1, HUGE)
    assert not worker.done()
    assert worker.progress_count == 5 + 4
    np.testing.assert_array_equal(target, shard)
    server.poll()
    server.answer(b"x" * 192)
    struct.pack_into("<Q", memory, REPLY + 8, 2**63)
    assert worker.done()
    assert worker.reply == b"x" * 192


def test_nor_a_mad_worker(ends, memory):
    worker, server = ends
    push(worker, b"r" * 192, [bytes(SLOT)])
    struct.pack_into("<Q", memory, ASKED + 8, 2**63)
    assert server.poll() == b"r" * 192
    server.take()
    flag(memory, SENT, 1, HUGE)
    with pytest.raises(ValueError, match="3 cells are in the ring"):
        server.take(HUGE)
    for said in (SLOT + 1, 2**32 - 1, 2**31):  # the last two: places in an arena that does not exist
        struct.pack_into("<3I", memory, SENT + 8, said, said, said)
        with pytest.raises(ValueError, match=f"wrong size or place of a cell: {said % 2**31} bytes"):
            server.cell()
    flag(memory, SENT, 1, 0)  # back
    assert server.cell() is None
    assert server.read == 0
    flag(memory, 9 * 128, 1, HUGE)
    assert server.read == 0  # not more than given


def serve(boxes, shards, rounds):
    """Subtract each cell from the shard, and give it at once. rounds: requests in all."""
    last = -1
    for _ in range(rounds):
        until = time.monotonic() + LIMIT_S
        while (last := Mailbox.wait_any(boxes, 20_000, last + 1)) < 0:
            assert time.monotonic() < until
        box, at = boxes[last], 0
        (nbytes,) = struct.unpack("<q", box.poll())
        while at < nbytes:
            cell = np.frombuffer(next_cell(box), np.int32)
            shards[last][at // 4 : at // 4 + cell.size] -= cell
            at += cell.nbytes
            box.take()
            box.give()
        box.answer(struct.pack("<q", nbytes))


@pytest.mark.parametrize("workers", [1, 3])
def test_many_requests_of_several_workers(workers):
    elements, rounds = 3000, 40
    bell = mmap.mmap(-1, 64)
    memories = [mmap.mmap(-1, mailbox_bytes(SLOTS, SLOT)) for _ in range(workers)]
    shards = [np.zeros(elements, np.int32) for _ in range(workers)]
    boxes = [Mailbox(memory, SLOTS, SLOT, bell) for memory in memories]
    outcomes = []

    def work(index):
        worker = Mailbox(memories[index], SLOTS, SLOT, bell)
        rng = np.random.default_rng(index)
        expected = np.zeros(elements, np.int32)
        for _ in range(rounds):
            size = int(rng.integers(0, elements))
            gradients = [rng.integers(-9, 9, n).astype(np.int32) for n in (size // 3, size - size // 3)]
            targets = [np.empty(size - size // 2, np.int32), np.empty(size // 2, np.int32)]
            expected[:size] -= np.concatenate(gradients)
            nbytes = size * 4
            record = struct.pack("<q", nbytes)
            if not worker.begin(record, gradients, cells_of(nbytes), targets, shards[index], rows_of(nbytes)):
                finish(worker)
            assert worker.reply == record
            np.testing.assert_array_equal(np.concatenate(targets), expected[:size])
            if rng.integers(4) == 0:
                time.sleep(0.003)  # long enough for a server to sleep
        outcomes.append(index)

    threads = [threading.Thread(target=work, args=[index]) for index in range(workers)]
    for thread in threads:
        thread.start()
    serve(boxes, shards, rounds * workers)
    for thread in threads:
        thread.join(LIMIT_S)
    assert sorted(outcomes) == list(range(workers))


def test_between_processes_one_asleep(memory):
    """A server that sleeps takes no CPU time to speak of, and neither does a worker that waits for its reply.

    (CPU time, not time: however busy the machine is, who sleeps takes none.)
    """
    child = os.fork()
    if child == 0:
        worker, code = Mailbox(memory, SLOTS, SLOT), 1
        try:
            time.sleep(0.3)
            worker.begin(b"after a while", [], NONE, [], None, NONE)
            before = time.process_time()
            if finish(worker) == b"late" and time.process_time() - before < 0.1:
                code = 0
        finally:
            os._exit(code)
    try:
        server = Mailbox(memory, SLOTS, SLOT)
        before = time.process_time()
        assert next_request(server) == b"after a while"
        assert time.process_time() - before < 0.1
        time.sleep(0.3)
        server.answer(b"late")
    finally:
        status = wait_for(child)
    assert status == 0


def wait_for(child):
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGKILL


def test_a_wait_releases_the_gil(ends):
    worker, server = ends
    worker.begin(b"", [], NONE, [], None, NONE)
    server.poll()
    answering = threading.Timer(0.02, server.answer, [b"from a thread"])
    answering.start()
    assert finish(worker) == b"from a thread"
    answering.join()
