"""`LocalMode`: mode local. Each rank trains alone, as a job of one rank does in mode sync, and all ranks average their
parameters in rounds (rounds.py).

So a step is a step of `SyncMode` with a communicator of one rank, and a round follows the update. All ranks count the
same steps: also one that makes no update, because it is skipped, has failed or has no samples.

Checkpoints are written in rounds: parameters that all ranks have, the mean of the ranks' optimizer states, and the
state of the outer optimizer.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from allred import arrays, nest, world
from allred.arrays import Array
from allred.comm import functions
from allred.comm.backends.backend import SingleBackend
from allred.comm.communicator import Communicator
from allred.comm.ops import ReduceOp
from allred.errors import RanksChanged
from allred.fusion import Tensor
from allred.modes.options import StepInput
from allred.modes.rounds import Rounds
from allred.modes.sync import SyncMode
from allred.wording import count

OUTER_STATE = "the outer optimizer of mode local"  # key in checkpoints, which exist: keep it


def alone() -> Communicator:
    """Return a communicator of this rank alone, with its number in the world."""
    made = Communicator(SingleBackend(), world.config().timeout_s)
    made.ranks = (functions.current().number,)
    return made


class LocalMode(SyncMode):
    """Mode local of one optimizer. Arguments: as of SyncMode; the options of the inner steps have no compression.
    rounds: made with the options of the rounds."""

    def __init__(self, *arguments: Any, rounds: Rounds) -> None:
        super().__init__(*arguments)
        self._rounds, self._replica = rounds, None
        rounds.on_exchange, rounds.on_lost = self._commit_exchange, self._drop_lost_state
        self._leaves: dict[str, Array] = {}
        self._samples_of_step: int | None = None
        self.steps_made = 0  # of this rank; between two rounds other ranks may have made another number
        self._is_complete = True  # whether the ranks are equal: no step was made since the last round
        self._ranks_changed = False  # whether a change of the ranks has interrupted the exchange of the last step
        self._is_open = False  # whether a step has begun that is not committed
        self.continues_step = False  # set by a hooked torch optimizer: the next call of `step` is of the same step

    # Steps.

    def step(self, given: StepInput) -> None:
        if not self.continues_step:
            self._complete_step()
        if not given.problem:
            names = [tensor.name for tensor in given.tensors]
            self._rounds.prepare(names, given.leaves, given.samples)
            self._leaves |= zip(names, given.leaves, strict=True)
        self._samples_of_step, self._is_open = given.samples, True
        super().step(given)

    def repeat(self, communicator: Communicator, values: list[Any], samples: int | None) -> bool:
        return False

    def reduce(self, communicator: Communicator, name: str, grad: Any, samples: int | None) -> None:
        """No effect: nothing is sent before a round."""

    def _reduce(self, given: StepInput, overlapped: bool = False) -> list[Any] | None:
        if given.samples == 0:  # the gradients are of no sample
            self._reducer.samples = 0
            return None
        return super()._reduce(given, overlapped)

    def _begin(self, communicator: Communicator) -> None:
        super()._begin(functions.current())

    def _end(self, given: StepInput, used: bool) -> None:
        self._reducer.samples *= functions.current().size  # as if all had the same number
        super()._end(given._replace(communicator=functions.current()), used)

    def commit(self, used: bool) -> None:
        self._is_open = self._is_complete = False
        self.steps_made += 1
        if (recovery := world.current().recovery) is not None:
            recovery.keep_position()
        try:
            self._end_step()
        except RanksChanged:
            if recovery is None or not recovery.absorbs():
                raise
            self._ranks_changed = True  # the next batch forms the next world, which completes the round

    def _drop_lost_state(self) -> None:
        """Set the states of the optimizer that are not finite to zero, such as moments: the parameters of this rank
        were not finite, and it begins again from the base."""
        for _, state in self._states():
            if not np.isfinite(state).all():
                state[...] = 0

    def _end_step(self) -> None:
        self._rounds.end_step(self._leaves, self._samples_of_step)
        if self._rounds.at_boundary:
            self._average_buffers()

    def _average_buffers(self) -> None:
        self._average("end of a round: buffers of the module", self._named_buffers())
        self._commit_exchange()
        self._is_complete = self._rounds.is_global

    def _commit_exchange(self) -> None:
        """In an elastic job: an exchange is complete."""
        if self._rounds.has_state and (recovery := world.current().recovery) is not None:
            recovery.commit_exchange(self.steps_made - 1)

    def _complete_step(self) -> None:
        """Count a step that has begun, and made no update: its loss scale was too large, or it has failed."""
        if self._is_open:
            self._samples_of_step = 0 if self._samples_of_step is not None else None
            self.commit(used=False)

    def round(self) -> None:
        """Make the parameters of all ranks equal. Collective."""
        self._complete_step()
        try:
            self._make_round()
        except RanksChanged:
            if (recovery := world.current().recovery) is None:
                raise
            recovery.form()  # that completes the round with the ranks that are left

    def _make_round(self) -> None:
        if self._is_complete:  # also on a rank that has joined after the round
            return
        self._rounds.round(self._leaves)
        self._average_buffers()

    def _average(self, what: str, named: Sequence[tuple[str, Array]]) -> None:
        """Average arrays over the ranks in which all of them are finite, in place. Arrays that not all ranks have stay
        as they are. Collective."""
        communicator = functions.current()
        table = [(name, array.shape, array.dtype.str) for name, array in named]
        if not (everyone := communicator.allgather_object(table, f"{self._title}: {what}").wait())[0]:
            return
        common = set(table).intersection(*everyone)
        mine = [array for row, (_, array) in zip(table, named, strict=True) if row in common]
        finite = self._rounds.has_state and all(np.isfinite(array).all() for array in mine)
        sums = [array.copy() if finite else np.zeros_like(array) for array in mine]
        ranks = np.array([finite], np.int64)
        communicator.grouped_allreduce_blocking([*sums, ranks], True, ReduceOp.SUM, f"{self._title}: {what}")
        for array, total in zip(mine, sums, strict=True) if ranks[0] else ():
            np.divide(total, ranks[0], out=array, casting="unsafe")

    def _named_buffers(self) -> list[tuple[str, Array]]:
        return list(self.buffers())

    # Parameters and state.

    def broadcast(self, params: Any, tensors: list[Tensor], root: int, problem: str, values: bool) -> None:
        super().broadcast(params, tensors, root, problem, values)
        self._restart()
        self.steps_made = functions.broadcast_object(self.steps_made, root, f"steps of {self._title}")
        self._rounds.broadcast(params, tensors, root, values)

    def _restart(self) -> None:
        self._rounds.restart()
        self._leaves, self._is_open, self._is_complete = {}, False, True

    # Elastic jobs (membership/recovery.py).

    @property
    def defers_changes(self) -> bool:
        is_alone = functions.current().size == 1  # its rounds have no wait that notices a change
        return bool(self._leaves) and not self._ranks_changed and not is_alone

    def begin_world(self) -> None:
        self._ranks_changed = self._is_open = False
        self._rounds.begin_world()

    def complete_round(self, params: Any, has_state: bool) -> int:
        mine = has_state, self.steps_made, self._is_complete, list(self._rounds.base)
        everyone = functions.allgather_object(mine, f"{self._title}: steps of the ranks that are left")
        newest = max(range(len(everyone)), key=lambda rank: everyone[rank][:2])
        if not all(is_complete for counts, _, is_complete, _ in everyone if counts):
            leaves = dict(nest.leaves(params)) | self._leaves
            self._rounds.has_state = has_state
            try:
                self._rounds.complete({name: leaves[name] for name in everyone[newest][3]})
                self._average_buffers()
            finally:
                self._rounds.has_state = True
            self._leaves = {}  # the next step of all ranks begins with a new base
        return newest

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self._restart()
        self._rounds.reset_outer()

    @property
    def saves_in_rounds(self) -> bool:
        return True

    def before_checkpoint(self) -> None:
        self._complete_step()
        self._make_round()
        self._rounds.drop_residuals()
        self._average("the states of the optimizers", self._states())

    def _states(self) -> list[tuple[str, Array]]:
        """Return views of the floats in the state of the inner optimizer, by name; none for LBFGS, whose history is
        not a mean."""
        live = getattr(self._optimizer, "live_state", None)
        if live is None or getattr(self._optimizer, "calls_closure", False):
            return []
        views = [
            (name, leaf.detach().numpy() if hasattr(leaf, "detach") else leaf) for name, leaf in nest.leaves(live())
        ]
        return [(name, each) for name, each in views if isinstance(each, np.ndarray) and arrays.is_inexact(each.dtype)]

    def save(self, params: Any, extra: Any, copy: bool) -> Callable[[str], str]:
        return super().save(self._rounds.global_parameters(params, self._leaves), extra, copy)

    def more_state(self) -> dict[str, Any]:
        own = {"steps": self._optimizer.global_step} if self._counts else {}
        return {OUTER_STATE: self._rounds.outer_state() | own}

    def load_more_state(self, state: dict[str, Any]) -> None:
        if (saved := state.get(OUTER_STATE)) is None:
            self._rounds.reset_outer()
        else:
            self._rounds.load_outer_state(saved)
        self._load_own_steps(saved)

    def _load_own_steps(self, saved: dict[str, Any] | None) -> None:
        """Restore how many updates the optimizer of the rank that has saved had made: the step of the checkpoint is
        that of all ranks."""
        if saved is not None and self._counts and "steps" in saved:
            self._optimizer.global_step = saved["steps"]

    # SessionSupport.

    @property
    def global_step(self) -> int:
        """Steps that all ranks have counted."""
        return self.steps_made

    def count_from(self, step: int) -> None:
        super().count_from(step)
        self.steps_made = step

    @property
    def can_save(self) -> bool:
        return super().can_save and self._rounds.is_global

    def end_of_step(self) -> bool:
        self._complete_step()
        return self.at_boundary

    @property
    def at_boundary(self) -> bool:
        return self._rounds.at_boundary and not self._ranks_changed  # a rank that has joined does not end this step

    # Texts.

    def _first_step(self, communicator: Communicator, tensors: list[Tensor]) -> str:
        nbytes = arrays.amount(sum(tensor.nbytes for tensor in tensors))
        what = f"{count(len(tensors), 'parameter')} ({nbytes}) are averaged"
        return f"mode local: each rank trains alone; {what}, {self._rounds.describe()}"

    def summary(self) -> str:
        lines = [line for line in super().summary().splitlines() if not line.startswith(("gradients:", "not in place"))]
        return "\n".join([*lines, self._rounds.summary()])
