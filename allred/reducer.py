"""Gradients in, averaged gradients out.

    check: all ranks bring the same tensors -> plan -> weight -> pack -> allreduce -> unpack, bucket by bucket

A communicator that fuses by itself (`fuses`) takes all gradients as one group instead of buckets.

Before the first byte moves, the ranks compare their plans and settings and tell each other how many samples their
gradients stand for, in one header (comm/header.py); a rank whose gradients cannot be used says so there, and all raise
the same error.
"""

import functools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from allred import arrays, world
from allred.arrays import Array
from allred.comm import functions, ops
from allred.comm.ops import ReduceOp
from allred.comm.work import Work
from allred.compression import Compression
from allred.config import parse_bytes
from allred.errors import InputError
from allred.fusion.buffer import buffer_of
from allred.fusion.plan import Plan, Tensor, plan
from allred.gpu import device_arrays as gpu
from allred.timeline.recorder import span

# The note in a header: samples in the low bits, an inspector's flags, and three flags.
_SAMPLES = 2**47 - 1
_EARLY = 2**47  # this rank has given gradients before the step
_INSPECTED = 48  # the lowest bit of the inspector's
_UNCOUNTED = 2**62  # this rank does not know its number of samples
_MISSING = 2**63  # this rank lacks a gradient


class Inspector:
    """Looks at gradients on their way, for mistakes. This one looks at nothing; see modes/detect.

    What it finds before the ranks have shown each other their headers it tells as flags. After that it knows all
    ranks' flags, and has to come to the same answer, or error, on every rank.
    """

    @property
    def settings(self) -> str:
        """What must be the same on all ranks, in words."""
        return ""

    def before(self, plan: Plan, values: Sequence[Any], samples: int | None) -> int:
        """This rank's flags, 0 to 2**14 - 1."""
        return 0

    def agreed(self, flags: list[int], plan: Plan, values: Sequence[Any]) -> bool:
        """Every rank's flags are known, and nothing has been changed: whether to go on."""
        return True

    def reduced(self, flags: list[int], plan: Plan, values: Sequence[Any]) -> bool:
        """The gradients are reduced: whether to use them."""
        return True

    # Where gradients go out one by one, before all of them are there (modes/early.py).

    def asks(self, samples: int | None) -> bool:
        """Whether this step has to be one in which all are there before any is changed."""
        return False

    def look(self, plan: Plan, values: Sequence[Any]) -> int:
        """Some of them are about to go out: this rank's flags, of which `closed` gets those of all."""
        return 0

    def closed(self, flags: list[int], plan: Plan, values: Sequence[Any]) -> bool:
        """All are reduced: whether to use them."""
        return True


_NOBODY = Inspector()


