"""opt.reduce(name, grad): gradients that go out before the step, with the results and errors of a step without."""

import dataclasses
import functools
import time

import numpy as np
import pytest

import allred
from allred import world
from allred.cluster import processors
from allred.comm import functions
from allred.errors import InputError, NonFiniteError
from allred.modes.detect.mistake_checks import MistakeChecks

pytestmark = pytest.mark.mpi

FIRST = 3  # steps that are checked, and so as any other (allred/modes/detect)
SHAPES = {"a": (40, 50), "b": (7,), "c": (300, 400), "d": (), "e": (5, 5), "f": (0, 3)}


def params_of(dtype=np.float32):
    return {name: np.zeros(shape, dtype) for name, shape in SHAPES.items()}


@functools.lru_cache(maxsize=32)
def drawn(rank, step, dtype):
    rng = np.random.default_rng([rank, step])
    imaginary = 1j if np.dtype(dtype).kind == "c" else 0
    return {name: np.array(rng.normal(size=shape) * (1 + imaginary), dtype) for name, shape in SHAPES.items()}


def grads_of(rank, step, dtype=np.float32):
    return {name: grad.copy() for name, grad in drawn(rank, step, dtype).items()}


def train(steps, early, samples=None, dtype=np.float32, change=lambda step, grads: grads, **options):
    """The parameters after some steps; early(step): the names that are given before it, in order."""
    rank = allred.rank()
    params = params_of(dtype)
    opt = allred.distributed(allred.optim.SGD(lr=1.0), bucket_bytes=4096, **options)
    for step in range(steps):
        grads = change(step, grads_of(rank, step, dtype))
        for name in early(step):
            opt.reduce(name, grads[name], samples=samples)
        opt.step(params, grads, samples=samples)
    return params


def same(a, b):
    for name in a:
        assert a[name].tobytes() == b[name].tobytes(), name


NAMES = sorted(SHAPES)
WAYS = {
    "reverse": lambda step: NAMES[::-1],
    "some": lambda step: ["c", "e"],
    "another order on every rank": lambda step: list(np.random.default_rng([step, allred.rank()]).permutation(NAMES)),
    "not on rank 0": lambda step: NAMES if allred.rank() else [],
    "now and then": lambda step: NAMES if step % 2 else [],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.complex64])
def test_results_are_those_of_a_step_without(way, dtype):
    for samples in (None, 4, 3 + allred.rank()):
        same(train(7, WAYS[way], samples, dtype), train(7, lambda step: [], samples, dtype))


@pytest.mark.parametrize(
    "options", [{"compression": allred.Compression.fp16}, {"clip_norm": 0.5}, {"op": allred.Sum, "nonfinite": "ignore"}]
)
@pytest.mark.parametrize("samples", [None, 3])
def test_options_do_what_they_do_without(rank, options, samples):
    samples = samples and samples + rank
    same(train(6, WAYS["reverse"], samples, **options), train(6, lambda step: [], samples, **options))


def test_numbers_of_complex_parameters(rank, size):
    param, opt = np.zeros((), np.complex64), allred.distributed(allred.optim.SGD(lr=1.0))
    real = np.zeros((), np.float32)
    for _ in range(3):
        gradient = complex(rank, 1)
        opt.reduce("z", gradient)
        opt.step({"z": param, "x": real}, {"z": gradient, "x": 1.0})
    assert param == -3 * complex((size - 1) / 2, 1)
    opt.reduce("x", 1j)
    with pytest.raises(InputError, match=r"reduce\('x'\): got complex128 \(\), and the gradient is 'x' float32 \(\)"):
        opt.step({"z": param, "x": real}, {"z": 1j, "x": 1.0})


def test_within_a_process_set(rank, size):
    pair = allred.ProcessSet({0, size - 1})
    if pair.included():
        same(train(6, WAYS["reverse"], process_set=pair), train(6, lambda step: [], process_set=pair))


def test_nothing_is_left_out_where_a_rank_has_no_gradient(rank, size):
    def change(step, grads):
        return grads | {"c": None if rank == size - 1 else grads["c"], "a": None}

    def early(step):
        return ["e", "b"]

    same(train(6, early, change=change), train(6, lambda step: [], change=change))


class Recorded:
    """What an optimizer is given."""

    def step(self, params, grads):
        self.grads = grads


