"""Sharded update: each rank of a node updates a slice of the parameters, and gets the other slices from the others.

Without it every rank updates all parameters, to the same bits. A step, after the reduction of the gradients:

    1  all ranks compare how they would cut the tensors: one slice for each rank of the node that has not joined
    2  each rank updates its slice of the parameters and of the optimizer's state, and copies the new parameters to a
       block of memory that the ranks of the node share
    3  barrier
    4  each rank copies the other slices from the block to its parameters

The state lies in such a block, one copy for the node, so every rank can read all of it between two steps. So do the
parameters of `share`: then 2 writes them in place, and 4 is omitted. Every node updates all parameters.

No rank writes memory that another reads: 2 begins when all ranks have called the step, which 1 ensures, and ends when
all have completed 4 of the step before. Tensors that are not contiguous numpy arrays, or share memory with another one,
are updated by every rank, whose state is its own.
"""

import contextlib
import mmap
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from allred import log, nest, world
from allred.arrays import Array
from allred.comm import node_memory
from allred.comm.arguments import memory_conflicts
from allred.comm.backends import segment
from allred.comm.communicator import Communicator
from allred.comm.header import hash_text, mix
from allred.comm.process_set import PROCESS_SETS
from allred.fusion import Tensor
from allred.optim.base import Optimizer, optimizer_kind, splittable
from allred.optim.step_input import PendingUpdates, Slots
from allred.ps import variable

_CUT = 16  # elements; slices begin at multiples of it within a tensor


class _SlicePart(NamedTuple):
    """A part of a tensor that this rank updates. staged: in the block; None for shared parameters."""

    number: int  # of the pending update
    start: int
    stop: int
    param: Array
    slots: Slots
    staged: Array | None


class _ShardPlan(NamedTuple):
    """The work of this rank for these parameters, slots and ranks. copies: (parameter, staged) of the slices of other
    ranks. whole: the numbers of the updates that every rank makes."""

    params: list[Any]
    slots: list[Slots]
    ranks: tuple[int, ...]
    parts: list[_SlicePart]
    copies: list[tuple[Array, Array]]
    whole: list[int]

    def updates(self, pending: PendingUpdates) -> PendingUpdates:
        """Return the updates of the parts and of the whole tensors."""
        grads = [pending.grads[part.number].reshape(-1)[part.start : part.stop] for part in self.parts]
        return pending._replace(
            names=[pending.names[index] for index in [*(part.number for part in self.parts), *self.whole]],
            params=[part.param for part in self.parts] + [pending.params[index] for index in self.whole],
            grads=grads + [pending.grads[index] for index in self.whole],
            slots=[part.slots for part in self.parts] + [pending.slots[index] for index in self.whole],
        )

    def fits(self, pending: PendingUpdates, ranks: Sequence[int]) -> bool:
        return (
            len(self.params) == len(pending.params)
            and all(map(operator.is_, self.params, pending.params))
            and all(map(operator.is_, self.slots, pending.slots))
            and self.ranks == tuple(ranks)
        )


