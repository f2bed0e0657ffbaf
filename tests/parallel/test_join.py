"""Ranks that have joined: what the operations of the others come to without them."""

import time
import weakref

import numpy as np
import pytest

import allred
from allred import nest
from allred.errors import InputError, MismatchError
from allred.modes.detect import mistake_checks
from allred.wording import named

pytestmark = pytest.mark.mpi

NUMPYS = {allred.Average: np.mean, allred.Sum: np.sum, allred.Min: np.min, allred.Max: np.max, allred.Product: np.prod}


def until_joined(rank, size, body):
    """Ranks join one after the other, rank r after r + 1 rounds. body(the ranks that are left)."""
    for number in range(rank + 1):
        body(list(range(number, size)))
    assert allred.join() == size - 1


@pytest.mark.parametrize("op", NUMPYS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "uint64", "complex64"])
def test_reductions_are_of_those_that_are_left(rank, size, op, dtype):
    if (op is allred.Average and "int" in dtype) or (op in (allred.Min, allred.Max) and "complex" in dtype):
        pytest.skip("no such operation")

    def body(left):
        expected = NUMPYS[op](np.array([r + 1 for r in left], float)).astype(dtype)
        for shape in ((0,), (1,), (100_000,)):
            mine = np.full(shape, rank + 1, dtype)
            np.testing.assert_array_equal(allred.allreduce(mine, op), np.full(shape, expected))
            assert (mine == rank + 1).all()
            both = [mine, mine[:1].copy()]
            allred.grouped_allreduce_(both, op)
            np.testing.assert_array_equal(mine, np.full(shape, expected))
            np.testing.assert_array_equal(both[1], np.full(shape, expected)[:1])
        turned = np.full((3, 2), rank + 1, dtype).T
        np.testing.assert_array_equal(allred.allreduce_(turned, op), np.full((2, 3), expected))

    until_joined(rank, size, body)


def test_the_other_operations(rank, size):
    def body(left):
        first, last = left[0], left[-1]
        x = np.full(2, float(rank))
        assert allred.broadcast(x, last).tolist() == [last] * 2
        assert allred.broadcast_(x.copy(), first).tolist() == [first] * 2
        assert allred.broadcast_object({"of": rank}, last) == {"of": last}
        assert allred.allgather(np.full(rank, rank)).tolist() == [r for r in left for _ in range(r)]
        assert allred.allgather_object(rank) == left
        rows, counts = allred.alltoall(np.full(len(left), rank), splits=[int(r in left) for r in range(size)])
        assert (rows.tolist(), counts.tolist()) == (left, [int(r in left) for r in range(size)])
        allred.barrier()
        assert allred.size() == size

    until_joined(rank, size, body)


def test_what_would_be_of_a_rank_that_is_out_is_an_error(rank, size):
    if size == 1:
        pytest.skip("nobody is out")
    if rank:
        with pytest.raises(
            InputError, match=r"^broadcast\(root=0\) 'w' float64 \(2,\): rank 0 has joined; the root must"
        ):
            allred.broadcast(np.zeros(2), 0, "w")
        with pytest.raises(InputError, match=r"^broadcast_object\(root=0\): rank 0 has joined"):
            allred.broadcast_object(None)
        with pytest.raises(InputError, match=r"^reducescatter\(Average\) .*: some rows are for rank 0, which joined"):
            allred.reducescatter(np.zeros(size))
        with pytest.raises(InputError, match=r"^alltoall\(\) .*: some rows are for rank 0, which joined"):
            allred.alltoall(np.zeros(size))
        assert allred.allreduce(1.0, allred.Sum) == size - 1
    assert allred.join() == 1


def test_errors_are_of_those_that_are_left(rank, size):
    """The same on all of these, with their numbers; who is out goes on waiting."""
    if size < 3:
        pytest.skip("takes two that are left")
    if rank:
        with pytest.raises(MismatchError, match=r"allreduce.* 'a' .* on rank 1; .* 'b' .* on rank"):
            allred.allreduce(1.0, name="a" if rank == 1 else "b")
        with pytest.raises(InputError, match=rf"rank {size - 1}: .* is not a reduction"):
            allred.allreduce(1.0, "mean" if rank == size - 1 else allred.Sum)
        assert allred.allreduce(1.0, allred.Sum) == size - 1
    assert allred.join() == 1


@pytest.mark.parametrize("last", [0, -1])
def test_the_last_one_is_known_to_all(rank, size, last):
    """Rank 0, or the last, makes three operations more."""
    if rank == last % size:
        assert [allred.allreduce(2.0, allred.Sum) for _ in range(3)] == [2.0] * 3
    assert allred.join() == last % size


def test_all_at_once_and_again(size):
    for _ in range(3):
        assert allred.join() == 0
        assert allred.allreduce(1.0, allred.Sum) == size


