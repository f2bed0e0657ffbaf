"""`bench allreduce` and `bench fused`: allreduces of one array, and of all gradients of a model in one call.

All calls are blocking and in place, on the same arrays.

allred                    allreduce_ or grouped_allreduce_
allred uncompressed       the same without --compression
mpi, mpi per tensor       --against mpi: mpi4py's Allreduce on a duplicate of COMM_WORLD, one call per tensor
mpi concatenate + split   copy all tensors into a flat array, one Allreduce, copy back; the flat array is allocated once
arena on                  --arena: arrays of `allred.empty`, from 16 KiB, and the communicator of `allred.init`
arena off                 arrays of numpy, and a communicator of the same ranks without arenas, as with ALLRED_ARENA=0

`bench step` uses `Arenas` and `allocate` too.
"""

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import allred
from allred import arena, arrays, world
from allred.arrays import Array
from allred.bench import measure, output, verify
from allred.bench.measure import Call
from allred.bench.verify import Shape
from allred.comm import functions
from allred.comm.communicator import Communicator
from allred.comm.ops import Compression
from allred.comm.process_set import dedicated
from allred.errors import ConfigError

UNCOMPRESSED = "allred uncompressed"


class MpiBaseline:
    """A choice of --against, made by a call with the mpi4py communicator and the dtype, on all ranks: allreduce by
    mpi4py on its communicator `comm`, without allred.

    array_calls, group_calls: the calls that are compared with `allreduce_` and `grouped_allreduce_`, by name. details:
    more results for the record of a group; collective. close: frees what it holds; collective.
    """

    def __init__(self, comm: Any, dtype: np.dtype[Any]) -> None:
        from mpi4py import MPI

        self._comm, self._in_place, self._sum = comm, MPI.IN_PLACE, MPI.SUM

    def array_calls(self, array: Array) -> dict[str, Call]:
        return {"mpi": functools.partial(self._comm.Allreduce, self._in_place, array, self._sum)}

    def group_calls(self, group: list[Array]) -> dict[str, Call]:
        flats = [array.reshape(-1) for array in group]
        (buffer,) = allocate([(sum(flat.size for flat in flats),)], flats[0].dtype)
        ends = np.cumsum([flat.size for flat in flats])
        parts = [buffer[end - flat.size : end] for flat, end in zip(flats, ends, strict=True)]

        def per_tensor() -> None:
            for array in group:
                self._comm.Allreduce(self._in_place, array, self._sum)

        def concatenated() -> None:
            np.concatenate(flats, out=buffer)
            self._comm.Allreduce(self._in_place, buffer, self._sum)
            for flat, part in zip(flats, parts, strict=True):
                np.copyto(flat, part)

        return {"mpi per tensor": per_tensor, "mpi concatenate + split": concatenated}

    def details(self, group: list[Array], seconds: float) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


BASELINES: dict[str, Callable[[Any, np.dtype[Any]], Any]] = {"mpi": MpiBaseline}


def allocate(shapes: Sequence[Shape], dtype: np.dtype[Any], empty: Callable[..., Any] = np.empty) -> list[Any]:
    """Arrays of zeros, each in its own memory, written once so that all pages exist. empty: allocates one."""
    group = [empty(shape, dtype) for shape in shapes]
    for array in group:
        array.fill(0)
    return group


def in_arena(shape: Shape, dtype: np.dtype[Any]) -> Array:
    """Return an array in the arena if it is large enough to be reduced in place, as gradients of numpy are."""
    large = arrays.size_of(shape) * dtype.itemsize >= arena.MIN_BYTES
    return (allred.empty if large else np.empty)(shape, dtype)


class Arenas:
    """The communicators that --arena names, in its order: on, off. Collective. Raises ConfigError without arenas."""

    def __init__(self, names: Sequence[str]) -> None:
        if names and (reason := arena.refusal()):
            raise ConfigError(f"--arena: this job has no arenas: {reason}")
        self.names = names
        self.communicators = {name: functions.current() if name == "on" else _without_arenas() for name in names}

    @staticmethod
    def parse(text: str) -> list[str]:
        """Return the words of the argument. Raises ValueError.

        >>> Arenas.parse("on,off")
        ['on', 'off']
        """
        words = text.split(",")
        if not set(words) <= {"on", "off"} or len(set(words)) < len(words):
            raise ValueError(f"--arena: expected on, off, or on,off; got {text!r}")
        return words

    def allocate(self, name: str, shapes: Sequence[Shape], dtype: np.dtype[Any]) -> list[Any]:
        """Return arrays of zeros for the communicator of this name."""
        return allocate(shapes, dtype, in_arena if name == "on" else np.empty)

    def variant(self, name: str) -> str:
        """Return the name of a variant in the results: the first one is `allred`."""
        return "allred" if name == self.names[0] else f"arena {name}"


def _without_arenas() -> Communicator:
    size = functions.current().size
    arena.disable("--arena off")
    try:
        return dedicated(range(size), "the benchmark without arenas")
    finally:
        arena.enable(world.config().arena, size)


