"""The decorator over many ranks: what it computes is what one rank computes from the global batch."""

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI
from scipy.optimize import minimize

import allred
from allred import checkpoint, nest, optim
from allred.errors import InputError, MismatchError, NonFiniteError
from allred.modes import load_checkpoint

pytestmark = pytest.mark.mpi

ROWS, FEATURES = 1437, 16


def problem(dtype=np.float64):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(ROWS, FEATURES)).astype(dtype)
    return x, (x @ rng.normal(size=FEATURES) + 0.1 * rng.normal(size=ROWS)).astype(dtype)


def start(dtype=np.float64):
    return {"w": np.zeros(FEATURES, dtype), "deep": [np.zeros((), dtype), np.zeros((0, 2), dtype)]}


def grads_of(params, x, y):
    error = x @ params["w"] + params["deep"][0] - y
    n = max(len(x), 1)
    return {"w": x.T @ error / n, "deep": [np.asarray(error.sum() / n, x.dtype), np.zeros((0, 2), x.dtype)]}


def train(opt, batch_size, dtype=np.float64, **options):
    params = start(dtype)
    for x, y in allred.data.batches(*problem(dtype), batch_size=batch_size, epochs=3, seed=7, **options):
        opt.step(params, grads_of(params, x, y))
    return params


@pytest.mark.parametrize("batch_size", [200, 479])
@pytest.mark.parametrize("count", [2, 3])
def test_towers_within_ranks(count, batch_size):
    """Parts of parts of a batch, few of them even."""
    together, opt = start(), allred.distributed(optim.SGD(lr=0.02, momentum=0.9))
    towers = allred.Towers(count, lambda params, x, y: (np.square(y).mean(), grads_of(params, x, y)))
    for x, y in allred.data.batches(*problem(), batch_size=batch_size, epochs=3, seed=7):
        loss, grads = towers(together, x, y)
        assert loss == pytest.approx(np.square(y).mean())
        opt.step(together, grads)
    alone = train(optim.SGD(lr=0.02, momentum=0.9), batch_size, rank=0, size=1)
    np.testing.assert_allclose(together["w"], alone["w"], rtol=1e-9)
    assert len(set(allred.allgather_object(allred.digest(together)))) == 1


def test_towers_of_ranks_without_samples(size):
    params, opt = {"w": np.zeros(2)}, allred.distributed(optim.SGD(lr=1.0))
    towers = allred.Towers(2, lambda params, x: (0, {"w": np.full(2, x.sum() / max(len(x), 1))}))
    for x in allred.data.batches(np.arange(1.0, size + 2), batch_size=size, seed=None):
        opt.step(params, towers(params, x)[1])
    assert params["w"] == pytest.approx(-np.arange(1.0, size + 1).mean() - (size + 1))


def test_integers_and_a_rank_without_samples(rank, size):
    params, opt = [np.zeros(2, int)], allred.distributed(optim_sum_of_integers(), op=allred.Sum)
    opt.step(params, [np.full(2, 3)], samples=rank if size > 1 else 1)
    assert params[0].tolist() == [3 * max(size - 1, 1)] * 2


def optim_sum_of_integers():
    class Add:
        def step(self, params, grads):
            params[0] += grads[0]

    return Add()


