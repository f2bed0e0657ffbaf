"""Cases of `allred.jax.distributed(...).step` in the mode of this job; test_modes.py runs it.

One rank alone computes the expected values with optax.
"""

import collections
import functools
import os
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizer_case_runner import case, run_cases

import allred
import allred.jax
from allred.errors import CheckpointError, InputError, NonFiniteError
from allred.jax import TrainingState, distributed

allred.init(banner=False)
MODE = os.environ["ALLRED_MODE"]
RANK, SIZE = allred.rank(), allred.size()  # of the workers
Pair = collections.namedtuple("Pair", ["left", "right"])


def new_params():
    return {"layer": {"w": jnp.arange(6.0).reshape(2, 3)}, "rest": [jnp.ones(4), Pair(jnp.ones(()), jnp.ones((2, 1)))]}


def gradients(step, rank):
    random = np.random.default_rng(100 * step + rank)
    return jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape), jnp.float32), new_params())


def mean_gradients(step):
    return jax.tree.map(lambda *leaves: sum(leaves) / SIZE, *(gradients(step, rank) for rank in range(SIZE)))


def alone(transformation, given, params=None):
    """Return parameters and state after steps with these gradients."""
    params = new_params() if params is None else params
    state = transformation.init(params)
    for grads in given:
        updates, state = transformation.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def close(found, expected, tolerance=1e-6):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


def make():
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.1))


def shared_folder():
    name = tempfile.mkdtemp() if RANK == 0 else None
    return allred.broadcast_object(name)


@case
def steps():
    """Mode sync: the mean gradients. Mode ps with one worker: the gradients in order. Mode local: a round after every
    second step, with an outer optimizer that takes the mean. With two servers a global norm is not known."""
    options = {"every": 2, "outer": allred.optim.SGD(1.0)} if MODE == "local" else {}
    make_here = functools.partial(optax.adamw, 0.1) if os.environ.get("ALLRED_NUM_PS") else make
    optimizer, params = distributed(make_here(), **options), new_params()
    state = optimizer.init(params)
    for step in range(4):
        params, state = optimizer.step(params, state, gradients(step, RANK))
    if MODE == "local":
        expected, states = new_params(), [None] * SIZE
        for start in (0, 2):
            ends = []
            for rank in range(SIZE):
                own, kept = expected, states[rank] or make().init(expected)
                for step in (start, start + 1):
                    updates, kept = make().update(gradients(step, rank), kept, own)
                    own = optax.apply_updates(own, updates)
                ends.append(own)
                states[rank] = kept
            expected = jax.tree.map(lambda *leaves: sum(leaves) / SIZE, *ends)
    else:
        expected = alone(make_here(), map(mean_gradients, range(4)))[0]
    close(params, expected)
    if MODE == "sync":
        close(state, alone(make(), map(mean_gradients, range(4)))[1])
    assert optimizer.allred.global_step == 4
    optimizer.allred.finish()


@case
def a_step_equals_one_in_a_program():
    if MODE != "sync":
        return
    results = []
    for name in ("outside", "inside"):
        optimizer, params = distributed(make(), name=name), new_params()
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        for step in range(3):
            grads = gradients(step, RANK)
            if name == "outside":
                params, state = optimizer.step(params, state, grads, samples=RANK + 1)
            else:
                updates, state = update(grads, state, params, samples=RANK + 1)
                params = optax.apply_updates(params, updates)
        results.append((params, state))
    close(*results)


@case
def a_step_that_is_skipped_or_refused():
    if MODE != "sync":
        return
    bad = jax.tree.map(lambda leaf: leaf * (jnp.nan if RANK == SIZE - 1 else 1), gradients(0, RANK))
    optimizer, params = distributed(make(), nonfinite="skip"), new_params()
    state = optimizer.init(params)
    after = optimizer.step(params, state, bad)
    close(after, (params, state), 0)
    close(optimizer.step(*after, gradients(0, RANK))[0], alone(make(), [mean_gradients(0)])[0])
    with pytest.raises(NonFiniteError, match=rf"'layer\.w' on rank {SIZE - 1}"):
        distributed(make()).step(params, state, bad)
    with pytest.raises(InputError, match="the gradients are"):
        distributed(make()).step(params, state, {"other": jnp.ones(2)})


@case
def in_a_program_only_mode_sync():
    if MODE == "sync":
        return
    optimizer = distributed(make(), name="other")
    with pytest.raises(InputError, match=f"in mode {MODE}; use the method `step`"):
        jax.jit(optimizer.update)(new_params(), optimizer.init(new_params()), new_params())
    with pytest.raises(InputError, match=f"in mode {MODE}"):
        allred.jax.average_gradients(new_params())


