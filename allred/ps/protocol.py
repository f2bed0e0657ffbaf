"""Protocol between workers and parameter servers: records of steps, and control requests.

A step takes one step request to each server, or several. The flags of a request select these actions, in this order:

    BEGIN   ask whether the gradient may be used (policy sync; a gradient that may not is received and dropped)
    PUSH    send the gradient, cell by cell
    DONE    report that all servers have the gradient; the reply comes when the worker may continue
    PULL    receive the parameters, cell by cell
    LOOKUP  receive vectors of an embedding table (table_cells.py); alone

Control requests are rare. A worker sends one as a pickled object (`ControlRequest`); the server replies with an object.
"""

import dataclasses
import struct
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple, dataclass_transform

from allred import checkpoint
from allred.arrays import Array, amount
from allred.comm.backends.segment import Offer
from allred.embeddings.table_form import TableForm
from allred.errors import AllredError
from allred.ps.placement import Placement
from allred.ps.shard import Parts
from allred.wording import count

RECORD_BYTES = 64  # of each step request and each step reply

BEGIN, PUSH, DONE, PULL, ABSENT, INIT, DRAIN, LOOKUP, TRAIN, PREFETCH, TABLES = (1 << bit for bit in range(11))
# ABSENT: some pieces have no gradient; an additional first cell marks them, one byte for each piece.
# INIT: the cells are initial parameters, not gradients. DRAIN: this worker was asked to stop. TRAIN: a lookup makes the
# rows that are missing. PREFETCH: the worker does not wait for the vectors. TABLES: the gradients of embedding tables
# come before the gradients of the parameters.

DROPPED, DRAINING = (1 << bit for bit in range(2))  # of replies. DRAINING: a rank was asked to stop, so all must stop

_REQUEST = struct.Struct("<IqqddIQ16x")
_REPLY = struct.Struct("<Iqqq36x")


class StepRequest(NamedTuple):
    """flags; the worker's step; the version it pulled last; its learning rate, NaN for no change; the weight of its
    gradient in the mean of its step. Of a lookup: the number of the table, and of the ids."""

    flags: int
    step: int
    version: int
    lr: float
    weight: float = 1.0
    table: int = 0
    ids: int = 0


class StepReply(NamedTuple):
    """flags; the step that the worker may begin now; the version of the pulled parameters; staleness of the push."""

    flags: int
    step: int
    version: int
    staleness: int


pack_request, pack_reply = _REQUEST.pack, _REPLY.pack  # the fields as a record


def unpack_request(record: bytes) -> StepRequest:
    return StepRequest._make(_REQUEST.unpack(record))


def unpack_reply(record: bytes) -> StepReply:
    return StepReply._make(_REPLY.unpack(record))


@dataclass_transform(frozen_default=True)
class ControlRequest:
    """Base class of control requests; its subclasses are frozen dataclasses.

    title: the text of the wait for the reply. late: the reply may depend on requests of other workers. trains: the wait
    lasts while other workers train; the servers report a worker that makes no requests.
    """

    title, late, trains = "", False, False

    def __init_subclass__(cls, title: str = "", late: bool = False, trains: bool = False) -> None:
        cls.title, cls.late, cls.trains = title, late, trains
        dataclasses.dataclass(frozen=True)(cls)


class Register(ControlRequest, title="registration with the parameter servers", late=True):
    """Register a worker. Reply: `Registration`.

    skeleton: the nest of the parameters, with their positions as leaves. agreement: the options that must be equal on
    all ranks. optimizer: worker 0's pickled options and optimizer for `Server.join()`, or why there are none. arena:
    the worker's memory for gradients, or None. tables: of embeddings.
    """

    placement: Placement
    skeleton: Any
    agreement: str
    optimizer: bytes | str = b""
    arena: Offer | None = None
    tables: tuple[TableForm, ...] = ()


class Registration(NamedTuple):
    """Reply to `Register`. mailbox, parameters, vectors: shared memory of the server, the last one for the vectors that
    the worker looks up; None on another node. reads_arena: whether the server has mapped the worker's arena.
    server_returns: whether the server process continues when the last worker has left."""

    mailbox: Offer | None
    parameters: Offer | None
    vectors: Offer | None
    reads_arena: bool
    server_returns: bool


class LoadState(ControlRequest, title="the optimizer's state"):
    """Set the optimizer's state."""

    state: Any
    parts: Parts


class InitialParameters(ControlRequest, title="the parameters to start from"):
    """Worker 0 sends the hash of the initial parameters; the parameters follow as a push."""

    digest: str


class AwaitStart(ControlRequest, late=True):
    """Wait until worker 0 has sent initial parameters `number` times. Reply: their hash."""

    number: int


class CountRows(ControlRequest, title="the size of a table"):
    """Reply: the number of rows of a table at this server."""

    table: int


class GetRows(ControlRequest, title="the rows of a table"):
    """Reply: the rows of a table at this server, as `RowStore.columns`."""

    table: int


class WriteRows(ControlRequest, title="vectors for a table"):
    """Write rows, as `RowStore.write`."""

    table: int
    columns: dict[str, Array]


class LoadRows(ControlRequest, title="the rows of a table"):
    """Read the rows of a table from the checkpoint `path`, in which it had made `step` updates."""

    table: int
    path: Path
    step: int


class CompareBatches(ControlRequest, title="the arguments of the batches"):
    """Send the arguments of this worker's batches. Reply: {worker: arguments} so far."""

    arguments: Any


class SetHyperparameters(ControlRequest, title="the hyperparameters of the optimizer"):
    """Set the result of the optimizer's `hyperparameters`."""

    values: Any


class GetState(ControlRequest, title="the optimizer's state"):
    """Reply: the optimizer's state and the slots of this server's pieces."""


