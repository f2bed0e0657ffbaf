"""Cases of averaged gradients in allred.jax; test_cases.py runs it.

Expected values come from one process: each rank also trains on the global batches alone.
"""

import collections
import contextlib
import functools
import importlib
import io

import equinox as eqx
import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizer_case_runner import case, run_cases

import allred
import allred.jax
from allred.errors import DriftError, InputError, MismatchError, NonFiniteError
from allred.jax import average_gradients, broadcast_params, distributed, raise_allred_errors

enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else importlib.import_module("jax.experimental").enable_x64
allred.init(banner=False)
RANK, SIZE = allred.rank(), allred.size()
MEAN = (SIZE - 1) / 2


def batch(step, rank, size=None):
    """Images and labels of one rank; ranks have 3, 4, ... samples."""
    random = np.random.default_rng(1000 * step + rank)
    x = random.normal(size=(3 + rank if size is None else size, 8)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int32) + (x[:, 1] > 0)


def global_batch(step):
    return tuple(map(np.concatenate, zip(*(batch(step, rank) for rank in range(SIZE)), strict=True)))


def new_params(seed):
    first, second = jax.random.split(jax.random.key(seed))
    return {
        "hidden": {"w": jax.random.normal(first, (8, 16)) / 3, "b": jnp.zeros(16)},
        "out": [jax.random.normal(second, (16, 3)) / 4, jnp.zeros(3)],
    }


def loss_of(params, x, y):
    hidden = jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"])
    logits = hidden @ params["out"][0] + params["out"][1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def close(found, expected, tolerance=1e-6):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


def equal_on_all_ranks(tree):
    text = str([np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)])
    return len(set(allred.allgather_object(text))) == 1


def train(optimizer, seed, batches, jit=True, broadcasts=True, with_params=True, counts=True):
    params = new_params(seed)
    if broadcasts:
        params = broadcast_params(params)
    state = optimizer.init(params)

    def step(params, state, x, y):
        grads = jax.grad(loss_of)(params, x, y)
        more = {"samples": len(x)} if counts else {}
        updates, state = optimizer.update(grads, state, params if with_params else None, **more)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step) if jit else step
    for x, y in batches:
        params, state = step(params, state, x, y)
    return params


def alone(make, steps=4):
    """Return the parameters of one rank that trains on the global batches."""
    return train(optax.with_extra_args_support(make()), 0, map(global_batch, range(steps)), broadcasts=False)


CHAIN = functools.partial(optax.chain, optax.clip_by_global_norm(0.3))


@case
def training_equals_one_rank_on_the_global_batch():
    """Also with batches of different sizes, with and without jit and parameters, with clipping, inside of batches."""
    for make, jit, with_params in (
        (lambda: optax.sgd(0.1), False, False),
        (lambda: CHAIN(optax.adam(1e-2)), True, False),
        (lambda: optax.adamw(1e-2), True, True),
    ):
        batches = (batch(step, RANK) for step in range(4))
        found = train(distributed(make()), RANK, batches, jit, with_params=with_params)
        close(found, alone(make))
        assert equal_on_all_ranks(found)


@case
def samples_are_known_inside_of_batches():
    x, y = map(np.concatenate, zip(*map(global_batch, range(4)), strict=True))
    make = lambda: optax.sgd(0.1)  # noqa: E731
    data = allred.data.batches(x, y, batch_size=7, epochs=2, seed=None)
    found = train(distributed(make()), RANK, data, counts=False)
    order = [slice(start, start + 7) for start in range(0, len(x), 7)]
    expected = train(
        optax.with_extra_args_support(make()), 0, [(x[part], y[part]) for part in order * 2], broadcasts=False
    )
    close(found, expected)


