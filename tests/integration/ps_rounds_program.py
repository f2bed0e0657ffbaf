"""Cases of mode ps with `every`: `ps_rounds_program.py DIRECTORY CASES` under mpirun. CASES: JSON, a list of [name of a
function, number of servers, its arguments]; without servers the argument `mode`. Worker 0 prints the name of each case
that has passed.

The servers return from Server.join() after each case, and the next case starts with a new allred.Server.
"""

import json
import pathlib
import sys

import numpy as np
import pytest
from mpi4py.MPI import COMM_WORLD

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "parallel"))
import test_local as local

import allred
from allred import nest, optim
from allred.errors import InputError
from allred.ps import Async, Bounded, Sync

DIRECTORY, CASES = sys.argv[1], json.loads(sys.argv[2])
INNER = {"momentum": lambda: optim.SGD(0.1, momentum=0.9), "adamw": lambda: optim.AdamW(0.05)}


def check_equal(params, expected):
    for (name, got), (_, right) in zip(nest.leaves(params), nest.leaves(expected), strict=True):
        half = np.float16 in (got.dtype, np.asarray(right).dtype)
        limits = {"rtol": 1e-3, "atol": 1e-3} if half else {"rtol": 1e-4, "atol": 1e-5}
        np.testing.assert_allclose(got, right, **limits, err_msg=name)


def in_turn(rank):
    """Return whether this is worker `rank`, after a barrier: then only this worker exchanges."""
    allred.barrier()
    return allred.rank() == rank


def means(form, inner, samples):
    """Policy sync with all workers: what a simulation of mode local gives."""
    rank, outer = allred.rank(), optim.SGD(0.7, momentum=0.5, nesterov=True)
    expected, _ = local.simulate(form, allred.size(), 14, INNER[inner], every=4, outer=outer, samples=samples)
    params = local.FORMS[form]()
    opt = allred.distributed(INNER[inner](), every=4, consistency=Sync())
    opt.broadcast(params)
    for step in range(1, 15):
        given = local.samples_of(rank, step) if samples else None
        opt.step(params, local.gradients(params, rank, step), samples=given)
    check_equal(params, expected[rank])
    assert opt.global_step == 12
    opt.finish()
    allred.barrier()
    opt.pull(params)
    assert len(set(allred.allgather_object(allred.digest(params)))) == 1
    assert opt.global_step == 16
    assert "4 exchanges of" in opt.summary()


def quorum(grace_s):
    """A change that comes too late for its step is not lost: the worker rebases, and the next change contains it.

    Outer SGD(1): the parameters of the servers move by the change itself. Worker 1 moves by 8 in each round."""
    policy = Sync(replicas_to_aggregate=1, grace_s=grace_s)
    params, opt = {"w": np.zeros(3)}, allred.distributed(
        optim.SGD(1.0), every=2, outer=optim.SGD(1.0), consistency=policy
    )  # fmt: skip
    opt.broadcast(params)

    def round_of(rank, gradient):
        if in_turn(rank):
            for _ in range(2):
                opt.step(params, {"w": np.full(3, gradient)})

    round_of(0, -1.0)
    round_of(1, -4.0)  # for step 0, which has ended
    found = allred.allgather_object((params["w"].tolist(), opt.dropped))
    assert found == [([2.0] * 3, 0), ([2.0 + 8.0] * 3, 1)], found
    round_of(1, -4.0)
    assert allred.allgather_object((params["w"].tolist(), opt.dropped))[1] == ([2.0 + 16.0] * 3, 1)
    opt.pull(params)
    assert params["w"].tolist() == [18.0] * 3
    assert opt.global_step == 4
    round_of(0, -1.0)  # for the step that worker 1 has ended
    if in_turn(0):
        opt.round()  # without another step
    allred.barrier()
    opt.pull(params)
    assert (params["w"].tolist(), opt.dropped) == ([20.0] * 3, 1)


def grace():
    """A step waits for the others: then it is the mean of both, weighted by samples."""
    policy = Sync(replicas_to_aggregate=1, grace_s=60.0)
    params, opt = [np.zeros(2)], allred.distributed(
        optim.SGD(1.0), every=2, outer=optim.SGD(1.0), consistency=policy
    )  # fmt: skip
    opt.broadcast(params)
    rank = allred.rank()
    for number in range(1, 4):
        for _ in range(2):
            opt.step(params, [np.full(2, -1.0 - 4.0 * rank)], samples=1 + 2 * rank)
        assert params[0].tolist() == [number * (2.0 + 3 * 10.0) / 4] * 2
    assert opt.statistics().updates == 3
    assert opt.dropped == 0


