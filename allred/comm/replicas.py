"""Replicas: the copies of parameters and optimizer state that the ranks keep equal. `join` makes them equal again.

A rank that has joined misses the steps of the others. When all ranks have joined, they exchange the versions of their
replicas. A replica that has missed steps on some ranks is copied from the rank that joined last.

Which replicas belong together follows from the operation in which they began: the first step, or the broadcast of a
rank whose replica had not begun. All ranks of that operation know its number. So ranks may make their optimizers in any
order, and one of a rank that took part in no step and no broadcast is not taken for another one.
"""

import weakref
from typing import Any, NamedTuple, Protocol

from allred import log, nest, world
from allred.comm.communicator import Communicator
from allred.comm.header import hash_text
from allred.errors import InputError
from allred.fusion import Tensor
from allred.wording import named


class Version(NamedTuple):
    """The description of a replica that the ranks exchange. name: of its optimizer. layout: a hash of names, shapes and
    dtypes of the parameters."""

    name: str
    steps: int
    layout: int


class Owner(Protocol):
    """The optimizer of a replica."""

    name: str

    def replicated(self, trained: dict[str, Any]) -> Any:
        """Return the nest of parameters to copy. trained: the parameters of its steps, by name."""

    def broadcast(self, params: Any, root: int) -> None: ...


class Replica:
    """This rank's parameters and state of one optimizer. `_REPLICAS` has those of all optimizers without process set
    that have begun.

    It keeps the parameters of the last broadcast and steps alive, but not the optimizer, which keeps this object.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = weakref.ref(owner)
        self.steps = 0
        self.tensors: list[Tensor] = []  # of the last step
        self.leaves: list[Any] = []  # its parameters
        self.communicator: Communicator | None = None  # of the last step
        self._trained: dict[str, Any] = {}  # parameters of the last broadcast and of steps with other tensors, by name
        self._replicas: weakref.WeakSet[Replica] | None = None  # of the world in which it began
        self._number: int | None = None

    def number(self, communicator: Communicator) -> int:
        """Return the number of the operation in which it began; if it has not begun, of the last operation."""
        if self._number is None or self._replicas is not _REPLICAS.of(world.current()):
            return communicator.operations
        return self._number

    def begin_steps(self, communicator: Communicator, tensors: list[Tensor]) -> None:
        """Call at the end of a step with other tensors, or of another communicator, than the step before. The caller
        then sets `steps` and `leaves`, as at the end of each step."""
        if self._replicas is not _REPLICAS.of(world.current()):
            self._begin(communicator.operations)
        if tensors != self.tensors:
            self._trained = self._all_trained()
        self.communicator, self.tensors = communicator, tensors

    def copied(self, number: int, steps: int, params: Any) -> None:
        """Note the parameters of a broadcast. number, steps: those of the root."""
        self._begin(number)
        self.steps, self.tensors, self.leaves, self._trained = steps, [], [], dict(nest.leaves(params))

    def _begin(self, number: int) -> None:
        self._replicas, self._number = _REPLICAS.of(world.current()), number
        self._replicas.add(self)

    def _all_trained(self) -> dict[str, Any]:
        names = [tensor.name for tensor in self.tensors]
        return self._trained | dict(zip(names, self.leaves, strict=True))

    def state(self) -> "_State | None":
        """Return what `refresh` needs; None if the optimizer was discarded."""
        owner, number = self._owner(), self._number
        if owner is None or number is None:
            return None
        try:
            params = owner.replicated(self._all_trained())
        except InputError:  # its torch optimizer was discarded
            return None
        lines = [f"{name} {tuple(leaf.shape)} {leaf.dtype}" for name, leaf in nest.leaves(params)]
        return _State(owner, number, params, Version(owner.name, self.steps, hash_text(" ".join(lines))))


_REPLICAS = world.Slot(weakref.WeakSet[Replica])  # that `join` makes equal


class _State(NamedTuple):
    owner: Owner
    number: int
    params: Any
    version: Version


def refresh(communicator: Communicator, joined_at: int, last: int) -> None:
    """Make all replicas equal again. Collective, when all ranks have joined.

    joined_at: `communicator.operations` when this rank joined. last: the rank that joined last.
    """
    states = [state for replica in list(_REPLICAS.of(world.current())) if (state := replica.state()) is not None]
    own = {state.number: state for state in states}
    versions = {number: state.version for number, state in own.items()}
    everyone = communicator.allgather_object((joined_at, versions), "replicas").wait()
    for number, newest in sorted(everyone[last][1].items()):
        found = [theirs.get(number) for _, theirs in everyone]
        if all(version is not None and version.layout == newest.layout for version in found):
            if {version.steps for version in found if version} != {newest.steps}:
                own[number].owner.broadcast(own[number].params, last)
            continue
        joined_before = [joined < number for joined, _ in everyone]  # the others without it have discarded it
        without = [
            rank
            for rank, version in enumerate(found)
            if (joined_before[rank] if version is None else version.layout != newest.layout)
        ]
        if without:
            log.warning(
                f"join(): {named('rank', without)} joined before the first step of {newest.name} with its parameters, "
                f"so these are not copied from rank {last}, which joined last; call "
                f"{newest.name}.broadcast(params, root={last}) on all ranks"
            )
