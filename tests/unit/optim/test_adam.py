"""What is Adam's own: the bias correction counts the optimizer's steps, also for a tensor that joins later."""

import numpy as np
import pytest

from allred import optim


def test_bias_correction_counts_steps_of_the_optimizer():
    params = [np.array(0.0), np.array(0.0)]
    optimizer = optim.Adam(lr=0.5, betas=(0.75, 0.5), eps=0.0)
    optimizer.step(params, [3.0, None])
    assert float(params[0]) == pytest.approx(-0.5)
    optimizer.step(params, [None, 3.0])
    # m = 0.25 g, v = 0.5 g^2, t = 2
    expected = -0.5 * (0.25 / (1 - 0.75**2)) / np.sqrt(0.5 / (1 - 0.5**2))
    assert float(params[1]) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_a_constant_gradient_moves_every_element_by_lr_each_step(name):
    param, optimizer = np.zeros(3), getattr(optim, name)(lr=0.25, eps=0.0, weight_decay=0.0)
    for step in range(1, 6):
        optimizer.step(param, np.array([1e-6, -1.0, 1e6]))
        np.testing.assert_allclose(param, step * np.array([-0.25, 0.25, -0.25]), rtol=1e-12)
