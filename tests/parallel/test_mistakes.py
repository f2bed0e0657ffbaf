"""Mistakes that raise nothing by themselves, and let the ranks train wrongly: each is found, on all ranks at once."""

import dataclasses
import gc

import numpy as np
import pytest

import allred
from allred import optim, world
from allred.errors import DriftError, InputError, MismatchError

pytestmark = [pytest.mark.mpi]


@pytest.fixture(autouse=True)
def several(size):
    if size == 1:
        pytest.skip("one rank agrees with itself")


@pytest.fixture
def check_steps(monkeypatch):
    def set_to(steps):
        monkeypatch.setattr(world.current(), "config", dataclasses.replace(world.config(), check_steps=steps))

    set_to(5)
    return set_to


class Descent:
    """An optimizer of the user's own, without state and count."""

    def __init__(self, lr=1.0):
        self.lr = lr

    def step(self, params, grads):
        for param, grad in zip(params, grads, strict=True):
            if grad is not None:
                param -= self.lr * grad


def run(opt, params, steps, rank):
    """Steps with gradients that differ between ranks; the number of steps done before an error."""
    done = 0
    for _ in range(steps):
        opt.step(params, [np.full_like(param, rank + 1) for param in params])
        done += 1
    return done


def same_everywhere(error):
    assert len(set(allred.allgather_object(str(error.value)))) == 1


def test_parameters_that_differ_at_the_start(rank, size):
    params = [np.ones((2, 3)), np.full((2, 3), 1.0 + (rank == size - 1) * 1e-12)]
    opt = allred.distributed(Descent())
    for _ in range(2):  # again, as long as it is not repaired
        with pytest.raises(
            DriftError,
            match=r"^opt.step\(\): the ranks have drifted apart before step 1: parameter '1' differs on rank "
            rf"{size - 1} \(first difference at index \[0, 0\]: 1.0 on ranks? 0.*, 1.000000000001 on rank "
            rf"{size - 1}\)\. "
            r"Start from the same values everywhere: call broadcast\(params\)",
        ) as error:
            run(opt, params, 1, rank)
    same_everywhere(error)
    assert params[0].tolist() == np.ones((2, 3)).tolist()
    opt.broadcast(params)
    assert run(opt, params, 3, rank) == 3


def test_parameters_that_share_memory_on_one_rank_are_found_at_the_first_step(rank, size):
    memory = np.ones(8)
    apart = {"a": np.ones(5), "b": np.ones(4)}
    params = {"a": memory[:5], "b": memory[4:]} if rank == size - 1 else apart
    opt = allred.distributed(optim.SGD(lr=0.1))
    words = rf"before step 1: parameters 'a' and 'b' share memory on rank {size - 1} only\. Let the same"
    with pytest.raises(DriftError, match=words) as error:
        opt.step(params, {name: np.ones(param.shape) for name, param in params.items()})
    same_everywhere(error)
    opt.step(apart, {name: np.ones(param.shape) for name, param in apart.items()})


def test_a_scaler_on_one_rank_only_is_an_error_of_broadcast(rank, size):
    opt = allred.distributed(optim.SGD(lr=0.1), scaler=allred.GradScaler() if rank == size - 1 else None)
    with pytest.raises(MismatchError, match=f"scaler: True on rank {size - 1}") as error:
        opt.broadcast([np.ones(3)])
    same_everywhere(error)


@pytest.mark.parametrize("maker", [optim.SGD, optim.Adam, Descent])
def test_learning_rates_that_differ_are_found_at_the_first_step(rank, size, maker):
    opt = allred.distributed(maker(lr=0.2 if rank == size - 1 else 0.1))
    with pytest.raises(
        DriftError, match=rf"the optimizer's lr is 0.1 on rank.*, 0.2 on rank {size - 1}. Give every"
    ) as error:
        run(opt, [np.ones(3)], 1, rank)
    same_everywhere(error)


