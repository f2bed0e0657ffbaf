"""Every public name shows itself in an example. The whole package's doctests check what the examples print."""

import pytest

from allred import optim


@pytest.mark.parametrize("name", sorted(set(optim.__all__) - {"Schedule"}))
def test_public_names_have_an_example(name):
    assert ">>>" in getattr(optim, name).__doc__
