"""State of a hooked optimizer: the current backward pass, the next step, when gradients are sent, and whether all ranks
reduce the gradients of a step in the same way (`ReductionAgreement`).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from allred import log, world
from allred.cluster import processors
from allred.comm.communicator import Communicator
from allred.comm.header import by_rank
from allred.errors import InputError
from allred.gpu.device_arrays import to_host
from allred.modes.detect import drift


@dataclasses.dataclass(slots=True)
class BackwardPass:
    """The state of one backward pass; a new record after each."""

    overlaps: bool = False  # whether it sends gradients before its end
    names: set[str] = dataclasses.field(default_factory=set)  # of the gradients passed to reduce()
    has_failed: bool = False  # by an exception
    problem: str = ""  # why its gradients cannot be used


@dataclasses.dataclass(slots=True)
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


_NUMBERS = 4  # of a reduction since the last update: 0 for the first one, then 1, 2, 3, 1, 2, 3, ...


class ReductionAgreement:
    """Flags in the header exchange of each reduction, about the reductions of a rank since the last update. Only the
    ranks together know whether all reduce the gradients of one step in the same way:

    - A rank that lacks gradients, or adds them in no_sync(), reduces in `step`. What the program does in between, such
      as clipping, it does with averages on the other ranks only. So `step` compares the gradients if the ranks differ.
    - A rank may call backward() outside of no_sync() once more than others. The others then are in
      their next step, or compare in `step`: an error. In their next step they have number 0, and this rank has not.

    in_step: whether this rank reduces in `step`. has_local: whether it has added gradients in no_sync() since the last
    reduction.
    """

    def __init__(self, title: str) -> None:
        self._title, self.in_step, self.has_local = title, False, False
        self.begin_step()

    def begin_step(self, number: int = 0) -> None:
        """Call after an update, and where an error has ended a step on all ranks; after a broadcast with number 1,
        because some ranks may make an update before the next reduction."""
        self._number = number  # of the next reduction
        self.differs = False  # whether the ranks have differed in `in_step` or `has_local`

    def flags(self) -> int:
        return self._number + _NUMBERS * self.in_step + 2 * _NUMBERS * self.has_local

    def check(self, flags: list[int], ranks: Sequence[int]) -> None:
        """Raises InputError if the ranks reduce gradients of different steps."""
        numbers = [] if len(set(flags)) == 1 else [flag % _NUMBERS for flag in flags]
        if len(set(numbers)) > 1:
            modulo = f" (modulo {_NUMBERS - 1})"
            texts = [f"reduction number {n + 1}{modulo * bool(n)} since the last update" for n in numbers]
            raise InputError(
                f"{self._title}: the ranks reduce gradients of different steps: {by_rank(texts, ranks)}. All ranks "
                "must make the same number of backward passes outside of no_sync(), and call step() equally often. To "
                "continue after this error, call optimizer.allred.broadcast() and optimizer.zero_grad() on all ranks, "
                "because some ranks may have made one update more"
            )
        self.differs = self.differs or bool(numbers)  # in `in_step` or `has_local`
        self._number = self._number % (_NUMBERS - 1) + 1
        self.has_local = False

    def compare(self, communicator: Communicator, gradients: Callable[[bool], dict[str, Any]]) -> None:
        """Before an update, if the ranks have differed (`differs`): compare their reduced gradients. Collective. Raises
        InputError if they are not equal.

        gradients: returns their arrays by name; of sparse ones the values, or with True dense copies, because a
        gradient may be sparse on some ranks only.
        """
        title = f"{self._title}: comparison of the reduced gradients"
        fields = communicator.check("step", title, note=drift.fingerprint(_parts(gradients(False)))).wait()
        if len({each.note for each in fields}) == 1:
            return
        tables = communicator.allgather_object(drift.table(_parts(gradients(True))), title).wait()
        odd = [name for _, name in drift.differing_parts(tables)]
        if odd:
            raise InputError(
                f"{self._title}: the reduced gradients of '{odd[0]}' differ between the ranks. Some ranks had no "
                "gradients, or used no_sync(), and reduced in step(); on the other ranks the program changed the "
                "gradients between backward() and step(). To clip, pass clip_norm to allred.distributed(); for other "
                "changes, compute gradients on all ranks, for example by adding 0 * parameter.sum() to the loss"
            )


def _parts(gradients: dict[str, Any]) -> list[drift.Part]:
    return [drift.Part("state", name, to_host(value)) for name, value in gradients.items()]
