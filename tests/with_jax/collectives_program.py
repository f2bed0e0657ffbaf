"""Cases of the collectives of allred.jax; test_cases.py runs it."""

import functools
import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from optimizer_case_runner import case, run_cases

import allred
import allred.jax
from allred.errors import InputError, MismatchError
from allred.jax import allgather, allreduce, broadcast, grouped_allreduce, raise_allred_errors

enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else importlib.import_module("jax.experimental").enable_x64
allred.init(banner=False)
RANK, SIZE = allred.rank(), allred.size()
X = jnp.arange(1.0, 5.0) + RANK
MEAN = jnp.arange(1.0, 5.0) + (SIZE - 1) / 2


def loss(x):
    return jnp.sum(allreduce(x) ** 2)


def check(found, expected):
    """Compare trees of arrays, within 1e-6."""
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def rows(function, x=X):
    return function(jnp.stack([x, 2 * x, 3 * x]))


# Derivatives, and the control flow of JAX.


@case
def derivatives():
    gradient = 2 * MEAN
    check(jax.grad(loss)(X), gradient)
    check(jax.jit(jax.grad(loss))(X), gradient)
    check(jax.grad(jax.jit(loss))(X), gradient)
    check(jax.jit(jax.grad(jax.jit(loss)))(X), gradient)
    check(jax.value_and_grad(loss)(X), (jnp.sum(MEAN**2), gradient))
    check(jax.jvp(loss, (X,), (X,)), (jnp.sum(MEAN**2), jnp.sum(gradient * MEAN)))
    check(jax.linearize(loss, X)[1](X), jnp.sum(gradient * MEAN))
    check(jax.hessian(loss)(X), 2 * jnp.eye(4))
    check(jax.jit(jax.hessian(loss))(X), 2 * jnp.eye(4))
    check(jax.jacrev(allreduce)(X), jnp.eye(4))
    check(jax.grad(lambda x: jnp.sum(allreduce(x, allred.Sum) ** 2))(X), 2 * SIZE * SIZE * MEAN)


@case
def only_some_arrays_of_a_group_are_differentiated():
    def function(x, y):
        first, count, second = grouped_allreduce([x, jnp.ones((), jnp.int32), y], allred.Sum)
        return jnp.sum(first * count) + jnp.sum(second)

    check(jax.grad(function)(X, X), SIZE * SIZE * jnp.ones(4))
    check(jax.grad(function, argnums=(0, 1))(X, X), (SIZE * SIZE * jnp.ones(4), SIZE * jnp.ones(4)))


@case
def custom_derivatives():
    check(jax.grad(lambda x: jax.nn.relu(allreduce(x)).sum())(X), jnp.ones(4))

    @jax.custom_vjp
    def doubled(x):
        return allreduce(x)

    doubled.defvjp(lambda x: (allreduce(x), None), lambda _, g: (2 * allreduce(g),))
    check(jax.grad(lambda x: doubled(x).sum())(X), 2 * jnp.ones(4))
    check(jax.jit(jax.grad(lambda x: doubled(x).sum()))(X), 2 * jnp.ones(4))


@case
def vmap():
    expected = rows(lambda x: x, MEAN)
    check(rows(jax.vmap(allreduce)), expected)
    check(rows(jax.jit(jax.vmap(allreduce))), expected)
    check(rows(jax.vmap(jax.grad(loss))), 2 * expected)
    check(rows(jax.jit(jax.vmap(jax.grad(loss)))), 2 * expected)
    check(jax.vmap(allreduce, in_axes=1, out_axes=1)(jnp.stack([X, X], 1)), jnp.stack([MEAN, MEAN], 1))
    both = jax.vmap(lambda x, y: grouped_allreduce([x, y]), in_axes=(0, None))(jnp.stack([X, X]), X)
    check(both, (jnp.stack([MEAN, MEAN]), jnp.stack([MEAN, MEAN])))
    gathered = jax.vmap(allgather)(jnp.stack([X, 2 * X]))
    check(gathered, jnp.stack([allgather(X), allgather(2 * X)]))
    check(jax.vmap(allgather, in_axes=1)(jnp.stack([X, 2 * X], 1)), gathered)
    check(rows(jax.vmap(lambda x: broadcast(x, SIZE - 1))), rows(lambda x: broadcast(x, SIZE - 1)))


@case
def scan():
    def body(carry, _):
        return allreduce(carry) + 1, carry.sum()

    def function(x):
        return jax.lax.scan(body, x, None, length=1000)[0]

    check(jax.jit(function)(X), MEAN + 1000)
    check(jax.jit(jax.grad(lambda x: jnp.sum(function(x) ** 2)))(X), 2 * (MEAN + 1000))
    check(jax.grad(lambda x: function(x).sum())(X), jnp.ones(4))
    check(jax.vmap(function)(jnp.stack([X, X])), jnp.stack([MEAN, MEAN]) + 1000)
    check(jax.lax.map(allreduce, jnp.stack([X, X])), jnp.stack([MEAN, MEAN]))


