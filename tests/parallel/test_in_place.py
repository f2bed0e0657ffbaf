"""Reductions of arrays in the arenas of the ranks: the bits of the ring, whatever mix of memory the ranks have."""

import ml_dtypes
import numpy as np
import pytest

import allred
from allred import arena, native, optim
from allred.comm import functions
from allred.errors import MismatchError, NonFiniteError

pytestmark = pytest.mark.mpi

DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", ml_dtypes.bfloat16, "float32", "float64"]
DTYPES += ["uint16", "uint32", "uint64", "complex64", "complex128"]
LARGE = 30_000  # elements; above the smallest size of every dtype


@pytest.fixture(autouse=True)
def _arenas():
    if functions.current().backend.name != "shm" or native.arena_usage()[0] == 0:
        pytest.skip("these ranks have no arenas")


def numbers(dtype, count, seed):
    random = np.random.default_rng([seed, allred.rank()])
    if np.dtype(dtype) == bool:
        return random.integers(0, 2, count).astype(bool)
    if np.dtype(dtype).kind in "iu":
        return random.integers(0, 5, count).astype(dtype)
    values = random.normal(size=count)
    return (values + 1j * random.normal(size=count) if np.dtype(dtype).kind == "c" else values).astype(dtype)


def in_arena(values):
    array = allred.empty(values.shape, values.dtype)
    array[...] = values
    return array


def is_shared(array):
    """Whether the array lies in the arena of this rank."""
    memory = np.frombuffer(arena.memory()[0], np.uint8)
    return np.shares_memory(memory, array)


def reduced_in_place(function):
    """Call the function; return its result and the bytes that were reduced in place."""
    before = functions.current().in_place_bytes
    return function(), functions.current().in_place_bytes - before


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("op", [allred.Average, allred.Sum, allred.Min, allred.Max, allred.Product], ids=str)
def test_the_result_has_the_bits_of_the_ring(size, dtype, op):
    kind = np.dtype(dtype).kind
    if op is allred.Average and kind in "biu":
        pytest.skip("integers have no Average")
    if op in (allred.Sum, allred.Average) and kind == "b":
        pytest.skip("bools have no Sum")
    if op in (allred.Min, allred.Max) and kind == "c":
        pytest.skip("complex numbers have no order")
    private = numbers(dtype, LARGE, 1)
    shared = in_arena(private)
    expected = allred.allreduce(private, op)
    result, nbytes = reduced_in_place(lambda: allred.allreduce_(shared, op))
    assert result.tobytes() == expected.tobytes()
    assert nbytes == shared.nbytes


def group(seed, where):
    """Arrays of several dtypes, in the arena if where(index), large and small."""
    made = []
    for index, (dtype, count) in enumerate(
        [("f4", LARGE), ("f8", 5), ("f4", LARGE + 3), ("f8", LARGE), ("f4", 7), ("i8", LARGE)]
    ):
        values = numbers(dtype, count, seed + index)
        made.append(in_arena(values) if where(index) else values)
    return made


@pytest.mark.parametrize("mix", ["all", "none", "even", "by rank", "last rank private"])
@pytest.mark.parametrize("blocking", [True, False])
def test_a_group_may_mix_arrays_in_the_arena_and_others(rank, size, mix, blocking):
    where = {
        "all": lambda index: True,
        "none": lambda index: False,
        "even": lambda index: index % 2 == 0,
        "by rank": lambda index: (index + rank) % 2 == 0,
        "last rank private": lambda index: rank < size - 1,
    }[mix]
    expected = allred.grouped_allreduce(group(1, lambda index: False), allred.Sum)
    given = group(1, where)

    def reduce():
        if blocking:
            return allred.grouped_allreduce_(given, allred.Sum)
        return allred.grouped_allreduce_async_(given, allred.Sum).wait()

    results, nbytes = reduced_in_place(reduce)
    assert [result.tobytes() for result in results] == [result.tobytes() for result in expected]
    assert all(result is array for result, array in zip(results, given, strict=True))
    large = [array.nbytes for array in given if array.size >= LARGE]
    shared = {"all": sum(large), "even": large[0] + large[1]}.get(
        mix, sum(large) if size == 1 and mix == "by rank" else 0
    )
    if size > 1 or mix in ("all", "none", "even"):
        assert nbytes == shared


def test_views_and_other_targets(size):
    whole = allred.empty((3, LARGE + 1), "f4")
    whole[...] = numbers("f4", whole.size, 2).reshape(whole.shape)
    expected = allred.allreduce(np.array(whole[1]), allred.Sum)
    result, nbytes = reduced_in_place(lambda: allred.allreduce_(whole[1], allred.Sum))
    assert result.tobytes() == expected.tobytes() == whole[1].tobytes()
    assert nbytes == whole[1].nbytes
    columns = whole[:, ::2]  # not contiguous: passes as a copy
    expected = allred.allreduce(np.array(columns), allred.Sum)
    assert allred.allreduce_(columns, allred.Sum).tobytes() == expected.tobytes()
    source = in_arena(numbers("f4", LARGE, 3))
    before = source.tobytes()
    expected = allred.allreduce(np.array(source), allred.Sum)
    assert allred.allreduce(source, allred.Sum).tobytes() == expected.tobytes()
    assert source.tobytes() == before