class ShardedUpdate:
    """The sharded updates of one optimizer of allred.optim. title: of its steps, for messages."""

    def __init__(self, optimizer: Optimizer, title: str) -> None:
        self._optimizer, self._title = optimizer, title
        self._communicator: Communicator  # of the last step
        self._leaves: list[Any] = []  # the parameters of the last step
        self._layout = _NO_LAYOUT  # of these
        self._staged: dict[str, Array] = {}  # the new parameters in a block, flat
        self._shared_slots: dict[str, Slots] = {}  # slots in a block, as the optimizer has them
        self._blocks = 0  # a hash of the operations that have allocated the blocks: the same on ranks that share them
        self._plan: _ShardPlan | None = None

    def forget_state(self) -> None:
        """Let the next step move the optimizer's state to a new block. Called on all ranks."""
        self._unshare(list(self._shared_slots))

    def _unshare(self, names: Iterable[str]) -> None:
        """Give this rank its own copy of slots that the node shares. Called on all ranks, when none changes them."""
        for name in names:
            slots = self._shared_slots.pop(name, None)
            if slots is not None and self._optimizer.has_slots(name, slots):
                self._optimizer.replace_slots(name, {key: slot.copy() for key, slot in slots.items()})
        self._plan = None

    def prepare(self, communicator: Communicator, tensors: Sequence[Tensor], leaves: list[Any]) -> bool:
        """Prepare `step` on the ranks of a communicator. Collective. Returns False, and has changed nothing, if ranks
        of a node cannot share memory. leaves: the parameters, in the order of `tensors`. Raises MismatchError if they
        have different layouts on the ranks."""
        self._communicator, layout = communicator, self._layout
        if len(leaves) != len(self._leaves) or not all(map(operator.is_, leaves, self._leaves)):
            layout = _layout(tensors, leaves)
        state = all(self._optimizer.has_slots(name, slots) for name, slots in self._shared_slots.items())
        settings = f"state={'shared' if state and self._shared_slots else 'per rank'}"
        title, note = f"{self._title}: sharded update", mix(layout.hash, self._blocks)
        everyone = communicator.check("step", title, settings=settings, note=note).wait()  # and a barrier
        if len({each.note for each in everyone}) > 1:
            communicator.check("step", title, layout.lines).wait()  # raises if these differ
            self._layout, self._blocks = _NO_LAYOUT, 0  # a rank that had joined lacks blocks, so all make new ones
            self.forget_state()
        if layout.hash != self._layout.hash:
            self._unshare(self._shared_slots.keys() - layout.cut.keys())
            if not self._allocate_staged(layout, leaves):
                self.forget_state()
                return False
        if layout is not self._layout:
            self._layout, self._leaves, self._plan = layout, list(leaves), None
        return True

    def step(self, params: Any, grads: Any) -> None:
        """Update the parameters, after `prepare`. Collective. Arguments and errors are those of `Optimizer.step`."""
        self._update(self._optimizer.begin_step(params, grads))

    def _update(self, pending: PendingUpdates) -> None:
        own_slots = self._share_slots(pending)
        ranks = self._communicator.active.ranks
        plan = self._plan
        if plan is None or not plan.fits(pending, ranks):
            plan = self._plan = self._make_plan(pending, ranks)
        for part in plan.parts if own_slots else ():
            if (own := own_slots.get(pending.names[part.number])) is not None:
                for key, slot in part.slots.items():
                    slot[...] = own[key].reshape(-1)[part.start : part.stop]
        self._optimizer.update_all(plan.updates(pending))
        for part in plan.parts:
            if part.staged is not None:
                part.staged[...] = part.param
        self._communicator.barrier().wait()
        for param, staged in plan.copies:
            param[...] = staged

    def _make_plan(self, pending: PendingUpdates, ranks: Sequence[int]) -> _ShardPlan:
        """Cut the tensors into slices of equal numbers of elements, which begin at multiples of _CUT."""
        here = _ranks_of_node(self._communicator.number, ranks)
        mine, names = here.index(self._communicator.number), pending.names
        cut = [
            index
            for index, name in enumerate(names)
            if name in self._layout.cut and (not pending.slots[index] or name in self._shared_slots)
        ]
        total, at = sum(pending.params[index].size for index in cut), 0
        plan = _ShardPlan(list(pending.params), list(pending.slots), tuple(ranks), [], [], [])
        for index in cut:
            param = pending.params[index].reshape(-1)
            bounds = [_bound(number * total // len(here) - at, param.size) for number in range(len(here) + 1)]
            start, stop, staged = bounds[mine], bounds[mine + 1], self._staged.get(names[index])
            if start < stop:
                slots = {key: slot.reshape(-1)[start:stop] for key, slot in pending.slots[index].items()}
                plan.parts.append(
                    _SlicePart(
                        index, start, stop, param[start:stop], slots, None if staged is None else staged[start:stop]
                    )
                )
            if staged is not None:
                plan.copies.extend((param[a:b], staged[a:b]) for a, b in ((0, start), (stop, param.size)) if a < b)
            at += param.size
        plan.whole.extend(sorted(set(range(len(names))) - set(cut)))
        return plan

    # Memory that the ranks of a node share.

    def _allocate_staged(self, layout: "_ShardLayout", leaves: list[Any]) -> bool:
        like = {name: leaves[index] for name, index in layout.cut.items() if name not in layout.shared}
        sizes = [node_memory.size_in_block(param.shape, param.dtype) for param in like.values()]
        block = self._allocate(sum(sizes), "parameters")
        if block is None:
            return False
        self._staged = {name: block.empty((param.size,), param.dtype) for name, param in like.items()}
        return True

    def _allocate(self, nbytes: int, what: str) -> node_memory.NodeMemory | None:
        communicator = self._communicator
        self._blocks = mix(self._blocks, communicator.operations)
        return _allocate(communicator, nbytes, f"{self._title}: memory for {what}")

    def _share_slots(self, pending: PendingUpdates) -> dict[str, Slots]:
        """Let the slots that the node does not share yet lie in a new block. Return their values, by tensor."""
        own = {
            name: slots
            for name, slots in zip(pending.names, pending.slots, strict=True)
            if slots and name in self._layout.cut and self._shared_slots.get(name) is not slots
        }
        if not own:
            return {}
        nbytes = sum(node_memory.size_in_block(s.shape, s.dtype) for slots in own.values() for s in slots.values())
        block = self._allocate(nbytes, "the optimizer's state")
        self._plan = None
        if block is None:  # every rank updates these tensors
            return {}
        for index, name in enumerate(pending.names):
            if name in own:
                shared = {key: block.empty(slot.shape, slot.dtype) for key, slot in own[name].items()}
                self._shared_slots[name] = pending.slots[index] = shared
                self._optimizer.replace_slots(name, shared)
        return own


class _ShardLayout(NamedTuple):
    """Which tensors are updated in slices. lines: one for each tensor, equal on all ranks. hash: of the lines. cut:
    {name: position} of the tensors that are sliced. shared: names of the tensors from `share`."""

    hash: int
    lines: list[str]
    cut: dict[str, int]
    shared: set[str]


_NO_LAYOUT = _ShardLayout(0, [], {}, set())


def _layout(tensors: Sequence[Tensor], leaves: Sequence[Any]) -> _ShardLayout:
    host = [index for index, leaf in enumerate(leaves) if isinstance(leaf, np.ndarray)]
    tied = {host[i] for pair in memory_conflicts([leaves[index] for index in host]) for i in pair}
    cut = {
        tensors[i].name: i
        for i in host
        if i not in tied and type(leaves[i]) is np.ndarray and leaves[i].flags.c_contiguous and leaves[i].size
    }
    shared = {name for name, index in cut.items() if node_memory.is_shared(leaves[index])}
    lines = [
        f"{tensor._replace(dtype=leaf.dtype)}{', overlapping memory' * (index in tied)}"
        f"{', sharded' * (tensor.name in cut)}{', from opt.share()' * (tensor.name in shared)}"
        for index, (tensor, leaf) in enumerate(zip(tensors, leaves, strict=True))
    ]
    return _ShardLayout(hash_text("\n".join(lines)), lines, cut, shared)


def _bound(element: int, count: int) -> int:
    """Return where a slice begins in a tensor of `count` elements, if it would begin at `element`, which may be
    outside."""
    return max(0, min(-(-element // _CUT) * _CUT, count))


def _ranks_of_node(number: int, ranks: Sequence[int]) -> list[int]:
    """Return the workers in `ranks` that are on the node of worker `number`."""
    sets = PROCESS_SETS.of(world.current())
    return [number] if sets is None else [rank for rank in ranks if sets.facts[rank].node == sets.facts[number].node]


def _allocate(communicator: Communicator, nbytes: int, title: str) -> node_memory.NodeMemory | None:
    """Make a block on each node; None on all ranks if a rank cannot map it. Collective; all ranks pass the same
    `nbytes`. title: of the exchanges, in errors."""
    mine = _ranks_of_node(communicator.number, communicator.active.ranks)
    memory, offer = None, None
    if communicator.number == mine[0]:
        with contextlib.suppress(OSError):
            memory, offer = segment.offer(max(nbytes, mmap.PAGESIZE))
    offers = communicator.allgather_object(offer, title).wait()
    offer = offers[list(communicator.active.ranks).index(mine[0])]
    if memory is None and offer is not None:
        memory = segment.accept(offer)
    mapped = communicator.allgather_object(memory is not None, title).wait()
    return node_memory.NodeMemory(memory, mine) if memory is not None and all(mapped) else None


def share(communicator: Communicator, params: Any, title: str) -> Any:
    """Copy `params` to memory that all ranks of a node map, and return the nest of the new arrays. Collective.

    The new arrays contain the values of the first rank of each node. Arrays that overlap another array of `params`
    (tied weights), and leaves that are not plain numpy arrays, are returned unchanged: each rank keeps its own. Returns
    `params` itself if the ranks of a node cannot share memory.
    """
    named = nest.leaves(params)
    eligible = [leaf for _, leaf in named if type(leaf) is np.ndarray]
    tied = {id(eligible[i]) for pair in memory_conflicts(eligible) for i in pair}  # each rank keeps these
    eligible = [leaf for leaf in eligible if id(leaf) not in tied]
    lines = [f"{name}{', tied' * (id(leaf) in tied)} {getattr(leaf, 'shape', ())}" for name, leaf in named]
    communicator.check("parameters", title, lines).wait()  # all ranks allocate the same arrays
    nbytes = sum(node_memory.size_in_block(leaf.shape, leaf.dtype) for leaf in eligible)
    block = _allocate(communicator, nbytes, title)
    if block is None:
        return params
    shared = []
    for _, leaf in named:
        target = block.empty(leaf.shape, leaf.dtype) if type(leaf) is np.ndarray and id(leaf) not in tied else leaf
        if target is not leaf and communicator.number == block.ranks[0]:
            target[...] = leaf
        if target is not leaf:
            variable.move(leaf, target)
        shared.append(target)
    communicator.barrier().wait()
    return nest.rebuild(params, shared)


def new_sharded_update(communicator: Communicator, optimizer: Any, title: str) -> ShardedUpdate | None:
    """Return None, after a message, if each rank must update all parameters."""
    if communicator.size == 1:
        return None
    if not splittable(optimizer):
        kind = optimizer_kind(optimizer)
        log.info(f"{title}: sharded=True has no effect: {kind} is not an elementwise optimizer of allred.optim")
        return None
    return ShardedUpdate(optimizer, title)