class GetStep(ControlRequest, title="the number of the step"):
    """Reply: the optimizer's updates, including those before a restore, and the version of the parameters."""


class SetStep(ControlRequest, title="the number of the step"):
    """The parameters were restored from a checkpoint of this step."""

    step: int


class Save(ControlRequest):
    """Write this server's part of a checkpoint. Reply: (shard, optimizer's state, version, {table: (file with rows,
    number of updates, base)}). names: of tensors that have another name in checkpoints. extra: one more entry. name:
    of the checkpoint. complete: names of the complete checkpoints with tables that this worker has written."""

    directory: Path
    names: dict[str, str]
    extra: tuple[checkpoint.Entry, Array] | None = None
    name: str = ""
    complete: frozenset[str] = frozenset()


class CheckpointComplete(ControlRequest):
    """Announce a complete checkpoint, for the status of the server."""

    path: str


class GetStatistics(ControlRequest, title="statistics of the parameter servers"):
    """Reply: the statistics of this server."""


class BeginDrain(ControlRequest, title="the stop request", late=True):
    """Begin no more steps. Reply, when no worker is sending a gradient: whether this worker writes the last checkpoint,
    and the version of the parameters."""


class EndDrain(ControlRequest, title="the checkpoint at the end"):
    """Wait for the result of the last checkpoint. result: given by the worker that writes it. Reply: the result."""

    result: str | None


class Finish(ControlRequest, title="the end of this worker's steps"):
    """This worker makes no more steps, but still sends other requests."""


class AwaitFinish(ControlRequest, title="the end of the other workers' steps", late=True, trains=True):
    """Wait until all workers have finished or are gone."""


class ShareFailure(ControlRequest, title="final status of worker 0", late=True):
    """Wait for the `number`-th final status of worker 0. Reply: its error, or None.

    is_chief: this is worker 0, and `failure` is its status.
    """

    number: int
    is_chief: bool
    failure: AllredError | None


class Leave(ControlRequest):
    """This worker makes no more requests. There is no reply."""


class LeaveAndWait(Leave, title="the end of the other workers", trains=True):
    """This worker makes no more requests. Reply: the statistics, after the last worker has left."""


_GROUPS = 8  # of a histogram


@dataclasses.dataclass
class ServerStatistics:
    """Statistics of one server.

    gradients   number of gradients that were applied or added to the sum of their step, without dropped ones
    updates     of the parameters: one for each gradient; with policy sync one for each step
    staleness   {updates: gradients}: how many updates the parameters of each gradient lacked when it arrived
    dropped     {worker: gradients that were too late for their step}; only at server 0
    torn        gradients that were applied in part, because their worker died
    unused      policy sync: gradients of the last step, if it was incomplete when the last worker left; `gradients`
                includes them
    """

    server: int
    gradients: int = 0
    updates: int = 0
    pulls: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    torn: int = 0
    unused: int = 0
    staleness: Counter[int] = dataclasses.field(default_factory=Counter)
    dropped: Counter[int] = dataclasses.field(default_factory=Counter)


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Statistics of all servers, as returned by `opt.statistics()`.

    servers: those of each server. policy, placement: descriptions of the consistency policy and of the placement.
    """

    servers: tuple[ServerStatistics, ...]
    policy: str
    placement: str

    @property
    def staleness(self) -> Counter[int]:
        """{updates: gradients}: how many updates the parameters of each gradient lacked, over all servers."""
        return sum((each.staleness for each in self.servers), Counter())

    @property
    def dropped(self) -> Counter[int]:
        """{worker: number of its gradients that were dropped}."""
        return self.servers[0].dropped

    @property
    def updates(self) -> int:
        """Number of updates of the parameters; equal on all servers while no step is in progress."""
        return self.servers[0].updates

    def __str__(self) -> str:
        first = self.servers[0]
        dropped = ", ".join(f"worker {worker}: {number}" for worker, number in sorted(self.dropped.items()))
        lines = [
            f"parameter servers, {self.policy}: {first.gradients} gradients, {first.updates} updates; "
            f"dropped {sum(self.dropped.values())}{f' ({dropped})' * bool(dropped)}",
            f"staleness (updates): {histogram(self.staleness)}",
        ]
        if first.unused:
            were = "were" if first.unused > 1 else "was"
            lines.append(f"{count(first.unused, 'gradient')} of a step that was not complete {were} not used")
        for each in self.servers:
            torn = f", {each.torn} gradients torn" if each.torn else ""
            lines.append(
                f"server {each.server}: {amount(each.bytes_in)} in, {amount(each.bytes_out)} out, "
                f"{each.updates} updates, {each.pulls} pulls{torn}"
            )
        return "\n".join(lines)


def histogram(counts: Counter[int]) -> str:
    """Return counts as percentages, in at most 8 groups of neighbouring values.

    >>> histogram(Counter({0: 90, 1: 9, 4: 1}))
    '0: 90 %, 1: 9 %, 4: 1 %; mean 0.13, largest 4'
    """
    total = sum(counts.values())
    if not total:
        return "none"
    values = sorted(counts)
    size = -(-len(values) // _GROUPS)
    texts = []
    for at in range(0, len(values), size):
        group = values[at : at + size]
        percent = 100 * sum(counts[value] for value in group) / total
        name = f"{group[0]}-{group[-1]}" if len(group) > 1 else f"{group[0]}"
        texts.append(f"{name}: {percent:.0f} %" if percent >= 1 else f"{name}: {percent:.1g} %")
    mean = sum(value * count for value, count in counts.items()) / total
    return f"{', '.join(texts)}; mean {mean:.3g}, largest {values[-1]}"
