"""Ranks that pass different arguments to `batches`, `stream` or `prefetch`: all raise an error before any update."""

import contextlib
import dataclasses
import re

import numpy as np
import pytest

import allred
from allred import world
from allred.data import loader, shuffled, stream
from allred.errors import MismatchError
from allred.modes.detect.batch_arguments import BatchArguments
from allred.wording import named

pytestmark = [pytest.mark.mpi]
ROWS = np.arange(200.0)


@pytest.fixture(autouse=True)
def several(size):
    if size == 1:
        pytest.skip("one rank agrees with itself")
    loader.ITERATIONS.set(world.current(), loader.Iterations())


@pytest.fixture
def comparisons(monkeypatch):
    """The steps before which the ranks exchanged the arguments."""
    steps, compare = [], BatchArguments.compare
    monkeypatch.setattr(
        BatchArguments, "compare", lambda self, ranks, step: [steps.append(step), compare(self, ranks, step)]
    )
    return steps


def batches(rows=200, **given):
    return allred.data.batches(ROWS[:rows], **{"batch_size": 20, **given})


def streamed(rows=200, buffer=10, seed=0, **given):
    return stream(shuffled(ROWS[:rows].tolist(), buffer, seed), **{"batch_size": 20, **given})


class Training:
    """Steps of one parameter."""

    def __init__(self, **options):
        self.opt = allred.distributed(allred.optim.SGD(lr=0.1), **options)
        self.params, self.steps = [np.zeros(1)], 0

    def step(self, **given):
        self.opt.step(self.params, [np.ones(1) * (1 + allred.rank() + self.steps)], **given)
        self.steps += 1

    def run(self, data, steps=None):
        """Make a step for each batch, or for the first `steps` batches."""
        with contextlib.closing(iter(data)) as running:
            for number, _ in enumerate(running, 1):
                self.step()
                if number == steps:
                    return


def refused(call, *words):
    with pytest.raises(MismatchError, match="".join(map(re.escape, words))) as error:
        call()
    assert len(set(allred.allgather_object(str(error.value)))) == 1


@pytest.mark.parametrize("ahead", [False, True], ids=["", "prefetch"])
@pytest.mark.parametrize(
    ("make", "name", "value", "other"),
    [
        (batches, "rows", 200, 190),
        (batches, "seed", 0, 1),
        (batches, "seed", 0, None),
        (batches, "batch_size", 20, 25),
        (batches, "epochs", 1, 2),
        (batches, "drop_last", False, True),
        (streamed, "rows", 200, 190),
        (streamed, "seed", 0, 1),
        (streamed, "buffer", 10, 11),
        (streamed, "batch_size", 20, 25),
    ],
)
def test_arguments_that_differ_are_an_error_before_the_first_update(rank, size, make, name, value, other, ahead):
    data, training = make(**{name: other if rank == size - 1 else value}), Training()
    data = allred.data.prefetch(data) if ahead else data
    words = f"opt.step(): the ranks iterate over batches with different arguments: {name}={value} on rank"
    for _ in range(2):  # every step raises the error
        refused(lambda: training.run(data), words)
    with pytest.raises(MismatchError, match=rf"{name}={other} on rank {size - 1}\. Samples would be skipped"):
        training.run(data)
    assert training.params[0] == 0
    training.run(make(), 3)
    assert training.steps == 3


def test_equal_arguments_are_compared_once(comparisons):
    training = Training()
    for _ in range(3):  # a new object each time
        training.run(batches())
    training.run(batches(), 2)  # ends early
    assert training.steps == 32
    assert comparisons == [1]


def test_arguments_of_later_iterations_are_compared(rank, size, comparisons):
    training = Training()
    training.run(batches(epochs=2))
    training.run(batches(epochs=2, seed=1))
    assert comparisons == [1, 21]
    refused(lambda: training.run(batches(seed=2 + (rank == 0))), "opt.step(): the ranks iterate over")
    assert training.steps == 40
    training.run(batches(seed=2))
    training.run(batches(seed=3 + (rank == 0)), 9)  # an exchange is at least 20 steps behind the one before
    assert comparisons == [1, 21, 41, 41]


def test_a_state_that_only_the_chief_has_loaded(rank, size):
    training, data = Training(), batches()
    if rank == 0:
        data.load_state_dict({"epoch": 0, "samples": 40, "rows": 200, "seed": 0})
    others = named("rank", range(1, size))
    refused(
        lambda: training.run(data),
        f"start='epoch 0, sample 40' on rank 0, start='epoch 0, sample 0' on {others}. Samples would be skipped",
    )


