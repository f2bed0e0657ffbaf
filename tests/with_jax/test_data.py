"""Batches that JAX uses without a copy: in one process, as a subprocess has the first computation of JAX."""

import sys

import pytest

from allred import testing

pytest.importorskip("jax")

PROGRAM = """
import jax, numpy as np
import allred
x = np.arange(500_000, dtype=np.float32).reshape(1000, 500)
made = {"batches": allred.data.batches(x, batch_size=100, rank=0, size=1)}
made["prefetch"] = allred.data.prefetch(allred.data.batches(x, batch_size=100, rank=0, size=1))
for name, batches in made.items():
    kept = [(jax.device_put(batch), batch.copy(), batch.ctypes.data) for batch in batches]
    assert all((np.asarray(array) == copy).all() for array, copy, _ in kept)
    print(name, sum(array.unsafe_buffer_pointer() == address for array, _, address in kept), "of", len(kept))
"""


def test_device_put_makes_no_copy():
    result = testing.run([sys.executable, "-c", PROGRAM], 60, {})
    assert result.out == "batches 10 of 10\nprefetch 10 of 10\n", result.text
