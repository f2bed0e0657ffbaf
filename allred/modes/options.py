"""The arguments of `allred.distributed` (`StepOptions`), those of a step (`StepInput`), and the base classes of mode
sync (sync.py) and mode ps (ps.py): `Mode` and `SessionSupport`.
"""

import dataclasses
import numbers
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from allred import nest
from allred.arrays import Array
from allred.comm import ops
from allred.comm.communicator import Communicator
from allred.comm.ops import Compression, ReduceOp
from allred.comm.process_set import ProcessSet
from allred.config import choices, parse_bytes
from allred.embeddings.embedding import Embedding, TableLink
from allred.errors import AllredError, InputError
from allred.fusion import Tensor
from allred.modes.clipping import GradScaler
from allred.optim.base import Optimizer
from allred.optim.optimizers import SGD
from allred.ps.consistency import Async, Bounded, Policy, Sync
from allred.ps.placement import How, check_placement
from allred.ps.protocol import Statistics
from allred.ps.shard import locks
from allred.validators import integer, positive

NONFINITE_POLICIES = choices("nonfinite")
_CONSISTENCY_POLICIES = choices("consistency")


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """Options of one distributed optimizer or gradient function; see `allred.distributed`. None: use the setting.
    Raises InputError for a value that cannot be used."""

    name: str = "opt"
    op: ReduceOp = ReduceOp.AVERAGE
    accumulate: int = 1
    bucket_bytes: int | str | None = None
    nonfinite: str | None = None
    process_set: ProcessSet | None = None
    compression: Compression = Compression.none
    error_feedback: bool | None = None
    clip_norm: float | None = None
    scaler: GradScaler | None = None
    consistency: Policy | str | None = None
    placement: How | None = None
    use_locking: bool | None = None
    sharded: bool = False
    every: int | None = None
    outer: Optimizer | None = None
    fragments: int = 1
    delay: int = 0
    mix: float = 0.5
    tables: Sequence[Embedding] = ()
    ops: ClassVar[tuple[ReduceOp, ...]] = (ReduceOp.AVERAGE, ReduceOp.SUM)  # that `op` may be

    def __post_init__(self) -> None:
        self._replace("op", ops.of(self.op))
        self._check_types()
        self._replace("accumulate", integer("accumulate", self.accumulate, 1, "it counts micro-steps"))
        self._replace("bucket_bytes", _size(self.bucket_bytes))
        self._check_rounds()
        self._check_tables()
        if self.clip_norm is not None:
            self._replace("clip_norm", positive("allred.distributed", "clip_norm", self.clip_norm))
        if self.scaler is not None:
            if self.nonfinite not in (None, "skip"):
                raise InputError(
                    f"nonfinite={self.nonfinite!r}: a scaler skips steps whose gradients are not finite; leave it out"
                )
            self._replace("nonfinite", "skip")

    def _check_types(self) -> None:
        if not isinstance(self.name, str):
            raise InputError(f"allred.distributed: name={self.name!r} must be a string")
        if not isinstance(self.process_set, ProcessSet | None):
            raise InputError(f"{self.name}: process_set={self.process_set!r} must be an allred.ProcessSet")
        if self.scaler is not None and not isinstance(self.scaler, GradScaler):
            raise InputError(f"scaler={self.scaler!r} must be an allred.GradScaler")
        if not isinstance(self.use_locking, bool | None):
            raise InputError(f"use_locking={self.use_locking!r} must be True or False")
        if not isinstance(self.sharded, bool):
            raise InputError(f"{self.name}: sharded={self.sharded!r} must be True or False")
        if self.placement is not None:
            check_placement(self.placement)
        if self.op not in self.ops:
            raise InputError(f"op={self.op!r} cannot combine gradients; use allred.Average or allred.Sum")
        if not isinstance(self.compression, Compression):
            raise InputError(f"compression={self.compression!r}: expected allred.Compression{ops.COMPRESSIONS}")
        if self.compression.is_quantized and self.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise InputError(f"op={self.op!r} with compression={self.compression!r}: use allred.Average or allred.Sum")
        if not isinstance(self.error_feedback, bool | None):
            raise InputError(f"error_feedback={self.error_feedback!r} must be True or False")
        if self.error_feedback and self.compression is Compression.none:
            raise InputError("error_feedback=True needs compression, such as allred.Compression.int8")
        if self.nonfinite is not None and self.nonfinite not in NONFINITE_POLICIES:
            policies = ", ".join(NONFINITE_POLICIES)
            raise InputError(f"nonfinite={self.nonfinite!r} is not a policy; use one of {policies}")
        given = self.consistency
        if not (given is None or isinstance(given, Policy) or given in _CONSISTENCY_POLICIES):
            raise InputError(
                f"consistency={given!r} must be allred.ps.Async(), allred.ps.Bounded(staleness=...), "
                f"allred.ps.Sync(...), or one of the words {', '.join(_CONSISTENCY_POLICIES)}"
            )

    def _check_rounds(self) -> None:
        """Check the options of rounds: of mode local, and of mode ps with `every`."""
        if self.every is not None:
            self._replace("every", integer("every", self.every, 1, "it counts steps"))
        self._replace("fragments", integer("fragments", self.fragments, 1, "it counts parts of the parameters"))
        self._replace("delay", integer("delay", self.delay, 0, "it counts steps"))
        if not isinstance(self.outer, Optimizer | None):
            raise InputError(
                f"outer is a {type(self.outer).__name__}; expected an optimizer of allred.optim, such as "
                "allred.optim.SGD(0.7)"
            )
        if not (isinstance(self.mix, (numbers.Real, np.floating)) and 0 <= self.mix < 1):
            raise InputError(f"mix={self.mix!r} must be a number from 0, and less than 1")

    def _check_tables(self) -> None:
        if isinstance(self.tables, Embedding) or not all(isinstance(table, Embedding) for table in self.tables):
            raise InputError(f"{self.name}: tables={self.tables!r:.80} must be a list of allred.Embedding")
        self._replace("tables", tuple(self.tables))
        names = [table.name for table in self.tables]
        if len(set(names)) < len(names):
            raise InputError(f"{self.name}: two of the tables {names} have the same name; give each its own")
        given = {
            "accumulate": self.accumulate > 1, "clip_norm": self.clip_norm is not None, "scaler": self.scaler,
            "process_set": self.process_set is not None,
        }  # fmt: skip
        if self.tables and (wrong := [name for name, is_given in given.items() if is_given]):
            raise InputError(
                f"{self.name}: {', '.join(wrong)} cannot be used with tables, whose gradients it would not include; "
                "leave one of the two out"
            )

    def with_settings(self, settings: Any) -> "StepOptions":
        """Return the options of mode local, with the settings in place of None. Raises InputError."""
        every = settings.local_steps if self.every is None else self.every
        if self.delay >= every or self.fragments > every:
            raise InputError(
                f"{self.name}: every={every} must be more than delay={self.delay}, and not less than "
                f"fragments={self.fragments}"
            )
        outer = self.outer or SGD(0.7, momentum=0.5, nesterov=True)
        return dataclasses.replace(self, every=every, outer=outer)

    def _replace(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def keeps_residuals(self) -> bool:
        """Whether errors of compression are kept (error_feedback.py)."""
        return self.compression.is_quantized if self.error_feedback is None else self.error_feedback

    @property
    def title(self) -> str:
        return f"{self.name}.step()"

    # Mode ps.

    def policy(self, settings: Any) -> Policy:
        given = settings.consistency if self.consistency is None else self.consistency
        if isinstance(given, Policy):
            return given
        if given == "bounded":
            return Bounded(settings.staleness)
        return Async() if given == "async" else Sync(settings.replicas_to_aggregate or None)

    def asks_to_lock(self, settings: Any) -> bool:
        return bool(settings.use_locking if self.use_locking is None else self.use_locking)

    def locks(self, optimizer: Any, settings: Any) -> bool:
        return locks(self.asks_to_lock(settings), self.policy(settings), optimizer)

    def agreement(self, optimizer: Any, settings: Any) -> str:
        """Describe what must be the same on all ranks. The learning rate may differ: worker 0's is used."""
        every = f", every={self.every}" if self.every is not None and self.every > 1 else ""
        return f"{_describe(optimizer)}, {self.policy(settings)}, use_locking={self.locks(optimizer, settings)}{every}"

    def describe(self, optimizer: Any) -> bytes | str:
        """Pickle the options and the optimizer for a server in `Server.join()`; return the reason if that fails."""
        options = dataclasses.replace(self, placement=None, process_set=None, scaler=None, tables=())
        try:
            return pickle.dumps((options, optimizer))
        except Exception as error:  # any exception of a class of the user
            return f"{type(optimizer).__name__} cannot be pickled ({type(error).__name__}: {error})"


def _size(bucket_bytes: int | str | None) -> int | None:
    try:
        size = None if bucket_bytes is None else parse_bytes(bucket_bytes)
    except ValueError as error:
        raise InputError(f"bucket_bytes: {error}") from None
    if size == 0:
        raise InputError("bucket_bytes=0 is too small; it must be at least 1")
    return size


def _describe(optimizer: Any) -> str:
    """Return the class of an optimizer, and for one of allred.optim the numbers it was made with."""
    if not isinstance(optimizer, Optimizer):
        return f"{type(optimizer).__name__}()"
    if hasattr(optimizer, "pushed_hyperparameters"):  # those of worker 0 are sent to the servers
        return optimizer.kind
    numbers = [
        f"{name}={value}"
        for name, value in nest.leaves(optimizer.hyperparameters())
        if isinstance(value, (bool, int, float)) and name.rpartition(".")[2] not in ("lr", "initial_lr")
    ]
    return f"{optimizer.kind}({', '.join(numbers)})"


class StepInput(NamedTuple):
    """The arguments of one step, matched and checked on this rank. All lists are in the order of the nest.

    communicator: of the optimizer's ranks.
    tensors: name, shape and dtype of each gradient. The same list object as in the step before means that nothing in
        it has changed, and that `plain` is true.
    leaves, values: the parameters and gradients. samples: of how many samples the gradients are the mean; None if
    unknown. problem: why this rank's gradients cannot be used, then the lists are empty.
    plain: whether all gradients are present, on the host and contiguous.
    """

    communicator: Communicator
    params: Any
    grads: Any
    tensors: list[Tensor]
    leaves: list[Any]
    values: list[Any]
    samples: int | None
    problem: str
    plain: bool


class SessionSupport(ABC):
    """The operations of an optimizer that a Session needs, and a training loop without a session does not."""

    is_lockstep: ClassVar[bool]  # whether all ranks make every step together

    @property
    def saves_in_rounds(self) -> bool:
        """Whether checkpoints are written after `before_checkpoint` only."""
        return False

    @property
    @abstractmethod
    def update_interrupted(self) -> bool:
        """Whether an exception has interrupted an update, so that the parameters belong to no step."""

    @abstractmethod
    def latest_step(self) -> int:
        """Return the current global step. Mode ps: a request to the servers."""

    @abstractmethod
    def count_from(self, step: int) -> None:
        """Set the global step after a restore. On all workers, in mode ps on worker 0 first: it tells the servers."""

    @abstractmethod
    def broadcast_failure(self, failure: AllredError | None) -> AllredError | None:
        """Return the `failure` of worker 0 (or None) on all workers. Collective."""

    @property
    def can_save(self) -> bool:
        """Whether a rank that has failed may write a checkpoint."""
        return not self.update_interrupted

    def end_of_step(self) -> bool:
        """End the step of this rank. Return whether all ranks end it together. Mode local: collective in some steps."""
        return self.is_lockstep

    @property
    def at_boundary(self) -> bool:
        """Mode local: whether the last step ended a period of `every` steps, which all ranks end together. Without
        fragments and delay their parameters are equal then."""
        return True

    def before_checkpoint(self) -> None:  # noqa: B027
        """Mode local: make all ranks equal. Embedding tables in mode sync: send the rows to rank 0. Collective."""

    # Without effect in mode sync.

    def request_stop(self) -> None:  # noqa: B027
        """Mode ps: make the next step of every worker raise ShutdownError, after a checkpoint."""

    def set_final_save(self, save: Callable[[], str]) -> None:  # noqa: B027
        """Mode ps: set the function that writes the checkpoint after `request_stop` and returns its path."""

    def wait_all_workers(self) -> None:  # noqa: B027
        """Mode ps: `finish`, and wait until all workers have finished or failed."""


class Mode(SessionSupport):
    """How the ranks of a distributed optimizer train together. See `DistributedOptimizer` for the public methods."""

    dropped = 0  # gradients of this worker that were too late for their step
    continues_step = False  # mode local: see LocalMode
    # Mode local: returns the floats that are averaged in rounds, such as running means, by name.
    buffers: Callable[[], Sequence[tuple[str, Array]]] = staticmethod(tuple)

    @property
    @abstractmethod
    def skipped(self) -> int:
        """Steps skipped because of gradients that are not finite."""

    @property
    @abstractmethod
    def global_step(self) -> int: ...
    @abstractmethod
    def step(self, given: StepInput) -> None: ...
    @abstractmethod
    def broadcast(self, params: Any, tensors: list[Tensor], root: int, problem: str, values: bool) -> None: ...
    @abstractmethod
    def state_dict(self) -> Any: ...
    @abstractmethod
    def load_state_dict(self, state: Any) -> None: ...
    def load_new_state(self, state: Any) -> None:
        """As `load_state_dict`, for a state whose arrays nobody else has: they need not be copied."""
        self.load_state_dict(state)

    @abstractmethod
    def summary(self) -> str: ...
    @abstractmethod
    def save(self, params: Any, extra: Any, copy: bool) -> Callable[[str], str]:
        """Return a function that writes a checkpoint of this moment into a directory, and returns its path. extra: an
        object to pickle into the checkpoint. copy: whether the function is called after later steps."""

    def reduce(self, communicator: Communicator, name: str, grad: Any, samples: int | None) -> None: ...
    @abstractmethod
    def share(self, params: Any) -> Any: ...
    def more_state(self) -> dict[str, Any]:
        """Return what a checkpoint contains beside parameters and optimizer."""
        return {}

    def load_more_state(self, state: dict[str, Any]) -> None: ...
    def round(self) -> None: ...

    # Elastic jobs: see recovery.RecoverableOptimizer.

    steps_made = 0

    @property
    def defers_changes(self) -> bool:
        return False

    def complete_round(self, params: Any, has_state: bool) -> int | None:
        return None

    @property
    def table_link(self) -> TableLink | None:
        """The way to the rows of the tables of this optimizer; None without tables."""
        return None

    def begin_world(self) -> None: ...
    def pull(self, params: Any) -> None: ...
    def statistics(self) -> Statistics | None:
        """Mode ps: return the statistics of the servers."""
        return None

    def finish(self) -> None: ...