def test_schedules_and_other_hyper_parameters_that_differ(rank, size):
    odd = rank == size - 1
    for name, optimizer in (
        ("learning_rate is 0.1 on", optim.SGD(lr=optim.constant(0.3 if odd else 0.1))),
        ("momentum is 0.9 on", optim.SGD(lr=0.1, momentum=0.8 if odd else 0.9)),
        ("betas.1 is 0.999 on", optim.Adam(lr=0.1, betas=(0.9, 0.99 if odd else 0.999))),
        ("nesterov is False on", optim.SGD(lr=0.1, momentum=0.9, nesterov=odd)),
    ):
        with pytest.raises(DriftError, match=f"the optimizer's {name}"):
            run(allred.distributed(optimizer), [np.ones(3)], 1, rank)


def test_optimizer_state_that_differs(rank, size):
    opt, params = allred.distributed(optim.SGD(lr=0.1, momentum=0.9)), [np.ones(3)]
    run(opt, params, 1, rank)
    if rank == 0:
        opt.optimizer._slots["0"]["momentum_buffer"][2] += 1
    odd = "rank 1" if size == 2 else "rank 0"  # of two, the first is taken for right
    with pytest.raises(
        DriftError, match=rf"the optimizer's state 'slots.0.momentum_buffer' differs on {odd} \(.*\)\. Something"
    ):
        run(opt, params, 1, rank)


def test_a_state_that_only_one_rank_restored(rank, size):
    opt = allred.distributed(optim.SGD(lr=0.1, momentum=0.9))
    if rank == 0:
        opt.load_state_dict({"global_step": 7, "slots": {"0": {"momentum_buffer": np.zeros(3)}}})
    with pytest.raises(
        DriftError, match=r"'global_step' is 7 on rank 0, 0 on rank.*momentum_buffer' (differs|is missing)"
    ):
        run(opt, [np.ones(3)], 1, rank)


def test_a_state_dict_of_any_kind(rank, size):
    class Odd(Descent):
        def state_dict(self):
            odd = {
                "name": f"rank {rank}",
                "function": print,
                "none": None,
                "objects": np.array([object()]),
                "big": 2**80,
            }
            return {"odd": odd, "x": [np.zeros(2)], "flag": True, "seen": rank if self.lr < 1 else 0}

        def load_state_dict(self, state): ...

    assert run(allred.distributed(Odd()), [np.ones(3)], 2, rank) == 2
    with pytest.raises(DriftError, match="the optimizer's state 'seen' is 0 on rank 0, 1 on rank 1"):
        run(allred.distributed(Odd(lr=0.5)), [np.ones(3)], 1, rank)


def test_a_state_dict_that_fails_on_one_rank_is_an_error_on_all(rank, size):
    class Bad(Descent):
        def state_dict(self):
            return {} if rank else {}["nothing"]

    with pytest.raises(InputError, match="rank 0: comparing the ranks' parameters: KeyError: 'nothing'") as error:
        run(allred.distributed(Bad()), [np.ones(3)], 1, rank)
    same_everywhere(error)


def test_drift_between_checks_is_found_in_the_next_step(rank, size, check_steps):
    opt, params = allred.distributed(Descent()), [np.ones(2), np.ones(4)]
    run(opt, params, 6, rank)
    if rank == size - 1:
        params[1][3] += 1
    where = rf"differs on rank {size - 1} \(first difference at index \[3\]: .* on ranks? 0.*, .* on rank {size - 1}\)"
    with pytest.raises(DriftError, match=rf"apart after step 5 and before step 7: parameter '1' {where}. Something"):
        run(opt, params, 1, rank)


LARGE = {"a": (5000,), "b": (), "c": (40, 50), "d": (0, 3), "e": (1,), "f": (3000,)}  # 10 002 elements, ten windows


def large(layout="C"):
    params = {name: np.zeros(shape, np.float32) for name, shape in LARGE.items()}
    return params | ({"c": np.asfortranarray(params["c"])} if layout == "Fortran" else {})


