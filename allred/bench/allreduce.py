"""`bench allreduce` and `bench fused`: allred's allreduce, and optionally raw MPI or raw NCCL on the same arrays.

For each size or set: allocate, verify every implementation, time them interleaved (measure.py), verify, print.
"""

import argparse
from typing import Any

import allred
from allred import arrays
from allred.bench import baselines, gpu, measure, output, sets, verify
from allred.comm import functions
from allred.compression import Compression


def run(options: argparse.Namespace, comm: Any, conditions: dict[str, Any]) -> None:
    """Measure all sizes or sets; rank 0 prints. Raises WrongResultError on all ranks. Calls allred.shutdown()."""
    labels = {"ranks": comm.Get_size(), "dtype": arrays.name_of(options.dtype), "backend": functions.current().name}
    if options.compression is not Compression.none:
        labels["compression"] = options.compression.name
    on_gpu = {"device": "cuda", **gpu.describe()} if options.device == "cuda" else {}
    conditions = {"op": "Sum", **on_gpu, **conditions}
    writer = output.ResultWriter(options.json, enabled=comm.Get_rank() == 0)
    writer.header(options.bench, labels, conditions, options.against or labels.get("compression"))
    baseline: baselines.Baseline | None = None
    if options.against:
        baseline = baselines.MpiBaseline(comm) if options.against == "mpi" else gpu.NcclBaseline(comm, options.dtype)
    for item in options.items:
        what, results = _measure(item, options, comm, baseline)
        for result in results:
            thread = {"progress_thread": functions.current().queue.engine.has_progress_thread}
            writer.line({"bench": options.bench, **what, **labels, **result, **conditions, **thread})
    writer.footer(functions.current().queue.engine.has_progress_thread)
    if baseline is not None:
        baseline.close()
    comm.Free()
    allred.shutdown()


def _measure(
    item: Any, options: argparse.Namespace, comm: Any, baseline: baselines.Baseline | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Size or set of `item`, and one record per compared implementation."""
    single, on_gpu = options.bench == "allreduce", options.device == "cuda"
    shapes = [(item // options.dtype.itemsize,)] if single else sets.SETS[item]()
    group = (gpu if on_gpu else baselines).allocate(shapes, options.dtype)
    nbytes, title = sum(array.nbytes for array in group), f"{options.bench} {item}"
    what = {"bytes": nbytes} if single else {"set": item, "bytes": nbytes, "tensors": len(group)}
    calls = baselines.allred_calls(group, single, options.compression)
    if baseline is not None:
        calls |= baseline.array_calls(group[0]) if single else baseline.group_calls(group)
    for name, call in calls.items():
        verify.check(f"{title} by {name}", call, group, comm)
    synchronize = gpu.synchronize if on_gpu else measure.no_synchronize
    times = measure.interleave(calls, comm, options.seconds * max(1, len(calls) - 1), synchronize)
    verify.check_zeros(title, group, comm)
    ours = times.pop("allred")
    details = gpu.enqueue_and_pack(group, comm, options.seconds) if on_gpu and not single else {}
    others = times.items() or [(None, None)]
    size = comm.Get_size()
    return what, [{**output.result(ours, name, other, nbytes, size), **details} for name, other in others]
