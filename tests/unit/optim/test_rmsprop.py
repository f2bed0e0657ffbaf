"""What is RMSProp's own: the variance under the root of the centered form."""

import numpy as np

from allred import optim


def test_a_variance_that_rounds_below_zero_counts_as_zero():
    """With a constant gradient s - a^2 goes to 0 and rounding takes it below in some elements."""
    values = np.linspace(0.1, 1.0, 100)
    param, optimizer = np.zeros(100), optim.RMSProp(lr=0.0, decay=0.5, centered=True)
    below = False
    for _ in range(100):
        optimizer.step(param, values)
        slots = optimizer.state_dict()["slots"][""]
        below = below or (slots["square_avg"] < slots["grad_avg"] ** 2).any()
    assert below, "the case this test is for did not arise"
    assert np.isfinite(param).all()


def test_nan_gradients_are_not_hidden_by_that():
    optimizer = optim.RMSProp(centered=True)
    optimizer.step(np.zeros(2), np.array([np.nan, 1.0]))
    param = np.zeros(2)
    optimizer.step(param, np.array([1.0, 1.0]))  # the averages hold the NaN
    np.testing.assert_array_equal(np.isnan(param), [True, False])
