"""`StepHeader`: what each rank tells the others in the header exchange of a step, beside what must be the same on all.

It fills the two fields of a header that may differ between ranks (`comm.header.OwnFields`): `note` has the number of
samples in its low 47 bits, then the flags; `rows` has the hash.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from allred.comm.header import OwnFields

# Flags. This rank
(
    NONFINITE,  # has gradients that are not finite
    LARGE,  # has gradients that are finite, but whose sum over the ranks may not be
    CHECK,  # requests a comparison of parameters and gradients
    BATCHES,  # requests a comparison of the arguments of its batches, which have not been compared yet
    DEFERRED,  # requests a check of the results by the reduction, because it has not scanned its gradients
    PREPARED,  # can reduce without another header exchange: its gradients are on a GPU, and as they should be
    MAY_REPEAT,  # can make the next step as a `SteadyStep`, if it is like this one
    NEEDS_ALL,  # needs all gradients before any is changed (overlap.py)
    MISSING,  # lacks a gradient
    OVERLAPPED,  # has passed gradients to opt.reduce()
    SAVED,  # has written a checkpoint since the last step (error_feedback.py)
) = (1 << bit for bit in range(11))

LARGEST_SAMPLES = 2**47 - 1
_FLAGS_SHIFT, _MORE_SHIFT = 48, 59
_UNCOUNTED = 2**47  # the number of samples is not known


class StepHeader(NamedTuple):
    """samples: of how many samples the gradients are the mean; None: not known. flags: of those above. more: 0 to 15,
    see `MoreFlags`. content_hash: of prepared gradients (`Reducer.prepare`), else of the parameters in the drift
    window."""

    samples: int | None = None
    flags: int = 0
    more: int = 0
    content_hash: int = 0

    def pack(self) -> OwnFields:
        note = _UNCOUNTED if self.samples is None else self.samples
        return OwnFields(self.content_hash, note | self.flags << _FLAGS_SHIFT | self.more << _MORE_SHIFT)

    @classmethod
    def unpack(cls, fields: OwnFields) -> "StepHeader":
        rows, note = fields
        samples = None if note & _UNCOUNTED else note & LARGEST_SAMPLES
        return cls(samples, note >> _FLAGS_SHIFT & 2**11 - 1, note >> _MORE_SHIFT, rows)


class MoreFlags(Protocol):
    """Four flags of a wrapper around mode sync, in the header exchange of each reduction."""

    def flags(self) -> int:
        """Return the flags of this rank, 0 to 15."""

    def check(self, flags: list[int], ranks: Sequence[int]) -> None:
        """Check the flags of all ranks. An error is raised on all of them. flags: by rank."""


class Agreement(NamedTuple):
    """The result of a header exchange; the same on all ranks, except `weight`."""

    weight: float | None  # factor of this rank's gradients; None: all ranks count equally
    headers: list[StepHeader]  # by rank

    def any(self, flag: int) -> bool:
        """Whether a rank has set the flag."""
        return any(each.flags & flag for each in self.headers)

    def all(self, flag: int) -> bool:
        """Whether all ranks have set the flag."""
        return all(each.flags & flag for each in self.headers)

    @property
    def hashes(self) -> list[int]:
        return [each.content_hash for each in self.headers]