def run(options: argparse.Namespace, comm: Any, conditions: dict[str, Any]) -> None:
    """Measure all sizes or sets; rank 0 prints. Calls allred.shutdown().

    Raises ConfigError or WrongResultError on all ranks.
    """
    labels = {"ranks": comm.Get_size(), "dtype": arrays.name_of(options.dtype), "backend": functions.current().name}
    if options.compression is not Compression.none:
        labels["compression"] = options.compression.name
    if options.arena:
        labels["arena"] = options.arena[0]
    on_gpu = {"device": "cuda", **describe_gpu()} if options.device == "cuda" else {}
    conditions = {"op": "Sum", **on_gpu, **conditions}
    cases = _Cases(options, comm)
    writer = output.ResultWriter(options.json, enabled=comm.Get_rank() == 0)
    against = options.against or ",".join(options.arena[1:]) or labels.get("compression")
    writer.header(options.bench, labels, conditions, against)
    for item in options.items:
        what, results = cases.measure(item)
        for result in results:
            thread = {"progress_thread": functions.current().queue.engine.has_progress_thread}
            writer.line({"bench": options.bench, **what, **labels, **result, **conditions, **thread})
    writer.footer(functions.current().queue.engine.has_progress_thread)
    if cases.baseline is not None:
        cases.baseline.close()
    comm.Free()
    allred.shutdown()


class _Cases:
    """The compared calls of each size or set. Collective."""

    def __init__(self, options: argparse.Namespace, comm: Any) -> None:
        self._options, self._comm, self._arenas = options, comm, Arenas(options.arena)
        self._single, self._on_gpu = options.bench == "allreduce", options.device == "cuda"
        self.baseline = BASELINES[options.against](comm, options.dtype) if options.against else None

    def measure(self, item: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the name and size of `item`, and one record per compared implementation."""
        options, comm = self._options, self._comm
        shapes: list[Shape] = [(item // options.dtype.itemsize,)] if self._single else verify.SETS[item]()
        cases = self._calls(shapes)
        group = cases["allred"][1]
        nbytes, title = sum(array.nbytes for array in group), f"{options.bench} {item}"
        what = {"bytes": nbytes} if self._single else {"set": item, "bytes": nbytes, "tensors": len(group)}
        for name, (call, its_group) in cases.items():
            verify.check(f"{title} by {name}", call, its_group, comm)
        timed = {name: call for name, (call, _) in cases.items()}
        synchronize = synchronize_gpu if self._on_gpu else measure.no_synchronize
        times = measure.interleave(timed, comm, options.seconds * max(1, len(cases) - 1), synchronize)
        for name, (_, its_group) in cases.items():
            verify.check_zeros(f"{title} by {name}" if options.arena else title, its_group, comm)
        ours = times.pop("allred")
        several = self.baseline is not None and not self._single
        details = self.baseline.details(group, options.seconds) if several and self.baseline else {}
        others = times.items() or [(None, None)]
        return what, [
            {**output.result(ours, name, other, nbytes, comm.Get_size()), **details} for name, other in others
        ]

    def _calls(self, shapes: list[Shape]) -> dict[str, tuple[Call, list[Any]]]:
        """Return the calls by name, each with the arrays that it reduces; `allred` is the first one."""
        found: dict[str, tuple[Call, list[Any]]] = {}
        dtype, single = self._options.dtype, self._single
        for name, communicator in self._arenas.communicators.items():
            group = self._arenas.allocate(name, shapes, dtype)
            call: Call = functools.partial(communicator.grouped_allreduce_blocking, group, True, allred.Sum, "")
            if single:
                call = functools.partial(communicator.allreduce_blocking, group[0], True, allred.Sum, "")
            found[self._arenas.variant(name)] = call, group
        if not found:
            group = allocate(shapes, dtype, empty_on_gpu if self._on_gpu else np.empty)
            calls = _calls_of_allred(group, single, self._options.compression)
            found = {name: (call, group) for name, call in calls.items()}
        if self.baseline is not None:
            calls = self.baseline.array_calls(group[0]) if single else self.baseline.group_calls(group)
            found |= {name: (call, group) for name, call in calls.items()}
        return found


def _calls_of_allred(group: list[Any], single: bool, compression: Compression) -> dict[str, Call]:
    """Return allred's calls by name. single: allreduce_ of the only array, else grouped_allreduce_ of all."""
    call: Callable[..., object]
    if single:
        call = functools.partial(allred.allreduce_, group[0], allred.Sum)
    else:
        call = functools.partial(allred.grouped_allreduce_, group, allred.Sum)
    if compression is Compression.none:
        return {"allred": call}
    return {"allred": functools.partial(call, compression=compression), UNCOMPRESSED: call}


# --device cuda: a sample ends when the GPU has finished; the calls of a batch are queued one after another.


def gpu() -> Any:
    """Return the device of this rank (allred.gpu.streams.Device)."""
    devices = functions.current().devices
    assert devices is not None  # --device cuda requires it
    return devices.device


def synchronize_gpu() -> None:
    gpu().xp.cuda.Device().synchronize()


def empty_on_gpu(shape: Shape, dtype: np.dtype[Any]) -> Any:
    return gpu().xp.empty(shape, dtype)


def describe_gpu() -> dict[str, Any]:
    """The GPU's name and the versions of NCCL and cupy, for the JSON record."""
    name = gpu().xp.cuda.runtime.getDeviceProperties(gpu().index)["name"]
    return {"gpu": name.decode(), "nccl": gpu().nccl.get_version(), "cupy": gpu().xp.__version__}