@pytest.mark.parametrize("bucket_bytes", [1, 64, 1000, "1MiB"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_buckets_of_any_size_give_the_same_mean(rank, size, bucket_bytes, dtype):
    shapes = [(3,), (), (50,), (0,), (4, 5), (7,), (200,)]
    rng = np.random.default_rng(0)
    base = [rng.integers(-8, 8, size=s) for s in shapes]
    params, grads = [np.zeros(s, dtype) for s in shapes], [np.asarray(b * (rank + 1), dtype) for b in base]
    allred.distributed(optim.SGD(lr=1.0), bucket_bytes=bucket_bytes).step(params, grads)
    for b, grad, param in zip(base, grads, params, strict=True):
        mean = np.asarray(b * np.float32((size + 1) / 2), np.float32).astype(dtype)
        np.testing.assert_array_equal(grad, mean)  # overwritten with the mean
        np.testing.assert_array_equal(param, -mean)


def test_a_restored_state_has_no_samples_of_an_incomplete_step(size, tmp_path):
    params, opt = {"w": np.zeros(2)}, allred.distributed(optim.SGD(lr=1.0))
    for samples in (3, 4):
        opt.save(tmp_path, params)
        for grad in ({"w": np.full(2, 500.0)}, {"w": np.ones(2)}):
            opt.reduce("w", grad["w"], samples)
            if grad["w"][0] > 1:
                opt.restore(tmp_path, params)
                samples += 1
        opt.step(params, grad, samples)
    assert params["w"].tolist() == [-2, -2]


def test_gradient_functions_average_their_last_result(rank, size):
    @allred.distributed.gradients
    def loss_and_grads(value):
        return value, {"w": np.full(3, value), "b": value}

    loss, grads = loss_and_grads(float(rank))
    mean = (size - 1) / 2
    assert loss == rank
    assert grads["w"].tolist() == [mean] * 3
    assert grads["b"] == mean


def test_gradient_functions_reduce_their_values_too(rank, size):
    x, total = np.arange(3.0), size * (size - 1) / 2

    @allred.distributed.gradients(values=True)
    def means(x):
        return float(rank), np.float32(rank), np.full(2, rank, np.float32), np.array(1.0 * rank), x * rank

    *numbers, grad = means(x)
    mean = total / size
    assert [np.asarray(number).tolist() for number in numbers] == [mean, mean, [mean] * 2, mean]
    assert [type(number) for number in numbers] == [float, np.float32, np.ndarray, np.ndarray]
    assert grad.tolist() == (x * total / size).tolist()

    @allred.distributed.gradients(values=True, op=MPI.SUM)
    def sums(params):
        return rank, {"w": params["w"] * rank}

    value, grads = sums({"w": x})
    assert (value, type(value)) == (total, int)
    assert grads["w"].tolist() == (x * total).tolist()

    for result, words in (
        (("text", x.copy()), "values=True takes numbers and arrays, got str"),
        ((1.0, x * np.nan), "gradients are not finite: 'gradient'"),
        ((np.nan, x.copy()), "gradients are not finite: 'value.0'"),
    ):
        function = allred.distributed.gradients(lambda x, result=result: result, values=True)
        with pytest.raises((InputError, NonFiniteError), match=words):
            function(x)


def test_an_argument_like_the_gradient_need_not_be_the_parameters(rank, size):
    averaged = allred.distributed.gradients(lambda sample: sample * 2)
    assert averaged(np.full(3, float(rank))).tolist() == [size - 1.0] * 3


@pytest.mark.parametrize("method", ["BFGS", "L-BFGS-B", "CG"])
def test_an_optimizer_that_decides_by_the_value_gets_the_same_one_on_all_ranks(rank, size, method):
    def function_of(numbers):
        def function(x):  # the sum over ranks is convex; each rank's part has another minimum
            differences = x - numbers[:, None]
            return float(np.log(np.cosh(differences)).sum()), np.tanh(differences).sum(axis=0)

        return function

    everything = np.random.default_rng(0).normal(size=(size, 7)) * 3
    serial = minimize(function_of(everything.reshape(-1)), np.zeros(3), jac=True, method=method)
    together = allred.distributed.gradients(function_of(everything[rank]), op=allred.Sum, values=True)
    found = minimize(together, np.zeros(3), jac=True, method=method)
    np.testing.assert_allclose(found.fun, serial.fun, rtol=1e-6)
    np.testing.assert_allclose(found.x, serial.x, atol=1e-3)
    assert len(set(allred.allgather_object((found.nfev, found.x.tobytes())))) == 1

    if size > 1:
        alone = allred.distributed.gradients(function_of(everything[rank]), op=allred.Sum)

        def search():
            minimize(alone, np.zeros(3), jac=True, method=method)
            alone(np.full(3, float(rank)))  # a rank may complete its search

        with pytest.raises(MismatchError, match=r"function\(\): the ranks pass different parameters, .* values=True"):
            search()


def test_broadcast_gives_everyone_the_roots_parameters_and_state(rank, size):
    for root in {0, size - 1}:
        opt = allred.distributed(optim.Adam(lr=0.1))
        params = {"w": np.full(3, float(rank)), "f": np.full((2, 3), rank, np.float32, order="F")}
        opt.optimizer.step(params, {"w": np.full(3, rank + 1.0), "f": np.ones((2, 3), np.float32)})
        if rank == root:
            opt.optimizer.global_step = 41
        opt.broadcast(params, root)
        assert opt.optimizer.global_step == 41
        assert len({allred.digest(params)} | set(allred.allgather_object(allred.digest(params)))) == 1
        assert len(set(allred.allgather_object(allred.digest(opt.state_dict()["slots"])))) == 1


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"w": np.zeros((3, 5))}, r"tensor 0 of 1 differs: 'w' float64 \(3, 4\) on .*; 'w' float64 \(3, 5\) on rank"),
        ({"w": np.zeros((3, 4), np.float32)}, r"'w' float64 \(3, 4\) on .*; 'w' float32 \(3, 4\) on rank"),
        ({"v": np.zeros((3, 4))}, r"'w' float64 .* on .*; 'v' float64 \(3, 4\) on rank"),
        (
            {"w": np.zeros((3, 4)), "z": np.zeros(1)},
            r"tensor 1 of 2 differs: no such tensor on .*; 'z' float64 \(1,\) on rank",
        ),
    ],
)
def test_different_parameters_are_the_same_error_on_every_rank(rank, size, odd, message):
    if size == 1:
        pytest.skip("one rank cannot differ")
    params = odd if rank == size - 1 else {"w": np.zeros((3, 4))}
    grads = {name: np.ones_like(value) for name, value in params.items()}
    before = allred.digest([params, grads])
    opt = allred.distributed(optim.SGD(lr=1.0))
    for call in (lambda: opt.broadcast(params), lambda: opt.step(params, grads)):
        with pytest.raises(MismatchError, match=message) as error:
            call()
        assert f"rank {size - 1}" in str(error.value)
        assert "every rank must build the same parameters" in str(error.value)
        assert len(set(allred.allgather_object(str(error.value)))) == 1
    assert allred.digest([params, grads]) == before


