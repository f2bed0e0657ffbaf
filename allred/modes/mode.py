"""What a mode does for a DistributedOptimizer: sync.py, ps.py."""

from collections.abc import Callable
from typing import Any, Protocol

from allred.errors import AllredError
from allred.fusion.plan import Tensor
from allred.ps.stats import Statistics


class Mode(Protocol):
    """How the optimizers of all ranks work together."""

    @property
    def skipped(self) -> int: ...

    @property
    def dropped(self) -> int: ...

    def step(
        self, params: Any, grads: Any, tensors: list[Tensor], leaves: list[Any], values: list[Any],
        samples: int | None, problem: str,
    ) -> None:  # fmt: skip
        """One step. leaves: of the parameters; tensors, values: of the gradients; all in the nest's order. problem: why
        there are none, in words. The same list of tensors as before means that nothing about them has changed."""

    def reduce(self, name: str, grad: Any, samples: int | None) -> None:
        """A gradient of the next step is ready. samples: as in it."""

    def broadcast(self, params: Any, tensors: list[Tensor], root: int, problem: str) -> None:
        """Start from the root's parameters and optimizer state."""

    def pull(self, params: Any) -> None: ...

    def finish(self) -> None: ...

    def meet(self) -> None:
        """`finish`, and wait until all others have."""

    def hear(self, failure: AllredError | None) -> AllredError | None:
        """On worker 0: tell all of it, or that there is none; on the others: hear of it."""

    def statistics(self) -> Statistics: ...

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...

    def save(self, params: Any, extra: Any, copy: bool) -> Callable[[str], str]:
        """What writes a checkpoint of this moment into a directory, and gives its path. copy: it is called later."""

    @property
    def in_step(self) -> bool:
        """Whether all ranks make every step together."""

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has spent in communication so far."""

    def ask_to_end(self) -> None:
        """Where they do not: all are to end, soon."""

    def end_with(self, save: Callable[[], str]) -> None:
        """What is to write the checkpoint then."""

    @property
    def torn(self) -> bool:
        """Whether an update of the parameters has begun and not ended: an exception has cut it short."""

    @property
    def global_step(self) -> int: ...

    def latest_step(self) -> int:
        """The global step of this moment. Mode ps: a request to the servers."""

    def count_from(self, step: int) -> None:
        """Worker 0 has restored the checkpoint of that step: the next ones are later. Mode ps: on worker 0 alone."""

    def summary(self) -> str: ...