@case
def accumulation():
    make = lambda: optax.MultiSteps(distributed(optax.sgd(0.1), name="accumulated"), 3)  # noqa: E731
    batches = [batch(step, RANK, 4) for step in range(6)]
    found = train(make().gradient_transformation(), RANK, batches, counts=False)
    whole = [
        tuple(map(np.concatenate, zip(*(batch(s, r, 4) for s in part for r in range(SIZE)), strict=True)))
        for part in ((0, 1, 2), (3, 4, 5))
    ]
    close(found, train(optax.with_extra_args_support(optax.sgd(0.1)), 0, whole, broadcasts=False))
    for name, value in (("accumulate", 2), ("scaler", allred.GradScaler()), ("sharded", True), ("clip_norm", 1.0)):
        with pytest.raises(InputError, match=f"{name} is not available with JAX"):
            distributed(optax.sgd(0.1), **{name: value})


@case
def training_in_a_scan():
    optimizer, params = distributed(optax.sgd(0.1)), broadcast_params(new_params(RANK))
    xs, ys = (np.stack(each) for each in zip(*(batch(step, RANK, 4) for step in range(6)), strict=True))

    @jax.jit
    def train_all(params, state, xs, ys):
        def step(carry, data):
            params, state = carry
            loss, grads = jax.value_and_grad(loss_of)(params, *data)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), allred.jax.allreduce(loss)

        return jax.lax.scan(step, (params, state), (xs, ys))

    (found, _), losses = train_all(params, optimizer.init(params), xs, ys)
    whole = [tuple(map(np.concatenate, zip(*(batch(s, r, 4) for r in range(SIZE)), strict=True))) for s in range(6)]
    close(found, train(optax.with_extra_args_support(optax.sgd(0.1)), 0, whole, broadcasts=False))
    assert equal_on_all_ranks(losses)


@case
def a_wrapper_inside_decides_by_the_mean():
    optimizer = distributed(optax.apply_if_finite(optax.sgd(1.0), 5), nonfinite="ignore")
    params, update = {"w": jnp.zeros(2)}, jax.jit(optimizer.update)
    state = optimizer.init(params)
    for value in (1.0, jnp.nan if RANK == SIZE - 1 else 1.0, 10.0):
        updates, state = update({"w": jnp.full(2, value)}, state, params)
        params = optax.apply_updates(params, updates)
    close(params, {"w": jnp.full(2, -11.0)})


@case
def one_rank_is_left_unchanged():
    """optax's property of wrappers: with one rank the updates and the state are those of the inner transformation."""
    first = allred.ProcessSet([0])
    if RANK:
        return
    for inner in (CHAIN(optax.adamw(0.1)), optax.adafactor(0.1)):
        wrapped = distributed(inner, process_set=first)
        params = new_params(0)
        states = inner.init(params), wrapped.init(params)
        for step in range(3):
            grads = jax.grad(loss_of)(params, *batch(step, 0))
            one, other = (
                jax.jit(each.update)(grads, state, params) for each, state in zip((inner, wrapped), states, strict=True)
            )
            close(other, one, 0)
            states = one[1], other[1]
        assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])


Pair = collections.namedtuple("Pair", ["left", "right"])


@case
def forms_of_gradients():
    w = jnp.full((2, 3), float(RANK))
    for tree in (w, {"w": w}, [w, (w[0], w[0, 0])], Pair({"a": w}, [w]), {1: w, 2: [w]}, {"none": None, "w": w}):
        expected = jax.tree.map(lambda leaf: jnp.full(leaf.shape, MEAN), tree)
        close(average_gradients(tree), expected)
        close(jax.jit(average_gradients)(tree), expected)
        close(average_gradients(tree, params=expected), expected)
    with pytest.raises(InputError, match=r"the name 'a\.b'"):
        average_gradients({"a": {"b": w}, "a.b": w})
    for tree in ({}, [], None):
        assert average_gradients(tree) == tree
        assert jax.jit(average_gradients)(tree) == tree
    close(average_gradients({"empty": jnp.zeros((0, 2)), "w": w})["w"], jnp.full((2, 3), MEAN))
    close(average_gradients({"w": np.full((2, 3), RANK, np.float32)[::-1].T})["w"], jnp.full((3, 2), MEAN))
    close(average_gradients({"w": float(RANK)})["w"], MEAN)
    for dtype in ("float16", "bfloat16", "float32"):
        found = jax.jit(average_gradients)({"w": jnp.full(5, RANK, dtype)})["w"]
        assert found.dtype == dtype
        close(found.astype(float), jnp.full(5, MEAN))
    with enable_x64(True):
        close(average_gradients({"w": jnp.full(5, RANK + 1e-12)})["w"], np.full(5, MEAN + 1e-12), 1e-15)
    close(average_gradients({"w": w}, op=allred.Sum)["w"], jnp.full((2, 3), SIZE * MEAN))
    assert isinstance(average_gradients(Pair(w, w)), Pair)


