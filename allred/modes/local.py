"""`LocalMode`: mode local. Each rank trains alone, as a job of one rank does in mode sync, and all ranks average their
parameters in rounds (rounds.py).

So a step is a step of `SyncMode` with a communicator of one rank, and a round follows the update. Checkpoints are
written in rounds: parameters that all ranks have, the mean of the ranks' optimizer states, and the state of the outer
optimizer.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from allred import arrays, nest, world
from allred.arrays import Array
from allred.comm import functions
from allred.comm.backends.backend import SingleBackend
from allred.comm.communicator import Communicator
from allred.comm.ops import ReduceOp
from allred.errors import InputError
from allred.fusion import Tensor
from allred.modes.options import StepInput
from allred.modes.rounds import Rounds
from allred.modes.sync import SyncMode
from allred.wording import count

_OUTER = "the outer optimizer of mode local"  # key in checkpoints, which exist: keep it


def alone() -> Communicator:
    """Return a communicator of this rank alone, with its number in the world."""
    made = Communicator(SingleBackend(), world.config().timeout_s)
    made.ranks = (functions.current().number,)
    return made


class LocalMode(SyncMode):
    """Mode local of one optimizer. Arguments: as of SyncMode; the options of the inner steps have no compression.
    rounds: with those of the rounds."""

    def __init__(self, *arguments: Any, rounds: Rounds) -> None:
        super().__init__(*arguments)
        self._rounds, self._replica = rounds, None
        self._leaves: dict[str, Array] = {}
        self._samples_of_step: int | None = None

    def step(self, given: StepInput) -> None:
        self._prepare(given)
        super().step(given)

    def repeat(self, communicator: Communicator, values: list[Any], samples: int | None) -> bool:
        return False

    def _prepare(self, given: StepInput) -> None:
        if not given.problem:
            names = [tensor.name for tensor in given.tensors]
            self._rounds.prepare(names, given.leaves)
            self._leaves |= zip(names, given.leaves, strict=True)
        self._samples_of_step = given.samples

    def reduce(self, communicator: Communicator, name: str, grad: Any, samples: int | None) -> None:
        """No effect: nothing is sent before a round."""

    def _begin(self, communicator: Communicator) -> None:
        super()._begin(functions.current())

    def _end(self, given: StepInput, used: bool) -> None:
        self._reducer.samples *= functions.current().size  # as if all had the same number
        super()._end(given._replace(communicator=functions.current()), used)

    def commit(self, used: bool) -> None:
        rounds = self._rounds
        rounds.end_step(
            {name: leaf for name, leaf in self._leaves.items() if name in rounds.base}, self._samples_of_step
        )
        if rounds.at_boundary:
            self._average_buffers()

    def round(self) -> None:
        """Make the parameters of all ranks equal. Collective."""
        self._rounds.round({name: leaf for name, leaf in self._leaves.items() if name in self._rounds.base})
        self._average_buffers()

    def _average_buffers(self) -> None:
        if self.buffers:
            functions.current().grouped_allreduce_blocking(
                [*self.buffers], True, ReduceOp.AVERAGE, f"{self._title}: buffers of the module"
            )

    # Parameters and state.

    def broadcast(self, params: Any, tensors: list[Tensor], root: int, problem: str, values: bool) -> None:
        super().broadcast(params, tensors, root, problem, values)
        self._rounds.restart()
        self._leaves = {}
        if values:
            communicator, outer = functions.current(), self._rounds.outer
            state = outer.state_dict() if communicator.number == root else None
            outer.load_state_dict(communicator.broadcast_object(state, root, f"outer state of {self._title}").wait())

    def before_checkpoint(self) -> None:
        self.round()
        self._rounds.drop_errors()
        functions.current().grouped_allreduce_blocking(
            self._states(), True, ReduceOp.AVERAGE, f"{self._title}: the states of the optimizers"
        )

    def _states(self) -> list[Array]:
        """Return views of the floats in the state of the inner optimizer."""
        live = getattr(self._optimizer, "live_state", None)
        found = [] if live is None else [leaf for _, leaf in nest.leaves(live())]
        views = [leaf.detach().numpy() if hasattr(leaf, "detach") else leaf for leaf in found]
        return [each for each in views if isinstance(each, np.ndarray) and arrays.is_inexact(each.dtype)]

    def save(self, params: Any, extra: Any, copy: bool) -> Callable[[str], str]:
        if not self._rounds.is_global:
            raise InputError(
                f"{self._title}: in mode local a checkpoint is written after a round: call opt.round() on all ranks "
                "before opt.save()"
            )
        return super().save(params, extra, copy)

    @property
    def can_save(self) -> bool:
        return super().can_save and self._rounds.is_global

    @property
    def ends_together(self) -> bool:
        return self._rounds.at_boundary

    def more_state(self) -> dict[str, Any]:
        return {_OUTER: self._rounds.outer.state_dict()}

    def load_more_state(self, state: dict[str, Any]) -> None:
        if _OUTER in state:
            self._rounds.outer.load_state_dict(state[_OUTER])

    def _first_step(self, communicator: Communicator, tensors: list[Tensor]) -> str:
        nbytes = arrays.amount(sum(tensor.nbytes for tensor in tensors))
        what = f"{count(len(tensors), 'parameter')} ({nbytes}) are averaged"
        return f"mode local: each rank trains alone; {what}, {self._rounds.describe()}"

    def summary(self) -> str:
        return f"{super().summary()}\n{self._rounds.summary()}"
