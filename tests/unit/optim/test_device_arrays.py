"""The same code runs on cupy arrays: a stand-in that, like cupy's, answers NumPy's protocols and nothing else.

It refuses to become a numpy array, to meet one in an operation, and any function that cupy does not offer in this form.
"""

import numpy as np
import pytest

from allred import optim
from allred.errors import InputError


class DeviceArray:
    FUNCTIONS = (np.zeros_like, np.empty_like, np.full_like, np.array, np.asarray, np.ravel, np.einsum)

    def __init__(self, host):
        self.host = np.array(host)
        self.dtype, self.shape = self.host.dtype, self.host.shape
        self.flags = object()  # cupy's has no `writeable`

    def copy(self):
        return DeviceArray(self.host)

    def __float__(self):
        return float(self.host)

    def __radd__(self, number):  # sum() starts with 0
        return DeviceArray(number + self.host)

    def __add__(self, other):
        return DeviceArray(self.host + other.host)

    def __array__(self, *args, **kwargs):
        raise TypeError("Implicit conversion to a NumPy array is not allowed")

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **kwargs):
        assert method == "__call__"
        assert kwargs.keys() <= {"dtype", "casting"}
        operands = [*inputs, *out]
        assert not any(isinstance(operand, (np.ndarray, np.generic)) for operand in operands), "meets host memory"
        host = [operand.host if isinstance(operand, DeviceArray) else operand for operand in operands]
        result = ufunc(*host[: len(inputs)], out=tuple(host[len(inputs) :]) or None, **kwargs)
        return out[0] if out else DeviceArray(result)

    def __array_function__(self, function, types, args, kwargs):
        assert function in self.FUNCTIONS, f"{function.__name__} is not in cupy in this form"
        args = [arg.host if isinstance(arg, DeviceArray) else arg for arg in args]
        return DeviceArray(function(*args, **kwargs))

    @classmethod
    def of(cls, nest):
        return {name: cls(value) for name, value in nest.items()}


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64], ids=lambda dtype: dtype.__name__)
def test_optimizers_give_on_device_arrays_what_they_give_on_host_arrays(case, rng, dtype):
    host = {"w": rng.normal(size=(2, 3)).astype(dtype), "b": np.array(0.5, dtype)}
    device, on_host, on_device = DeviceArray.of(host), case.make(), case.make()
    for grad in rng.normal(size=(3, 2, 3)).astype(np.float32):
        on_host.step(host, {"w": grad, "b": 0.25})
        on_device.step(device, {"w": DeviceArray(grad), "b": 0.25})
    for name in host:
        np.testing.assert_array_equal(device[name].host, host[name], strict=True)
    slots = on_device.state_dict()["slots"]["w"]
    assert all(type(slot) is DeviceArray for slot in slots.values())


def test_state_saved_from_the_host_continues_on_the_device(case, rng):
    host, optimizer, moved = {"w": rng.normal(size=3)}, case.make(), case.make()
    optimizer.step(host, {"w": np.ones(3)})
    device = DeviceArray.of(host)
    moved.load_state_dict(optimizer.state_dict())
    optimizer.step(host, {"w": np.ones(3)})
    moved.step(device, {"w": DeviceArray(np.ones(3))})
    np.testing.assert_array_equal(device["w"].host, host["w"])


def test_a_gradient_on_the_other_device_is_refused(case):
    for param, grad in [(DeviceArray(np.ones(3)), np.ones(3)), (np.ones(3), DeviceArray(np.ones(3)))]:
        with pytest.raises(InputError, match="copy both to the same device"):
            case.make().step({"w": param}, {"w": grad})


def test_clipping_works_on_device_arrays():
    grads = DeviceArray.of({"w": np.array([3.0, 0.0]), "b": np.array(-4.0)})
    assert optim.global_norm(grads) == 5.0
    assert optim.clip_by_global_norm_(grads, 1.0) == 5.0
    np.testing.assert_allclose(grads["w"].host, [0.6, 0.0], rtol=1e-15)
    optim.clip_by_value_(grads, 0.5)
    np.testing.assert_array_equal(grads["w"].host, [0.5, 0.0])
    np.testing.assert_array_equal(grads["b"].host, -0.5)
