"""Where an optimizer is updated by the C kernel and where by numpy: the same numbers, and nothing is bypassed."""

import ml_dtypes
import numpy as np
import pytest

from allred import native, optim

pytestmark = pytest.mark.skipif(not native.available, reason=native.reason)


@pytest.fixture
def calls(monkeypatch):
    """Of each call of the kernel whether it did the update."""
    returned, update = [], native.update

    def recorded(*args):
        returned.append(update(*args))
        return returned[-1]

    monkeypatch.setattr(native, "update", recorded)
    return returned


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_optimizer_is_updated_by_a_kernel(case, calls, rng, dtype):
    params = {"w": rng.normal(size=(3, 5)).astype(dtype), "b": rng.normal(size=7).astype(dtype)}
    case.make().step(params, {"w": np.ones((3, 5), np.float16), "b": np.ones(7)})
    assert calls == [True, True]


def test_arguments_without_a_kernel_use_numpy(case, calls):
    halves = [np.ones(3, np.float16), np.ones(3, ml_dtypes.bfloat16)]
    case.make().step(halves, [np.ones(3, np.float32)] * 2)
    assert calls == []  # known from the dtype alone
    rest = [np.ones((4, 4))[::2, ::2], np.asfortranarray(np.ones((3, 4))), np.array(1.0)]
    case.make().step(rest, [np.ones_like(param) for param in rest])
    assert calls == [False] * 3
    expected = case.make()
    one = np.array([1.0])
    expected.step(one, np.array([1.0]))
    for param in rest:
        np.testing.assert_array_equal(param, np.broadcast_to(one[0], param.shape))


def test_a_gradient_that_is_its_parameter_gives_what_numpy_gives(case, calls, rng):
    """The formulas read the gradient after they have changed a slot, and the parameter last."""
    param = rng.normal(size=9)
    apart, grad = param.copy(), param.copy()
    case.make().step(param, param)
    case.make().step(apart, grad)
    assert calls == [False, True]
    np.testing.assert_array_equal(param, apart)


def test_hyper_parameters_of_a_subclass_are_asked(calls):
    class Warm(optim.Adam):
        asked = 0

        @property
        def eps(self):
            self.asked += 1
            return 0.5

        @eps.setter
        def eps(self, value):
            pass

    warm, plain = Warm(lr=0.1), optim.Adam(lr=0.1, eps=0.5)
    params = np.ones(4), np.ones(4)
    for _ in range(3):
        warm.step(params[0], np.ones(4))
        plain.step(params[1], np.ones(4))
    assert calls == [True, True]  # the other steps update all tensors in one call
    assert warm.asked == 3
    np.testing.assert_array_equal(*params)
    np.testing.assert_array_equal(*params)


def test_an_update_of_a_subclass_is_called_and_may_call_its_parents(case, calls):
    base = type(case.make())

    class Signed(base):
        def update(self, param, grad, slots, lr, step):
            super().update(param, np.sign(grad), slots, lr, step)

    param, expected = np.ones(5), np.ones(5)
    Signed(**case.hyper).step(param, np.array([3.0, -2.0, 0.5, -4.0, 0.0]))
    case.make().step(expected, np.array([1.0, -1.0, 1.0, -1.0, 0.0]))
    assert calls == [True, True]
    np.testing.assert_array_equal(param, expected)


def test_a_hyper_parameter_that_widens_the_arithmetic_still_does(calls, rng):
    """numpy takes a float64 scalar, unlike Python's float, as a reason to compute float32 arrays in float64."""
    assigned, grads = (
        optim.SGD(lr=0.1, momentum=0.9),
        np.random.default_rng(0).normal(size=(8, 1000)).astype(np.float32),
    )
    assigned.momentum = np.float64(0.9)
    param, buffer, expected = np.zeros(1000, np.float32), np.zeros(1000, np.float32), np.zeros(1000, np.float32)
    for grad in grads:
        assigned.step(param, grad)
        np.multiply(buffer, np.float64(0.9), out=buffer)
        np.add(buffer, grad, out=buffer)
        np.subtract(expected, buffer * np.float32(0.1), out=expected)
    assert calls == [False] * 8
    np.testing.assert_array_equal(param, expected)
