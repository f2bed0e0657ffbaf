"""What the ranks of a session do together outside of its steps: agree, wait for the chief, meet at the end and hear how
it went.

Their waits have a limit of their own, and the usual warnings.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from allred.cluster import topology
from allred.comm import functions
from allred.errors import AllredError, MismatchError
from allred.modes.detect.batch_arguments import arguments_of, difference
from allred.modes.optimizer import DistributedOptimizer
from allred.session import random_states
from allred.watch.wait import watched

FOREVER_S = 1e9


def agree(directory: str, max_steps: int | None, tracked: list[str], data: Any) -> str:
    """Compare the settings that must be equal on all ranks. Returns the directory of the chief. Raises MismatchError.

    data: the argument of `session.track`."""
    names = "checkpoint_dir", "max_steps", "what else is tracked"
    gathered = functions.allgather_object(((directory or None, max_steps, tracked), arguments_of(data)))
    given = [settings for settings, _ in gathered]
    if problem := difference([arguments for _, arguments in gathered], range(len(gathered))):
        raise MismatchError(f"session.track(): {problem}")
    for rank, each in enumerate(given):
        for name, its, chiefs in zip(names, each, given[0], strict=True):
            if its != chiefs and (name != "checkpoint_dir" or its is not None):
                raise MismatchError(
                    f"Session: {name} is {its!r} on rank {rank}, but {chiefs!r} on rank 0; give all ranks the same"
                )
    return given[0][0] or ""


@contextlib.contextmanager
def waiting(seconds: float = FOREVER_S) -> Iterator[None]:
    """Operations may wait for so long."""
    queue = functions.current().queue
    before, queue.timeout_s = queue.timeout_s, max(seconds, queue.timeout_s)
    try:
        yield
    finally:
        queue.timeout_s = before


def gather_random_states(optimizer: DistributedOptimizer, why: str = "") -> dict[int, Any] | None:
    """Those of all ranks, by rank; collective; None in mode ps. why: for the error of a rank that calls another one."""
    if not optimizer.session_support.is_lockstep:
        return None
    return dict(functions.allgather_object((topology.rank(), random_states.get()), why))


def meet(optimizer: DistributedOptimizer, params: Any) -> None:
    """Mode ps: workers make as many steps as they do. Then all have the same parameters."""
    optimizer.session_support.wait_all_workers()
    optimizer.pull(params)


def hear_of(optimizer: DistributedOptimizer, failure: AllredError | None) -> None:
    """Raise the chief's `failure` to write on all ranks. The watchers suspend the time limit while the chief writes;
    without watchers there is no time limit."""
    with contextlib.nullcontext() if watched() else waiting():
        failure = optimizer.session_support.broadcast_failure(failure)
    if failure is not None:
        raise failure
