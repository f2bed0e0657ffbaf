"""Protocol between workers and parameter servers: records of steps, and control requests.

A step takes one step request to each server, or several. The flags of a request select these actions, in this order:

    BEGIN   ask whether the gradient may be used (policy sync; a gradient that may not is received and dropped)
    PUSH    send the gradient, cell by cell
    DONE    report that all servers have the gradient; the reply comes when the worker may continue
    PULL    receive the parameters, cell by cell

Control requests are rare. A worker sends one as a pickled object (`ControlRequest`); the server replies with an object.
"""

import dataclasses
import struct
from pathlib import Path
from typing import Any, NamedTuple

from allred import checkpoint
from allred.arrays import Array
from allred.comm.backends.segment import Offer
from allred.errors import AllredError
from allred.ps.placement import Placement
from allred.ps.shard import Parts

RECORD_BYTES = 64  # of each step request and each step reply

BEGIN, PUSH, DONE, PULL, ABSENT, INIT, DRAIN = (1 << bit for bit in range(7))
# ABSENT: some pieces have no gradient; an additional first cell marks them, one byte for each piece.
# INIT: the cells are initial parameters, not gradients. DRAIN: this worker was asked to stop.

DROPPED, DRAINING = (1 << bit for bit in range(2))  # of replies. DRAINING: a rank was asked to stop, so all must stop

_REQUEST = struct.Struct("<Iqqd36x")
_REPLY = struct.Struct("<Iqqq36x")


class StepRequest(NamedTuple):
    """flags; the worker's step; the version it pulled last; its learning rate, NaN for no change."""

    flags: int
    step: int
    version: int
    lr: float


class StepReply(NamedTuple):
    """flags; the step that the worker may begin now; the version of the pulled parameters; staleness of the push."""

    flags: int
    step: int
    version: int
    staleness: int


pack_request, pack_reply = _REQUEST.pack, _REPLY.pack  # the fields as a record


def unpack_request(record: bytes) -> StepRequest:
    """Return the StepRequest of a record."""
    return StepRequest._make(_REQUEST.unpack(record))


def unpack_reply(record: bytes) -> StepReply:
    """Return the StepReply of a record."""
    return StepReply._make(_REPLY.unpack(record))


class ControlRequest:
    """Base class of control requests.

    TITLE: the text of the wait for the reply. LATE: the reply may depend on requests of other workers. TRAINS: the wait
    lasts while other workers train; the servers report a worker that makes no requests.
    """

    TITLE = ""
    LATE = False
    TRAINS = False


@dataclasses.dataclass(frozen=True)
class Register(ControlRequest):
    """Register a worker. Reply: `Registration`.

    skeleton: the nest of the parameters, with their positions as leaves. agreement: the options that must be equal on
    all ranks. optimizer: worker 0's pickled options and optimizer for `Server.join()`, or why there are none.
    """

    placement: Placement
    skeleton: Any
    agreement: str
    optimizer: bytes | str = b""
    TITLE = "registration with the parameter servers"
    LATE = True


class Registration(NamedTuple):
    """Reply to `Register`. mailbox, parameters: shared memory of the server; None on another node. server_returns:
    whether the server process continues when the last worker has left."""

    mailbox: Offer | None
    parameters: Offer | None
    server_returns: bool


@dataclasses.dataclass(frozen=True)
class LoadState(ControlRequest):
    """Set the optimizer's state."""

    state: Any
    parts: Parts
    TITLE = "the optimizer's state"


@dataclasses.dataclass(frozen=True)
class InitialState(LoadState):
    """Worker 0 sets the optimizer's state and the hash of the initial parameters, which follow as a push."""

    digest: str
    TITLE = "the optimizer's state to start from"


@dataclasses.dataclass(frozen=True)
class AwaitStart(ControlRequest):
    """Wait until worker 0 has sent initial parameters `number` times. Reply: their hash."""

    number: int
    LATE = True


@dataclasses.dataclass(frozen=True)
class CompareBatches(ControlRequest):
    """Send the arguments of this worker's batches. Reply: {worker: arguments} so far."""

    arguments: Any
    TITLE = "the arguments of the batches"


class GetState(ControlRequest):
    """Reply: the optimizer's state and the slots of this server's pieces."""

    TITLE = "the optimizer's state"


class GetStep(ControlRequest):
    """Reply: the optimizer's updates, including those before a restore, and the version of the parameters."""

    TITLE = "the number of the step"


@dataclasses.dataclass(frozen=True)
class SetStep(ControlRequest):
    """The parameters were restored from a checkpoint of this step."""

    step: int
    TITLE = "the number of the step"


@dataclasses.dataclass(frozen=True)
class Save(ControlRequest):
    """Write this server's part of a checkpoint. Reply: (shard, optimizer's state, version). extra: one more entry."""

    directory: Path
    extra: tuple[checkpoint.Entry, Array] | None = None


@dataclasses.dataclass(frozen=True)
class CheckpointComplete(ControlRequest):
    """Announce a complete checkpoint, for the status of the server."""

    path: str


class GetStatistics(ControlRequest):
    """Reply: the statistics of this server."""

    TITLE = "statistics of the parameter servers"


class BeginDrain(ControlRequest):
    """Stop all workers. Reply: whether this worker writes the last checkpoint."""

    TITLE = "the stop request"


@dataclasses.dataclass(frozen=True)
class EndDrain(ControlRequest):
    """Wait for the result of the last checkpoint. result: given by the worker that writes it. Reply: the result."""

    result: str | None
    TITLE = "the checkpoint at the end"


class Finish(ControlRequest):
    """This worker makes no more steps, but still sends other requests."""

    TITLE = "the end of this worker's steps"


class AwaitFinish(ControlRequest):
    """Wait until all workers have finished or are gone."""

    TITLE = "the end of the other workers' steps"
    LATE = TRAINS = True


@dataclasses.dataclass(frozen=True)
class ShareFailure(ControlRequest):
    """Wait for the `number`-th final status of worker 0. Reply: its error, or None.

    is_chief: this is worker 0, and `failure` is its status.
    """

    number: int
    is_chief: bool
    failure: AllredError | None
    TITLE = "final status of worker 0"
    LATE = True


class Leave(ControlRequest):
    """This worker makes no more requests. There is no reply."""


class LeaveAndWait(Leave):
    """This worker makes no more requests. Reply: the statistics, after the last worker has left."""

    TITLE = "the end of the other workers"
    TRAINS = True