def test_a_rank_may_iterate_over_more_than_the_others(rank, size):
    """As a chief does that evaluates while it trains."""
    training = Training()
    validation = iter(batches(60, seed=None)) if rank == 0 else iter([])
    for _ in range(2):
        next(validation, None)
        training.run(batches(), 2)
    if rank == 0:
        for _ in batches(40):
            pass  # to the end
    training.run(batches(), 2)
    validation.close() if rank == 0 else None
    for odd, words in ((rank, "arguments: seed=0 on rank 0, seed=1 on rank 1"), (0, "")):
        labelled, others, training = iter(batches(100)), iter(batches(120, seed=odd)), Training()
        for _ in zip(labelled, others, strict=False):
            if not words:
                training.step()
            else:
                refused(training.step, words)
        labelled.close(), others.close()


def test_data_of_its_own_is_not_compared(rank, size, comparisons):
    training = Training()
    training.run(batches(100 + 20 * rank, rank=0, size=1, seed=rank), 5)
    for x in np.split(ROWS, 10):  # a loader of the user's
        training.opt.step(training.params, [x[:1]], samples=1 + rank)
    assert comparisons == []
    if rank == 0:  # the others have their own
        training.run(batches(), 5)
    else:
        for _ in range(5):
            training.step(samples=1)
    assert comparisons == [16]


@pytest.mark.parametrize("seed", ["same", "different"])
def test_with_accumulation(rank, seed, comparisons):
    training, data = Training(accumulate=4), batches(seed=0 if seed == "same" else rank)
    if seed == "same":
        training.run(data)
        assert comparisons == [1]
    else:
        refused(lambda: training.run(data), "opt.step(): the ranks iterate over")
        assert training.steps == 3
    training.opt._accumulator.clear()


@pytest.mark.parametrize("seed", ["same", "different"])
def test_with_early_gradients(rank, seed, comparisons):
    training = Training()
    data = batches(epochs=4, seed=0)
    for number, _ in enumerate(data):
        grad = np.full(1, 1.0 + rank + number)
        training.opt.reduce("0", grad)
        training.opt.step(training.params, [grad])
    assert comparisons == [1]
    later = iter(batches(seed=1 if seed == "same" else 1 + rank))
    next(later)
    grad = np.full(1, 1.0 + rank)
    training.opt.reduce("0", grad)
    if seed == "same":
        training.opt.step(training.params, [grad])
    else:
        refused(lambda: training.opt.step(training.params, [grad]), "opt.step(): the ranks iterate over")
    assert comparisons == [1, 41]


def test_with_a_gradient_function(rank):
    @allred.distributed.gradients
    def gradients(x):
        return [x.sum(keepdims=True)]

    data = iter(batches(seed=rank))
    refused(
        lambda: gradients(next(data)), "gradients(): the ranks iterate over batches with different arguments: seed=0"
    )
    data.close()
    for x in batches():
        gradients(x)


def test_process_sets_have_data_of_their_own(rank, size):
    if size < 3:
        pytest.skip("needs a set of several ranks, and one more rank")
    sets = allred.ProcessSet([0]), allred.ProcessSet(range(1, size))
    mine = sets[rank > 0]
    own = {"rank": mine.rank(), "size": mine.size()}
    training, all_together = Training(process_set=mine), Training()
    for _ in batches(100 + 100 * (rank > 0), seed=int(rank > 0), epochs=1 + (rank == 0), **own):
        training.step()
        all_together.step()
    assert training.steps == 10
    if rank > 0:
        with pytest.raises(MismatchError, match=r"seed=1 on rank 1, seed=2 on rank 2"):
            Training(process_set=mine).run(batches(seed=rank, **own))
    allred.barrier()


def test_with_ranks_that_have_joined(rank, size):
    training = Training()
    with allred.Join():
        training.run(batches(epochs=3), 20 + rank)
        if rank == size - 1:  # the others have joined, or soon will
            training.run(batches(seed=5, epochs=3))
    training.run(batches(seed=6, epochs=6), 45)


def test_a_session_compares_them_when_it_tracks(rank, size):
    training = Training()
    data = allred.data.prefetch(batches(epochs=1 + (rank == size - 1)))
    with allred.Session(log_steps=None) as session:
        refused(
            lambda: session.track(params=training.params, optimizer=training.opt, data=data),
            "session.track(): the ranks iterate over batches with different arguments: epochs=1 on rank",
        )
    with allred.Session(log_steps=None) as session:
        session.track(params=training.params, optimizer=training.opt, data=batches())
        for _ in session.steps(batches()):
            training.step()


def test_it_does_not_depend_on_the_other_checks(rank, monkeypatch):
    monkeypatch.setattr(world.current(), "config", dataclasses.replace(world.config(), check_steps=0))
    refused(lambda: Training().run(batches(seed=rank)), "opt.step(): the ranks iterate over")