def test_headers_that_differ_write_nothing(rank, size):
    if size == 1:
        pytest.skip("one rank agrees with itself")
    array = in_arena(numbers("f4", LARGE + (rank == size - 1), 4))
    before = array.tobytes()
    with pytest.raises(MismatchError):
        allred.allreduce_(array, allred.Sum)
    assert array.tobytes() == before
    assert reduced_in_place(lambda: allred.allreduce_(in_arena(numbers("f4", LARGE, 4)), allred.Sum))[1] == LARGE * 4


def test_process_sets_reduce_in_place(rank, size):
    if size < 3:
        pytest.skip("a set of two ranks needs a third")
    pair = allred.ProcessSet([0, size - 1])
    if pair.included():
        array = in_arena(np.full(LARGE, rank, "f4"))
        assert (allred.allreduce_(array, allred.Sum, process_set=pair) == size - 1).all()


def test_gradients_of_an_optimizer_are_allocated_in_the_arena(size):
    params = {"w": np.zeros((200, 100), "f4"), "b": np.zeros(100, "f4")}
    opt = allred.distributed(optim.SGD(lr=1.0, momentum=0.5))
    opt.broadcast(params)
    before = functions.current().in_place_bytes
    for _ in range(3):
        x = np.ones((4, 200), "f4")
        opt.step(params, {"w": x.T @ np.full((4, 100), allred.rank(), "f4"), "b": np.ones(100, "f4")})
    assert (params["w"] == -(1 + 1.5 + 1.75) * 4 * (size - 1) / 2).all()
    assert functions.current().in_place_bytes - before == (3 * params["w"].nbytes if size > 1 else 0)
    assert size == 1 or "% reduced in place" in opt.summary()
    state = opt.optimizer.live_state()["slots"]["w"]
    assert not any(is_shared(slot) for slot in state.values())  # forks would copy it


def test_nan_in_the_arena_is_named_and_kept(rank, size):
    params = {"w": np.zeros(LARGE, "f4"), "v": np.zeros(LARGE, "f4")}
    grads = {name: in_arena(np.full(LARGE, rank, "f4")) for name in params}
    if rank == size - 1:
        grads["v"][[5, LARGE - 1]] = np.nan
    with pytest.raises(
        NonFiniteError, match=rf"'v' on rank {size - 1} \(2 of {LARGE} elements, the first is nan at \[5\]"
    ):
        allred.distributed(optim.SGD()).step(params, grads)
    assert not any(param.any() for param in params.values())
    assert np.isnan(grads["v"]).sum() == 2 * (rank == size - 1)


def weighted(where, dtype, samples, op, compression=allred.Compression.none):
    """The parameters after two steps with uneven batches. where: where gradients lie."""
    counts = {"w": LARGE, "b": 7, "v": LARGE + 3}
    params = {name: np.zeros(count, dtype) for name, count in counts.items()}
    opt = allred.distributed(optim.SGD(lr=1.0), op=op, compression=compression)
    for step in range(2):
        grads = {name: where(numbers(dtype, count, step)) for name, count in counts.items()}
        opt.step(params, grads, samples=samples)
    return b"".join(param.tobytes() for param in params.values())


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("op", [allred.Average, allred.Sum], ids=str)
@pytest.mark.parametrize("first", [0, 5])
def test_uneven_batches_are_reduced_in_place(rank, size, dtype, op, first):
    samples = first + 2 * rank if size > 1 else 1
    expected = weighted(lambda grad: grad, dtype, samples, op)
    result, nbytes = reduced_in_place(lambda: weighted(in_arena, dtype, samples, op))
    assert result == expected
    assert bool(nbytes) == (size > 1 and (dtype != "f2" or (op is allred.Sum and first > 0)))
    mixed = weighted(lambda grad: in_arena(grad) if rank else grad, dtype, samples, op)
    assert mixed == expected


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_weights_are_multiplied_into_each_rank_before_the_sum(rank, size, dtype):
    if size == 1:
        pytest.skip("one rank has no weight")
    everyone = [np.asarray(part) for part in allred.allgather_object(numbers(dtype, LARGE, 9))]
    factors = [np.dtype(dtype).type((3 + r) * size / sum(3 + other for other in range(size))) for r in range(size)]
    expected = everyone[0] * factors[0]
    for other, factor in zip(everyone[1:], factors[1:], strict=True):
        expected = expected + other * factor
    expected = expected / np.dtype(dtype).type(size)
    for where in (in_arena, np.array):
        params = {"w": np.zeros(LARGE, dtype)}
        allred.distributed(optim.SGD(lr=1.0)).step(params, {"w": where(everyone[rank])}, samples=3 + rank)
        assert (-params["w"]).tobytes() == expected.tobytes()


@pytest.mark.parametrize("place", ["arena", "private"])
def test_a_rank_without_samples_counts_for_nothing(rank, size, place):
    """Not even its NaN, in a reduction that does not check."""
    if size == 1:
        pytest.skip("one rank has no weight")
    last = rank == size - 1
    values = np.full(LARGE, np.nan if last else 2.0, "f4")
    array = in_arena(values) if place == "arena" else values
    comm = functions.current()
    comm.grouped_allreduce_blocking([array], True, allred.Sum, "w", weight=0.0 if last else 0.5)
    assert (array == size - 1).all()
