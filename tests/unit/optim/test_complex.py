"""Complex parameters are updated as pairs of real ones, by every optimizer, with the same bits."""

import numpy as np
import pytest

from allred.arrays import view_as_real
from allred.errors import InputError
from allred.optim import clip


def draw(rng, dtype, shape):
    return np.array(rng.normal(size=shape) + 1j * rng.normal(size=shape), dtype)


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
@pytest.mark.parametrize("layout", ["0-d", "C", "F", "strided", "empty"])
def test_as_real_numbers(case, rng, dtype, layout):
    shape = {"0-d": (), "empty": (0, 3)}.get(layout, (4, 6))
    param = draw(rng, dtype, shape)
    if layout == "F":
        param = np.asfortranarray(param)
    if layout == "strided":
        param = np.repeat(param, 2, axis=1)[:, ::2]
    real = view_as_real(param).copy()
    optimizer, other = case.make(), case.make()
    for _ in range(3):
        grad = draw(rng, dtype, shape)
        optimizer.step([param], [grad])
        other.step([real], [view_as_real(grad).copy()])
        assert view_as_real(param).tobytes() == real.tobytes()
    held, expected = optimizer.state_dict()["slots"]["0"], other.state_dict()["slots"]["0"]
    assert held.keys() == expected.keys() == set(case.slots)
    for name, slot in held.items():
        assert slot.dtype == dtype
        assert slot.shape == shape
        assert view_as_real(slot).tobytes() == expected[name].tobytes()


def test_state_continues(case, rng):
    params, one = [draw(rng, np.complex64, 3)], case.make()
    one.step(params, [draw(rng, np.complex64, 3)])
    copies, other = [params[0].copy()], case.make()
    other.load_state_dict(one.state_dict())
    grads = [draw(rng, np.complex64, 3)]
    one.step(params, grads)
    other.step(copies, grads)
    assert params[0].tobytes() == copies[0].tobytes()
    if case.slots:
        with pytest.raises(InputError, match=r"slot '\w+' of parameter '0' must be a float32"):
            other.step([np.zeros(3, np.float32)], [np.zeros(3, np.float32)])


def test_gradients_of_another_kind(case, rng):
    params, same = [draw(rng, np.complex64, 3)], [np.zeros(3, np.complex64)]
    same[0][:] = params[0]
    case.make().step(params, [np.ones(3, np.float32)])  # without an imaginary part
    case.make().step(same, [np.ones(3, np.complex64)])
    assert params[0].tobytes() == same[0].tobytes()
    for param, grad in ((np.ones(3, np.float32), np.ones(3, np.complex64)), (np.array(1, np.float32), 1j)):
        with pytest.raises(InputError, match="the gradient of '0' is complex, but its parameter is a float32"):
            case.make().step([param], [grad])


def test_norm_and_clipping():
    grads = [np.array([3j, 0], "c8"), np.array(4.0), None]
    assert clip.global_norm([*grads, 12j]) == 13
    assert clip.clip_by_global_norm_(grads, 1.0) == 5
    np.testing.assert_allclose(grads[0], [0.6j, 0], rtol=1e-6)
    with pytest.raises(InputError, match="clip_by_value_: complex numbers have no order; use clip_by_global_norm_"):
        clip.clip_by_value_(grads, 1.0)
