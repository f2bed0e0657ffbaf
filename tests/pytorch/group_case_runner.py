"""Runs the cases of a program under mpirun: functions of (rank, size), each on all ranks. Not a test."""

import os
import sys
import time
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist


def run(cases: list[Callable[[int, int], None]], names: list[str]) -> None:
    """Run the cases with these names, or all, in a group "allred", and print the name of each that has passed."""
    torch.set_num_threads(1)
    dist.init_process_group("allred")
    for case in cases:
        if names and case.__name__ not in names:
            continue
        try:
            case(dist.get_rank(), dist.get_world_size())
        except BaseException:
            print(
                f"FAILED {case.__name__} on rank {dist.get_rank()}\n{traceback.format_exc()}",
                file=sys.stderr,
                flush=True,
            )
            time.sleep(1)  # for the others to print theirs
            os._exit(1)
        dist.barrier()
        if dist.get_rank() == 0:
            print("passed", case.__name__, flush=True)
    dist.destroy_process_group()


def assert_same(found: object, expected: object, size: int) -> None:
    """Check that tensors, or lists of them, are equal: bit for bit with 2 ranks, within 1e-6 with more."""
    if isinstance(found, (list, tuple)):
        assert len(found) == len(expected), (found, expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other, size)
    elif isinstance(found, torch.Tensor):
        tolerance = 0 if size <= 2 else 1e-6
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    else:
        assert found == expected, (found, expected)
