"""A late start in mode ps: the program does something slow between the parameters and the first step of a worker.

The other workers train meanwhile. So the first gradient comes from parameters that lack many updates, and may move the
parameters back. It is applied as every gradient is; only the program can pull before it computes the gradient.
"""

from allred.cluster import report

_STEPS = 10  # of each worker, which they make meanwhile where no start is late


def warn_of_stale_start(name: str, worker: int, workers: int, staleness: int) -> None:
    """Print a warning if the first gradient is too old. staleness: the updates that its parameters lacked."""
    if staleness > _STEPS * workers:
        report.say_here(
            f"{name}.step(): the first gradient of worker {worker} came from parameters that lack {staleness} updates; "
            f"let {name}.broadcast(params) or {name}.pull(params) be the last call before the training loop"
        )