class Reducer:
    """Averages (or sums) lists of gradients over the ranks of the running world.

    `title` is what errors begin with. `settings`: what else must be the same on all ranks, in words.
    """

    def __init__(
        self,
        op: ReduceOp,
        bucket_bytes: int | str | None,
        title: str,
        settings: str = "",
        compression: Compression = Compression.none,
    ) -> None:
        if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise InputError(f"op={op!r} cannot combine gradients; use allred.Average or allred.Sum")
        if not isinstance(compression, Compression):
            raise InputError(f"compression={compression!r}: expected allred.Compression.none, .fp16 or .bf16")
        self.op, self.compression = op, compression
        self.samples = 0  # of all ranks, in the last reduction; 0 if they were not counted
        self.early = False  # whether some rank had given gradients before it
        self._bucket_bytes = _size(bucket_bytes)
        self._title, self._settings = title, settings
        self._plans: dict[tuple[int, tuple[Tensor, ...]], Plan] = {}

    def reduce(
        self,
        tensors: Sequence[Tensor],
        values: Sequence[Any],
        samples: int | None,
        problem: str = "",
        inspector: Inspector = _NOBODY,
        settings: str = "",
        early: bool = False,
    ) -> list[Any] | None:
        """The reduced gradients, in order: writable arrays among `values` are overwritten, others give new arrays.

        None if the inspector will not have them used, on all ranks.

        tensors: what every rank must bring. values: the gradients, of the tensors' shapes and dtypes; None counts as
        zeros if another rank has that gradient, and stays None otherwise. samples: how many samples the gradients are
        the mean of; ranks with more count for more. problem: why this rank cannot take part, in words. settings: what
        else must be the same on all ranks in this step. early: whether this rank has given gradients before; that any
        has is then known on all.

        Raises InputError or MismatchError, the same on every rank, before anything has been changed.
        """
        whole = self.plan(tensors)
        problem = problem or next((p for b in whole.buckets if (p := ops.refusal(self.op, b.dtype))), "")
        ready = [] if problem else writable(tensors, values)
        flags = 0 if problem else inspector.before(whole, ready, samples)
        note = self.note(samples, flags, any(value is None for value in ready)) | _EARLY * early
        words = self.agreement(inspector, settings)
        with span("negotiate", self._title):
            notes = functions.current().check("step", self._title, whole.lines, words, note, problem).wait()
        self.early = any(each & _EARLY for each in notes)
        weight, everyones = self.heard(notes)
        if self.any_missing(notes):
            ready = self._fill_missing(tensors, ready)
        if not inspector.agreed(everyones, whole, ready):
            return None
        present = [i for i, value in enumerate(ready) if value is not None]
        self._run(self.plan([tensors[i] for i in present]), [ready[i] for i in present], weight)
        return ready if inspector.reduced(everyones, whole, ready) else None

    def note(self, samples: int | None, flags: int, missing: bool = False) -> int:
        """What this rank tells the others in a header."""
        return (_UNCOUNTED if samples is None else min(samples, _SAMPLES)) | _MISSING * missing | flags << _INSPECTED

    def heard(self, notes: list[int]) -> tuple[float | None, list[int]]:
        """From every rank's note: by how much this rank's gradients count, and every rank's flags."""
        return self._weight(notes), self.flags(notes)

    @staticmethod
    def flags(notes: list[int]) -> list[int]:
        """Every rank's flags."""
        return [note >> _INSPECTED & 2**14 - 1 for note in notes]

    @staticmethod
    def any_missing(notes: list[int]) -> bool:
        """Whether some rank lacks a gradient."""
        return any(note & _MISSING for note in notes)

    def agreement(self, inspector: Inspector, settings: str) -> str:
        """What must be the same on all ranks, in words: the reducer's settings, an inspector's, and others."""
        own = f"op={self.op.value}", f"bucket_bytes={self.bucket_bytes}", f"compression={self.compression.name}"
        return " ".join(filter(None, (*own, inspector.settings, self._settings, settings)))

    @property
    def bucket_bytes(self) -> int:
        """The limit of a bucket: this reducer's own, else the setting."""
        return self._bucket_bytes or world.config().bucket_bytes

    def plan(self, tensors: Sequence[Tensor]) -> Plan:
        """The buckets in which `tensors` are reduced."""
        key = self.bucket_bytes, tuple(tensors)
        if key not in self._plans:
            if len(self._plans) >= 16:  # gradients of ever changing shape: do not keep them all
                self._plans.clear()
            self._plans[key] = plan(key[1], self.bucket_bytes)
        return self._plans[key]

    def _fill_missing(self, tensors: Sequence[Tensor], values: list[Any]) -> list[Any]:
        """Zeros where this rank lacks a gradient that another one has."""
        anywhere = self.anywhere([value is not None for value in values])
        like = next((value for value in values if gpu.is_device(value)), None)  # else the parameters are on the host
        return [
            gpu.zeros(like, tensor.shape, tensor.dtype) if value is None and some else value
            for tensor, value, some in zip(tensors, values, anywhere, strict=True)
        ]

    def anywhere(self, here: list[bool]) -> list[bool]:
        """Whether some rank has a gradient, for each, from what this rank has. Collective."""
        found = np.array(here, np.uint8)
        return functions.allreduce_(found, ReduceOp.MAX, f"{self._title}: who has which gradient").tolist()  # type: ignore[no-any-return]

    def _weight(self, notes: list[int]) -> float | None:
        """By how much this rank's gradients count; None where all ranks' count alike. Without samples: not at all."""
        active = functions.current().active
        counted = [not note & _UNCOUNTED for note in notes]
        if any(counted) and not all(counted):
            ranks = [rank for rank, known in zip(active.ranks, counted, strict=True) if not known]
            raise InputError(f"{self._title}: ranks {ranks} do not say how many samples they have, the others do")
        samples = [note & _SAMPLES for note in notes]
        self.samples = sum(samples) if all(counted) else 0
        if all(counted) and not self.samples:
            raise InputError(f"{self._title}: no rank has any samples, so there is nothing to average")
        if self.op is ReduceOp.SUM:
            return None if all(samples) or not any(counted) else float(bool(samples[active.rank]))
        if len(set(samples)) == 1:
            return None
        return samples[active.rank] * len(samples) / sum(samples)

    def _run(self, whole: Plan, values: list[Any], weight: float | None) -> None:
        """Reduce in place; those on a GPU first, which the others do not wait for."""
        communicator = functions.current()
        if (devices := communicator.gpu) is not None:
            order = [i for bucket in whole.buckets for i in bucket.indices]
            on_gpu = list(map(gpu.is_device, values))
            there = [values[i] for i in order if on_gpu[i]]
            if there:
                devices.weighted_allreduce_(there, self.op, self._title, self.compression, weight).wait()
                here = [i for i in sorted(order) if not on_gpu[i]]
                whole, values = self.plan([whole.tensors[i] for i in here]), [values[i] for i in here]
        if whole.buckets:
            self._run_on_host(whole, values, weight)

    def _run_on_host(self, plan: Plan, values: list[Array], weight: float | None) -> None:
        if functions.current().fuses and weight is None:
            whole = [values[i] for bucket in plan.buckets for i in bucket.indices]
            queue, start = functions.current().queue, time.perf_counter()
            before = queue.waited_s
            functions.grouped_allreduce_(whole, self.op, self._title, self.compression)
            queue.waited_s = before + time.perf_counter() - start  # all of it, not only what the queue saw
            return
        buffer = buffer_of(functions.current())
        for number, bucket in enumerate(plan.buckets):
            targets = [values[i] for i in bucket.indices]
            if len(targets) == 1:
                self._reduce(targets[0], weight, plan.tensors[bucket.indices[0]].name)
                continue
            parts = [arrays.flat(target) for target in targets]
            packed_bytes = bucket.count * bucket.dtype.itemsize
            name = f"bucket {number} of {len(plan.buckets)}"
            with span("pack", name, packed_bytes):
                packed = buffer.pack(parts, plan.largest(bucket.dtype))
            self._reduce(packed, weight, name)
            with span("unpack", name, packed_bytes):
                buffer.unpack(parts)
                for target, part in zip(targets, parts, strict=True):
                    arrays.copy_back(target, part)

    def _reduce(self, array: Array, weight: float | None, name: str) -> None:
        """Reduce in place."""
        moved, compression = self.weighted(array, weight)
        functions.allreduce_(moved, self.op, name, compression)
        if moved is not array:
            array[...] = moved

    def start(self, targets: list[Any], weight: float | None, name: str) -> Work[list[Any]]:
        """Begin to reduce arrays of one dtype and place; the results are they, or the work's where those are others."""
        communicator = functions.current()
        if (devices := communicator.gpu) is not None and gpu.is_device(targets[0]):
            return devices.weighted_allreduce_(targets, self.op, name, self.compression, weight)
        weighted = [self.weighted(target, weight) for target in targets]
        moved, compression = [array for array, _ in weighted], weighted[0][1]
        return functions.grouped_allreduce_async_(moved, self.op, name, compression)

    def weighted(self, array: Array, weight: float | None) -> tuple[Array, Compression]:
        """What is reduced in place of an array that counts by `weight`, and how it travels. 16-bit floats are weighted
        in float32, as they are summed, and rounded once, so they are never compressed."""
        if weight is None:
            return array, self.compression
        weighted = np.zeros_like(array, arrays.accumulator(array.dtype))
        if weight == 1:  # of integers, too
            weighted[...] = array
        elif weight:  # else zeros even where the gradient is NaN: the mean over no samples
            np.multiply(array, weight, out=weighted, dtype=weighted.dtype)
        return weighted, self.compression if weighted.dtype == array.dtype else Compression.none