def test_a_gradient_that_nobody_has_stays_none(rank):
    opt, params = allred.distributed(Recorded()), params_of()
    for step in range(FIRST + 2):
        grads = grads_of(rank, step) | {"a": None, "b": None if rank else np.ones(7, np.float32)}
        opt.reduce("e", grads["e"])
        opt.step(params, grads)
        assert opt.optimizer.grads["a"] is None
        assert opt.optimizer.grads["b"].shape == (7,)
        assert opt.optimizer.grads["e"] is grads["e"]


def test_integers_are_added_up_of_those_that_have_samples(rank, size):
    opt, params = allred.distributed(Recorded(), op=allred.Sum), {"n": np.zeros(3, np.int32)}
    samples = rank if size > 1 else 1
    for _ in range(FIRST + 2):
        grads = {"n": np.full(3, rank + 1, np.int32)}
        opt.reduce("n", grads["n"], samples)
        opt.step(params, grads, samples)
        assert grads["n"].tolist() == [sum(range(2, size + 1)) or 1] * 3


@pytest.fixture
def progress_thread(size):
    if size == 1 or functions.current().name != "shm":
        pytest.skip("a thread makes progress with several ranks and backend shm only")


@pytest.mark.usefixtures("progress_thread")
def test_gradients_go_out_before_the_step(rank, size):
    """In the agreed order, whatever the order here."""
    opt, params = allred.distributed(allred.optim.SGD(lr=1.0), bucket_bytes=4096), params_of()
    for step in range(FIRST + 1):
        grads = grads_of(rank, step)
        for name in NAMES[::-1]:
            opt.reduce(name, grads[name])
        if step < FIRST:
            if step:  # in the first there is nothing to hear of
                opt._get_mode()._overlap._opening.wait()
                opt._get_mode()._overlap._advance(functions.current())
                allred.barrier()
            assert grads["c"].tobytes() == grads_of(rank, step)["c"].tobytes()  # the checks are to see them all
            opt.step(params, grads)
    buckets = [[NAMES[index] for index in where] for where, _ in opt._get_mode()._overlap._buckets]
    assert buckets == [["c"], ["e", "d", "b"], ["a"]]  # as they become full
    mean = sum(grads_of(r, FIRST)["c"] for r in range(size)) / size
    deadline = time.monotonic() + 20
    while not opt._get_mode()._overlap._sent:
        opt._get_mode()._overlap._advance(functions.current())
        assert time.monotonic() < deadline
    while not np.allclose(grads["c"], mean, atol=1e-5):  # "c" is a bucket of its own, which the thread reduces
        time.sleep(0.001)
        assert time.monotonic() < deadline
    opt.step(params, grads)
    held = grads_of(rank, FIRST + 1)
    opt.reduce("a", held["a"])  # the last of the order: nothing goes
    time.sleep(0.01)
    assert held["a"].tobytes() == grads_of(rank, FIRST + 1)["a"].tobytes()
    opt.step(params, held)


@pytest.mark.parametrize(
    ("setting", "cores", "computes", "early"),
    [
        ("auto", 1, False, True),
        ("auto", 1, True, False),
        ("auto", 2, True, True),
        ("always", 1, True, True),
        ("never", 2, False, False),
    ],
)
def test_a_rank_without_a_free_core_sends_in_the_step(rank, size, monkeypatch, setting, cores, computes, early):
    """Only the last rank computes. The results are equal."""
    here, computes = world.current(), computes and rank == size - 1
    monkeypatch.setattr(here, "config", dataclasses.replace(here.config, overlap=setting))
    monkeypatch.setattr(here, "cores", cores)
    # Far from the limit of a half: the rank may lose its core between the readings of the two clocks.
    monkeypatch.setattr(processors, "runnable_s", lambda: (1e6 if computes else 0.0) * time.perf_counter())
    opt, params, expected = allred.distributed(allred.optim.SGD(lr=1.0), bucket_bytes=4096), params_of(), params_of()
    for step in range(FIRST + 3):
        grads = grads_of(rank, step)
        for name in NAMES[::-1]:
            opt.reduce(name, grads[name])
        assert opt._get_mode()._overlap._sends_early == (early or (setting == "auto" and not (computes and step)))
        opt.step(params, grads)
    opt = allred.distributed(allred.optim.SGD(lr=1.0), bucket_bytes=4096)
    for step in range(FIRST + 3):
        opt.step(expected, grads_of(rank, step))
    same(params, expected)


