"""`python -m allred bench`: the order of things.

    arguments -> malloc's settings (starts the process again) -> MPI's settings -> init -> for each size or set:
    allocate, verify every way, time them in turns (measure.py says how), verify, print

A wrong argument is found before MPI starts, on all ranks, and is exit code 2; a wrong sum is exit code 1.
"""

import argparse
import contextlib
import os
import shlex
from typing import Any

import allred
from allred import arrays
from allred.bench import data, gpu, measure, overlap, ps, sets, setting, table, verify, ways
from allred.bench.arguments import parse
from allred.cluster import mpi
from allred.comm import functions
from allred.compression import Compression
from allred.errors import ConfigError


def main(arguments: list[str]) -> int:
    """Run the benchmark that the arguments ask for; the exit code."""
    with contextlib.ExitStack() as silence:
        if not setting.first_rank():
            null = silence.enter_context(open(os.devnull, "w"))
            silence.enter_context(contextlib.redirect_stdout(null))
            silence.enter_context(contextlib.redirect_stderr(null))
        try:
            options = parse(arguments)
        except SystemExit as stop:  # argparse has spoken
            return setting.fail("") if stop.code else 0
    if options.malloc_tuned:
        setting.tune_malloc()
    try:
        action = {"ps": ps.run, "overlap": overlap.run, "data": data.run}.get(options.bench, run)
        action(options, command=shlex.join(["python", "-m", "allred", "bench", *arguments]))
    except ConfigError as error:  # the same on every rank
        return setting.fail(f"python -m allred bench: {error}")
    except verify.WrongResultError as error:
        return setting.fail(f"python -m allred bench: {error}", code=1)
    return 0


def run(options: argparse.Namespace, command: str) -> None:
    """Measure, and print on rank 0. Raises on all ranks if a result is wrong."""
    mpi_settings = setting.before_mpi(against=options.against == "mpi")
    allred.init(backend=options.backend, banner=False)
    MPI, _ = mpi.load()  # noqa: N806  (mpi4py's spelling)
    if MPI is None:
        raise ConfigError("a benchmark's barriers need an MPI, and none could be loaded; pip install 'allred[mpich]'")
    comm = MPI.COMM_WORLD.Dup()
    ranks = comm.Get_size()
    common = {"ranks": ranks, "dtype": arrays.name_of(options.dtype), "backend": functions.current().name}
    if options.compression is not Compression.none:
        common["compression"] = options.compression.name
    where = {
        "op": "Sum",
        **({"device": "cuda", **gpu.describe()} if options.device == "cuda" else {}),
        **setting.describe(comm, mpi_settings),
        "allred": allred.__version__,
        "command": f"mpirun -np {ranks} {command}" if ranks > 1 else command,
    }
    printer = table.Printer(options.json, speaks=comm.Get_rank() == 0)
    printer.begin(options.bench, common, where, options.against or common.get("compression"))
    theirs: ways.Ways | None = None
    if options.against:
        theirs = ways.Mpi(comm) if options.against == "mpi" else gpu.Raw(comm, options.dtype)
    for item in options.items:
        what, measured = _measured(item, options, comm, theirs)
        thread = {"progress_thread": functions.current().queue.engine.has_progress_thread}
        for numbers in measured:
            printer.line({"bench": options.bench, **what, **common, **numbers, **where, **thread})
    printer.end(functions.current().queue.engine.has_progress_thread)
    if theirs is not None:
        theirs.close()
    comm.Free()
    allred.shutdown()


def _measured(
    item: Any, options: argparse.Namespace, comm: Any, theirs: ways.Ways | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What was measured, and the numbers: one record for each way to compare with."""
    one, on_gpu = options.bench == "allreduce", options.device == "cuda"
    shapes = [(item // options.dtype.itemsize,)] if one else sets.SETS[item]()
    group = (gpu if on_gpu else ways).allocate(shapes, options.dtype)
    what = {"bytes": item} if one else {"set": item, "bytes": sum(a.nbytes for a in group), "tensors": len(group)}
    calls = ways.ours(group, one, options.compression)
    if theirs is not None:
        calls |= theirs.of_array(group[0]) if one else theirs.of_group(group)
    for name, call in calls.items():
        verify.check(f"{options.bench} {item} by {name}", call, group, comm)
    lines = max(1, len(calls) - 1)
    samples = measure.measure(calls, comm, options.seconds * lines, gpu.settle if on_gpu else measure.nothing)
    verify.check_zeros(f"{options.bench} {item}", group, comm)
    ours = samples.pop("allred")
    more = gpu.host_and_kernels(group, comm, options.seconds) if on_gpu and not one else {}
    others = samples.items() or [(None, None)]
    size = comm.Get_size()
    return what, [{**table.numbers(ours, name, other, what["bytes"], size), **more} for name, other in others]
