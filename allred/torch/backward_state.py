"""State of a hooked optimizer: the current backward pass, the next step, and when gradients are sent."""

import dataclasses
from collections.abc import Mapping

import torch

from allred import log, world
from allred.cluster import processors


@dataclasses.dataclass
class BackwardPass:
    """The state of one backward pass; a new record after each."""

    overlaps: bool = False  # whether it sends gradients before its end
    names: set[str] = dataclasses.field(default_factory=set)  # of the gradients passed to reduce()
    has_failed: bool = False  # by an exception
    problem: str = ""  # why its gradients cannot be used


@dataclasses.dataclass
class NextStep:
    """The state of the gradients for the next `step`; a new record after each."""

    is_reduced: bool = False
    is_skipped: bool = False  # by that reduction
    micro_samples: list[int | None] = dataclasses.field(default_factory=list)  # of backward passes not reduced yet


def decide_overlap(title: str, parameters: Mapping[str, torch.Tensor], size: int) -> bool:
    """Return whether gradients are sent during the backward pass, and log the reason. size: number of ranks."""
    setting, threads, cores = world.config().overlap, torch.get_num_threads(), processors.cores_per_rank()
    on_gpu = any(parameter.is_cuda for parameter in parameters.values())
    auto = on_gpu or cores > threads
    reason = f"this rank has {cores} core(s) and {threads} thread(s) of torch"
    reason = "the model is on a GPU" if on_gpu else reason
    overlaps = setting == "always" or (setting == "auto" and auto)
    reason = reason if setting == "auto" else f"ALLRED_OVERLAP={setting}"
    if size == 1:
        return False
    when = "during the backward pass" if overlaps else "in one group at the end of the backward pass"
    log.info(f"{title}: gradients are sent {when}, because {reason}")
    return overlaps
