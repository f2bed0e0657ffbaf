"""Mode local against a simulation of all ranks in one process, and its errors and checkpoints."""

import copy
import dataclasses
import itertools

import numpy as np
import pytest

import allred
from allred import Compression, nest, optim, world
from allred.errors import DriftError, InputError, MismatchError, NonFiniteError
from allred.session import Hook

pytestmark = pytest.mark.mpi


@pytest.fixture
def local(monkeypatch):
    """The running world, in mode local."""
    here = world.current()
    monkeypatch.setattr(here, "config", dataclasses.replace(here.config, mode="local"))


FORMS = {
    "nested": lambda: {
        "a": [np.zeros((3, 4)), np.zeros(5, np.float32)],
        "b": {"c": np.zeros(())},
        "e": np.zeros((0, 2)),
    },
    "bare": lambda: np.zeros(7),
    "0-d": lambda: np.zeros(()),
    "list": lambda: [np.zeros(1000), np.zeros((2, 3, 4), np.float16)],
}


def gradients(params, rank, step):
    rng = np.random.default_rng([rank, step])
    leaves = [np.asarray(rng.normal(size=leaf.shape) + leaf / 2).astype(leaf.dtype) for _, leaf in nest.leaves(params)]
    return nest.rebuild(params, leaves)


def samples_of(rank, step):
    return 1 + (rank + step) % 3