def test_unusable_gradients_on_one_rank_are_an_error_on_all(rank, size):
    if size == 1:
        pytest.skip("one rank cannot differ")
    params = [np.zeros(3)]
    bad = [np.ones(4)] if rank == size - 1 else [np.ones(3)]
    opt = allred.distributed(optim.SGD(lr=1.0))
    with pytest.raises(InputError, match=rf"rank {size - 1}: the gradient of '0' float64 \(3,\) has shape \(4,\)"):
        opt.step(params, bad)
    with pytest.raises(InputError, match=r"rank 0 gave no number of samples"):
        opt.step(params, [np.ones(3)], samples=None if rank == 0 else 5)
    with pytest.raises(MismatchError, match="different operations"):
        opt.step(params, [np.ones(3)]) if rank == 0 else allred.barrier()
    assert params[0].tolist() == [0, 0, 0]
    opt.step(params, [np.ones(3)])
    assert params[0].tolist() == [-1, -1, -1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": 2}, r"accumulate=1 .* on .*; .*accumulate=2 .* on rank"),
        ({"op": allred.Sum}, r"op=Average .* on .*; op=Sum .* on rank"),
        ({"bucket_bytes": 64}, r"bucket_bytes=1048576 .* on .*; .*bucket_bytes=64 .* on rank"),
    ],
)
def test_different_arguments_of_the_decorator_are_the_same_error_on_every_rank(rank, size, options, message):
    if size == 1:
        pytest.skip("one rank cannot differ")
    opt = allred.distributed(optim.SGD(lr=1.0), **(options if rank == size - 1 else {}))
    params, grads = [np.zeros(3)], [np.full(3, float(rank))]
    if rank == size - 1 and "accumulate" in options:
        opt.step(params, grads)
    with pytest.raises(MismatchError, match=rf"^opt.step\(\): ranks differ: .*{message} {size - 1}(\n|$)"):
        opt.step(params, grads, samples=None)
    assert grads[0].tolist() == [rank] * 3


def test_samples_that_cannot_be_used_on_one_rank_are_an_error_on_all(rank, size):
    if size == 1:
        pytest.skip("one rank cannot differ")
    opt, params = allred.distributed(optim.SGD(lr=1.0)), [np.zeros(3)]
    with pytest.raises(InputError, match=rf"rank {size - 1}: samples must be an integer >= 0, but is -1"):
        opt.step(params, [np.ones(3)], samples=-1 if rank == size - 1 else 5)
    with pytest.raises(InputError, match=rf"rank {size - 1}: samples={2**47} must be at most"):
        opt.step(params, [np.ones(3)], samples=2**47 if rank == size - 1 else 5)
    opt.step(params, [np.ones(3) if rank else None], samples=np.int64(3))
    np.testing.assert_allclose(params[0], -(size - 1) / size)


