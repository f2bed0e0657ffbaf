"""Which tensors of a group on a GPU are in which bucket, and which need no bucket."""

import numpy as np
import pytest

import allred
from allred.comm import device_buckets
from allred.comm.device_buckets import ReduceRequest, plan_buckets

SUM, AVERAGE = ReduceRequest(allred.Sum, ""), ReduceRequest(allred.Average, "")


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(device_buckets, "BUCKET_BYTES", 4096)


def plan(counts, dtype, request):
    return plan_buckets([(count,) for count in counts], [np.dtype(dtype)] * len(counts), request)


def bounds(found):
    return [[(each.start, each.stop) for each in bucket.slices] for bucket in found.buckets]


def test_slices_of_a_large_tensor():
    found = plan([2100], np.float32, AVERAGE)
    assert bounds(found) == [[(0, 1024)], [(1024, 2048)], [(2048, 2100)]]
    assert {bucket.is_packed for bucket in found.buckets} == {False}
    assert (found.direct, found.not_packed) == ({}, [0])


def test_slices_have_the_bytes_of_the_wire_dtype():
    found = plan([2100], np.float32, AVERAGE._replace(compression=allred.Compression.fp16))
    assert bounds(found) == [[(0, 2048)], [(2048, 2100)]]
    assert {(bucket.wire_dtype, bucket.is_packed) for bucket in found.buckets} == {("float16", True)}
    assert found.not_packed == []


def test_a_large_tensor_without_kernels_needs_no_bucket():
    found = plan([1009, 5, 7, 0, 900], np.float32, SUM)
    assert found.direct == {"float32": [0, 4]}
    assert bounds(found) == [[(0, 5), (0, 7)]]
    assert found.not_packed == [0, 4]


@pytest.mark.parametrize(
    ("dtype", "request_", "direct"),
    [
        (np.float32, SUM, True),
        (np.float32, SUM._replace(op=allred.Max), True),
        (np.float32, SUM._replace(checks=True), False),
        (np.int32, SUM._replace(checks=True), True),
        (np.float32, SUM._replace(weight=1.0), False),
        (np.int32, SUM._replace(weight=1.0), False),
        (np.float32, AVERAGE, False),
        (np.float32, AVERAGE._replace(is_single=True), True),
        (np.float16, AVERAGE, True),
        (np.float16, AVERAGE._replace(weight=1.0), False),
        (np.float32, SUM._replace(compression=allred.Compression.bf16), False),
        (np.float16, SUM._replace(compression=allred.Compression.bf16), True),
    ],
)
def test_what_a_kernel_is_needed_for(dtype, request_, direct):
    assert bool(plan([1009], dtype, request_).direct) == direct


def test_complex_numbers_are_twice_as_many_floats():
    """In buckets of their own: they are never compressed."""
    request = AVERAGE._replace(compression=allred.Compression.fp16)
    dtypes = [np.dtype(name) for name in ("f4", "c8", "c8", "c16")]
    found = plan_buckets([(5,), (5,), (), (300,)], dtypes, request)
    assert {(bucket.dtype, bucket.wire_dtype, bucket.is_inexact) for bucket in found.buckets} == {
        ("float32", "float16", True),
        ("float32", "float32", True),
        ("float64", "float64", True),
    }
    assert sorted(bounds(found)) == [[(0, 5)], [(0, 10), (0, 2)], [(0, 512)], [(512, 600)]]