@case
def a_session_in_a_program_and_outside():
    """Training that is interrupted after 4 of 6 steps, with the state, random keys and a counter. A program with numpy
    reads the parameters."""
    if MODE != "sync":
        return
    folder = shared_folder()

    def train(kind, directory, steps):
        optimizer = distributed(make(), name=kind)
        params = jax.tree.map(lambda leaf: leaf + RANK, new_params())  # those of rank 0 count
        first = TrainingState(
            params=params, opt_state=optimizer.init(params), keys=[jax.random.key(RANK)], count=0, flag=RANK == 0,
            arrays=[np.array([2**40 + RANK]), np.int64(2**40), jnp.ones(2, jnp.bfloat16)],
        )  # fmt: skip
        with allred.Session(checkpoint_dir=directory, save_steps=2, max_steps=steps) as session:
            session.track(params=first, optimizer=optimizer)
            while not session.should_stop():
                first.keys[0], key = jax.random.split(first.keys[0])
                noise = jax.random.normal(key)
                grads = jax.tree.map(lambda leaf, noise=noise: leaf + noise, gradients(first.count, RANK))
                if kind == "outside":
                    first.params, first.opt_state = optimizer.step(first.params, first.opt_state, grads)
                else:
                    updates, first.opt_state = jax.jit(optimizer.update)(grads, first.opt_state, first.params)
                    first.params = optax.apply_updates(first.params, updates)
                first.count += 1
        assert session.step == steps
        assert first.count == steps
        assert isinstance(first.count, int)
        assert first.flag is True
        assert [type(each) for each in first.arrays[:2]] == [np.ndarray, np.int64]
        assert [each.item() for each in first.arrays[:2]] == [2**40, 2**40]
        assert first.arrays[2].dtype == jnp.bfloat16
        return first.params, first.opt_state, jax.random.key_data(first.keys[0])

    whole = train("outside", f"{folder}/whole", 6)
    for kind in ("outside", "inside"):
        train(kind, f"{folder}/{kind}", 4)
        close(train(kind, f"{folder}/{kind}", 6), whole)
    for kind, number in (("outside", 9), ("inside", 0)):  # `restore` reads it too
        optimizer, params = distributed(make(), name=f"{kind} again"), jax.tree.map(jnp.zeros_like, new_params())
        found = TrainingState(
            params=params, opt_state=optimizer.init(params), keys=[jax.random.key(9)], count=number, flag=False,
            arrays=[np.array([0]), np.int64(0), jnp.zeros(2, jnp.bfloat16)],
        )  # fmt: skip
        assert optimizer.allred.restore(f"{folder}/{kind}", found) == 6
        close((found.params, found.opt_state, jax.random.key_data(found.keys[0])), whole)
        assert found.count == 6
    with pytest.raises(InputError, match=r"take an allred\.jax\.TrainingState"):
        optimizer.allred.save(folder, params)
    saved = allred.checkpoint.read_checkpoint(allred.checkpoint.newest(f"{folder}/whole")).params
    assert set(saved) == {"layer.w", "rest.0", "rest.1.left", "rest.1.right"}
    np.testing.assert_array_equal(saved["layer.w"], whole[0]["layer"]["w"])


@case
def save_and_restore():
    optimizer = distributed(make())  # a parameter server serves here
    folder, params = shared_folder(), new_params()
    training = TrainingState(params=params, opt_state=optimizer.init(params), key=jax.random.key(7))
    assert optimizer.allred.restore(folder, training) is None
    for step in range(2):
        training.params, training.opt_state = optimizer.step(training.params, training.opt_state, gradients(step, RANK))
    if MODE == "sync":
        state = training.opt_state
        optimizer.allred.save(folder, training)
        allred.barrier()
        other = distributed(make(), name="other")
        empty = jax.tree.map(jnp.zeros_like, params)
        found = TrainingState(params=empty, opt_state=other.init(empty), key=jax.random.key(0))
        assert other.allred.restore(folder, found) == 2
        close(found.params, training.params, 0)
        close(found.opt_state, state, 0)
        assert (jax.random.key_data(found.key) == jax.random.key_data(training.key)).all()
        small = distributed(optax.sgd(0.1), name="small")
        with pytest.raises(InputError, match="the state of optax has the arrays"):
            small.allred.restore(folder, TrainingState(params=empty, opt_state=small.init(empty)))
        less = {"layer": empty["layer"]}
        other = distributed(make(), name="less")
        with pytest.raises(CheckpointError, match="another model"):
            other.allred.restore(folder, TrainingState(params=less, opt_state=other.init(less)))
    optimizer.allred.finish()


@case
def numpy_parameters_that_the_program_changes():
    if MODE != "sync":
        return
    optimizer, params = distributed(optax.sgd(1.0)), {"w": np.zeros(2, np.float32)}
    state, grads = optimizer.init(params), {"w": np.full(2, RANK, np.float32)}
    with pytest.raises(NonFiniteError):
        optimizer.step(params, state, {"w": jnp.full(2, jnp.nan)})
    params["w"] += 100
    close(optimizer.step(params, state, grads)[0], {"w": jnp.full(2, 100 - (SIZE - 1) / 2)})
    assert (grads["w"] == RANK).all()
    for shape in ((3,), (2, 2)):
        close(optimizer.step({"w": jnp.ones(shape)}, state, {"w": jnp.ones(shape)})[0], {"w": jnp.zeros(shape)})


@case
def broadcast():
    if MODE != "sync":
        return
    optimizer = distributed(make())
    params = jax.tree.map(lambda leaf: leaf + RANK, new_params())
    state = jax.tree.map(lambda leaf: leaf + RANK, optimizer.init(params))
    training = TrainingState(params=params, opt_state=state, key=jax.random.key(RANK), name="kept")
    optimizer.allred.broadcast(training, root=SIZE - 1)
    close(training.params, jax.tree.map(lambda leaf: leaf + SIZE - 1, new_params()))
    assert int(training.opt_state[1][0].count) == SIZE - 1
    assert training.name == "kept"
    assert (jax.random.key_data(training.key) == jax.random.key_data(jax.random.key(SIZE - 1))).all()


run_cases()
