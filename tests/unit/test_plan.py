"""Properties of the bucket planner over random sets of tensors."""

import numpy as np
import pytest

from allred.fusion import Plan, Tensor

DTYPES = [np.dtype(name) for name in ("float16", "float32", "float64")]


def random_tensors(rng):
    count = rng.integers(0, 30)
    return [
        Tensor(f"t{i}", tuple(rng.integers(0, 12, size=rng.integers(0, 4)).tolist()), DTYPES[rng.integers(3)])
        for i in range(count)
    ]


@pytest.mark.parametrize("seed", range(50))
def test_every_non_empty_tensor_is_in_one_bucket_that_fits(seed):
    rng = np.random.default_rng(seed)
    tensors, limit = random_tensors(rng), int(rng.integers(1, 4000))
    result = Plan(tuple(tensors), limit)
    placed = [i for bucket in result.buckets for i in bucket.indices]
    assert sorted(placed) == [i for i, t in enumerate(tensors) if t.elements]
    for bucket in result.buckets:
        assert {tensors[i].dtype for i in bucket.indices} == {bucket.dtype}
        assert bucket.count == sum(tensors[i].elements for i in bucket.indices)
        assert list(bucket.indices) == sorted(bucket.indices)
        if len(bucket.indices) > 1:
            assert bucket.count * bucket.dtype.itemsize <= limit
            assert all(2 * tensors[i].elements * bucket.dtype.itemsize < limit for i in bucket.indices)
    assert result.nbytes == sum(t.elements * t.dtype.itemsize for t in tensors)


@pytest.mark.parametrize("seed", range(5))
def test_buckets_are_filled(seed):
    """No two neighbouring buckets of a dtype could have been one."""
    rng = np.random.default_rng(seed)
    tensors = [Tensor(str(i), (int(rng.integers(1, 40)),), DTYPES[1]) for i in range(200)]
    counts = [bucket.count for bucket in Plan(tuple(tensors), 400).buckets]
    firsts = [tensors[bucket.indices[0]].elements for bucket in Plan(tuple(tensors), 400).buckets]
    assert all(count + first > 100 for count, first in zip(counts, firsts[1:], strict=False))


def test_the_lines_name_what_must_agree():
    tensor = Tensor("fc1.weight", (64, 10), np.dtype("float32"))
    assert Plan((tensor,), 100).lines == ("'fc1.weight' float32 (64, 10)",)
