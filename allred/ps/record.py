"""What a worker and a server say to each other about a step: one record each way, of RECORD_BYTES bytes.

A step is one request to each server, or several, by what its flags ask for; the server does them in this order:

    BEGIN   may this gradient be used? (the coordinator of sync decides; what is dropped still passes, unused)
    PUSH    gradients come, cell by cell
    DONE    the gradient is on all servers; the answer waits until the worker may go on (the coordinator decides)
    PULL    parameters go back, cell by cell
"""

import struct
from typing import NamedTuple

RECORD_BYTES = 64

BEGIN, PUSH, DONE, PULL, ABSENT, INIT, DRAIN = (1 << bit for bit in range(7))
# ABSENT: some pieces have no gradient; a first cell says which, a byte each. INIT: the cells are not gradients but
# parameters to start from. DRAIN: this worker was asked to end.

DROPPED, DRAINING, SAVE = (1 << bit for bit in range(3))  # of answers; SAVE: whoever reads this writes the checkpoint

_REQUEST = struct.Struct("<IIqqd")
_ANSWER = struct.Struct("<IIqqq")


class Request(NamedTuple):
    """flags; the worker's step; the version it pulled last; its learning rate, NaN where it has none to tell."""

    flags: int
    step: int
    version: int
    lr: float

    def pack(self) -> bytes:
        return _REQUEST.pack(self.flags, 0, self.step, self.version, self.lr).ljust(RECORD_BYTES, b"\0")

    @classmethod
    def unpack(cls, record: bytes) -> "Request":
        flags, _, step, version, lr = _REQUEST.unpack_from(record)
        return cls(flags, step, version, lr)


class Answer(NamedTuple):
    """flags; the step that the worker may begin now; the version of what it has pulled; the staleness of its push."""

    flags: int
    step: int
    version: int
    staleness: int

    def pack(self) -> bytes:
        return _ANSWER.pack(self.flags, 0, self.step, self.version, self.staleness).ljust(RECORD_BYTES, b"\0")

    @classmethod
    def unpack(cls, record: bytes) -> "Answer":
        flags, _, step, version, staleness = _ANSWER.unpack_from(record)
        return cls(flags, step, version, staleness)
