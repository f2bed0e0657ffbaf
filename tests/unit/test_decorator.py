"""allred.distributed in a world of one: what it takes, what it gives back, what it refuses."""

import ml_dtypes
import numpy as np
import pytest

import allred
from allred.errors import InputError, NotInitializedError


class Descent:
    """The smallest optimizer: an object with step(params, grads)."""

    def __init__(self, lr=1.0):
        self.lr = lr

    def step(self, params, grads):
        for param, grad in zip(params, grads, strict=True):
            param -= self.lr * grad


@pytest.fixture
def world():
    allred.init(banner=False)
    yield
    allred.shutdown()


def test_an_object_a_class_and_a_class_with_arguments(world):
    made = [
        allred.distributed(Descent(lr=0.5)),
        allred.distributed(Descent)(lr=0.5),
        allred.distributed(op=allred.Sum, name="mine")(Descent)(0.5),
        allred.DistributedOptimizer(Descent(lr=0.5), op=allred.Sum, name="mine", bucket_bytes="1MiB"),
    ]
    for opt in made:
        params = [np.ones(3), np.ones(())]
        opt.step(params, [np.full(3, 2.0), np.array(4.0)])
        assert params[0].tolist() == [0, 0, 0]
        assert params[1] == -1
        assert isinstance(opt, allred.DistributedOptimizer)
        assert isinstance(opt.optimizer, Descent)


def test_a_decorated_class_keeps_its_name_and_is_a_class():
    made = allred.distributed(Descent)
    assert isinstance(made, type)
    assert (made.__name__, made.__doc__, made.__wrapped__) == ("Descent", Descent.__doc__, Descent)
    assert isinstance(made(0.1), made)


def test_wrapping_needs_no_init_but_stepping_does():
    opt = allred.distributed(Descent())
    for call in (lambda: opt.step([np.ones(1)], [np.ones(1)]), lambda: opt.broadcast([np.ones(1)]), opt.summary):
        with pytest.raises(NotInitializedError, match=r"call allred.init\(\) first"):
            call()


class TorchLike:
    def step(self, closure=None): ...


@pytest.mark.parametrize("target", [None, 3, "sgd", TorchLike(), TorchLike, Descent.step, len, [Descent()]])
def test_anything_else_is_a_type_error_that_lists_the_forms(target):
    with pytest.raises(
        TypeError, match=r"object with step\(params, grads\); a class with such a step.*distributed.gradients"
    ):
        allred.distributed(target)


def test_wrapping_twice_is_refused():
    with pytest.raises(TypeError, match="distributed already"):
        allred.distributed(allred.distributed(Descent))
    with pytest.raises(TypeError, match="distributed already"):
        allred.distributed(allred.distributed(Descent()))
    averaged = allred.distributed.gradients(lambda: [np.ones(2)])
    with pytest.raises(TypeError, match=r"<lambda>\(\) averages its gradients already"):
        allred.distributed.gradients(averaged)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": 0}, "accumulate must be an integer >= 1, but is 0"),
        ({"accumulate": 1.5}, "accumulate must be an integer >= 1, but is 1.5"),
        ({"op": allred.Max}, "op=allred.Max cannot combine gradients"),
        ({"op": "mean"}, "op='mean' cannot combine gradients"),
        ({"nonfinite": "hope"}, "nonfinite='hope' is not a policy; use one of raise, skip, ignore"),
        ({"bucket_bytes": 0}, "bucket_bytes=0 is too small"),
        ({"bucket_bytes": -1}, "bucket_bytes: -1 is not a size"),
        ({"bucket_bytes": "lots"}, "bucket_bytes: 'lots' is not a size"),
        ({"use_locking": "no"}, "use_locking='no' must be True or False"),
        ({"placement": "byte"}, "placement='byte' must be 'bytes', 'round_robin', 'greedy', a function"),
    ],
)
@pytest.mark.parametrize("target", [Descent(), Descent])
def test_options_are_checked_when_wrapping(target, options, message):
    with pytest.raises(InputError, match=message):
        allred.distributed(target, **options)


