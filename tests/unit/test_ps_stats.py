"""What has passed at servers, in words; and the records of steps."""

import pickle
from collections import Counter

import pytest

from allred.ps import protocol
from allred.ps.protocol import (
    DRAINING,
    DROPPED,
    RECORD_BYTES,
    ServerStatistics,
    Statistics,
    StepReply,
    StepRequest,
    histogram,
    pack_reply,
    pack_request,
    unpack_reply,
    unpack_request,
)


def servers():
    first = ServerStatistics(0, gradients=10, updates=5, pulls=12, bytes_in=2_000_000, bytes_out=3_500_000)
    second = ServerStatistics(1, gradients=10, updates=5, pulls=11, bytes_in=10_000, bytes_out=0, torn=2)
    first.staleness.update({0: 9, 3: 1})
    second.staleness.update({0: 10})
    first.dropped.update({2: 3, 0: 1})
    return first, second


def test_statistics_of_several_servers():
    told = Statistics(servers(), "sync: so it is", "bytes")
    assert told.staleness == Counter({0: 19, 3: 1})
    assert told.dropped == {0: 1, 2: 3}
    assert told.updates == 5
    assert str(told).splitlines() == [
        "parameter servers, sync: so it is: 10 gradients, 5 updates; dropped 4 (worker 0: 1, worker 2: 3)",
        "staleness (updates): 0: 95 %, 3: 5 %; mean 0.15, largest 3",
        "server 0: 2.00 MB in, 3.50 MB out, 5 updates, 12 pulls",
        "server 1: 10.00 kB in, 0 B out, 5 updates, 11 pulls, 2 gradients torn",
    ]


@pytest.mark.parametrize(
    ("unused", "words"),
    [
        (1, "1 gradient of a step that was not complete was not used"),
        (2, "2 gradients of a step that was not complete were not used"),
    ],
)
def test_unused_gradients_are_reported(unused, words):
    first, second = servers()
    first.unused = second.unused = unused
    told = str(Statistics((first, second), "sync", "bytes")).splitlines()
    assert told[2] == words
    assert len(told) == 5


def test_statistics_before_the_first_step():
    told = str(Statistics((ServerStatistics(0),), "async", "bytes"))
    assert told.startswith("parameter servers, async: 0 gradients, 0 updates; dropped 0\nstaleness (updates): none\n")


def test_statistics_can_be_pickled():
    one, _ = servers()
    assert pickle.loads(pickle.dumps(one)) == one


def test_a_histogram_has_few_rows():
    counts = Counter(dict.fromkeys(range(100), 1))
    words = histogram(counts)
    assert words.count("%") == 8
    assert words.startswith("0-12: 13 %, ")
    assert words.endswith("mean 49.5, largest 99")
    assert histogram(Counter()) == "none"


@pytest.mark.parametrize("step", [0, 1, 2**40])
def test_records_survive_packing(step):
    request = StepRequest(protocol.PUSH | protocol.PULL | protocol.DRAIN, step, step + 7, 0.125, 32.5)
    packed = pack_request(*request)
    assert len(packed) == RECORD_BYTES
    assert unpack_request(packed) == request
    reply = StepReply(DROPPED | DRAINING, step, step + 1, step)
    packed = pack_reply(*reply)
    assert len(packed) == RECORD_BYTES
    assert unpack_reply(packed) == reply


def test_no_learning_rate_is_nan():
    lr = unpack_request(pack_request(0, 0, 0, float("nan"), 1.0, 0, 0)).lr
    assert lr != lr


def test_flags_differ():
    flags = (
        protocol.BEGIN,
        protocol.PUSH,
        protocol.DONE,
        protocol.PULL,
        protocol.ABSENT,
        protocol.INIT,
        protocol.DRAIN,
    )
    assert sum(flags) == 2 ** len(flags) - 1
    assert DROPPED ^ DRAINING == DROPPED + DRAINING == 3
