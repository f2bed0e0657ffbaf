"""Steps that a server serves in C, against the optimizer: both ends in one process, a thread for each worker."""

import mmap
import threading

import numpy as np
import pytest

from allred import native, optim
from allred.ps import protocol

if not native.available:
    pytest.skip(f"C extension: {native.reason}", allow_module_level=True)

SLOTS, SLOT, PUSH_PULL = 8, 256, protocol.PUSH | protocol.PULL
OPTIMIZERS = {
    "sgd": lambda: optim.SGD(0.1, weight_decay=0.01),
    "momentum": lambda: optim.SGD(0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda: optim.Adagrad(0.1),
    "rmsprop": lambda: optim.RMSProp(0.01, momentum=0.5, centered=True),
    "adam": lambda: optim.Adam(0.01, weight_decay=0.1),
    "adamw": lambda: optim.AdamW(0.01),
}


class Server:
    """A shard of one vector in cells, and the mailboxes of some workers."""

    def __init__(self, optimizer, elements, dtype, workers=1):
        self.optimizer, self.memory = optimizer, mmap.mmap(-1, 2**16)
        self.params = np.frombuffer(self.memory, dtype, elements)
        self.slots = optimizer.slots(self.params)
        step = SLOT // self.params.itemsize
        self.ranges = [(at, min(at + step, elements)) for at in range(0, elements, step)]
        names = optimizer.kernel(0.1, 1).slots
        cells = [(self.params[a:b], *(n and self.slots[n][a:b] for n in names)) for a, b in self.ranges]
        self.server = native.StepServer(optimizer.kernel(0.1, 1).rule, cells)
        shared = [mmap.mmap(-1, native.mailbox_bytes(SLOTS, SLOT)) for _ in range(workers)]
        self.boxes = [native.Mailbox(each, SLOTS, SLOT) for each in shared]
        self.ends = [native.Mailbox(each, SLOTS, SLOT) for each in shared]
        self.server.set_boxes(self.boxes, native.Mailbox)
        self.version = self.updates = 0

    def serve(self, limit_us=20_000, chief=0, clocks=None, largest_lead=0):
        adam = None
        if isinstance(self.optimizer, optim.Adam):
            adam = (*self.optimizer.betas, self.optimizer.eps, self.optimizer.weight_decay)
        numbers = self.optimizer.kernel(self.optimizer.lr, self.updates + 1).numbers
        self.version, self.updates, box, record = self.server.serve(
            PUSH_PULL,
            self.version,
            self.updates,
            self.optimizer.lr,
            numbers,
            adam,
            limit_us,
            0,
            chief,
            clocks,
            largest_lead,
        )
        return box, record

    def serve_until(self, version):
        """Serve steps up to this version; those whose cells are late, as Python does. Return how many were late."""
        late = 0
        while self.version < version:
            box, record = self.serve()
            if record is None:
                continue
            late, reached, request = late + 1, 0, protocol.unpack_request(record)
            self.updates += 1
            while reached < len(self.ranges):
                numbers = self.optimizer.kernel(self.optimizer.lr, self.updates).numbers
                reached = self.server.apply(box, reached, True, numbers)
            self.version += 1
            staleness = self.version - 1 - request.version
            self.boxes[box].answer(protocol.pack_reply(0, request.step + 1, self.version, staleness))
        return late

    def sizes(self):
        item = self.params.itemsize
        up = np.array([(b - a) * item for a, b in self.ranges], np.int64)
        return up, np.array([(a * item, (b - a) * item) for a, b in self.ranges], np.int64)

    def request(self, worker, gradient, target, version, flags=PUSH_PULL, lr=float("nan")):
        """Make a request of a worker. Return its reply."""
        up, down = self.sizes()
        record = protocol.pack_request(flags, 7, version, lr, 1.0, 0, 0)
        end = self.ends[worker]
        if not end.begin(record, [gradient], up, [target], self.memory, down):
            while not end.spin_wait():
                pass
        return protocol.unpack_reply(end.reply)


def alongside(*functions):
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.daemon = True  # a failed test ends
        thread.start()
    return threads


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("elements", [1, 100, 129])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_have_the_bits_of_the_optimizer(name, elements, dtype):
    server, alone = Server(OPTIMIZERS[name](), elements, dtype), OPTIMIZERS[name]()
    expected, rng, found, replies = np.zeros(elements, dtype), np.random.default_rng(0), [], []
    gradients = [rng.normal(size=elements).astype(dtype) for _ in range(6)]

    def work():
        for version, gradient in enumerate(gradients):
            target = np.empty(elements, dtype)
            replies.append(server.request(0, gradient, target, version))
            found.append(target)

    (thread,) = alongside(work)
    late = server.serve_until(len(gradients))
    thread.join()
    for number, (gradient, target) in enumerate(zip(gradients, found, strict=True)):
        alone.step({"w": expected}, {"w": gradient})
        np.testing.assert_array_equal(target, expected)
        assert replies[number] == (0, 8, number + 1, 0)
    if late < 6:
        assert server.server.take_counts() == ([(0, 6 - late)], [(0, 6 - late)])
    assert server.server.take_counts() == ([], [])


def test_other_requests_are_returned():
    server = Server(optim.SGD(0.1), 10, np.float32)
    others = [
        {"flags": protocol.PULL}, {"flags": PUSH_PULL | protocol.ABSENT}, {"lr": 0.5}, {"version": 1},
        {"version": -300},
    ]  # fmt: skip
    for other in others:
        given = {"version": 0, **other}
        ones = np.ones(10, np.float32)
        (thread,) = alongside(lambda ones=ones, given=given: server.request(0, ones, np.empty_like(ones), **given))
        box, record = server.serve()
        assert box == 0
        request = protocol.unpack_request(record)
        assert (request.flags, request.version) == (given.get("flags", PUSH_PULL), given["version"])
        assert server.version == 0
        assert not server.params.any()
        server.boxes[0].give(1)
        server.boxes[0].answer(protocol.pack_reply(0, 0, 0, 0))
        thread.join()
    (thread,) = alongside(lambda: server.request(0, np.ones(10, np.float32), np.empty(10, np.float32), 0, lr=0.1))
    server.serve_until(1)  # the learning rate of the server
    thread.join()


def test_the_learning_rates_of_other_workers_do_not_count():
    server = Server(optim.SGD(0.1), 10, np.float32, workers=2)
    (thread,) = alongside(lambda: server.request(1, np.ones(10, np.float32), np.empty(10, np.float32), 0, lr=9.0))
    server.serve_until(1)
    thread.join()
    np.testing.assert_array_equal(server.params, np.float32(-0.1))


def test_several_workers():
    server, steps = Server(optim.SGD(1.0), 200, np.float32, workers=3), 300
    torn = []

    def work(worker):
        version = 0
        for _ in range(steps):
            target = np.empty(200, np.float32)
            version = server.request(worker, np.ones(200, np.float32), target, version).version
            if (target != -version).any():
                torn.append((worker, version))

    threads = alongside(*(lambda worker=worker: work(worker) for worker in range(3)))
    late = server.serve_until(3 * steps)
    for thread in threads:
        thread.join()
    assert torn == []
    boxes, staleness = server.server.take_counts()
    assert sum(number for _, number in boxes) == sum(number for _, number in staleness) == 3 * steps - late


@pytest.mark.parametrize(
    ("clocks", "largest_lead", "is_served"),
    [
        ([0, 0], 0, False), ([0, 1], 0, True), ([0, 0], 1, True), ([5, 4], 1, False), ([5, 5], 1, True),
        ([4, 9], 0, True),
    ],
)  # fmt: skip
def test_the_step_of_a_worker_that_must_wait_afterwards_is_returned(clocks, largest_lead, is_served):
    server, ones = Server(optim.SGD(0.1), 10, np.float32, workers=2), np.ones(10, np.float32)
    for _ in range(50):  # until no cell is late
        version = server.version
        (thread,) = alongside(lambda: server.request(0, ones, np.empty_like(ones), server.version))
        box, record = -1, None
        while record is None and server.version == version:
            box, record = server.serve(clocks=clocks, largest_lead=largest_lead)
        if record is not None:
            while not server.server.apply(box, 0, True, server.optimizer.kernel(0.1, 1).numbers):
                pass
            server.boxes[box].answer(protocol.pack_reply(0, 0, 0, 0))
        thread.join()
        if (record is None) == is_served:
            break
    assert (record is None) == is_served


@pytest.mark.parametrize("is_vectors", [False, True])
def test_a_step_awaits_the_readers_of_the_shard_and_not_those_of_vectors(is_vectors):
    """A worker reads vectors that it has prefetched in its next request, or never."""
    server = Server(optim.SGD(1.0), 10, np.float32, workers=2)
    vector, down = np.empty(1, np.float32), np.array([(0, 4)], np.int64)
    record = protocol.pack_request(protocol.LOOKUP, 0, 0, 0.0, 1.0, 0, 1)
    assert not server.ends[1].begin(record, [], np.empty(0, np.int64), [vector], server.memory, down, False)
    assert server.serve()[0] == 1
    server.boxes[1].give(1, is_vectors)
    server.boxes[1].answer(protocol.pack_reply(0, 0, 0, 0))
    (thread,) = alongside(lambda: server.request(0, np.ones(10, np.float32), np.empty(10, np.float32), 0))
    if is_vectors:
        server.serve_until(1)
    else:
        while server.serve()[0] != 0:
            pass
        numbers = server.optimizer.kernel(1.0, 1).numbers
        assert server.server.apply(0, 0, True, numbers) == 0
        server.ends[1].done()
        while server.server.apply(0, 0, True, numbers) == 0:
            pass
        server.boxes[0].answer(protocol.pack_reply(0, 0, 0, 0))
    thread.join()
    np.testing.assert_array_equal(server.params, np.float32(-1.0))


def test_cells_are_applied_as_they_arrive():
    server = Server(optim.SGD(0.5), 10 * 64, np.float32)  # more cells than slots
    numbers, target = server.optimizer.kernel(0.5, 1).numbers, np.empty(10 * 64, np.float32)
    (thread,) = alongside(lambda: server.request(0, np.full(10 * 64, 2.0, np.float32), target, 0))
    box, record = server.serve()
    assert (box, server.version) == (0, 0)
    assert protocol.unpack_request(record).flags == PUSH_PULL
    reached = 0
    while reached < 10:
        reached = server.server.apply(0, reached, True, numbers)
    server.boxes[0].answer(protocol.pack_reply(0, 0, 0, 0))
    thread.join()
    np.testing.assert_array_equal(target, np.float32(-1.0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: native.StepServer("adamx", []), "no elementwise rule 'adamx'"),
        (lambda s: native.StepServer("row_wise_adagrad", []), "no elementwise rule"),
        (
            lambda s: native.StepServer("sgd", [(np.zeros(3), np.zeros(4))]),
            "array 1 of a cell has another",
        ),
        (lambda s: native.StepServer("sgd", [(np.zeros(3, int), None)]), "array 0 of a cell has another type"),
        (lambda s: s.serve(clocks=[0, 0]), "clocks are a list with one number of each box"),
        (lambda s: native.StepServer.__new__(native.StepServer).apply(0, 0, True, ()), "is not constructed"),
        (lambda s: s.server.apply(1, 0, True, (0.1, 0.0, 0.0, 0.0)), "there is no box 1"),
        (lambda s: s.server.apply(0, 0, True, (0.1, 0.0, 0.0, 0.0)), "no request is being served"),
    ],
)
def test_arguments_are_checked(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call(Server(optim.SGD(0.1), 10, np.float32))