@pytest.mark.parametrize("target", [None, len, Descent])
def test_the_class_takes_an_optimizer_only(target):
    with pytest.raises(TypeError, match=r"DistributedOptimizer takes an object with step\(params, grads\), got"):
        allred.DistributedOptimizer(target)


def test_gradient_functions(world):
    @allred.distributed.gradients
    def alone(x):
        """Doc."""
        return {"w": x}

    @allred.distributed.gradients(op=allred.Sum)
    def with_loss(x):
        return 0.5, "aux", [x, 3.0]

    x = np.ones(2)
    assert alone(x)["w"] is x
    assert alone.__doc__ == "Doc."
    loss, aux, grads = with_loss(x)
    assert (loss, aux, grads[1]) == (0.5, "aux", 3.0)
    with pytest.raises(TypeError, match="takes a function"):
        allred.distributed.gradients(Descent())


def test_numbers_and_read_only_gradients_arrive_as_new_arrays(world):
    locked = np.ones(2)
    locked.flags.writeable = False
    seen = []

    class Spy:
        def step(self, params, grads):
            seen.append(grads)

    mine = np.ones(2)
    allred.distributed(Spy()).step([np.ones(2), np.ones(()), np.ones(2), np.ones(1)], [locked, 2.0, mine, None])
    assert seen[0][0] is not locked
    assert seen[0][1] == 2.0
    assert seen[0][2] is mine
    assert seen[0][3] is None


@pytest.mark.parametrize(
    ("params", "grads", "message"),
    [
        ({"w": np.ones(2)}, {"v": np.ones(2)}, "params and grads differ in structure, in 'v', 'w'"),
        ([np.ones(2)], [np.ones(3)], r"the gradient of '0' float64 \(2,\) has shape \(3,\)"),
        ([2.0], [1.0], "parameter '0' is float; it is updated in place, so it must be a writable array"),
        ([np.ones(2)], [np.ones(2, complex)], r"the gradient of '0' float64 \(2,\) is complex128; pass its real part"),
        ([np.ones(2)], [np.ones(2, np.longdouble)], "'0': dtype .* cannot be reduced"),
        ([np.ones(2, int)], [np.ones(2, int)], r"Average of int64 is not defined"),
        ([np.ones(2), np.ones(2, int)], [np.ones(2), np.ones(2, int)], r"Average of int64 is not defined"),
        ([np.ones(2)], ["hello"], "'0': dtype <U5 cannot be reduced"),
        ({1: np.ones(2), "1": np.ones(2)}, {1: np.ones(2), "1": np.ones(2)}, "two parameters are named '1'"),
        ([np.ones(2)], [np.ma.masked_array(np.ones(2), [True, False])], "'0': a masked array would lose its mask"),
    ],
)
def test_unusable_gradients_are_named_and_nothing_is_changed(world, params, grads, message):
    opt = allred.distributed(Descent(), name="sgd")
    before = allred.digest([np.asarray(value) for _, value in allred.nest.leaves(params)])
    with pytest.raises(InputError, match=rf"^sgd.step\(\): {message}"):
        opt.step(params, grads)
    assert allred.digest([np.asarray(value) for _, value in allred.nest.leaves(params)]) == before


def test_accumulate_gives_the_mean_over_samples(world):
    opt, params = allred.distributed(Descent(), accumulate=3), [np.zeros(1, np.float32)]
    for value, samples in ((1.0, 2), (5.0, 4), (100.0, 0)):
        assert params[0] == 0
        opt.step(params, [np.full(1, value, np.float32)], samples=samples)
    assert np.isclose(params[0], -(1 * 2 + 5 * 4) / 6)
    for value in (1.0, 2.0, 6.0):
        opt.step(params, [np.full(1, value, np.float32)])
    assert np.isclose(params[0], -(22 / 6) - 3)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_accumulate_adds_up_in_float32_and_keeps_the_dtype(world, dtype):
    """float16 overflows at 65504 and bfloat16 stops counting at 256; and no number of samples widens float32."""
    opt, params = allred.distributed(Descent(), accumulate=300), [np.zeros(3, dtype)]
    for _ in range(300):
        opt.step(params, [np.full(3, 100, dtype)], samples=np.int64(1000))
    assert params[0].dtype == dtype
    np.testing.assert_array_equal(params[0], np.full(3, -100, dtype))