def test_a_state_on_some_ranks_only_is_an_error_on_all(rank, size):
    if size == 1:
        pytest.skip("one rank cannot differ")

    class Stateless:
        def step(self, params, grads): ...

    opt = allred.distributed(Stateless() if rank == 0 else optim.SGD())
    with pytest.raises(MismatchError, match="ranks differ: optimizer has a state: False, scaler: False on rank 0; "):
        opt.broadcast([np.zeros(2)])


def test_a_micro_step_that_fails_on_one_rank_is_an_error_on_all_at_the_end_of_the_step(rank, size):
    if size == 1:
        pytest.skip("one rank cannot differ")
    opt, params = allred.distributed(optim.SGD(lr=1.0), accumulate=3), [np.zeros(3)]
    for wrong, samples in ([np.ones(4)], None), ([np.ones(3, int)], None), ([np.ones(3)], -1), ([np.ones(3)], 2):
        problems = []
        for micro in range(3):  # the same calls on all ranks, which all raise in the last one
            bad = micro == 1 and rank == size - 1
            try:
                opt.step(params, wrong if bad else [np.ones(3)], samples if bad else None)
            except InputError as error:
                problems.append((micro, str(error)))
        assert len(problems) == 1
        assert problems[0][1].startswith(f"opt.step(): rank {size - 1}: micro-step 2 of 3: ")
        assert len(set(allred.allgather_object(problems[0]))) == 1
        assert not opt.accumulates
        opt.step(params, [np.full(3, 0.0)])
        opt.step(params, [np.full(3, 1.5 * (rank + 1))])
        opt.step(params, [np.full(3, 1.5 * (rank + 1))])
    np.testing.assert_allclose(params[0], -4 * (size + 1) / 2)


def test_tied_gradients_are_reduced_once(size):
    shared, params = np.ones(200_000), [np.zeros(200_000), np.zeros(200_000), np.zeros(3)]
    small = np.ones(3)
    opt = allred.distributed(optim.SGD(lr=1.0), op=allred.Sum)
    opt.step([*params, np.zeros(3)], [shared, shared, small, small])
    assert params[0][0] == params[1][0] == params[2][0] == -size
    square, both = np.ones((300, 300)), [np.zeros((300, 300)), np.zeros((300, 300))]
    opt.step(both, [square, square.T])
    assert both[0][0, 0] == both[1][0, 0] == -size


OVERLAPS = {
    "views": lambda buffer: [buffer[:4], buffer[2:6], buffer[4:8]],
    "strided": lambda buffer: [buffer[:8:2], buffer[6:10], buffer[2:6]],
    "columns": lambda buffer: [buffer[:12].reshape(3, 4)[0], buffer[:12].reshape(4, 3)[:, 1], buffer[8:12]],
    "windows": lambda buffer: [
        *np.lib.stride_tricks.sliding_window_view(buffer[:5], 4, writeable=True),
        np.lib.stride_tricks.as_strided(buffer[9:], (4,), (0,)),
    ],
    "disjoint": lambda buffer: [buffer[:8:2], buffer[1:9:2], buffer[12:16]],
}


@pytest.mark.parametrize("views", OVERLAPS)
@pytest.mark.parametrize("op", [allred.Sum, allred.Average])
def test_gradients_that_share_memory_on_one_rank_are_reduced_as_if_they_did_not(rank, size, views, op):
    opt, params = allred.distributed(optim.SGD(lr=1.0), op=op), [np.zeros(4) for _ in range(3)]
    expected = [np.zeros(4) for _ in range(3)]
    for step in range(3):
        everyone = [OVERLAPS[views](np.arange(16.0) + 100 * other + step) for other in range(size)]
        mine = everyone[rank] if rank == size - 1 else [grad.copy() for grad in everyone[rank]]
        for want, *grads in zip(expected, *[[g.copy() for g in each] for each in everyone], strict=True):
            want -= np.sum(grads, axis=0) / (size if op is allred.Average else 1)
        opt.step(params, mine)
        for param, want in zip(params, expected, strict=True):
            np.testing.assert_array_equal(param, want)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("count", [5, 300_000])
