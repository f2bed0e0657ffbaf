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

_REQUEST = struct.Struct("<Iqqd36x")
_ANSWER = struct.Struct("<Iqqq36x")


class Request(NamedTuple):
    """flags; the worker's step; the version it pulled last; its learning rate, NaN where it has none to tell."""

    flags: int
    step: int
    version: int
    lr: float


class Answer(NamedTuple):
    """flags; the step that the worker may begin now; the version of what it has pulled; the staleness of its push."""

    flags: int
    step: int
    version: int
    staleness: int


def pack_request(flags: int, step: int, version: int, lr: float) -> bytes:
    """A Request as a record."""
    return _REQUEST.pack(flags, step, version, lr)


def unpack_request(record: bytes) -> Request:
    """The Request of a record."""
    return Request._make(_REQUEST.unpack(record))


def pack_answer(flags: int, step: int, version: int, staleness: int) -> bytes:
    """An Answer as a record."""
    return _ANSWER.pack(flags, step, version, staleness)


def unpack_answer(record: bytes) -> Answer:
    """The Answer of a record."""
    return Answer._make(_ANSWER.unpack(record))