@pytest.mark.usefixtures("progress_thread")
def test_what_went_out_early_is_counted_too(rank):
    opt, params = allred.distributed(allred.optim.SGD(lr=1.0), bucket_bytes=4096), params_of()
    counts = []
    for step in range(FIRST + 2):
        grads = grads_of(rank, step)
        for name in NAMES:
            opt.reduce(name, grads[name])
        if step >= FIRST:
            opt._get_mode()._overlap._opening.wait()
            opt._get_mode()._overlap._advance(functions.current())
            allred.barrier()  # all of it has gone
        opt.step(params, grads)
        counts.append(opt._get_mode()._timer.sent_bytes)
    assert counts == [(step + 1) * counts[0] for step in range(FIRST + 2)]


def sliding(array):
    """Return a writable array of this shape whose rows share memory."""
    return np.lib.stride_tricks.as_strided(array, array.shape, (4, *array.strides[1:]))


MISTAKES = {
    "unknown": (
        lambda opt, grads: opt.reduce("z", grads["a"]),
        r"reduce\('z'\): no gradient has this name; they are 'a'",
    ),
    "twice": (lambda opt, grads: [opt.reduce("a", grads["a"]) for _ in range(2)], "was called twice for one step"),
    "shape": (
        lambda opt, grads: opt.reduce("a", np.zeros(3, "f4")),
        r"reduce\('a'\): got float32 \(3,\), and the grad",
    ),
    "dtype": (lambda opt, grads: opt.reduce("a", grads["a"].astype("f8")), "got float64"),
    "other array": (lambda opt, grads: opt.reduce("a", grads["a"].copy()), "got another array than step"),
    "same memory": (
        lambda opt, grads: [grads.update(b=grads["a"][0, :7]), opt.reduce("a", grads["a"])],
        "'a' and 'b' share memory, which reduce",
    ),
    "own memory": (
        lambda opt, grads: [grads.update(a=sliding(grads["a"])), opt.reduce("a", grads["a"])],
        "'a' has several elements in the same memory",
    ),
    "no array": (lambda opt, grads: opt.reduce("a", ["x"]), r"reduce\(\): 'a'"),
}


@pytest.mark.parametrize("what", MISTAKES)
@pytest.mark.parametrize("steps", [0, FIRST + 1], ids=["first step", "later"])
@pytest.mark.parametrize("setting", ["always", "never"])
def test_mistakes_are_errors_on_all_ranks_in_step(rank, size, what, steps, setting, monkeypatch):
    mistake, words = MISTAKES[what]
    monkeypatch.setattr(world.current(), "config", dataclasses.replace(world.config(), overlap=setting))
    if (steps == 0 or setting == "never") and what in ("shape", "dtype", "no array"):
        words = "got another array than step"
    opt, params = allred.distributed(allred.optim.SGD(lr=1.0), bucket_bytes=4096), params_of()
    for step in range(steps):
        grads = grads_of(rank, step)
        for name in NAMES:
            opt.reduce(name, grads[name])
        opt.step(params, grads)
    before = {name: param.copy() for name, param in params.items()}
    grads = grads_of(rank, steps)
    if rank == size - 1:
        mistake(opt, grads)
    for name in ("e", "f"):
        opt.reduce(name, grads[name])
    with pytest.raises(InputError, match=words) as error:
        opt.step(params, grads)
    assert len(set(allred.allgather_object(str(error.value)))) == 1
    same(params, before)
    for step in range(2):  # and training goes on
        grads = grads_of(rank, step)
        opt.reduce("a", grads["a"])
        opt.step(params, grads)


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_nan_is_found_before_the_parameters_are_changed(rank, size, policy):
    opt, params = allred.distributed(allred.optim.SGD(lr=1.0), nonfinite=policy), params_of()
    for step in range(FIRST + 2):
        grads = grads_of(rank, step)
        if step == FIRST + 1 and rank == size - 1:
            grads["c"][3, 4] = np.nan
        for name in NAMES:
            opt.reduce(name, grads[name])
        before = {name: param.copy() for name, param in params.items()}
        if step <= FIRST:
            opt.step(params, grads)
    if policy == "skip":
        opt.step(params, grads)
        assert opt.skipped == 1
    else:
        with pytest.raises(NonFiniteError, match=rf"'c' on rank {size - 1} \(1 of 120000 elements, the first is nan"):
            opt.step(params, grads)
    same(params, before)


