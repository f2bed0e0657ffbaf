"""The header's bytes, and the error that comes of headers that disagree."""

import struct

import pytest

from allred.comm import header
from allred.comm.header import OpDescriptor
from allred.errors import InputError, MismatchError


def reduce_call(shape="(4,)", **changes):
    return OpDescriptor("allreduce", "w", f"allreduce(Sum) 'w' float32 {shape}", op=2, dtype=8, **changes)


def test_64_bytes_that_can_be_read():
    packed = reduce_call(rows=5, note=2**64 - 1).pack(7)
    assert len(packed) == header.BYTES == 64
    assert header.own_fields(packed) == (5, 2**64 - 1)
    assert struct.unpack("<QBBBBi", packed[:16]) == (7, header.KINDS.index("allreduce"), 2, 8, 0, -1)


def test_rows_and_notes_are_each_ranks_own():
    assert header.agree([reduce_call(rows=r, note=r).pack(3) for r in range(4)])


@pytest.mark.parametrize(
    "other",
    [
        reduce_call("(5,)"),
        OpDescriptor("allreduce", "v", "allreduce(Sum) 'w' float32 (4,)", op=2, dtype=8),
        OpDescriptor("allreduce", "w", "allreduce(Sum) 'w' float32 (4,)", op=3, dtype=8),
        OpDescriptor("allreduce", "w", "allreduce(Sum) 'w' float32 (4,)", op=2, dtype=9),
        OpDescriptor("broadcast", "w", "allreduce(Sum) 'w' float32 (4,)", op=2, dtype=8),
        reduce_call(root=0),
        reduce_call(tensors=("x",)),
    ],
)
def test_every_other_difference_is_seen(other):
    assert not header.agree([reduce_call().pack(3), other.pack(3)])
    assert not header.agree([reduce_call().pack(3), reduce_call().pack(4)])


def test_a_problem_never_agrees():
    assert not header.agree([reduce_call(problem="bad").pack(0)] * 2)


def test_different_operations_are_listed_by_rank():
    error = header.verdict([reduce_call(), reduce_call("(5,)"), reduce_call()])
    assert isinstance(error, MismatchError)
    assert str(error).startswith(
        "ranks called different operations: allreduce(Sum) 'w' float32 (4,) on ranks 0,2; "
        "allreduce(Sum) 'w' float32 (5,) on rank 1; all ranks must"
    )


def test_the_first_different_tensor_is_named_with_both_values():
    a = OpDescriptor("step", title="opt.step()", tensors=("'b' float32 (4,)", "'w' float32 (2, 3)"))
    b = OpDescriptor("step", title="opt.step()", tensors=("'b' float32 (4,)", "'w' float32 (2, 4)", "'z' float32 ()"))
    assert "tensor 1 of 3 differs: 'w' float32 (2, 3) on rank 0; 'w' float32 (2, 4) on rank 1" in str(
        header.verdict([a, b])
    )
    assert "no such tensor on rank 0; 'z' float32 () on rank 1" in str(
        header.verdict(
            [
                OpDescriptor("step", tensors=a.tensors[:1]),
                OpDescriptor("step", tensors=(a.tensors[0], "'z' float32 ()")),
            ]
        )
    )


def test_a_problem_is_reported_with_its_ranks():
    error = header.verdict(
        [reduce_call(), reduce_call(problem="Average of int64"), reduce_call(problem="Average of int64")]
    )
    assert isinstance(error, InputError)
    assert str(error) == "allreduce(Sum) 'w' float32 (4,): ranks 1-2: Average of int64"
    everyone = header.verdict([reduce_call(problem="Average of int64")] * 2)
    assert str(everyone) == "allreduce(Sum) 'w' float32 (4,): Average of int64"


def test_a_name_is_shown_in_one_line():
    assert header.quoted("fc1.weight") == " 'fc1.weight'"
    assert header.quoted("") == header.quoted(None) == ""
    assert header.quoted("a\nb\udc80") == r" 'a\nb\udc80'"
    assert header.quoted(5) == " '5'"  # no string: refused later, with this title