def applied_alone(policy):
    """Each change is applied alone, by default with the learning rate 1 / workers."""
    consistency = {"async": Async(), "bounded": Bounded(1)}[policy]
    outer = optim.SGD(0.5) if policy == "async" else None
    params, opt = np.zeros(4), allred.distributed(optim.SGD(1.0), every=2, outer=outer, consistency=consistency)
    opt.broadcast(params)
    for rank in (0, 1, 0):
        if in_turn(rank):
            for _ in range(2):
                opt.step(params, np.full(4, -1.0 - rank))
    allred.barrier()
    opt.pull(params)
    assert params.tolist() == [2 / 2 + 4 / 2 + 2 / 2] * 4
    if outer is not None:
        outer.lr = 0.6
        opt.step(params, np.ones(4))
        with pytest.raises(InputError, match=r"outer has lr=0.6, .* use at most 1 / workers = 0.5"):
            opt.step(params, np.ones(4))
    for outer, words in [
        (optim.SGD(0.5, momentum=0.9), r"outer has momentum=0.9, .*use at most 0.5, or consistency"),
        (optim.SGD(0.7), r"outer has lr=0.7, .* use at most 1 / workers = 0.5"),
        (optim.SGD(lambda step: 1.0), "outer has lr=1"),
    ]:
        with pytest.raises(InputError, match=words):
            allred.distributed(optim.SGD(1.0), every=2, outer=outer, consistency=consistency).broadcast(params)


def not_finite():
    """A worker whose parameters are not finite counts nothing, and begins again from those of the servers."""
    params, opt = {"w": np.zeros(3), "b": np.zeros(2, np.float32)}, allred.distributed(
        optim.SGD(1.0, momentum=0.5), every=2, outer=optim.SGD(1.0), consistency=Sync(), nonfinite="ignore"
    )  # fmt: skip
    opt.broadcast(params)
    for step in range(4):
        bad = np.nan if step == 1 and allred.rank() == 1 else -1.0
        opt.step(params, {"w": np.full(3, bad), "b": np.full(2, -1.0, np.float32)})
        if step == 1:
            assert params["w"].tolist() == [2.5] * 3  # worker 0 alone
            assert params["b"].tolist() == [2.5] * 2
    assert np.isfinite(params["w"]).all()
    assert opt.summary().count("1 exchange of parameters that were not finite") == allred.rank()


def train(opt, params, steps):
    for step in steps:
        opt.step(params, local.gradients(params, allred.rank(), step))


def made():
    """With an inner optimizer without a state, because a checkpoint has the state of one worker."""
    return allred.distributed(optim.SGD(0.1), every=3, outer=optim.SGD(0.5, momentum=0.5), consistency=Sync())


def save(name):
    params, opt = local.FORMS["nested"](), made()
    opt.broadcast(params)
    train(opt, params, range(6))
    path = opt.save(f"{DIRECTORY}/{name}", params)
    assert (path is None) == (allred.rank() > 0)
    allred.barrier()
    train(opt, params, range(6, 12))
    if name == "ps" and allred.rank() == 0:
        np.save(f"{DIRECTORY}/expected.npy", params["a"][0])


def restore(name, has_outer):
    """Training goes on, in mode ps and local with the outer momentum if the checkpoint has it."""
    params, opt = local.FORMS["nested"](), made()
    assert opt.restore(f"{DIRECTORY}/{name}", params) == 6
    assert opt.global_step == 6
    train(opt, params, range(6, 12))
    assert opt.global_step == 12
    if has_outer:
        np.testing.assert_allclose(params["a"][0], np.load(f"{DIRECTORY}/expected.npy"), rtol=1e-6)


def session(begin, max_steps, end):
    """Every worker ends at max_steps, and the next session goes on from the last checkpoint."""
    params, opt = [np.zeros(5)], made()
    with allred.Session(f"{DIRECTORY}/session", save_steps=3, max_steps=max_steps, log_steps=None) as session:
        assert session.track(params=params, optimizer=opt) == begin
        while not session.should_stop():
            opt.step(params, [np.full(5, -1.0)])
    assert session.step == end
    assert len(set(allred.allgather_object(allred.digest(params)))) == 1


def main():
    for name, servers, arguments in CASES:
        if servers:
            server = allred.Server({"ps": servers, "worker": COMM_WORLD.size - servers})
        else:
            allred.init(mode=arguments.pop("mode"), banner=False)
        if servers and allred.job_name() == "ps":
            server.join()
        else:
            globals()[name](**arguments)
            if allred.rank() == 0:
                print(name, flush=True)
        allred.shutdown()


main()