def test_a_sum_that_overflows_is_an_error_on_all(rank, size):
    if size == 1:
        pytest.skip("one rank adds nothing")
    opt, params = allred.distributed(allred.optim.SGD(lr=1.0)), params_of()
    for step in range(FIRST + 2):
        grads = grads_of(rank, step)
        if step == FIRST + 1:
            grads["b"][-1] = np.finfo("f4").max
        before = {name: param.copy() for name, param in params.items()}
        for name in NAMES:
            opt.reduce(name, grads[name])
        if step <= FIRST:
            opt.step(params, grads)
    with pytest.raises(NonFiniteError, match="but the sum over the ranks of 'b' is not"):
        opt.step(params, grads)
    same(params, before)
    opt.step(params, grads_of(rank, 0))  # and training goes on


def test_early_gradients_are_scanned_only_where_their_reductions_do_not_check_them(rank, size, monkeypatch):
    opt, params = settled(rank)
    scanned = []
    monkeypatch.setattr(MistakeChecks, "scan_bucket", lambda self, bucket, values: scanned.append(bucket) or 0)
    for samples in (None, 1 + rank):
        scanned.clear()
        grads = grads_of(rank, 0)
        opt.reduce("a", grads["a"], samples)
        opt.step(params, grads, samples)
        assert bool(scanned) == (not functions.current().backend.checks_finite or (samples is not None and size > 1))


def test_samples_are_given_in_the_first_call(rank):
    opt, params, grads = allred.distributed(allred.optim.SGD(lr=1.0)), params_of(), grads_of(rank, 0)
    opt.reduce("a", grads["a"], samples=3)
    with pytest.raises(InputError, match=r"samples=4 in step\(\), but 3 in the first reduce"):
        opt.step(params, grads, samples=4)
    opt.reduce("a", grads["a"], samples=2)
    opt.step(params, grads, samples=2)
    opt.reduce("a", grads["a"], samples=-1)
    with pytest.raises(InputError, match="samples must be an integer >= 0, but is -1"):
        opt.step(params, grads)


def settled(rank, **options):
    """An optimizer whose gradients go out early from now on, with its parameters."""
    opt, params = allred.distributed(allred.optim.SGD(lr=1.0), **options), params_of()
    for step in range(FIRST + 1):
        grads = grads_of(rank, step)
        opt.reduce("a", grads["a"])
        opt.step(params, grads)
    return opt, params


def test_other_gradients_than_those_of_the_agreed_order(rank):
    """Are an error on all ranks; with them it begins anew."""
    opt, _ = settled(rank)
    params = {"new": np.zeros(3)}
    with pytest.raises(InputError, match=r"step\(\) has other gradients"):
        opt.step(params, {"new": np.ones(3)})
    for _ in range(2):
        grads = {"new": np.ones(3)}
        opt.reduce("new", grads["new"])
        opt.step(params, grads)
    assert params["new"].tolist() == [-2.0] * 3


@pytest.mark.parametrize("what", ["samples", "scale"])
def test_ranks_that_differ_hear_of_it_in_step(rank, size, what):
    if size == 1:
        pytest.skip("takes several ranks")
    scaler = allred.GradScaler(init_scale=1.0)
    opt, params = settled(rank, scaler=scaler)
    if what == "scale" and rank == 1:
        scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0})
    grads = grads_of(rank, FIRST + 1)
    for name in NAMES:
        opt.reduce(name, grads[name], samples=3 if what == "samples" and rank == 1 else None)
        time.sleep(0.05)  # so that the answer comes meanwhile
    with pytest.raises(allred.AllredError, match="gave no number of samples" if what == "samples" else "scale=2"):
        opt.step(params, grads)


def test_accumulated_gradients_are_known_in_step():
    opt = allred.distributed(allred.optim.SGD(lr=1.0), accumulate=2)
    with pytest.raises(InputError, match="do not call reduce"):
        opt.reduce("a", np.zeros(3))


def test_with_places_compared_every_step_is_as_any_other(rank):
    """Which of the calls here sends a bucket depends on chance."""
    communicator = allred.comm.functions.current()
    communicator.checks_places = True
    try:
        early = train(6, lambda step: NAMES[:: 1 if rank else -1])
    finally:
        communicator.checks_places = False
    same(early, train(6, lambda step: []))
