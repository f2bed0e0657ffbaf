"""`Reduction`: the arguments of an allreduce or a grouped allreduce."""

from typing import NamedTuple

from allred.arrays import Array
from allred.comm.arguments import array_descriptor, group_descriptor
from allred.comm.group import Group
from allred.comm.header import OpDescriptor
from allred.comm.ops import Compression, ReduceOp, narrows
from allred.comm.work import Steps


class Reduction(NamedTuple):
    """Arrays to reduce, each into a target of its shape: the array itself, or a new contiguous one."""

    kind: str  # allreduce, of one array, or grouped_allreduce
    sources: list[Array]
    targets: list[Array]
    op: ReduceOp
    name: str
    compression: Compression
    checks_finite: bool = False

    def descriptor(self) -> OpDescriptor:
        """Return the descriptor. Raises InputError if the arguments cannot be used."""
        if self.kind == "allreduce":
            return array_descriptor(self.kind, self.sources[0], self.name, self.op, compression=self.compression)
        return group_descriptor(self.sources, self.name, self.op, self.compression)

    def move(self, group: Group, flats: list[Array]) -> Steps[None]:
        """Reduce one array after the other between the ranks of a group. flats: the flat targets."""
        for source, target, flat in zip(self.sources, self.targets, flats, strict=True):
            if source is not target:
                target[...] = source
            wire = self.compression.value if narrows(flat.dtype, self.compression.value) else 0
            yield from group.backend.allreduce(flat, self.op, wire)
