"""`Reduction`: the arguments of an allreduce or a grouped allreduce."""

from typing import NamedTuple

import numpy as np

from allred.arrays import Array
from allred.comm.arguments import array_descriptor, group_descriptor
from allred.comm.group import Group
from allred.comm.header import OpDescriptor
from allred.comm.ops import Compression, ReduceOp, narrows
from allred.comm.work import Steps
from allred.fusion import assign_buckets

PACKED_BYTES = 2**20


class Reduction(NamedTuple):
    """Arrays to reduce, each into a target of its shape: the array itself, or a new contiguous one."""

    kind: str  # allreduce, of one array, or grouped_allreduce
    sources: list[Array]
    targets: list[Array]
    op: ReduceOp
    name: str
    compression: Compression
    checks_finite: bool = False
    weight: float | None = None  # of this rank, whose arrays are multiplied by it; None on all ranks: no weights

    def descriptor(self) -> OpDescriptor:
        """Return the descriptor. Raises InputError if the arguments cannot be used."""
        if self.kind == "allreduce":
            return array_descriptor(self.kind, self.sources[0], self.name, self.op, compression=self.compression)
        return group_descriptor(self.sources, self.name, self.op, self.compression, self.weight)

    def move(self, group: Group, flats: list[Array]) -> Steps[None]:
        """Reduce the arrays between the ranks of a group. flats: the flat targets. Small arrays are packed: each call
        of a backend costs a round trip between hosts."""
        for source, target, flat in zip(self.sources, self.targets, flats, strict=True):
            if source is not target:
                target[...] = source
            if self.weight is not None:
                weigh(flat, self.weight)
        for bucket in assign_buckets([flat.nbytes for flat in flats], [flat.dtype for flat in flats], PACKED_BYTES):
            parts = [flats[index] for index in bucket]
            packed = parts[0] if len(parts) == 1 else np.concatenate(parts)
            wire = self.compression.value if narrows(packed.dtype, self.compression.value) else 0
            yield from group.backend.allreduce(packed, self.op, wire)
            start = 0
            for part in parts if len(parts) > 1 else ():
                part[:] = packed[start : start + part.size]
                start += part.size


def weigh(array: Array, weight: float) -> None:
    """Multiply an array by the weight of this rank, as C does. Weight 0 gives zeros, also for NaN: the mean over no
    samples."""
    if weight == 0:
        array[...] = 0
    elif weight != 1:
        np.multiply(array, weight, out=array)