@case
def samples_are_weights():
    w = jnp.full(3, float(RANK))
    total = sum(rank + 1 for rank in range(SIZE))
    expected = jnp.full(3, sum(rank * (rank + 1) for rank in range(SIZE)) / total)
    for samples in (RANK + 1, np.int64(RANK + 1), np.array(RANK + 1, np.uint8), jnp.array(RANK + 1)):
        close(average_gradients({"w": w}, samples)["w"], expected)
        close(jax.jit(average_gradients)({"w": w}, samples)["w"], expected)
    if SIZE > 1:
        found = average_gradients({"w": jnp.full(3, jnp.nan if RANK == 0 else 1.0)}, samples=min(RANK, 1))
        close(found["w"], jnp.ones(3))


@case
def gradients_that_are_not_finite():
    value = jnp.array([1.0, jnp.nan if RANK == SIZE - 1 else 1.0])
    for function in (average_gradients, jax.jit(average_gradients)):
        with pytest.raises(NonFiniteError, match=rf"'a\.b\.1' on rank {SIZE - 1}") as caught, raise_allred_errors():
            function({"a": {"b": [value[:1], value]}})
        assert len(set(allred.allgather_object(str(caught.value)))) == 1
        with pytest.raises(NonFiniteError, match="the array"), raise_allred_errors():
            function(value)
    found = average_gradients({"w": value}, nonfinite="ignore")["w"]
    assert np.isnan(found[1])
    assert found[0] == 1
    with pytest.raises(InputError, match=r"allred\.jax\.distributed"):
        average_gradients({"w": value}, nonfinite="skip")
    optimizer = distributed(optax.adam(0.1), nonfinite="skip", name="skipping")
    state = optimizer.init({"w": value})
    for update in (optimizer.update, jax.jit(optimizer.update)):
        updates, after = update({"w": value}, state)
        close(updates, {"w": jnp.zeros(2)}, 0)
        close(after, state, 0)
        updates, after = update({"w": jnp.ones(2)}, state)
        assert float(updates["w"][1]) < 0
        assert after[0].count == 1


def raise_mismatch(text):
    return pytest.raises(MismatchError, match=text)


@case
def mistakes_are_found():
    if SIZE == 1:
        return
    with pytest.raises(MismatchError, match=r"float32 \(3,\)"), raise_allred_errors():
        jax.jit(average_gradients)({"w": jnp.ones(2 + RANK)})
    with pytest.raises(DriftError, match=r"'w'"), raise_allred_errors():
        jax.jit(average_gradients)({"w": jnp.ones(4)}, params={"w": jnp.ones(4) * RANK})
    with pytest.raises(InputError, match="differ in structure"):
        average_gradients({"w": jnp.ones(2)}, params={"v": jnp.ones(2)})
    with pytest.raises(InputError, match=r"optax\.GradientTransformation"):
        distributed(allred.optim.SGD(0.1))
    with pytest.raises(InputError, match="int32"):
        average_gradients({"w": jnp.ones(2, jnp.int32)})
    for samples in (-1, 2.5, jnp.ones(2, int), 2**31, np.int64(2**32 + 1), np.uint64(2**40), np.array(2**40)):
        with pytest.raises(InputError, match="samples"), raise_allred_errors():
            average_gradients({"w": jnp.ones(2)}, samples=samples)
    programs = [jax.jit(lambda w: average_gradients({"w": w})), jax.jit(lambda w: average_gradients({"w": w * 2}))]
    for number, program in enumerate(programs):
        program.__wrapped__.__name__ = f"program_{number}"
    for program in (programs[RANK % 2], programs[(RANK + 1) % 2]):
        with raise_mismatch(r"jit_program_(0.*jit_program_1|1.*jit_program_0)"), raise_allred_errors():
            program(jnp.ones(3))
    text = io.StringIO()
    with contextlib.redirect_stderr(text), contextlib.redirect_stdout(text):
        for _ in range(3):
            average_gradients({"w": jnp.arange(70.0)}, name="equal")
    if RANK == 0:
        assert "all ranks have the same gradients" in text.getvalue(), text.getvalue()


