"""Gradients that are reduced as they become ready, while the rest of them is computed: `opt.reduce(name, grad)`.

    the first step with reduce()   is as any other; at its end all ranks take over the order in which the gradients
                                   became ready on rank 0
    every later step
      1  opening     with the first reduce(), or in step() on a rank that does without: a header, that all ranks expect
                     the same gradients in this order, what samples they stand for, and whether one wants to see all of
                     them before any is changed (the checks of modes/detect). If so, this step is as any other
      2  buckets     each goes out when its gradients are ready and those before it have gone, on every rank in the same
                     order; out of order they wait for their turn
      3  closing     in step(), when the last one is through: a header, with this rank's mistakes since, and whether
                     its gradients were finite

What a rank does wrong between 1 and 3 it keeps to itself until 3, and sends zeros for what is missing: the others wait
for its buckets. So errors come in step(), and are the same on all ranks.

Gradients may be on the host or on a GPU, each where it was on the first rank when the order was settled.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from allred import arrays
from allred.arrays import Array
from allred.comm import functions
from allred.comm.communicator import Communicator
from allred.comm.work import Work
from allred.errors import AllredError, InputError
from allred.fusion.plan import Plan, Tensor, plan
from allred.gpu import device_arrays as gpu
from allred.reducer import Inspector, Reducer, takes_gpu, tensor_of, writable
from allred.timeline.recorder import span

_ASKS = 1  # a flag of the opening: this rank's inspector has to see all gradients first
_PLACES = ("the host", "a GPU")


class Early:
    """Of one optimizer in mode sync. `title`: what errors begin with. `settings`: what else must be the same on all
    ranks in a step, in words."""

    def __init__(self, reducer: Reducer, inspector: Inspector, title: str, settings: Callable[[], str]) -> None:
        self._reducer, self._inspector, self._title, self._settings = reducer, inspector, title, settings
        self._tensors: list[Tensor] = []  # as step() has them; of the step that settled the order
        self._positions: dict[str, int] = {}  # in that list, by name
        self._buckets: list[tuple[tuple[int, ...], Plan]] = []  # positions in that list, in the agreed order
        self._on_gpu: list[bool] = []  # by position
        self._like: Any = None  # an empty array of a kind that this rank has there
        self._all: Plan | None = None
        self._communicator: Communicator | None = None  # of the step that has begun
        self._clear()

    def _clear(self) -> None:
        self._given: dict[str, Any] = {}  # since the last step, in the order in which they came
        self._ready: dict[int, Any] = {}  # position: the array that is reduced
        self._opening: Work[list[int]] | None = None
        self._asked: bool | None = None  # whether some rank has to see all gradients first; None: not heard yet
        self._running: list[tuple[Work[list[Array]], list[Array]]] = []  # and where the results belong
        self._problem, self._flags = "", 0
        self._stream: Any = None  # that the last gradient on a GPU was computed on
        if self._communicator is not None:
            self._communicator.unfinished.pop(self, None)
        self._communicator = None

    def forget(self) -> None:
        """The next step begins anew; on all ranks."""
        self._all = None
        self._clear()

    # As gradients become ready.

    @property
    def begun(self) -> bool:
        """Whether the next step has some of its gradients."""
        return bool(self._given)

    def reduce(self, name: str, grad: Any, samples: int | None) -> None:
        """Take a gradient. Raises nothing that is about this rank alone."""
        if name in self._given:
            self._problem = self._problem or f"reduce({name!r}) was called twice for one step; call step() after each"
            return
        if not self.begun:
            self._communicator = functions.current()
            self._communicator.unfinished[self] = f"reduce({name!r}) has begun a step; call {self._title} before"
        self._given[name] = grad
        self._follow([grad])
        if self._all is None:
            return
        if self._opening is None:
            self._open(samples)
        self._problem = self._problem or self._take(name, grad)
        self._advance()

    def _take(self, name: str, grad: Any) -> str:
        """Note a gradient; what is wrong with it, in words."""
        index = self._positions.get(name)
        if index is None:
            return _unknown(name, list(self._positions))
        tensor = self._tensors[index]
        try:
            got = tensor if isinstance(grad, (int, float)) else tensor_of(name, grad)
        except InputError as error:
            return f"reduce(): {error}"
        if got != tensor:
            return f"reduce({name!r}): got {arrays.describe(got.shape, got.dtype)}, and the gradient is {tensor}"
        if words := self._elsewhere(index, grad):
            return words
        self._ready[index] = writable([tensor], [grad])[0]
        return ""

    def _elsewhere(self, index: int, grad: Any) -> str:
        """That a gradient is not where it was when the order was settled, in words."""
        here, then = gpu.is_device(grad), self._on_gpu[index]
        if here == then:
            return ""
        name = self._tensors[index].name
        return f"the gradient '{name}' is on {_PLACES[here]}, and was on {_PLACES[then]} when their order was settled"

    def _open(self, samples: int | None) -> None:
        assert self._all is not None
        settings = self._reducer.agreement(self._inspector, self._settings())
        flags = _ASKS * self._inspector.asks(samples)
        note = self._reducer.note(samples, flags)
        title = f"{self._title}: the gradients that come early, in their order"
        self._opening = functions.current().check("step", title, self._all.lines, settings, note)

    def _advance(self) -> None:
        """Send what can go, if the ranks have agreed by now."""
        assert self._opening is not None
        try:
            if self._asked is None and not self._opening.done():
                return
            self._hear()
        except AllredError:  # all ranks have it; step() raises it
            return
        while not self._asked and len(self._running) < len(self._buckets):
            if not all(index in self._ready for index in self._buckets[len(self._running)][0]):
                break
            self._send()
        if self._running and any(self._on_gpu):
            functions.current().queue.progress(self._running[-1][0])  # which nobody else does, as C does on the host

    def _hear(self) -> None:
        """What all ranks said when they opened. Raises what all of them raise."""
        assert self._opening is not None
        if self._asked is None:
            with span("negotiate", self._title):
                notes = self._opening.wait()
            self._weight, flags = self._reducer.heard(notes)
            self._asked = any(flag & _ASKS for flag in flags)

    def _send(self) -> None:
        """The next bucket goes out."""
        number = len(self._running)
        indices, bucket = self._buckets[number]
        targets = [self._ready[index] for index in indices]
        self._follow(targets)
        self._flags |= self._inspector.look(bucket, targets)
        name = f"{self._title}: early bucket {number} of {len(self._buckets)}"
        self._running.append((self._reducer.start(targets, self._weight, name), targets))

    def _follow(self, grads: Sequence[Any]) -> None:
        """Those on a GPU may come on several streams, and go out together, perhaps in a later call: each stream waits
        for the one before, so whichever is current then comes after all of them."""
        for grad in filter(gpu.is_device, grads) if takes_gpu() else ():
            stream = gpu.current_stream(grad)
            if self._stream is not None and stream.ptr != self._stream.ptr:
                stream.wait_event(self._stream.record())
            self._stream = stream

    # In step().

    def finish(
        self, tensors: Sequence[Tensor], values: Sequence[Any], samples: int | None, problem: str
    ) -> list[Any] | None:
        """As `Reducer.reduce`: reduce what is left, wait for the rest; None if the gradients are not to be used."""
        try:
            if self._given:
                self._follow(values)
            if self._given or self._all is not None:
                problem = problem or self._problem or self._refusal(tensors, values)
            if self._all is None:
                return self._settle(tensors, values, samples, problem)
            return self._finish(tensors, values, samples, problem)
        except AllredError:
            self._all = None  # on all ranks: the next steps begin anew
            raise
        finally:
            self._clear()

    def _settle(
        self, tensors: Sequence[Tensor], values: Sequence[Any], samples: int | None, problem: str
    ) -> list[Any] | None:
        """A step as any other. If reduce() was called on some rank, agree on an order for those to come."""
        names = {tensor.name: index for index, tensor in enumerate(tensors)} if self._given else {}
        if odd := [name for name in self._given if name not in names]:
            problem = problem or _unknown(odd[0], list(names))
        settings = self._settings()
        given = bool(self._given)
        mean = self._reducer.reduce(tensors, values, samples, problem, self._inspector, settings, given)
        if self._reducer.early and not functions.current().checks_places:  # which call sends a bucket is chance
            order = [names[name] for name in self._given]
            order += [index for index in reversed(range(len(tensors))) if index not in order]
            first = functions.current().active.ranks[0]
            like = next(filter(gpu.is_device, mean or values), None)
            on_gpu = [gpu.is_device(like if value is None else value) for value in mean or values]
            title = f"{self._title}: the order of early gradients"
            order, self._on_gpu = functions.broadcast_object((order, on_gpu), first, title)
            self._like = gpu.zeros(like, (0,), np.dtype(np.float32))
            self._tensors, self._positions = list(tensors), {tensor.name: i for i, tensor in enumerate(tensors)}
            self._all = plan([tensors[index] for index in order], self._reducer.bucket_bytes)
            self._buckets = []
            for bucket in sorted(self._all.buckets, key=lambda bucket: bucket.indices[-1]):
                for there in (True, False):  # those on a GPU travel by themselves
                    where = tuple(order[i] for i in bucket.indices if self._on_gpu[order[i]] is there)
                    if where:
                        self._buckets.append((where, plan([tensors[i] for i in where], self._reducer.bucket_bytes)))
        return mean

    def _finish(
        self, tensors: Sequence[Tensor], values: Sequence[Any], samples: int | None, problem: str
    ) -> list[Any] | None:
        if self._opening is None:
            self._open(samples)
        problem = problem or self._odd(tensors, values)
        self._hear()
        if self._asked:
            return self._reducer.reduce(tensors, values, samples, problem, self._inspector, self._settings())
        rest = [index for index in range(len(self._tensors)) if index not in self._ready]
        others = [self._tensors[index] for index in rest]
        late = writable(others, [None if problem else values[index] for index in rest])
        missing = [index for index, value in zip(rest, late, strict=True) if value is None]
        self._ready |= zip(rest, late, strict=True)
        self._ready |= {index: self._zeros(index) for index in missing}
        while len(self._running) < len(self._buckets):
            self._send()
        for work, targets in self._running:
            for target, result in zip(targets, work.wait(), strict=True):
                if target is not result:
                    target[...] = result
        return self._close(missing, problem)

    def _zeros(self, index: int) -> Any:
        """In place of a gradient that this rank lacks."""
        return gpu.zeros(self._like if self._on_gpu[index] else None, *self._tensors[index][1:])

    def _close(self, missing: list[int], problem: str) -> list[Any] | None:
        """The buckets are through: hear of mistakes, of gradients that nobody has, and of those that are not finite."""
        note = self._reducer.note(None, self._flags, missing=bool(missing))
        title = f"{self._title}: the end of early gradients"
        with span("negotiate", title):
            notes = functions.current().check("step", title, note=note, problem=problem).wait()
        mean = [self._ready[index] for index in range(len(self._tensors))]
        if self._reducer.any_missing(notes):
            here = [index not in missing for index in range(len(self._tensors))]
            mean = [value if some else None for value, some in zip(mean, self._reducer.anywhere(here), strict=True)]
        whole = self._reducer.plan(self._tensors)
        return mean if self._inspector.closed(self._reducer.flags(notes), whole, mean) else None

    def _refusal(self, tensors: Sequence[Tensor], values: Sequence[Any]) -> str:
        """Why such gradients cannot be reduced one by one, in words."""
        mine = [(t.name, v) for t, v in zip(tensors, values, strict=True) if isinstance(v, np.ndarray) and v.size]
        there = [(t.name, v) for t, v in zip(tensors, values, strict=True) if gpu.is_device(v) and t.elements]
        begin = [*arrays.memory_of([value for _, value in mine]), *gpu.addresses([value for _, value in there])]
        names: dict[int, str] = {}
        for (name, _), memory in zip(mine + there, begin, strict=True):
            first = names.setdefault(memory, name)
            if first != name and (first in self._given or name in self._given):
                return f"'{first}' and '{name}' are one memory, which reduce() changes for both; pass a copy of one"
        return ""

    def _odd(self, tensors: Sequence[Tensor], values: Sequence[Any]) -> str:
        """What does not fit between what step() was given and what reduce() was, in words."""
        if list(tensors) != self._tensors:
            return "step() has other gradients, by name, shape or dtype, than the one that settled their order"
        for name, grad in self._given.items():
            index = self._positions.get(name)
            if index is not None and values[index] is not grad:
                return f"reduce({name!r}) was given another array than step(); pass the same to both"
        here = [(index, value) for index, value in enumerate(values) if value is not None]
        return next(filter(None, (self._elsewhere(index, value) for index, value in here)), "")


def _unknown(name: str, names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"reduce({name!r}): no gradient has this name; they are {', '.join(map(repr, names[:5]))}{more}"