@case
def while_and_fori():
    check(jax.lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, allreduce(c[1])), (0, X)), (5, MEAN))
    check(jax.jit(lambda x: jax.lax.fori_loop(0, 5, lambda _, c: allreduce(c), x))(X), MEAN)
    rounds = jax.lax.while_loop(lambda c: allreduce(c[1]).sum() < 100, lambda c: (c[0] + 1, c[1] + 1), (0, X))[0]
    assert set(allred.allgather_object(int(rounds))) == {int(np.ceil((100 - MEAN.sum()) / 4))}
    check(rows(jax.vmap(lambda x: jax.lax.fori_loop(0, 3, lambda _, c: allreduce(c), x))), rows(lambda x: x, MEAN))


@case
def cond():
    def choose(x, reduces):
        return jax.lax.cond(reduces, allreduce, lambda x: x, x)

    check(jax.jit(choose)(X, True), MEAN)
    check(jax.jit(choose)(X, False), X)
    check(jax.grad(lambda x: jnp.sum(choose(x, x.sum() > 0) ** 2))(X), 2 * MEAN)
    check(jax.vmap(choose)(jnp.stack([X, X]), jnp.array([True, False])), jnp.stack([MEAN, X]))


@case
def checkpoint():
    check(jax.grad(jax.checkpoint(loss))(X), 2 * MEAN)
    check(jax.jit(jax.grad(jax.checkpoint(loss)))(X), 2 * MEAN)
    body = jax.checkpoint(lambda carry, _: (jnp.sin(allreduce(carry)), None))
    plain = lambda carry, _: (jnp.sin(allreduce(carry)), None)  # noqa: E731
    gradients = [
        jax.grad(lambda x, body=body: jnp.sum(jax.lax.scan(body, x, None, length=5)[0]))(X) for body in (body, plain)
    ]
    check(*gradients)


@case
def donated_memory():
    function = jax.jit(allreduce, donate_argnums=0)
    for _ in range(3):
        check(function(X + 0), MEAN)
    kept = jnp.ones(100_000) * RANK
    check(jax.jit(lambda x: (allreduce(x), x))(kept), (jnp.full(100_000, (SIZE - 1) / 2), jnp.full(100_000, RANK)))
    check(kept, jnp.full(100_000, RANK))


# Order.


@case
def many_operations_that_do_not_depend_on_each_other():
    """XLA runs independent operations of large arrays at the same time; equal shapes could be exchanged."""
    inner = jax.jit(lambda x: allreduce(x * 2))
    x = jnp.full(30_000, float(RANK))

    @jax.jit
    def program(x):
        return [inner(x + k) for k in range(20)] + [allreduce(x + k) for k in range(20)] + [inner(x - 1)]

    mean = (SIZE - 1) / 2
    expected = [2 * (mean + k) for k in range(20)] + [mean + k for k in range(20)] + [2 * (mean - 1)]
    for _ in range(5):
        assert [float(each[0]) for each in program(x)] == expected


@case
def functions_and_loops_with_operations_in_one_program():
    def loop(x, length):
        return jax.lax.scan(lambda c, _: (allreduce(c), None), x, None, length=length)[0]

    inner = jax.jit(loop, static_argnums=1)
    program = jax.jit(lambda x: (loop(x, 3), inner(x + 1, 2), allreduce(x + 2), inner(x + 3, 2)))
    x = jnp.full(30_000, float(RANK))
    for _ in range(5):
        assert [float(each[0]) for each in program(x)] == [(SIZE - 1) / 2 + k for k in range(4)]


@case
def one_operation_without_an_order():
    one = jax.jit(functools.partial(allreduce, ordered=False))
    for _ in range(10):
        check(one(X), MEAN)
    two = jax.jit(lambda x: allreduce(x, ordered=False) + allreduce(x * 2, ordered=False))
    nested = jax.jit(lambda x: one(x) + 1)
    for function in (two, nested) if SIZE > 1 else ():
        with pytest.raises(InputError, match="ordered=False, but"):
            function(X)


@case
def the_same_program_on_equal_and_other_shapes():
    function = jax.jit(allreduce)
    for count, shape in itertools.product((1, 2), ((), (0,), (3,), (2, 0, 3), (5, 2), (70_000,))):
        check(function(jnp.full(shape, float(RANK * count))), jnp.full(shape, count * (SIZE - 1) / 2))