def test_accumulate_with_gradients_that_are_sometimes_missing_or_numbers(world):
    opt, params = allred.distributed(Descent(), accumulate=4), [np.zeros((), np.float32), np.zeros(2)]
    for grad in (3.0, None, 1.0, None):
        opt.step(params, [grad, None if grad else np.ones(2)])
    assert params[0] == -1
    assert params[0].dtype == np.float32
    assert params[1].tolist() == [-0.5, -0.5]


def test_mismatched_micro_steps_are_an_error_and_the_next_step_starts_again(world):
    opt, params = allred.distributed(Descent(), accumulate=2), [np.zeros(1)]
    for bad, samples, message in [
        ([np.ones(1)], None, "known for some micro-steps"),
        ([np.ones(1, np.float32)], 1, "this micro-step have other names, shapes or dtypes"),
        ([np.ones(2)], 1, "has shape"),
    ]:
        opt.step(params, [np.ones(1)], samples=1)
        with pytest.raises(InputError, match=message):
            opt.step(params, bad, samples=samples)
    assert params[0] == 0
    opt.step(params, [np.ones(1)])
    opt.step(params, [np.ones(1)])
    assert params[0] == -1


def test_integers_are_not_accumulated(world):
    opt = allred.distributed(Descent(), op=allred.Sum, accumulate=2)
    opt.step([np.ones(2, int)], [np.ones(2, int)])  # the error of a micro-step is raised in the last one
    with pytest.raises(InputError, match=r"micro-step 1 of 2: the gradient of '0' int64 \(2,\) cannot be accumulated"):
        opt.step([np.ones(2, int)], [np.ones(2, int)])


@pytest.mark.parametrize("samples", [-1, 2.5, "many"])
def test_samples_are_whole_numbers(world, samples):
    with pytest.raises(InputError, match=r"^opt.step\(\): samples must be an integer >= 0, but is"):
        allred.distributed(Descent()).step([np.ones(1)], [np.ones(1)], samples=samples)
    with pytest.raises(InputError, match="no rank has any samples"):
        allred.distributed(Descent()).step([np.ones(1)], [np.ones(1)], samples=0)


def test_a_gradient_given_twice_is_reduced_once(world):
    """Tied weights: in place, the second time would reduce what the first has reduced already."""
    shared, params = np.ones(100_000), [np.zeros(100_000), np.zeros(100_000)]
    allred.distributed(Descent()).step(params, [shared, shared])
    assert params[0][0] == params[1][0] == -1


def test_state_is_the_optimizers_own(world):
    opt = allred.distributed(allred.optim.SGD(lr=0.1, momentum=0.9))
    opt.step([np.ones(2)], [np.ones(2)])
    assert opt.state_dict()["global_step"] == 1
    opt.load_state_dict({"global_step": 7, "slots": {}})
    assert opt.optimizer.global_step == 7
    with pytest.raises(InputError, match="Descent has no state_dict and load_state_dict"):
        allred.distributed(Descent()).state_dict()


def test_summary_has_the_times_of_a_step(world):
    opt = allred.distributed(Descent())
    assert "no steps yet" in opt.summary()
    for _ in range(3):
        opt.step([np.ones(2)], [np.ones(2)], samples=10)
    assert opt.summary().startswith(
        "world: 1 rank on 1 node, mode sync\nbackend: single (one rank)\nspeed: 3 steps in "
    )
    assert "examples/s over all ranks" in opt.summary()