def test_uneven_shares_of_16_bit_gradients_are_rounded_once(rank, size, dtype, count):
    def grad(r):
        return (np.random.default_rng(r).normal(size=count)).astype(dtype)

    samples = [2 * r + 1 for r in range(size)]
    params, mine = [np.zeros(count, dtype), np.zeros(2, dtype)], [grad(rank), np.zeros(2, dtype)]
    allred.distributed(optim.SGD(lr=1.0)).step(params, mine, samples=samples[rank])
    exact = sum(grad(r).astype(np.float64) * samples[r] for r in range(size)) / sum(samples)
    ulp = np.maximum(np.abs(exact), 1e-2) * float(ml_dtypes.finfo(dtype).eps)
    assert (np.abs(mine[0].astype(np.float64) - exact) <= 0.501 * ulp).all()


def test_an_optimizer_outlives_shutdown_and_init(size):
    opt, params = allred.distributed(optim.SGD(lr=1.0)), [np.zeros(2)]
    opt.step(params, [np.ones(2)])
    allred.shutdown()
    allred.init(banner=False)
    opt.step(params, [np.ones(2)])
    assert params[0].tolist() == [-2, -2]


def test_the_summary_counts_all_ranks_samples(size):
    opt, params = allred.distributed(optim.SGD(lr=1.0)), [np.zeros(2)]
    for _ in range(3):
        opt.step(params, [np.ones(2)], samples=10)
    assert opt._get_mode()._timer.samples == 30 * size
    assert f"world: {size} rank" in opt.summary()


def test_a_checkpoint_of_another_model_is_an_error_on_all_ranks(rank, size, tmp_path):
    """After which they go on together."""
    opt, params = allred.distributed(optim.SGD(lr=0.1)), {"w": np.ones(3, np.float32)}
    opt.save(tmp_path, params)
    with pytest.raises(allred.CheckpointError, match=r"is of another model: parameter 'v' .* but is not in it;"):
        opt.restore(tmp_path, {"v": np.ones(3, np.float32)})
    assert opt.restore(tmp_path, params) == 0


def test_a_restore_into_a_read_only_array_is_an_error_on_all_ranks(rank, tmp_path):
    opt, params = allred.distributed(optim.SGD(lr=1.0)), [np.ones(3)]
    opt.step(params, [np.ones(3)])
    opt.save(tmp_path, params)
    target = np.ones(3)
    target.flags.writeable = rank != 0
    with pytest.raises(InputError, match="'0' is a read-only array"):
        opt.restore(tmp_path, [target])
    assert target.tolist() == [1, 1, 1]
    assert opt.restore(tmp_path, params) == 1


class Picky:
    """An optimizer of a program, which refuses some states."""

    def __init__(self):
        self.state = 0

    def step(self, params, grads):
        params["w"] -= grads["w"]

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = 1 // state


def test_a_state_that_the_optimizer_refuses_is_an_error_on_all_ranks(tmp_path):
    """The parameters of no rank have changed, and the ranks go on together."""
    opt, params = allred.distributed(Picky()), {"w": np.ones(3)}
    opt.step(params, {"w": np.ones(3)})
    opt.save(tmp_path, params)
    params["w"] += 5
    with pytest.raises(allred.CheckpointError, match=r"loading the state of Picky .* failed: ZeroDivisionError"):
        opt.restore(tmp_path, params)
    assert params["w"].tolist() == [5, 5, 5]
    opt.step(params, {"w": np.ones(3)})
    assert params["w"].tolist() == [4, 4, 4]