def _size(bucket_bytes: int | str | None) -> int | None:
    try:
        size = None if bucket_bytes is None else parse_bytes(bucket_bytes)
    except ValueError as error:
        raise InputError(f"bucket_bytes: {error}") from None
    if size == 0:
        raise InputError("bucket_bytes=0 is too small; it must be at least 1")
    return size


def writable(tensors: Sequence[Tensor], values: Sequence[Any]) -> list[Any]:
    """The arrays to reduce in: the caller's own; copies of numbers, read-only arrays and memory that comes twice."""
    plain = all(type(value) is np.ndarray and value.flags.writeable for value in values)
    if plain and len(set(arrays.memory_of(values))) == len(values):  # as in most steps
        return list(values)
    known = gpu.layouts(values)  # of arrays that can be written to
    if known is not None and len({layout[0] for layout in known}) == len(values):
        return list(values)
    seen: set[int] = set()
    if any(map(gpu.is_device, values)):
        host = [index for index, value in enumerate(values) if not gpu.is_device(value)]
        mine = iter(writable([tensors[index] for index in host], [values[index] for index in host]))
        return [_writable_on_gpu(value, seen) if gpu.is_device(value) else next(mine) for value in values]
    can_write = [isinstance(value, np.ndarray) and value.flags.writeable for value in values]
    memory = iter(arrays.memory_of([value for value, good in zip(values, can_write, strict=True) if good]))
    ready: list[Any] = []
    for tensor, value, good in zip(tensors, values, can_write, strict=True):
        if good and (address := next(memory)) not in seen:
            seen.add(address)
            ready.append(value)
        else:
            ready.append(None if value is None else np.array(value, tensor.dtype))
    return ready


def _writable_on_gpu(value: Any, seen: set[int]) -> Any:
    """The same for an array on a GPU."""
    adopted = gpu.adopt(value)
    address = adopted.array.data.ptr
    if adopted.writable and (address not in seen or not adopted.array.size):
        seen.add(address)
        return value
    with gpu.on_stream(adopted):
        return adopted.to_caller(adopted.array.copy())


def takes_gpu() -> bool:
    """Whether gradients may be on a GPU."""
    return functions.current().takes_device_arrays


def tensor_of(name: str, value: Any) -> Tensor:
    """What a plan has to know of an array or a number. Raises InputError if it is not one, or of unusable dtype."""
    try:
        if gpu.is_device(value) and takes_gpu():
            return _tensor(name, *gpu.shape_and_dtype(value))
        array = value if type(value) is np.ndarray else arrays.as_host_array(value)
        return _tensor(name, array.shape, array.dtype)
    except InputError as error:
        raise InputError(f"'{name}': {error}") from None


@functools.lru_cache(maxsize=2**16)  # every gradient of every step
def _tensor(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
    arrays.dtype_code(dtype)  # raises
    return Tensor(name, shape, dtype)
