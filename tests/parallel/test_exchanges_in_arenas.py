"""allgather, broadcast and reducescatter of arrays in the arenas of the ranks: the results of the ring."""

import numpy as np
import pytest

import allred
from allred import native
from allred.comm import functions
from allred.errors import MismatchError

pytestmark = pytest.mark.mpi

ROWS = 5_003  # of 4 numbers; not divisible by the ranks


@pytest.fixture(autouse=True)
def _arenas():
    if functions.current().backend.name != "shm" or native.arena_usage()[0] == 0:
        pytest.skip("these ranks have no arenas")


def array(rank, place, dtype="f4", rows=ROWS):
    """Numbers of a rank. place: arena, private, or last private, which is the arena except on the last rank."""
    in_arena = place == "arena" or (place == "last private" and rank < allred.size() - 1)
    made = (allred.empty if in_arena else np.empty)((rows, 4), dtype)
    made[...] = np.random.default_rng([7, rank]).integers(0, 2 if dtype == "bool" else 9, (rows, 4))
    return made


def read_from_arenas(function):
    """Call the function; return its result, and whether this rank has read from arenas."""
    segment = functions.current().backend.segment
    before = segment.read_in_place
    return function(), segment.read_in_place > before


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("place", ["arena", "private", "last private"])
def test_allgather(rank, size, place, asynchronous):
    values = array(rank, place)
    gather = (lambda: allred.allgather_async(values).wait()) if asynchronous else (lambda: allred.allgather(values))
    got, in_arena = read_from_arenas(gather)
    np.testing.assert_array_equal(got, np.concatenate([array(each, "private") for each in range(size)]))
    assert in_arena == (place == "arena")


def test_allgather_of_different_numbers_of_rows(rank, size):
    got, in_arena = read_from_arenas(lambda: allred.allgather(array(rank, "arena", rows=ROWS * (rank + 1))))
    expected = [array(each, "private", rows=ROWS * (each + 1)) for each in range(size)]
    np.testing.assert_array_equal(got, np.concatenate(expected))
    assert in_arena


def test_allgather_of_a_rank_without_rows(rank, size):
    got, in_arena = read_from_arenas(lambda: allred.allgather(array(rank, "arena", rows=ROWS * (rank > 0))))
    expected = [array(each, "private", rows=ROWS * (each > 0)) for each in range(size)]
    np.testing.assert_array_equal(got, np.concatenate(expected))
    assert in_arena


def test_the_gathered_array_may_contain_that_of_the_rank(rank, size):
    result = allred.empty((size * ROWS, 4), "f4")
    own = result[rank * ROWS : (rank + 1) * ROWS]
    own[...] = array(rank, "private")
    got, in_arena = read_from_arenas(lambda: functions.current().allgather(own, out=result).wait())
    np.testing.assert_array_equal(got, np.concatenate([array(each, "private") for each in range(size)]))
    assert in_arena


@pytest.mark.parametrize("root", [0, -1])
@pytest.mark.parametrize("place", ["arena", "private"])
def test_the_memory_of_the_root_decides_a_broadcast(rank, size, root, place):
    root %= size
    values = array(rank, place if rank == root else "private")
    got, in_arena = read_from_arenas(lambda: allred.broadcast_(values, root))
    assert got is values
    np.testing.assert_array_equal(got, array(root, "private"))
    assert in_arena == (place == "arena" and rank != root)


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int16", "int64", "uint32", "float16", "float32", "float64", "complex64"]
)
@pytest.mark.parametrize("op", [allred.Sum, allred.Average, allred.Max], ids=str)
def test_reducescatter(rank, size, dtype, op):
    kind = np.dtype(dtype).kind
    defined = {"b": (allred.Max,), "f": (allred.Sum, allred.Average, allred.Max), "c": (allred.Sum, allred.Average)}
    if op not in defined.get(kind, (allred.Sum, allred.Max)):
        pytest.skip("not defined")
    got, in_arena = read_from_arenas(lambda: allred.reducescatter(array(rank, "arena", dtype), op))
    ring, in_ring = read_from_arenas(lambda: allred.reducescatter(array(rank, "last private", dtype), op))
    assert got.tobytes() == ring.tobytes()
    assert in_arena
    assert not in_ring


def test_large_results_are_copied_past_the_caches(rank, size):
    values = array(rank, "arena", rows=2**20 + 1)  # 16 MiB
    values[0, 0] = rank
    got, in_arena = read_from_arenas(lambda: allred.allgather(values))
    for each in range(size):
        part = got[each * len(values) : (each + 1) * len(values)]
        assert part[0, 0] == each
        np.testing.assert_array_equal(part[1:], array(each, "private", rows=len(values))[1:])
    assert in_arena


def test_headers_that_differ_read_nothing(rank, size):
    values = array(rank, "arena", dtype="f8" if rank else "f4")
    before = functions.current().backend.segment.read_in_place
    with pytest.raises(MismatchError):
        allred.broadcast_(values, 0)
    assert functions.current().backend.segment.read_in_place == before


def test_data_may_be_overwritten_directly_afterwards(rank, size):
    values = array(rank, "arena")
    for turn in range(20):
        values[...] = 10 * turn + rank
        got = allred.allgather(values)
        values[...] = -1
        assert [int(part[0, 0]) for part in np.split(got, size)] == [10 * turn + each for each in range(size)]