def test_started_operations(rank, size):
    """Many under way when a rank joins: those that it is not in any more are begun already."""
    if rank == 0:
        assert allred.allreduce_async(np.ones(9), allred.Sum).wait().tolist() == [size] * 9
    else:
        works = [allred.allreduce_async(np.ones(n), allred.Sum) for n in (9, 100_000, 0, 5)]
        gathered = allred.allgather_async([rank])
        assert gathered.wait().tolist() == list(range(1, size))
        for work, ranks in zip(works, (size, size - 1, size - 1, size - 1), strict=True):
            assert set(work.wait().tolist()) <= {ranks}
    assert allred.join() == min(1, size - 1)


def test_process_sets(rank, size):
    """A set is joined for itself, also by ranks that are in others."""
    members = allred.ProcessSet(range(size // 2, size))
    if members.included():
        if rank != size // 2:
            assert allred.allreduce(1.0, allred.Sum, process_set=members) == members.size() - 1
        assert allred.join(members) == min(size // 2 + 1, size - 1)
    assert allred.allreduce(1.0, allred.Sum) == size


class Sum:
    """An optimizer that adds up what it gets."""

    def step(self, params, grads):
        params += grads


class SumOfEach(Sum):
    """The same for a dict."""

    def step(self, params, grads):
        for name in params:
            super().step(params[name], grads[name])


def test_training(rank, size):
    """Rank r has 2 + 2 r batches of one gradient, r + 1, weighted by r + 1; each mean is of the ranks that have one."""
    opt, params = allred.distributed(Sum()), np.zeros(3)
    with allred.Join() as joined:
        with pytest.raises(InputError, match="after the block"):
            _ = joined.last
        for _ in range(2 + 2 * rank):
            opt.step(params, np.full(3, rank + 1.0), samples=rank + 1)
    assert joined.last == size - 1
    left = [[r + 1 for r in range(size) if step < 2 + 2 * r] for step in range(2 * size)]
    means = [sum(r * r for r in ranks) / sum(ranks) for ranks in left]
    np.testing.assert_allclose(params, np.full(3, sum(means)))
    for _ in range(5):  # goes on as before: the parameters are equal, and are compared
        opt.step(params, np.full(3, 1.0 + rank))


def test_training_with_all_that_a_step_may_do(rank, size):
    """Gradients that go out early, clipping, a scaler that skips a step: the same on all that are left."""
    scaler = allred.GradScaler(init_scale=4.0)
    opt = allred.distributed(allred.optim.SGD(lr=1.0), clip_norm=1.0, scaler=scaler)
    params = {"a": np.zeros(40), "b": np.zeros(9)}
    for step in range(2 + 4 * rank):
        grad = np.inf if step == 7 and rank == size - 1 else scaler.get_scale()
        grads = {name: np.full_like(value, grad) for name, value in params.items()}
        for name in grads if step % 2 else ():
            opt.reduce(name, grads[name])
        opt.step(params, grads)
        if step == 7:
            assert opt.skipped == 1
        else:
            assert opt.grad_norm == pytest.approx(7.0)
    allred.join()
    assert scaler.get_scale() == (2.0 if size > 2 else 4.0)
    steps = sum(1 for step in range(2 + 4 * (size - 1)) if step != 7)
    np.testing.assert_allclose(params["a"], np.full(40, -steps / 7.0))
    opt.step(params, {name: np.ones_like(value) for name, value in params.items()})


def test_drift_is_found_among_those_that_are_left(rank, size):
    """Who has joined has older parameters, and that is no drift."""
    opt, params = allred.distributed(allred.optim.SGD(lr=1.0)), np.zeros(3)
    for step in range(1 if rank == 0 else 3):
        if step == 2 and rank == size - 1 and size > 2:
            params += 1
        if step == 2 and size > 2:
            with pytest.raises(allred.DriftError, match=f"differs on rank {size - 1}"):
                opt.step(params, np.full(3, rank + 1.0))
        else:
            opt.step(params, np.full(3, rank + 1.0))
    allred.join()


def uneven_steps(opt, params, steps):
    for _ in range(steps):
        opt.step(params, {name: np.full_like(value, allred.rank() + 1.0) for name, value in params.items()})


def assert_equal_on_all(opt, params):
    slots = opt.state_dict()["slots"] if hasattr(opt.optimizer, "state_dict") else {}
    assert len(set(allred.allgather_object((nest.digest(params), nest.digest(slots), opt.global_step)))) == 1


@pytest.mark.parametrize("make", [lambda: allred.optim.SGD(lr=0.1, momentum=0.9), allred.optim.Adam, SumOfEach])
def test_all_ranks_get_the_parameters_of_the_last_one(rank, make):
    """And the state and the number of updates, although nothing was broadcast before."""
    opt, params = allred.distributed(make()), {"a": np.full(3, 5.0), "b": np.full((2, 2), 7.0)}
    with allred.Join() as joined:
        uneven_steps(opt, params, 1 + 2 * rank)
        own = {name: value.copy() for name, value in params.items()}
    expected = allred.broadcast_object(own, joined.last)
    for name in params:
        np.testing.assert_array_equal(params[name], expected[name])
    assert_equal_on_all(opt, params)
    uneven_steps(opt, params, 4)  # compares the ranks
    assert_equal_on_all(opt, params)


def test_micro_steps_are_kept(rank, size):
    """Also if the steps that a rank has missed have made no update, but changed the scaler."""
    scaler, params = allred.GradScaler(init_scale=4.0), {"a": np.zeros(3)}
    opt = allred.distributed(allred.optim.SGD(lr=1.0), accumulate=2, scaler=scaler)
    opt.broadcast(params)
    with allred.Join():
        for _ in range(2 * rank):
            opt.step(params, {"a": np.full(3, np.inf)})
        opt.step(params, {"a": np.full(3, 4.0)})
    assert opt.accumulates
    assert (scaler.get_scale(), params["a"].tolist()) == (4.0 / 2 ** (size - 1), [0.0] * 3)
    opt.step(params, {"a": np.full(3, 4.0)})
    assert not opt.accumulates
    assert params["a"].tolist() == [-4.0 / scaler.get_scale()] * 3


def test_a_rank_that_took_part_in_no_step(rank, size, capfd):
    """Nothing is copied: it may not be the same optimizer. A warning and the error of the next step explain it."""
    if size == 1:
        pytest.skip("one rank cannot differ from others")
    opt, params = allred.distributed(allred.optim.SGD(lr=1.0)), np.zeros(3)
    with allred.Join():
        for _ in range(2 * (rank == 1)):
            opt.step(params, np.ones(3))
    warning = named("rank", [other for other in range(size) if other != 1])
    assert (f"join(): {warning} joined before the first step of opt" in capfd.readouterr().err) == (rank == 0)
    with pytest.raises(
        allred.DriftError, match=r"had joined have missed steps: .* broadcast\(params, root=joined.last"
    ):
        opt.step(params, np.ones(3))
    opt.broadcast(params, root=1)
    opt.step(params, np.ones(3))
    assert params.tolist() == [-3.0] * 3
    with allred.Join():  # now all take part
        for _ in range(rank):
            opt.step(params, np.ones(3))
    assert params.tolist() == [-2.0 - size] * 3


def test_ranks_with_equal_numbers_of_steps_copy_nothing(rank, monkeypatch):
    opt, params = allred.distributed(allred.optim.Adam()), {"a": np.zeros(3)}
    monkeypatch.setattr(opt, "broadcast", lambda *_: pytest.fail("nothing is to be copied"))
    with allred.Join():
        uneven_steps(opt, params, 2)


def test_several_optimizers(rank):
    """Of the same name and layout, first used in another order than made. Only those on all ranks are copied."""
    first, second, third = ({"a": np.full(3, float(number))} for number in range(3))
    one, two, three = (allred.distributed(allred.optim.SGD(lr=1.0)) for _ in range(3))
    two.broadcast(second)
    one.broadcast(first)
    with allred.Join():
        for _ in range(rank + 1):
            uneven_steps(one, first, 1)
            uneven_steps(two, second, 1)
    assert_equal_on_all(one, first)
    assert_equal_on_all(two, second)
    assert second["a"][0] == first["a"][0] + 1
    del one
    with allred.Join():
        for _ in range(2 * rank):
            uneven_steps(two, second, 1)
            uneven_steps(three, third, 1)
    assert_equal_on_all(two, second)
    assert three.global_step == 2 * rank


def test_optimizers_and_parameters_that_are_discarded(rank):
    opt, params = allred.distributed(allred.optim.SGD(lr=1.0)), {"a": np.zeros(3)}
    uneven_steps(opt, params, 1)
    references = weakref.ref(opt), weakref.ref(params["a"])
    kept = opt if rank else None
    with allred.Join():
        if rank:
            uneven_steps(opt, params, 1)
        else:
            del opt, params
            assert [reference() for reference in references] == [None, None]
    assert kept is None or kept.global_step == 2
    assert not rank or params["a"][0] < 0


def test_parameters_in_other_arrays_and_in_two_parts(rank, size):
    """The arrays of the last steps count, and those of the broadcast for the part that was not stepped."""
    opt, params = allred.distributed(allred.optim.SGD(lr=1.0)), {"a": np.zeros(3), "b": np.zeros(2)}
    opt.broadcast(params)
    params = {name: value.copy() for name, value in params.items()}
    with allred.Join():
        for step in range(2 + 2 * rank):
            uneven_steps(opt, {"ab"[step % 2]: params["ab"[step % 2]]}, 1)
    assert_equal_on_all(opt, params)


def test_an_optimizer_of_a_process_set(rank, size):
    """Only its own broadcast copies its parameters."""
    members = allred.ProcessSet(range(size))
    opt, params = allred.distributed(allred.optim.SGD(lr=1.0), process_set=members), {"a": np.zeros(3)}
    with allred.Join(members) as joined:
        uneven_steps(opt, params, 1 + rank)
    assert allred.join() == 0
    assert opt.global_step == 1 + rank
    opt.broadcast(params, root=joined.last)
    assert_equal_on_all(opt, params)


def test_an_error_in_the_block_does_not_join(size):
    with pytest.raises(ZeroDivisionError), allred.Join():
        _ = 1 / 0
    assert allred.allreduce(1.0, allred.Sum) == size


def test_who_waits_has_no_time_limit(rank):
    communicator = allred.comm.functions.current()
    limit_s, communicator.queue.timeout_s = communicator.queue.timeout_s, 0.2
    try:
        if rank == 0:
            time.sleep(0.6)
        assert allred.join() == 0
    finally:
        communicator.queue.timeout_s = limit_s


def test_a_set_of_the_same_ranks_has_its_own_operations_under_way(rank, size):
    """What those that are left do together does not mix with what they have started on a set of just these."""
    if rank:
        x = np.full(300_000, float(rank))
        started = allred.allreduce_async(x, allred.Sum, process_set=allred.ProcessSet(range(1, size)))
        total = sum(range(1, size))
        assert set(allred.allreduce(10 * x, allred.Sum).tolist()) == {10.0 * total}
        assert set(started.wait().tolist()) == {total}
    assert allred.join() == min(1, size - 1)


def test_the_last_one_had_most_under_way(rank, size):
    works = [allred.allreduce_async(np.ones(100_000), allred.Sum) for _ in range(3 * rank)]
    assert allred.join() == size - 1
    assert all(work.done() for work in works)


@pytest.fixture
def checked_places():
    communicator = allred.comm.functions.current()
    communicator.checks_places = True
    yield
    communicator.checks_places = False


def test_in_different_places(rank, size, checked_places):
    opt, params = allred.distributed(allred.optim.SGD(lr=1.0)), {"a": np.zeros(3)}
    opt.broadcast(params)
    if rank == 0:
        assert allred.join() == min(1, size - 1)
    else:
        opt.step(params, {"a": np.ones(3)})
        assert allred.join() == 1
    assert params["a"].tolist() == [-1.0 if size > 1 else 0.0] * 3


@pytest.mark.parametrize("early", [False, True])
def test_a_second_epoch(rank, size, early, capfd):
    """Rank 0 has no batch in the first; what the others agreed on there is not known to it."""
    opt, params = allred.distributed(allred.optim.SGD(lr=1.0)), {"a": np.zeros(4)}
    for batches in (6 * (rank > 0), 6):
        with allred.Join() as joined:
            for _ in range(batches):
                grads = {"a": np.full(4, -1.0)}
                if early:
                    opt.reduce("a", grads["a"])
                opt.step(params, grads)
        opt.broadcast(params, root=joined.last)  # of ranks that made no step before, too
    assert params["a"].tolist() == [12.0 if size > 1 else 6.0] * 4
    assert id(opt.optimizer) not in mistake_checks._unused


@pytest.mark.parametrize("settled", [False, True])
def test_a_step_that_has_begun_must_end_first(rank, size, settled):
    opt, params = allred.distributed(allred.optim.SGD(lr=1.0)), {"a": np.zeros(4)}

    def train():
        for _ in range(settled):
            grads = {"a": np.ones(4)}
            opt.reduce("a", grads["a"])
            opt.step(params, grads)
        opt.reduce("a", np.ones(4))
        if rank > 0:
            opt.step(params, {"a": np.ones(4)})
        allred.join()

    with pytest.raises(InputError, match=r"join\(\): .*reduce\('a'\) has begun a step; call opt.step\(\) before"):
        train()
    opt.broadcast(params)
    opt.step(params, {"a": np.ones(4)})
    assert allred.join() in range(size)


def test_wrong_sets_are_refused_where_they_stand(size):
    for call in (lambda: allred.join([0]), lambda: allred.Join([0]).__enter__(), lambda: allred.barrier(1)):
        with pytest.raises(InputError, match=r"process_set=.* must be an allred.ProcessSet"):
            call()
    with pytest.raises(InputError, match="there are only"):
        allred.Join(allred.ProcessSet([*range(size), 99])).__enter__()