@pytest.mark.parametrize("sees", ["all", "first"])
@pytest.mark.parametrize("sharded", [False, True])
def test_each_rank_that_sees_the_checkpoint_reads_it(rank, sees, sharded, tmp_path, monkeypatch):
    """Else rank 0 reads it, and broadcasts. Whether a rank sees it is pretended: here all have one file system."""
    if sees == "first" and rank:
        monkeypatch.setattr(load_checkpoint, "_manifest_crc", lambda path: None)
    reads, read = [], checkpoint.read_committed
    monkeypatch.setattr(checkpoint, "read_committed", lambda path: reads.append(path) or read(path))

    def make():
        return allred.distributed(optim.SGD(lr=0.5, momentum=0.5), sharded=sharded), [
            np.ones((40, 50)),
            np.full((), 2.0),
        ]

    def step(opt, params):
        opt.step(params, [np.full((40, 50), 1.0 + rank), np.full((), 2.0 * rank)])

    opt, params = make()
    step(opt, params)
    opt.save(tmp_path, params)
    saved = [param.copy() for param in params]
    step(opt, params)
    other, found = make()
    for param in found:
        param += rank
    assert other.restore(tmp_path, found) == other.global_step == 1
    assert len(reads) == (1 if rank == 0 or (sees == "all" and allred.size() > 1) else 0)
    for one, two in zip(found, saved, strict=True):
        assert one.tobytes() == two.tobytes()
    step(other, found)
    for one, two in zip(found, params, strict=True):
        assert one.tobytes() == two.tobytes()


class Uncounted:
    """It does not count its steps."""

    def step(self, params, grads):
        params["w"] -= grads["w"]

    def state_dict(self):
        return {}

    def load_state_dict(self, state): ...


def test_all_ranks_count_from_the_restored_step(rank, tmp_path):
    """A skipped step is none."""
    opt, params = allred.distributed(Uncounted(), nonfinite="skip"), {"w": np.zeros(2)}
    for _ in range(3):
        opt.step(params, {"w": np.ones(2)})
    opt.save(tmp_path, params)
    other = allred.distributed(Uncounted(), nonfinite="skip")
    assert other.restore(tmp_path, params) == other.global_step == 3
    for number, gradient in enumerate((1.0, np.nan, 1.0)):
        other.step(params, {"w": np.full(2, gradient if rank == 0 else 1.0)})
        assert other.global_step == (4, 4, 5)[number]


def test_a_model_that_differs_on_one_rank_is_an_error_of_restore_on_all(rank, size, tmp_path):
    opt, params = allred.distributed(optim.SGD(lr=0.5, momentum=0.5)), {"w": np.ones(3)}
    opt.step(params, {"w": np.ones(3)})
    opt.save(tmp_path, params)
    opt.step(params, {"w": np.ones(3)})
    before, state = params["w"].copy(), opt.state_dict()
    given = {"w": np.ones(4)} if rank == size - 1 else params
    with pytest.raises(allred.CheckpointError, match=r"parameter 'w' of this model has shape \(4,\), but has") as error:
        opt.restore(tmp_path, given)
    assert len(set(allred.allgather_object(str(error.value)))) == 1
    assert params["w"].tolist() == before.tolist()
    assert nest.digest(opt.state_dict()) == nest.digest(state)
    assert opt.restore(tmp_path, params) == 1
    opt.step(params, {"w": np.ones(3)})
    assert params["w"].tolist() == before.tolist()


def test_the_keys_beside_a_scaler_are_those_of_earlier_checkpoints(rank, tmp_path):
    """A rename would make these unreadable."""
    opt, params = allred.distributed(optim.SGD(lr=0.1), scaler=allred.GradScaler()), {"w": np.ones(3)}
    opt.step(params, {"w": np.ones(3)})
    if rank == 0:
        opt.saving(params, "mine")(str(tmp_path))
        (_, content), _ = checkpoint.read_newest(tmp_path)
        extra = checkpoint.unpickle_extra(content.pickled)
        assert extra.keys() == {"the optimizer's scaler", "what else there is"}


def test_a_checkpoint_of_another_optimizer_is_an_error_on_all_ranks(tmp_path):
    params, other = {"w": np.ones(3, np.float32)}, {"w": np.zeros(3, np.float32)}
    opt = allred.distributed(optim.Adam(lr=0.1))
    opt.step(params, {"w": np.ones(3, np.float32)})
    opt.save(tmp_path, params)
    wrong = allred.distributed(optim.SGD(lr=0.1, momentum=0.9))
    words = r"step-\d+ is of another optimizer: it was saved with Adam, but this one is SGD; restore it with Adam"
    with pytest.raises(allred.CheckpointError, match=words):
        wrong.restore(tmp_path, other)
    assert (other["w"] == 0).all()
    assert opt.restore(tmp_path, other) == 1
    assert (other["w"] == params["w"]).all()
