"""benchmarks/bench.py groups: all_reduce in process groups of two ranks, as tensor-parallel programs call it.

Ranks 0 and 1, 2 and 3, and so on are groups, and call it at the same time: `gloo` and `allred`. With two ranks, other
lines compare with `world`, the default group of allred, of the same ranks: apart, because a call takes longer after one
of gloo. Lines: bytes of a float32 tensor.
"""

import argparse
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from allred.bench import measure
from allred.bench import torch as bench

SIZES = [1 << power for power in range(14, 21, 2)]


def run(options: argparse.Namespace, comm: Any, conditions: dict[str, Any]) -> None:
    """Measure; rank 0 prints. Calls allred.shutdown()."""
    bench.run(options, comm, conditions, _measure)


def _measure(options: argparse.Namespace, comm: Any, gloo: Any) -> Iterator[dict[str, Any]]:
    rank, size = comm.Get_rank(), comm.Get_size()
    if size % 2:
        raise ValueError(f"groups are pairs of ranks: expected an even number of ranks, got {size}")
    pairs = [[first, first + 1] for first in range(0, size, 2)]
    groups = {name: [dist.new_group(pair, backend=name) for pair in pairs][rank // 2] for name in ("gloo", "allred")}
    if size == 2:
        groups["world"] = dist.group.WORLD
    for nbytes in SIZES:
        tensor = torch.full((nbytes // 4,), float(rank))
        for group in groups.values():
            dist.all_reduce(tensor.fill_(float(rank)), group=group)
            assert torch.equal(tensor, torch.full_like(tensor, float(sum(pairs[rank // 2])))), group
        tensor.zero_()
        calls = {name: functools.partial(dist.all_reduce, tensor, group=group) for name, group in groups.items()}
        for baseline in [name for name in groups if name != "allred"]:
            both = {name: calls[name] for name in (baseline, "allred")}
            times = measure.interleave(both, comm, options.seconds)
            yield {"set": f"{nbytes >> 10} KiB", **bench.compare(times, baseline)}
