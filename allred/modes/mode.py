"""`Mode` and `SessionSupport`: the interfaces of mode sync (sync.py) and mode ps (ps.py)."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from allred.errors import AllredError
from allred.fusion import Tensor


class StepInput(NamedTuple):
    """The arguments of one step, matched and checked on this rank. All lists are in the order of the nest.

    tensors: name, shape and dtype of each gradient. The same list object as in the step before means that nothing in
        it has changed, and that `plain` is true.
    leaves, values: the parameters and gradients. samples: of how many samples the gradients are the mean; None if
    unknown. problem: why this rank's gradients cannot be used, then the lists are empty.
    plain: whether all gradients are present, on the host and contiguous.
    """

    params: Any
    grads: Any
    tensors: list[Tensor]
    leaves: list[Any]
    values: list[Any]
    samples: int | None
    problem: str
    plain: bool


class SessionSupport(Protocol):
    """The operations of an optimizer that a Session needs, and a training loop without a session does not."""

    is_lockstep: bool  # whether all ranks make every step together

    @property
    def update_interrupted(self) -> bool:
        """Whether an exception has interrupted an update, so that the parameters belong to no step."""

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has spent in communication."""

    def latest_step(self) -> int:
        """Return the current global step. Mode ps: a request to the servers."""

    def count_from(self, step: int) -> None:
        """Set the global step, after a restore. Mode ps: on worker 0 only."""

    def request_stop(self) -> None:
        """Mode ps: make the next step of every worker raise ShutdownError, after a checkpoint. Mode sync: nothing."""

    def set_final_save(self, save: Callable[[], str]) -> None:
        """Set the function that writes the checkpoint after `request_stop` and returns its path."""

    def wait_all_workers(self) -> None:
        """Mode ps: `finish`, and wait until all workers have finished or failed. Mode sync: nothing."""

    def broadcast_failure(self, failure: AllredError | None) -> AllredError | None:
        """Return the `failure` of worker 0 (or None) on all workers. Collective."""


class Mode(Protocol):
    """How the ranks of a distributed optimizer train together. See `DistributedOptimizer` for the public methods."""

    skipped: int  # steps skipped because of gradients that are not finite
    dropped: int  # gradients of this worker that were too late

    @property
    def global_step(self) -> int: ...

    def step(self, given: StepInput) -> None: ...

    def reduce(self, name: str, grad: Any, samples: int | None) -> None: ...

    def broadcast(self, params: Any, tensors: list[Tensor], root: int, problem: str) -> None: ...

    def pull(self, params: Any) -> None: ...

    def finish(self) -> None: ...

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...

    def save(self, params: Any, extra: Any, copy: bool) -> Callable[[str], str]:
        """Return a function that writes a checkpoint of this moment into a directory, and returns its path.

        extra: an object to pickle into the checkpoint. copy: whether the function is called after later steps."""

    def summary(self) -> str: ...