def fixed_grads(rank, without=()):
    return {n: None if n in without else np.full(shape, rank + 1, np.float32) for n, shape in LARGE.items()}


DRIFTS = {
    "first element": ("a", 0, {}),
    "middle": ("a", 4444, {"momentum": 0.9}),
    "0-d": ("b", 0, {}),
    "Fortran": ("c", 777, {"layout": "Fortran"}),
    "one element": ("e", 0, {"momentum": 0.9}),
    "last element": ("f", 2999, {}),
    "overlap": ("f", 1500, {"early": True}),
    "overlap, first": ("a", 0, {"early": True, "layout": "Fortran"}),
    # In the window of the next step: the update would make the ranks of a node equal again.
    "sharded": ("c", 500, {"sharded": True}),
    "accumulate": ("a", 4999, {"accumulate": 2}),
    "missing": ("a", 4999, {"without": ("c", "b")}),
    "missing on one rank": ("a", 100, {"without": ("b",), "without_elsewhere": ()}),
}


@pytest.mark.parametrize("what", DRIFTS)
def test_drift_of_one_element_is_found_within_some_steps(rank, size, check_steps, what):
    check_steps(10**6)  # no comparison of all parameters in the steps of this test
    name, index, options = DRIFTS[what]
    inner = optim.SGD(lr=1.0, momentum=options.get("momentum", 0.0))
    opt = allred.distributed(inner, accumulate=options.get("accumulate", 1), sharded=options.get("sharded", False))
    params = large(options.get("layout"))
    without = options.get("without", ()) if rank == 0 else options.get("without_elsewhere", options.get("without", ()))

    def step():
        for _ in range(options.get("accumulate", 1)):
            grads = fixed_grads(rank, without)
            for early in reversed(grads) if options.get("early") else ():
                opt.reduce(early, grads[early])
            opt.step(params, grads)

    for _ in range(5):
        step()
    if rank == size - 1:
        params[name][np.unravel_index(index, LARGE[name])] += 1
    before = ""

    def train():
        nonlocal before
        for _ in range(10):
            before = allred.digest(params)
            step()

    with pytest.raises(DriftError) as error:
        train()
    same_everywhere(error)
    assert allred.digest(params) == before
    shown = [int(place) for place in np.unravel_index(index, LARGE[name])]
    assert f"parameter '{name}' differs on rank {size - 1}" in str(error.value)
    assert f"(first difference at index {shown}: " in str(error.value) or not shown
    opt.broadcast(params)
    for _ in range(11):
        step()


def test_no_drift_is_reported_for_equal_changes_and_missing_gradients(rank, size, check_steps):
    """The ranks that lack the same gradients compare; parameters without a gradient may differ."""
    check_steps(10**6)
    opt, params = allred.distributed(Descent()), [np.zeros(3000), np.zeros(7), np.full(3, float(rank))]
    for step in range(12):
        params[0][step] = step
        params[1] = params[1] + 1 if step % 3 else params[1].copy()
        opt.step(params, [np.ones(3000), np.ones(7) if (step + rank) % 3 else None, None])
    assert len(set(allred.allgather_object(allred.digest(params[:2])))) == 1


def test_zero_switches_the_checks_off(rank, size, check_steps):
    check_steps(0)
    assert run(allred.distributed(optim.SGD(lr=0.1 * (rank + 1))), [np.full(2, float(rank))], 12, rank) == 12


def test_parameters_that_no_rank_has_a_gradient_for_may_differ(rank, size):
    opt, params = allred.distributed(Descent()), [np.ones(2), np.full(2, float(rank))]
    for _ in range(3):
        opt.step(params, [np.full(2, float(rank)), None])