@case
def compression():
    found = jax.jit(functools.partial(average_gradients, compression=allred.Compression.fp16))(
        {"w": jnp.full(9, RANK + 1e-5)}
    )
    close(found["w"], jnp.full(9, MEAN), 1e-3)


@case
def modules_of_flax_linen():
    class Net(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x):
            return flax.linen.Dense(3)(jnp.tanh(flax.linen.Dense(16)(x)))

    net, optimizer = Net(), distributed(optax.adam(1e-2))
    results = []
    for is_alone in (False, True):
        params = net.init(jax.random.key(0 if is_alone else RANK), jnp.zeros((1, 8)))
        params = params if is_alone else broadcast_params(params)
        inner = optax.with_extra_args_support(optax.adam(1e-2)) if is_alone else optimizer
        state = inner.init(params)

        @jax.jit
        def step(params, state, x, y, inner=inner):
            def loss(params):
                return optax.softmax_cross_entropy_with_integer_labels(net.apply(params, x), y).mean()

            updates, state = inner.update(jax.grad(loss)(params), state, params, samples=len(x))
            return optax.apply_updates(params, updates), state

        for number in range(4):
            data = global_batch(number) if is_alone else batch(number, RANK)
            params, state = step(params, state, *data)
        results.append(params)
    close(*results)


@case
def modules_of_flax_nnx():
    class Net(flax.nnx.Module):
        def __init__(self, rngs):
            self.hidden, self.out = flax.nnx.Linear(8, 16, rngs=rngs), flax.nnx.Linear(16, 3, rngs=rngs)

        def __call__(self, x):
            return self.out(jnp.tanh(self.hidden(x)))

    def run(is_alone):
        net = Net(flax.nnx.Rngs(0 if is_alone else RANK))
        if not is_alone:
            flax.nnx.update(net, broadcast_params(flax.nnx.state(net)))
        inner = optax.with_extra_args_support(optax.adam(1e-2)) if is_alone else distributed(optax.adam(1e-2))
        optimizer = flax.nnx.Optimizer(net, inner, wrt=flax.nnx.Param)

        @flax.nnx.jit
        def step(net, optimizer, x, y):
            def loss(net):
                return optax.softmax_cross_entropy_with_integer_labels(net(x), y).mean()

            optimizer.update(net, flax.nnx.grad(loss)(net), samples=len(x))

        for number in range(4):
            step(net, optimizer, *(global_batch(number) if is_alone else batch(number, RANK)))
        return flax.nnx.to_pure_dict(flax.nnx.state(net, flax.nnx.Param))

    close(run(False), run(True))


@case
def modules_of_equinox():
    def run(is_alone):
        net = eqx.nn.MLP(8, 3, 16, 1, activation=jnp.tanh, key=jax.random.key(0 if is_alone else RANK))
        net = net if is_alone else broadcast_params(net)
        inner = optax.with_extra_args_support(optax.adam(1e-2)) if is_alone else distributed(optax.adam(1e-2))
        state = inner.init(eqx.filter(net, eqx.is_array))

        @eqx.filter_jit
        def step(net, state, x, y):
            def loss(net):
                return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(net)(x), y).mean()

            params = eqx.filter(net, eqx.is_array)
            updates, state = inner.update(eqx.filter_grad(loss)(net), state, params, samples=len(x))
            return eqx.apply_updates(net, updates), state

        for number in range(4):
            net, state = step(net, state, *(global_batch(number) if is_alone else batch(number, RANK)))
        return eqx.filter(net, eqx.is_array)

    close(run(False), run(True))


run_cases()
