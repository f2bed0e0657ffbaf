"""The functions of horovod.common.util, and the exception of horovod.common.exceptions, that programs use."""

import importlib.util
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from allred.horovod import basics as hvd


class HorovodVersionMismatchError(ImportError):
    """Horovod was built for another version of a framework. allred never raises it."""


def _with_verbose(built: Callable[[], object]) -> Callable[..., bool]:
    """Return the function of hvd with the argument `verbose`, which has no effect."""

    def function(verbose: bool = False) -> bool:
        return bool(built())

    function.__name__ = function.__qualname__ = built.__name__
    function.__doc__ = f"Return whether hvd.{built.__name__}() is true. verbose has no effect."
    return function


mpi_built, gloo_built, nccl_built, ddl_built, ccl_built = map(
    _with_verbose, (hvd.mpi_built, hvd.gloo_built, hvd.nccl_built, hvd.ddl_built, hvd.ccl_built)
)


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raise ImportError if there is no part of Horovod for a framework, such as "horovod.torch"."""
    if not extension_available(ext_name.rpartition(".")[2]):
        raise ImportError(f"{ext_name} is not available: allred has horovod.torch and horovod.tensorflow")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether there is the part of Horovod for a framework that is installed: "torch", "tensorflow"."""
    return ext_base_name in ("torch", "tensorflow") and importlib.util.find_spec(ext_base_name) is not None


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether the framework has a GPU on which allred works: CUDA with PyTorch."""
    if ext_base_name != "torch" or not extension_available("torch"):
        return False
    import torch

    return bool(torch.cuda.is_available())


def split_list(l: Sequence[Any], n: int) -> list[Sequence[Any]]:  # noqa: E741  (Horovod's name)
    """Return a sequence as n parts, whose lengths differ by at most one; the first ones are the longer ones."""
    ends = [part * (len(l) // n) + min(part, len(l) % n) for part in range(n + 1)]
    return [l[begin:end] for begin, end in itertools.pairwise(ends)]