@case
def beside_an_ordered_callback_and_compiled_ahead_of_time():
    seen = []

    @jax.jit
    def program(x):
        io_callback(lambda value: seen.append(float(value)), None, x[0], ordered=True)
        return allreduce(x)

    for _ in range(3):
        check(program(X), MEAN)
    jax.effects_barrier()
    assert seen == [float(X[0])] * 3
    for compiled in (program.lower(X).compile(), jax.jit(lambda x: allreduce(x) + 1).lower(X).compile()):
        results = [compiled(X) for _ in range(3)]
        check(results[1:], results[:1] * 2)


# Dtypes, operators, collectives.


@case
def dtypes():
    both = jnp.ones(3, bool), [jnp.ones(3, dtype) for dtype in ("uint8", "int8", "int16", "uint16", "int32", "uint32")]
    floats = [jnp.full((2, 2), RANK, dtype) for dtype in ("float16", "bfloat16", "float32")]
    for run in (lambda f, *a: f(*a), lambda f, *a: jax.jit(f)(*a)):
        found = run(lambda *a: grouped_allreduce(a, allred.Sum), *both[1])
        assert [(each.dtype, each.tolist()) for each in found] == [(each.dtype, [SIZE] * 3) for each in both[1]]
        found = run(lambda *a: grouped_allreduce(a), *floats)
        assert [each.dtype for each in found] == [each.dtype for each in floats]
        check([each.astype(float) for each in found], [jnp.full((2, 2), (SIZE - 1) / 2)] * 3)
        assert run(lambda a: allreduce(a, allred.Max), jnp.array([RANK == 0, False])).tolist() == [True, False]
        assert run(lambda a: allreduce(a, allred.Min), jnp.array(RANK)).item() == 0
        assert run(lambda a: allreduce(a, allred.Product), jnp.array(2.0)).item() == 2.0**SIZE
    with enable_x64(True):
        check(jax.jit(allreduce)(jnp.array([1e-300, 1.0]) * (RANK + 1)), np.array([1e-300, 1.0]) * (SIZE + 1) / 2)
        assert allreduce(jnp.array(2**40 + RANK), allred.Max).item() == 2**40 + SIZE - 1


@case
def forms_of_values():
    assert allreduce(float(RANK)).item() == (SIZE - 1) / 2
    check(allreduce([1.0, RANK]), jnp.array([1.0, (SIZE - 1) / 2]))
    check(allreduce(np.full((2, 3), RANK, np.float32)[::-1].T), jnp.full((3, 2), (SIZE - 1) / 2))
    check(allreduce(jnp.arange(6.0).reshape(2, 3).T), jnp.arange(6.0).reshape(2, 3).T)
    assert grouped_allreduce([]) == []
    check(grouped_allreduce([jnp.zeros((0, 2)), jnp.ones(())]), [jnp.zeros((0, 2)), jnp.ones(())])
    many = [jnp.full(k % 3, float(RANK)) for k in range(300)]
    check(jax.jit(grouped_allreduce)(many), [jnp.full(k % 3, (SIZE - 1) / 2) for k in range(300)])
    check(grouped_allreduce(many), [jnp.full(k % 3, (SIZE - 1) / 2) for k in range(300)])


@case
def one_array_twice_and_without_jit():
    found = jax.jit(lambda x: grouped_allreduce([x, x, x[:2]]))(X)
    check(found, [MEAN, MEAN, MEAN[:2]])
    with jax.disable_jit():
        check(allreduce(X), MEAN)
        check(jax.jit(jax.grad(loss))(X), 2 * MEAN)
        check(broadcast(jnp.array(RANK), SIZE - 1), jnp.array(SIZE - 1))


@case
def gather_and_broadcast():
    assert allgather(jnp.array(RANK)).tolist() == list(range(SIZE))
    assert jax.jit(allgather)(jnp.array([[RANK, 2 * RANK]])).tolist() == [[rank, 2 * rank] for rank in range(SIZE)]
    assert allgather(jnp.arange(RANK + 1)).tolist() == [k for rank in range(SIZE) for k in range(rank + 1)]
    factors = jnp.arange(2.0 * SIZE)
    gradient = jax.grad(lambda x: (allgather(x) * factors * (RANK + 1)).sum())(jnp.ones(2))
    check(gradient, factors[2 * RANK : 2 * RANK + 2] * SIZE * (SIZE + 1) / 2)
    for function in (broadcast, jax.jit(broadcast, static_argnums=1)):
        check(function(jnp.array([RANK, 1]), SIZE - 1), jnp.array([SIZE - 1, 1]))
    gradient = jax.jit(jax.grad(lambda x: (broadcast(x) * (RANK + 1)).sum()))(jnp.ones(2))
    check(gradient, jnp.full(2, SIZE * (SIZE + 1) / 2 * (RANK == 0)))