def test_layouts_and_kinds_of_nan_are_no_difference(rank, size):
    quiet = np.array([0x7FC00000 + rank, 0x3F800000], np.uint32).view(np.float32)
    params = [np.ones((3, 4), order="F" if rank else "C"), quiet]
    params[0][1] = 2
    assert run(allred.distributed(Descent()), params, 3, rank) == 3


def test_a_step_around_the_wrapper_is_found_at_the_next_step(rank, size, check_steps):
    check_steps(1000)
    opt, params = allred.distributed(optim.SGD(lr=0.1)), [np.ones(3)]
    run(opt, params, 7, rank)
    if rank == size - 1:
        for _ in range(2):
            opt.optimizer.step(params, [np.ones(3)])
    with pytest.raises(DriftError) as error:
        run(opt, params, 1, rank)
    same_everywhere(error)
    assert "after step 3 and before step 8" in str(error.value)
    assert f"'global_step' is 7 on rank{'s' * (size > 2)} 0" in str(error.value)
    assert f"updates outside of this wrapper (0 on rank{'s' * (size > 2)} 0" in str(error.value)
    assert f"2 on rank {size - 1}); let all go through the wrapper's step" in str(error.value)


def test_every_rank_alone_around_the_wrapper(rank, size):
    opt, params = allred.distributed(optim.SGD(lr=0.1)), [np.ones(3)]
    run(opt, params, 4, rank)
    opt.optimizer.step(params, [np.full(3, float(rank))])
    with pytest.raises(DriftError, match=r"parameter '0' differs on .*updates outside of this wrapper \(1 on ranks 0"):
        run(opt, params, 1, rank)


def test_the_same_step_of_all_ranks_around_the_wrapper_is_no_mistake(rank, size):
    opt, params = allred.distributed(optim.SGD(lr=0.1)), [np.ones(3)]
    run(opt, params, 4, rank)
    opt.optimizer.step(params, [np.ones(3)])
    assert run(opt, params, 2, rank) == 2


def test_the_same_batch_everywhere_is_told_once(rank, size, check_steps, capfd):
    opt, params = allred.distributed(optim.SGD(lr=0.1), name="mine"), [np.ones(300), np.ones(3)]
    for step in range(20):
        opt.step(params, [np.full(300, 1.0 + step), np.zeros(3)])
        if step == 1:
            assert "same gradients" not in capfd.readouterr().err
    told = capfd.readouterr().err
    assert told.count("mine.step(): all ranks have the same gradients, bit for bit") == (rank == 0)
    assert ("allred.data.batches, or choose batches by allred.rank()" in told) == (rank == 0)


@pytest.mark.parametrize("kind", ["different", "zero", "no samples", "sometimes"])
def test_what_is_not_the_same_batch(rank, size, check_steps, capfd, kind):
    opt, params = allred.distributed(optim.SGD(lr=0.1)), [np.ones(3)]
    for step in range(30):
        value = {
            "different": 1.0 + rank,
            "zero": 0.0,
            "no samples": 2.0,
            "sometimes": 1.0 + rank * (step % 10 in (2, 4)),
        }
        samples = int(rank > 0) if kind == "no samples" else None
        opt.step(params, [np.full(3, value[kind])], samples=samples)
    assert "same gradients" not in capfd.readouterr().err


def test_gradient_functions_tell_the_same_batch_too(rank, check_steps, capfd):
    @allred.distributed.gradients
    def grads_of(value):
        return [np.full(3, value)]

    for _ in range(5):
        grads_of(3.0)
    assert capfd.readouterr().err.count("grads_of(): all ranks have the same gradients") == (rank == 0)


def test_averaging_in_the_function_and_in_the_optimizer_is_an_error(rank, size):
    @allred.distributed.gradients
    def grads_of(value):
        return {"a": np.full(3, value), "b": np.full(2, value)}

    opt, params = allred.distributed(optim.SGD(lr=0.1)), {"a": np.ones(3), "b": np.ones(2)}
    with pytest.raises(
        InputError,
        match=r"^opt.step\(\): these gradients are the mean over all ranks already, and would be averaged twice",
    ) as error:
        opt.step(params, grads_of(float(rank)))
    same_everywhere(error)
    assert params["a"].tolist() == [1, 1, 1]


