"""The functions of horovod.common.util that programs use, from allred."""

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

from allred import torch as hvd

__all__ = [
    "ccl_built", "ddl_built", "env", "extension_available", "gloo_built", "gpu_available", "is_iterable", "mpi_built",
    "nccl_built", "num_rank_is_power_2", "split_list",
]  # fmt: skip


def mpi_built(verbose: bool = False) -> bool:
    """Return whether there is MPI."""
    return bool(hvd.mpi_built())


def gloo_built(verbose: bool = False) -> bool:
    """Return whether there is Gloo."""
    return bool(hvd.gloo_built())


def nccl_built(verbose: bool = False) -> bool:
    """Return whether NCCL can be used."""
    return bool(hvd.nccl_built())


def ddl_built(verbose: bool = False) -> bool:
    """Return whether there is DDL."""
    return bool(hvd.ddl_built())


def ccl_built(verbose: bool = False) -> bool:
    """Return whether there is oneCCL."""
    return bool(hvd.ccl_built())


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether there is the part of Horovod for a framework: "torch"."""
    return ext_base_name == "torch"


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether the framework has a GPU."""
    import torch

    return extension_available(ext_base_name) and bool(torch.cuda.is_available())


@contextlib.contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables inside a block, except those that are None."""
    before = {name: os.environ.get(name) for name, value in kwargs.items() if value is not None}
    os.environ.update({name: value for name, value in kwargs.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number of ranks is a power of two."""
    return num_rank.bit_count() == 1


def split_list(l: Sequence[Any], n: int) -> list[Sequence[Any]]:  # noqa: E741  (Horovod's name)
    """Return a sequence as n parts, whose lengths differ by at most one; the first ones are the longer ones."""
    ends = [part * (len(l) // n) + min(part, len(l) % n) for part in range(n + 1)]
    return [l[begin:end] for begin, end in itertools.pairwise(ends)]


def is_iterable(x: Any) -> bool:
    """Return whether an object can be iterated."""
    return hasattr(x, "__iter__")
