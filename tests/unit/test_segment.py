"""The C type under the shared-memory backend, with one rank alone: its headers, and what it refuses."""

import gc
import sys
import threading

import numpy as np
import pytest

from allred import arrays, native
from allred.comm import ops
from allred.comm.arguments import array_descriptor, group_descriptor
from allred.comm.ops import ReduceOp

if not native.available:
    pytest.skip(f"C extension: {native.reason}", allow_module_level=True)

from allred.comm.backends.shm import _DTYPES, _OPS
from allred.native._kernels import Operation, Segment, segment_bytes
from allred.timeline.recorder import ROW

SLOT = 4096
DONE, NOT_TAKEN = True, None


PROBE = np.zeros((2, 3))


def alone(array=PROBE):
    return Segment(bytearray(segment_bytes(1, SLOT)), 0, 1, SLOT, array, _DTYPES, _OPS)


@pytest.fixture
def segment():
    made = alone()
    yield made
    made.close()


NAMES = ["", "w", "fc1.weight", "exactly8", "größe", "a name that is longer than a word or two"]
ARRAYS = [
    np.ones(shape, dtype) for shape in [(), (0,), (3,), (2, 0, 5), (64, 10)] for dtype in ("f4", "i8", "f2", "u1")
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype}{a.shape}")
def test_the_fast_path_makes_pythons_header(segment, array, name):
    for sequence in (1, 2):
        assert segment.allreduce(array, array, ReduceOp.SUM, name) is DONE
        assert segment.headers() == [array_descriptor("allreduce", array, name, ReduceOp.SUM).pack(sequence)]


@pytest.mark.parametrize("count", [0, 1, 2, 30])
def test_of_groups_too(segment, count):
    group = [np.ones((i, 3), _DTYPES[i % 5]) for i in range(count)]
    assert segment.grouped_allreduce(group, group, ReduceOp.MAX, "g") is DONE
    assert segment.headers() == [group_descriptor(group, "g", ReduceOp.MAX).pack(1)]


def read_only():
    array = np.ones(3)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("array", "op", "name"),
    [
        (np.ones((4, 4))[:, ::2], ReduceOp.SUM, ""),
        (np.asfortranarray(np.ones((4, 4))), ReduceOp.SUM, ""),
        (np.ones(3, ">f4"), ReduceOp.SUM, ""),
        (np.ones(3, "c8"), ReduceOp.MAX, ""),
        (np.ones(3, "g"), ReduceOp.SUM, ""),
        (np.ones(3, "i4"), ReduceOp.AVERAGE, ""),
        (np.ones(3, "?"), ReduceOp.SUM, ""),
        (np.ma.ones(3), ReduceOp.SUM, ""),
        (np.ones(3).view(np.matrix), ReduceOp.SUM, ""),
        (read_only(), ReduceOp.SUM, ""),
        ([1.0], ReduceOp.SUM, ""),
        (np.ones(3), "sum", ""),
        (np.ones(3), None, ""),
        (np.ones(3), ReduceOp.SUM, 7),
        (np.ones(3), ReduceOp.SUM, "\ud800"),
    ],
)
def test_unsupported_arguments_are_left_to_the_general_path(segment, array, op, name):
    assert segment.allreduce(array, array, op, name) is NOT_TAKEN
    assert segment.grouped_allreduce([np.ones(3), array], [np.ones(3), array], op, name) is NOT_TAKEN
    good = np.ones(3)
    assert segment.allreduce(good, good, ReduceOp.SUM, "") is DONE  # and nothing is held or counted
    assert segment.headers() == [array_descriptor("allreduce", good, "", ReduceOp.SUM).pack(1)]


def test_the_same_memory_twice_is_left_to_the_long_way(segment):
    array = np.ones(3)
    assert segment.grouped_allreduce([array, array], [array, array], ReduceOp.SUM, "") is NOT_TAKEN


@pytest.mark.parametrize(
    "other",
    [np.ones(5), np.ones(4, "i8"), np.ones(4, "f4"), np.ones(8)[::2], np.ones(4).view(np.matrix), np.ma.ones(4), None],
)
def test_both_source_and_target_must_be_plain_and_alike(segment, other):
    good = np.ones(4)
    assert segment.allreduce(good, other, ReduceOp.SUM, "") is NOT_TAKEN
    assert segment.allreduce(other, good, ReduceOp.SUM, "") is NOT_TAKEN


def test_no_fast_path_while_another_thread_has_the_lock(segment):
    array = np.ones(3)
    assert segment.acquire(False)
    assert not segment.acquire(False)
    assert segment.allreduce(array, array, ReduceOp.SUM, "") is NOT_TAKEN
    segment.release()
    assert segment.allreduce(array, array, ReduceOp.SUM, "") is DONE