@case
def broadcast_of_trees():
    seed = jax.random.key(RANK), jax.random.PRNGKey(RANK), jax.random.split(jax.random.key(RANK, impl="rbg"), 2)
    tree = {"a": [X, np.float32(RANK)], "key": seed, "name": "kept", "none": None, "function": len, "flag": RANK == 0}
    found = allred.jax.broadcast_params(tree, root=SIZE - 1)
    check(found["a"], [jnp.arange(1.0, 5.0) + SIZE - 1, SIZE - 1])
    assert found["name"] == "kept"
    assert found["function"] is len
    assert found["flag"] is (RANK == 0)
    draws = [float(jax.random.normal(found["key"][0])), float(jax.random.normal(found["key"][2][1]))]
    assert len(set(allred.allgather_object(str(draws)))) == 1


@case
def process_sets():
    if SIZE < 3:
        return
    first = allred.ProcessSet([0, 1])
    if RANK < 2:
        check(jax.jit(lambda x: allreduce(x, process_set=first))(X), jnp.arange(1.0, 5.0) + 0.5)
        check(jax.grad(lambda x: allreduce(x, process_set=first).sum())(X), jnp.ones(4))
        assert allgather(jnp.array(RANK), process_set=first).tolist() == [0, 1]
    else:
        with pytest.raises(InputError, match="not in"):
            allreduce(X, process_set=first)


# Errors.


@case
def differences_between_ranks():
    """The texts are the same on all ranks, and name the operation."""
    if SIZE == 1:
        return
    for function in (allreduce, jax.jit(lambda x: allreduce(x, name="loss"))):
        with pytest.raises(MismatchError) as caught, raise_allred_errors():
            function(jnp.ones(3 + RANK))
        assert len(set(allred.allgather_object(str(caught.value)))) == 1
        assert f"float32 ({3 + RANK},) on rank {RANK}" in str(caught.value)
    one, other = (lambda x: allreduce(x)), (lambda x: allreduce(x) + 1)
    one.__name__, other.__name__ = "one", "other"
    with pytest.raises(MismatchError, match=r"jit_other.*rank 0; .*jit_one.* ranks? 1"), raise_allred_errors():
        jax.jit(one if RANK else other)(X)
    function = jax.jit(lambda x: allreduce(x, name="again"))
    function(X[:4])
    for _ in range(2):
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=r"ABORTED.*float32"):
            function(jnp.ones(3 + RANK))
        with pytest.raises(MismatchError, match="'again"), raise_allred_errors():
            function(jnp.ones(3 + RANK))
    check(allreduce(X), MEAN)


@case
def what_is_refused_on_each_rank():
    if SIZE == 1:  # no call is made, so Max has a derivative
        return
    for function, value, text in (
        (allreduce, jnp.ones(2, jnp.int32), "op=allred.Average needs floats, got int32"),
        (allreduce, jnp.ones(2, jnp.complex64), "complex64"),
        (allreduce, jnp.ones(2, jnp.float8_e4m3fn), "float8"),
        (allreduce, jax.random.key(0), "key"),
        (jax.grad(lambda x: allreduce(x, allred.Max).sum()), X, "no derivative"),
        (jax.vmap(lambda x: allred.jax.average_gradients({"w": x})["w"]), jnp.ones((2, 2)), "jax.vmap"),
        (jax.grad(lambda x: allred.jax.average_gradients({"w": x})["w"].sum()), X, "no derivative"),
    ):
        with pytest.raises(InputError, match=text):
            function(value)
        with pytest.raises(InputError, match=text):
            jax.jit(function)(value)
    with pytest.raises(InputError, match="op="):
        allreduce(X, op="mean of all")


@case
def several_devices_of_one_rank():
    devices = jax.devices()
    if len(devices) < 2:
        return
    mesh = jax.sharding.Mesh(np.array(devices), ("device",))
    spec = jax.sharding.PartitionSpec("device")
    function = jax.shard_map(allreduce, mesh=mesh, in_specs=spec, out_specs=spec)
    with pytest.raises(InputError, match="2 devices of this process"):
        jax.jit(function)(X)
    with pytest.raises(InputError, match="second device"), raise_allred_errors():
        jax.jit(allreduce)(jax.device_put(X, devices[1]))
    check(allreduce(X), MEAN)


@case
def one_rank_makes_no_call():
    alone = allred.ProcessSet([0])
    if RANK == 0:
        text = jax.jit(lambda x: allreduce(x, process_set=alone)).lower(X).as_text()
        assert "custom_call" not in text
        check(allreduce(X, process_set=alone), X)
        check(allgather(X, process_set=alone), X)
        check(broadcast(X, process_set=alone), X)
    assert ("custom_call" in jax.jit(allreduce).lower(X).as_text()) == (SIZE > 1)


run_cases()