def test_a_wrapped_optimizer_inside_a_wrapped_one_is_an_error(rank, size):
    class Outer:
        def __init__(self):
            self.inner = allred.distributed(Descent(), name="inner")

        def step(self, params, grads):
            self.inner.step(params, grads)

    with pytest.raises(InputError, match=r"^inner.step\(\): these gradients are the mean"):
        run(allred.distributed(Outer()), [np.ones(3)], 1, rank)


def test_memory_that_is_used_again_is_no_mistake(rank, size):
    first, second = allred.distributed(Descent()), allred.distributed(Descent())
    params, others, grads = [np.ones(3)], [np.ones(3)], [np.empty(3)]
    for _ in range(4):
        for opt, target in ((first, params), (second, others)):
            grads[0][:] = rank + 1
            opt.step(target, grads)


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize(("first_value", "second_value"), [("equal", "equal"), ("differs", "equal")])
def test_equal_gradients_of_two_optimizers_in_one_buffer_are_no_mistake(rank, bare, first_value, second_value):
    first, second, buffer = allred.distributed(Descent()), allred.distributed(Descent()), np.empty(3)
    for _ in range(4):
        for opt, value in ((first, first_value), (second, second_value)):
            buffer[:] = rank + 1 if value == "differs" else 7
            opt.step(np.ones(3) if bare else [np.ones(3)], buffer if bare else [buffer])


def test_a_missing_gradient_is_no_array_that_is_gone(rank, size):
    """Another wrapper has averaged arrays that are no more; here all ranks bring the same, and None."""
    other = [np.full(3, 1.0 + rank)]
    allred.distributed(optim.SGD()).step([np.zeros(3)], other)
    del other[:]
    gc.collect()
    params = [np.zeros(3), np.zeros(2)]
    allred.distributed(optim.SGD(lr=1.0)).step(params, [np.ones(3), None])
    assert params[0].tolist() == [-1] * 3


def test_a_wrapper_may_see_its_own_result_again(rank, size):
    opt, params, grads = allred.distributed(Descent()), [np.ones(3)], [np.full(3, rank + 1.0)]
    for _ in range(4):
        opt.step(params, grads)


def test_one_optimizer_in_two_wrappers_is_told(rank, size, capfd):
    inner = optim.SGD(lr=0.1)
    first, second = allred.distributed(inner, name="first"), allred.distributed(inner, name="second")
    for opt in (first, second, first, second):
        run(opt, [np.ones(3)], 1, rank)
    told = capfd.readouterr().err
    assert told.count("second.step(): the same SGD object is wrapped twice and steps in first.step() too") == (
        rank == 0
    )


def test_a_wrapper_that_is_gone_is_no_second_one(rank, size, capfd):
    inner = optim.SGD(lr=0.1)
    another = allred.distributed(inner)
    for _ in range(3):
        run(allred.distributed(inner), [np.ones(3)], 2, rank)
    run(another, [np.ones(3)], 2, rank)
    assert "wrapped twice" not in capfd.readouterr().err


def test_a_wrapper_that_was_never_used_is_told_at_the_end(rank, size, capfd):
    inner, used, idle = optim.Adam(), optim.SGD(), optim.RMSProp()
    allred.distributed(inner)
    allred.distributed(idle)
    opt = allred.distributed(used)
    for _ in range(3):
        inner.step([np.ones(3)], [np.ones(3)])
    run(opt, [np.ones(3)], 1, rank)
    allred.shutdown()
    told = capfd.readouterr().err
    allred.init()
    line = "a distributed Adam made no step, but the optimizer it wraps made 3 by itself: each rank trained alone"
    assert told.count(line) == (rank == 0)
    assert "SGD" not in told
    assert "RMSProp" not in told