RECORD = bytes(64)
EIGHT = np.zeros(8, np.uint8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.begin_exchange(b"short", True), "a header has 64 bytes, not 5"),
        (lambda s: s.begin_allreduce(RECORD, [EIGHT], [EIGHT[:4]], [1], [0], 2), "8 bytes cannot be reduced into 4"),
        (
            lambda s: s.begin_allreduce(RECORD, [EIGHT[:7]], [EIGHT[:7]], [8], [0], 2),
            "7 bytes cannot be reduced into 7",
        ),
        (lambda s: s.begin_allreduce(RECORD, [EIGHT], [EIGHT], [0], [0], 2), "operator 2 is not defined for dtype 0"),
        (lambda s: s.begin_allreduce(RECORD, [EIGHT], [EIGHT], [77], [0], 2), "operator 2 is not defined for dtype 77"),
        (lambda s: s.begin_allgather(RECORD, EIGHT, EIGHT, [4]), "send has 8 bytes, but the counts add up to 4"),
        (lambda s: s.begin_allgather(RECORD, EIGHT, EIGHT, [4, 4]), "a list of 1 numbers"),
        (lambda s: s.begin_allgather(RECORD, EIGHT, EIGHT, [-1]), "-1 is not a count"),
        (lambda s: s.begin_broadcast(RECORD, EIGHT, 1), "root 1 is not a rank"),
        (
            lambda s: s.begin_alltoall(RECORD, EIGHT, EIGHT, [8], [4], 8),
            "receive has 8 bytes, but the counts add up to 4",
        ),
        (lambda s: s.begin_reducescatter(RECORD, EIGHT[:6], EIGHT[:6], [6], 8, 2), "counts must be whole elements"),
        (lambda s: s.headers(), "no operation is complete"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_moves(segment, call, message):
    with pytest.raises(ValueError, match=message):
        call(segment)
    operation = segment.begin_exchange(RECORD, False)
    assert operation.done()
    assert operation.headers_agree


@pytest.mark.parametrize(("rank", "ranks", "chunk"), [(1, 1, 64), (-1, 1, 64), (0, 0, 64), (0, 2, 64), (0, 1, 65)])
def test_impossible_segments_are_refused(rank, ranks, chunk):
    with pytest.raises(ValueError, match="no such rank"):
        Segment(bytearray(10**6), rank, ranks, chunk, np.zeros((2, 3)), _DTYPES, _OPS)
    with pytest.raises(ValueError, match="the memory has 64 bytes"):
        Segment(bytearray(64), 0, 1, 64, np.zeros((2, 3)), _DTYPES, _OPS)


def test_a_closed_segment_raises(segment):
    segment.close()
    segment.close()
    array = np.ones(3)
    assert segment.allreduce(array, array, ReduceOp.SUM, "") is NOT_TAKEN
    with pytest.raises(ValueError, match="closed"):
        segment.begin_exchange(RECORD, False)


def test_it_is_not_closed_under_an_operation(segment):
    assert segment.acquire(False)
    with pytest.raises(ValueError, match="another thread is in an operation"):
        segment.close()
    segment.release()


def test_codes_are_the_same_in_c_and_python():
    assert len(_DTYPES) == len(arrays.DTYPES) == 15
    assert list(ops.CODES.values()) == [1, 2, 3, 4, 5]


def test_a_running_operation_holds_its_arrays_and_keeps_the_order():
    memory, array, target = bytearray(segment_bytes(2, SLOT)), np.ones(3), np.ones(3)
    late, peer = (Segment(memory, rank, 2, SLOT, PROBE, _DTYPES, _OPS) for rank in range(2))
    late.set_tracing(True)
    begun = late.allreduce(array, target, ReduceOp.SUM, "")
    assert (sys.getrefcount(array), sys.getrefcount(target)) == (3, 3)
    answer = peer.allreduce(target.copy(), np.ones(3), ReduceOp.SUM, "")
    while not begun.done() or (answer is not DONE and not answer.done()):
        pass
    assert not late.pending
    assert late.allreduce(array, array, ReduceOp.SUM, "") is NOT_TAKEN  # as nobody has said yet that it is complete
    assert late.acquire(False)
    late.release()
    begun = late.allreduce(array, array, ReduceOp.SUM, "")
    assert late.acquire(False)
    late.release()
    assert late.pending
    assert late.allreduce(array, array, ReduceOp.SUM, "") is NOT_TAKEN
    assert [row[1] for row in ROW.iter_unpack(late.take_trace()[1])] == [0, 0]  # they end elsewhere


@pytest.mark.parametrize(
    "probe", [np.zeros(3), np.zeros((2, 4))[:, ::2], memoryview(bytearray(6)).cast("B", (2, 3)), None]
)
def test_no_fast_path_where_c_cannot_read_arrays(probe):
    made, array = alone(probe), np.ones(3)
    assert made.allreduce(array, array, ReduceOp.SUM, "") is NOT_TAKEN
    assert made.grouped_allreduce([array], [array], ReduceOp.SUM, "") is NOT_TAKEN


def test_a_group_with_memory_twice_is_found_also_behind_one_without(segment):
    """Of arrays in no order, in which the check remembers what it has found."""
    memory = np.ones((40, 8))
    group = [memory[i * 7 % 40] for i in range(40)]
    for _ in range(2):
        assert segment.grouped_allreduce(group, group, ReduceOp.SUM, "g") is DONE
    for wrong in ([*group[:-1], group[3]], [*group[:-1], memory.reshape(-1)[4:12]], [*group, group[0]]):
        assert segment.grouped_allreduce(wrong, wrong, ReduceOp.SUM, "g") is NOT_TAKEN
        assert segment.grouped_allreduce(wrong, wrong, ReduceOp.SUM, "g") is NOT_TAKEN
    assert segment.grouped_allreduce(group, group, ReduceOp.SUM, "g") is DONE
    assert segment.grouped_allreduce(wrong, [np.empty(8) for _ in wrong], ReduceOp.SUM, "g") is DONE


def test_what_an_operation_holds_it_gives_back(segment):
    array, target = np.ones(3), np.ones(3)
    for _ in range(3):
        segment.allreduce(array, target, ReduceOp.SUM, "")
        segment.allreduce(array, array, ReduceOp.SUM, "")
        segment.grouped_allreduce([array, np.ones((2, 2)).T], [target, np.ones((2, 2))], ReduceOp.SUM, "")
    assert (sys.getrefcount(array), sys.getrefcount(target)) == (2, 2)


def test_what_is_reduced_is_held_whatever_others_do():
    """While another thread is in a group of which nobody else knows any more; and of what is given back when that is
    over, each array begins another group."""
    array, one, other = np.ones(3), [np.ones(1) for _ in range(9)], [np.ones(1) for _ in range(9)]

    def attempt():
        """What was given back early, and all; None if that thread was too quick or too slow for others to come in."""
        gc.collect()  # the classes and segments of earlier attempts, whose operations would be counted
        segment, given_back, answers, operations = alone(), [], [], sys.getrefcount(Operation)

        class Memory(bytearray):
            def __del__(self):
                given_back.append("begun")
                given_back.append(segment.grouped_allreduce(one, other, ReduceOp.SUM, ""))

        def is_free():
            return segment.acquire(False) and segment.release() is None

        assert segment.allreduce(array, array, ReduceOp.SUM, "") is DONE
        group = [np.frombuffer(Memory(2**20)) for _ in range(4)]
        thread = threading.Thread(
            target=lambda: answers.append(segment.grouped_allreduce(group, group, ReduceOp.SUM, ""))
        )
        thread.start()
        while is_free() and thread.is_alive():
            pass
        group.clear()
        segment.allreduce(array, array, ReduceOp.SUM, "")
        early = given_back[:]
        seen = not is_free()
        thread.join()
        if not seen or answers != [DONE]:
            return None
        assert sys.getrefcount(Operation) == operations + 1  # the spare one
        return early, given_back

    while (found := attempt()) is None:
        pass
    assert found == ([], 4 * ["begun", DONE])


def test_a_list_that_changes_while_it_is_looked_at(segment):
    class Wire:
        def __index__(self):
            group.clear()
            return 0

    group = [np.ones(3) for _ in range(9)]
    assert segment.grouped_allreduce(group, group, ReduceOp.SUM, "", Wire()) is DONE


def test_any_number_of_notes_is_fetched_once_and_in_order(segment):
    array, names = np.ones(3, np.float32), [f"w{number}" for number in range(7)]
    segment.set_tracing(True)
    for number in range(20_000):
        segment.allreduce(array, array, ReduceOp.SUM, names[number % 7])
    noted, rows = segment.take_trace()
    found = list(ROW.iter_unpack(rows))
    assert noted == names
    assert max(map(sys.getrefcount, names)) < 10
    assert [row[2:] for row in found] == [(12, number % 7, 0) for number in range(20_000)]
    times = [time for row in found for time in row[:2]]
    assert times == sorted(times)
    assert segment.take_trace() == ([], b"")
    name, forgotten = names[0], alone()
    references = sys.getrefcount(name)
    forgotten.set_tracing(True)
    forgotten.allreduce(array, array, ReduceOp.SUM, name)
    del forgotten
    assert sys.getrefcount(name) == references


def test_what_is_noted_while_notes_are_fetched_is_fetched_later(segment):
    """The garbage collector may run anything at that moment."""

    def more(*_):
        segment.allreduce(array, array, ReduceOp.SUM, "more")
        passed.append(1)

    array, passed, threshold = np.ones(3), [], gc.get_threshold()
    segment.set_tracing(True)
    segment.allreduce(array, array, ReduceOp.SUM, "")
    _kept = [(number, -number) for number in range(5000)]  # so that new tuples take new memory
    gc.callbacks.append(more)
    gc.set_threshold(1)
    try:
        rows = segment.take_trace()[1]
    finally:
        gc.callbacks.remove(more)
        gc.set_threshold(*threshold)
    assert len(rows + segment.take_trace()[1]) == 32 * (1 + len(passed))


def test_what_has_no_truth_is_no_answer_to_whether_to_note(segment):
    with pytest.raises(ValueError, match="ambiguous"):
        segment.set_tracing(np.ones(2))
