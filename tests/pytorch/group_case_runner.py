"""Runs the cases of a program under mpirun: functions of (rank, size), each on all ranks. Not a test."""

import os
import sys
import tempfile
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
        run_case(case)
        report(case)
    dist.destroy_process_group()


def run_with_gloo(cases: list[Callable[[int, int], object]], names: list[str]) -> None:
    """Run each case in a group "allred", then in a group "gloo"; compare the tensors that it returns."""
    torch.set_num_threads(1)
    chosen = [case for case in cases if not names or case.__name__ in names]
    dist.init_process_group("allred")
    rank, size = dist.get_rank(), dist.get_world_size()
    found = [run_case(case) for case in chosen]
    store = f"file://{shared_directory()}/store"
    dist.destroy_process_group()
    dist.init_process_group("gloo", store, rank=rank, world_size=size)
    for case, result in zip(chosen, found, strict=True):
        expected = run_case(case)
        run_case(lambda rank, size, *both: assert_same(*both, size), result, expected, name=case.__name__)
        report(case)
    dist.destroy_process_group()


def run_case(case, *arguments, name=None):
    """Return the result of the case; end the job if it fails."""
    try:
        return case(dist.get_rank(), dist.get_world_size(), *arguments)
    except BaseException:
        print(
            f"FAILED {name or case.__name__} on rank {dist.get_rank()}, {dist.get_backend()}\n{traceback.format_exc()}",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(1)  # for the others to print theirs
        os._exit(1)


def report(case):
    dist.barrier()
    if dist.get_rank() == 0:
        print("passed", case.__name__, flush=True)


DIRECTORIES = []


def shared_directory() -> str:
    """A new folder, the same on all ranks; it is deleted at the end of rank 0."""
    if dist.get_rank() == 0:
        DIRECTORIES.append(tempfile.TemporaryDirectory(prefix="allred-torch-"))
    name = [DIRECTORIES[-1].name if DIRECTORIES else None]
    dist.broadcast_object_list(name)
    return name[0]


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
