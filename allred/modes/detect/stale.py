"""Warns of a stale first gradient in mode ps: a worker does something slow between the last pull and its first step.

The other workers train meanwhile, so the first gradient is computed from parameters that lack many updates, and may
undo progress. It is applied like every gradient. Only the program can pull before it computes the gradient.
"""

from allred.cluster import report

_STEPS = 10  # per worker; a smaller staleness of the first gradient is normal


def warn_of_stale_start(name: str, worker: int, workers: int, staleness: int) -> None:
    """Print a warning if the first gradient is too stale. staleness: the number of updates that its parameters lack."""
    if staleness > _STEPS * workers:
        report.say_here(
            f"{name}.step(): the first gradient of worker {worker} was computed from parameters that lack {staleness} "
            f"updates; call {name}.broadcast(params) or {name}.pull(params) directly before the training loop"
        )