def simulate(form, size, steps, make, every, outer, fragments=1, delay=0, mix=0.5, samples=False):
    """Return the parameters of each rank, without a round at the end, and the base."""
    ranks, optimizers = [FORMS[form]() for _ in range(size)], [make() for _ in range(size)]
    outer, base = copy.deepcopy(outer), {name: leaf.copy() for name, leaf in nest.leaves(FORMS[form]())}
    sizes = np.cumsum([each.nbytes for each in base.values()])
    of_fragment = [
        [n for n, end in zip(base, sizes, strict=True) if min((end - 1) * fragments // sizes[-1], fragments - 1) == f]
        for f in range(fragments)
    ]
    weights, pending = np.zeros((fragments, size)), []

    def begin(f, step):
        leaves = [dict(nest.leaves(params)) for params in ranks]
        means = {}
        for name in of_fragment[f]:
            wide = np.result_type(base[name], np.float32)
            changes = [(base[name].astype(wide) - np.asarray(each[name]).astype(wide)) for each in leaves]
            means[name] = sum(w * c for w, c in zip(weights[f], changes, strict=True)) / weights[f].sum()
        weights[f] = 0
        pending.append((step + delay, means))

    for step in range(1, steps + 1):
        for rank, (params, optimizer) in enumerate(zip(ranks, optimizers, strict=True)):
            optimizer.step(params, gradients(params, rank, step))
            weights[:, rank] += samples_of(rank, step) if samples else 1
        for f in range(fragments):
            if (step - every * (f + 1) // fragments) % every == 0:
                begin(f, step)
        for _due, means in [each for each in pending if each[0] <= step]:
            outer.step({name: base[name] for name in means}, means)
            for params, name in itertools.product(ranks, means):
                leaf = dict(nest.leaves(params))[name]
                leaf[...] = mix * leaf + (1 - mix) * base[name] if delay else base[name]
        pending = [each for each in pending if each[0] > step]
    return ranks, base


CASES = [
    {"every": 4, "outer": optim.SGD(0.7, momentum=0.5, nesterov=True)},
    {"every": 1, "outer": optim.SGD(1.0), "samples": True},
    {"every": 5, "outer": optim.Adam(0.1), "samples": True},
    {"every": 6, "outer": optim.SGD(0.7, momentum=0.5), "fragments": 3},
    {"every": 6, "outer": optim.SGD(0.7, momentum=0.5), "fragments": 2, "delay": 2, "mix": 0.25, "samples": True},
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("make", [lambda: optim.SGD(0.1, momentum=0.9), lambda: optim.AdamW(0.05)])
def test_results_are_those_of_the_simulation(local, rank, size, form, case, make):
    options, steps = dict(case), 17
    samples = options.pop("samples", False)
    expected, _ = simulate(form, size, steps, make, samples=samples, **options)
    params, opt = FORMS[form](), allred.distributed(make(), **options)
    opt.broadcast(params)
    for step in range(1, steps + 1):
        opt.step(params, gradients(params, rank, step), samples=samples_of(rank, step) if samples else None)
    for (name, got), (_, right) in zip(nest.leaves(params), nest.leaves(expected[rank]), strict=True):
        precise = {"rtol": 1e-3, "atol": 1e-3} if got.dtype == np.float16 else {"rtol": 1e-4, "atol": 1e-4}
        np.testing.assert_allclose(got, right, **precise, err_msg=name)
    opt.round()
    assert len(set(allred.allgather_object(allred.digest(params)))) == 1
    assert opt.global_step == steps
    before = allred.digest(params)
    opt.round()  # without a step since
    assert allred.digest(params) == before
    assert "mode local" in opt.summary()
    assert f"every={case['every']}" in opt.summary()


@pytest.mark.parametrize("compression", [Compression.int8, Compression.fp16])
def test_compression_and_accumulation(local, rank, size, compression):
    plain = None
    for each in (Compression.none, compression):
        params = {"w": np.zeros((300, 40), np.float32)}
        opt = allred.distributed(optim.SGD(0.1), every=4, compression=each, accumulate=2, clip_norm=100.0)
        opt.broadcast(params)
        for step in range(24):
            opt.step(params, gradients(params, rank, step))
        opt.round()
        assert len(set(allred.allgather_object(allred.digest(params)))) == 1
        plain = params["w"].copy() if plain is None else plain
    np.testing.assert_allclose(params["w"], plain, atol=0.02)


def test_a_rank_whose_parameters_are_not_finite_begins_again_from_the_base(local, rank, size):
    """The others' mean counts. If that is true of all ranks, all raise."""
    if size == 1:
        pytest.skip("one rank has no others")
    bad = size - 1
    params = {"w": np.zeros(10)}
    opt = allred.distributed(optim.SGD(1.0), every=2, outer=optim.SGD(1.0))
    opt.broadcast(params)
    for step in range(2):
        if rank == bad and step == 1:
            params["w"][3] = np.inf
        opt.step(params, {"w": np.full(10, -1.0 - rank)})
    np.testing.assert_allclose(params["w"], 2 * np.mean([1.0 + r for r in range(size) if r != bad]))
    opt.step(params, {"w": np.zeros(10)})
    params["w"][0] = np.nan
    with pytest.raises(NonFiniteError, match="the parameters of all ranks are not finite in a round"):
        opt.step(params, {"w": np.zeros(10)})


def test_a_gradient_that_is_not_finite(local, rank, size):
    """skip: the step of this rank alone. raise: on this rank, which ends the job; not tried here with several ranks."""
    params = {"w": np.zeros(4)}
    opt = allred.distributed(optim.SGD(1.0), every=2, outer=optim.SGD(1.0), nonfinite="skip")
    opt.broadcast(params)
    opt.step(params, {"w": np.full(4, np.nan if rank == 0 else -1.0)})
    assert opt.skipped == (rank == 0)
    opt.step(params, {"w": np.full(4, -1.0)})
    np.testing.assert_allclose(params["w"], (1 + 2 * (size - 1)) / size)
    other = allred.distributed(optim.SGD(1.0), every=2, nonfinite="raise")
    with pytest.raises(NonFiniteError, match=rf"of 'w' .*on rank {rank}\b|rank {rank}"):
        other.step({"w": np.zeros(4)}, {"w": np.full(4, np.nan)})


def test_ranks_that_begin_with_different_parameters(local, rank, size):
    if size == 1:
        pytest.skip("one rank has no others")
    params = {"v": np.zeros(3), "w": np.full(3, float(rank == size - 1))}
    opt = allred.distributed(optim.SGD(1.0), every=2)
    words = rf"parameter 'w' of rank {size - 1} is not that of rank 0.*call opt.broadcast\(params\)"
    with pytest.raises(DriftError, match=words):
        opt.step(params, {"v": np.ones(3), "w": np.ones(3)})


def test_ranks_whose_rounds_differ(local, rank, size):
    if size == 1:
        pytest.skip("one rank cannot differ")
    params = {"w": np.zeros(3)}
    opt = allred.distributed(optim.SGD(1.0), every=2 if rank else 4)
    opt.broadcast(params)

    def train_4_steps():
        for _ in range(4):
            opt.step(params, {"w": np.ones(3)})

    with pytest.raises(MismatchError, match=r"every=4, outer=SGD.*every=2, outer=SGD"):
        train_4_steps()


def test_options(local, rank):
    for options, words in (
        ({"every": 0}, "every must be"), ({"fragments": 0}, "fragments must be"), ({"delay": -1}, "delay must be"),
        ({"mix": 1.0}, "mix=1.0 must be a number from 0, and less than 1"),
        ({"outer": 0.7}, "outer is a float; expected"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words):
            allred.distributed(optim.SGD(), **options)
    for options, words in (
        ({"every": 4, "delay": 4}, "every=4 must be more than delay=4"),
        ({"every": 4, "fragments": 5}, "not less than fragments=5"),
        ({"op": allred.Sum}, r"op=allred.Sum is not available in mode local"),
        ({"sharded": True}, r"sharded=True is not available in mode local"),
    ):
        with pytest.raises(InputError, match=words):
            allred.distributed(optim.SGD(), **options).step([np.ones(3)], [np.ones(3)])
    with pytest.raises(InputError, match="mode local averages parameters, so it needs the optimizer"):
        allred.distributed.gradients(lambda: [1.0])()


def test_the_options_have_no_effect_in_mode_sync(rank, size):
    params, other = np.zeros(4), np.zeros(4)
    opt = allred.distributed(optim.SGD(1.0), every=2, outer=optim.SGD(0.3), fragments=2, delay=1)
    plain = allred.distributed(optim.SGD(1.0))
    for step in range(4):
        opt.step(params, np.full(4, rank + step + 0.0))
        plain.step(other, np.full(4, rank + step + 0.0))
    opt.round()
    assert np.array_equal(params, other)


def train(params, opt, rank, steps):
    for step in steps:
        opt.step(params, gradients(params, rank, step))


def make(**options):
    params = {"w": np.zeros((30, 20), np.float32), "b": np.zeros(20)}
    return params, allred.distributed(optim.AdamW(0.05), **options)


def test_checkpoints_between_modes(rank, size, tmp_path, monkeypatch):
    here = world.current()
    sync, to_local = here.config, dataclasses.replace(here.config, mode="local")
    monkeypatch.setattr(here, "config", to_local)
    params, opt = make(every=4, nonfinite="skip")
    opt.broadcast(params)
    train(params, opt, rank, range(9))
    bad = {name: np.full_like(leaf, np.nan if rank == 0 else 0.0) for name, leaf in params.items()}
    opt.step(params, bad)  # rank 0, which saves, skips it: a step of all ranks
    if rank == 0:
        with pytest.raises(InputError, match=r"written after a round: call opt.round\(\) on all ranks before opt.save"):
            opt.save(tmp_path, params)
    opt.round()
    opt.save(tmp_path, params)
    allred.barrier()
    for config in (sync, to_local):
        here.config = config
        again, other = make(every=4)
        assert other.restore(tmp_path, again) == other.global_step == 10
        assert other.optimizer.global_step == (10 if config is sync else 9)
        assert allred.digest(again) == allred.digest(params)
        train(again, other, rank, range(10, 18))
        other.round()
        assert other.global_step == 18
        assert len(set(allred.allgather_object(allred.digest(again)))) == 1
    here.config = sync
    params, opt = make()
    train(params, opt, rank, range(3))
    opt.save(tmp_path / "sync", params)
    allred.barrier()
    here.config = to_local
    again, other = make(every=4)
    assert other.restore(tmp_path / "sync", again) == 3
    assert allred.digest(again) == allred.digest(params)


@pytest.mark.parametrize("options", [{"every": 4}, {"every": 8, "fragments": 2, "delay": 1}])
def test_a_session(local, rank, tmp_path, options):
    def run(directory, steps):
        params, opt = make(**options)
        with allred.Session(str(directory), max_steps=steps, save_steps=8, keep=9) as session:
            begin = session.track(params=params, optimizer=opt)
            while not session.should_stop():
                opt.step(params, gradients(params, rank, session.step))
                session.log(value=1.0)
        return allred.digest(params), begin

    assert run(tmp_path, 16)[1] is None
    again, begin = run(tmp_path, 24)
    assert begin == 16
    assert len(set(allred.allgather_object(again))) == 1


@pytest.mark.parametrize("options", [{"every": 4}, {"every": 8, "fragments": 2, "delay": 1}])
def test_a_run_that_is_continued_from_a_checkpoint_gives_the_same_bits(local, rank, tmp_path, options):
    """What a session calls on all ranks before a checkpoint makes their optimizers equal."""
    whole, opt = make(**options)
    opt.broadcast(whole)
    train(whole, opt, rank, range(16))
    opt.session_support.before_checkpoint()
    opt.save(tmp_path, whole)
    allred.barrier()
    train(whole, opt, rank, range(16, 27))
    params, other = make(**options)
    assert other.restore(tmp_path, params) == 16
    train(params, other, rank, range(16, 27))
    assert allred.digest(params) == allred.digest(whole)


def test_the_optimizer_of_a_lost_rank_begins_again_and_checkpoints_have_the_mean_of_the_others(local, rank, size):
    if size == 1:
        pytest.skip("one rank has no others")
    params, opt = make(every=2, nonfinite="ignore")
    opt.broadcast(params)
    train(params, opt, rank, range(2))
    for step in range(2, 4):
        grads = gradients(params, rank, step)
        if rank == size - 1:
            grads["w"][1, 2] = np.nan
        opt.step(params, grads)
    assert np.isfinite(params["w"]).all()
    assert ("1 exchange of parameters that were not finite" in opt.summary()) == (rank == size - 1)
    train(params, opt, rank, range(4, 8))
    opt.session_support.before_checkpoint()
    state = opt.state_dict()["slots"]
    assert all(np.isfinite(slot).all() for slots in state.values() for slot in slots.values())
    assert len(set(allred.allgather_object((allred.digest(params), allred.digest(state))))) == 1


def test_frozen_parameters_stay_and_a_program_may_roll_back(local, rank):
    params, opt = make(every=2, outer=optim.SGD(0.7, momentum=0.5))
    opt.broadcast(params)
    train(params, opt, rank, range(4))
    frozen, saved, state = params["w"].copy(), copy.deepcopy(params), copy.deepcopy(opt.state_dict())
    for step in range(4, 8):
        opt.step(params, {"w": None, "b": gradients(params, rank, step)["b"]})
    np.testing.assert_array_equal(params["w"], frozen)
    for name in params:
        params[name][...] = saved[name]
    opt.load_state_dict(state)
    for _ in range(2):
        opt.step(params, {"w": np.zeros((30, 20)), "b": np.zeros(20)})
    assert abs(params["w"] - frozen).max() < 0.5  # the moments of the inner optimizer, not the way back


def test_batches_without_samples_and_samples_that_only_some_ranks_give(local, rank, size):
    params = {"w": np.zeros(3)}
    opt = allred.distributed(optim.SGD(1.0), every=2, outer=optim.SGD(1.0))
    opt.broadcast(params)
    for _ in range(2):
        opt.step(params, {"w": np.full(3, -1.0 if rank == 0 else np.nan)}, samples=5 * (rank == 0))
    np.testing.assert_allclose(params["w"], 2)
    assert (opt.global_step, opt.skipped) == (2, 0)
    if size > 1:
        opt.step(params, {"w": np.zeros(3)}, samples=3 if rank else None)
        with pytest.raises(InputError, match="some ranks gave no number of samples, but others did"):
            opt.step(params, {"w": np.zeros(3)}, samples=3 if rank else None)


def test_ranks_that_skip_different_steps_end_together(local, rank, tmp_path):
    params, opt = make(every=4, nonfinite="skip")
    with allred.Session(str(tmp_path), max_steps=8) as session:
        session.track(params=params, optimizer=opt)
        while not session.should_stop():
            grads = gradients(params, rank, session.step)
            if session.step == rank + 1:
                grads["b"][0] = np.inf
            opt.step(params, grads)
    assert (session.step, opt.global_step, opt.skipped) == (8, 8, 1)
    assert len(set(allred.allgather_object(allred.digest(params)))) == 1


def test_a_session_that_a_hook_stops_on_one_rank(local, rank, tmp_path):
    class Stop(Hook):
        def after_step(self, session, values):
            if rank == 0 and session.step == 5:
                session.request_stop("mine", everywhere=True)

    params, opt = make(every=4)
    with allred.Session(str(tmp_path), max_steps=40, hooks=[Stop()]) as session:
        session.track(params=params, optimizer=opt)
        while not session.should_stop():
            opt.step(params, gradients(params, rank, session.step))
    assert session.step == 8
    assert len(set(allred.allgather_object(allred.digest(params)))) == 1


def test_what_is_refused_or_tied(local, tmp_path):
    w = np.zeros(4)
    opt = allred.distributed(optim.SGD(1.0), every=4, fragments=2)
    with pytest.raises(InputError, match="'a' and 'b' share memory; in mode local with fragments"):
        opt.step({"a": w, "b": w}, {"a": np.ones(4), "b": np.ones(4)})
    with pytest.raises(InputError, match=r"join\(\) cannot be used in mode local"):
        allred.join()
    session = allred.Session(str(tmp_path))
    with pytest.raises(InputError, match="in mode local a session has one distributed optimizer"), session:
        session.track(params=w, optimizer=allred.distributed(optim.SGD()), other=allred.distributed(optim.SGD()))


@pytest.mark.parametrize("value", [1.0, 1.5, 2.0])
def test_a_parameter_that_appears_later_and_differs_is_found(local, rank, size, value):
    if size == 1:
        pytest.skip("one rank has no others")
    params, late = {"w": np.zeros(3)}, np.full(4, value * (rank > 0))
    opt = allred.distributed(optim.SGD(0.1), every=4)
    opt.broadcast(params)
    opt.step(params, {"w": np.ones(3)})
    params["b"] = late
    for _ in range(2):
        opt.step(params, {"w": np.ones(3), "b": np.ones(4)})
    with pytest.raises(DriftError, match="parameter 'b' of rank"):
        opt.step(params, {"w": np.ones(3), "b": np.ones(4)})


def test_numbers_of_samples_that_change_a_million_times(local):
    params = {"w": np.zeros(1)}
    opt = allred.distributed(optim.SGD(1.0), every=2, outer=optim.SGD(1.0), mix=np.float32(0.5))
    opt.broadcast(params)
    for samples in (10**7, 1, 1, 1, 1, 1):
        opt.step(params, {"w": np.ones(1)}, samples=samples)
    assert params["w"].tolist() == [-6]
