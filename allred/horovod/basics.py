"""init and shutdown, the numbers of the ranks, and what the installation can do."""

import collections
import os
from collections.abc import Callable
from typing import Any

from allred import log, startup, world
from allred.cluster import mpi, topology
from allred.comm.process_set import PROCESS_SETS
from allred.errors import InputError
from allred.horovod import rank_timeline, variables
from allred.horovod.process_sets import ProcessSet, check_initialized, register


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Initialize, as `allred.init`. Settings come from the environment variables ALLRED_* and HOROVOD_*. Repeated calls
    are allowed.

    comm: an mpi4py communicator, or a list of ranks of MPI.COMM_WORLD, which call init together; default: all.
    process_sets: a list of hvd.ProcessSet, the same on all ranks; "dynamic" and None: none. `hvd.add_process_set`
    needs no argument.

    Raises ValueError if an argument cannot be used, and in mode ps; and the errors of `allred.init`.

    Example: `hvd.init()`.
    """
    sets = _checked_sets(process_sets)
    if not world.is_initialized():
        variables.apply(os.environ)
        startup.init(None if comm == [] else comm)
        _start_timeline()
    check_mode_sync()
    register(sets)


def check_mode_sync() -> None:
    """Raise InputError in mode ps."""
    if world.config().mode == "ps":
        raise InputError(
            "ALLRED_MODE=ps: programs with Horovod's interface train in mode sync; for parameter servers use "
            "allred.init() and allred.distributed(optimizer)"
        )


def _start_timeline() -> None:
    """Start the timeline of HOROVOD_TIMELINE. If that is not possible, the program runs without it."""
    path = os.environ.get("HOROVOD_TIMELINE", "")
    if path and path != "DYNAMIC":
        try:
            rank_timeline.start_timeline(path)
        except InputError as error:
            log.rank_warning(f"HOROVOD_TIMELINE={path}: {error}")


def _checked_sets(given: Any) -> list[ProcessSet]:
    """Return the process sets of the argument of `init`."""
    sets = [] if given is None or given == "dynamic" else given
    if isinstance(sets, str) or not all(isinstance(each, ProcessSet) for each in sets):
        raise InputError(f"init(process_sets={given!r}): expected a list of hvd.ProcessSet")
    return list(sets)


def shutdown() -> None:
    """Shut down, as `allred.shutdown`. Does nothing before `hvd.init()`.

    Example: `hvd.shutdown()`.
    """
    if world.is_initialized():
        rank_timeline.stop_timeline()
        startup.shutdown()


def is_initialized() -> bool:
    """Return whether this process is a rank: after `init` and before `shutdown`.

    Example: `hvd.is_initialized()`.
    """
    return world.is_initialized()


def _number(number: Callable[[], int]) -> int:
    check_initialized("hvd.rank(), hvd.size() and others")
    return number()


def rank() -> int:
    """Return the rank of this process, 0 to size() - 1. Raises ValueError before `hvd.init()`.

    Example: `if hvd.rank() == 0: print(loss)`.
    """
    return _number(topology.rank)


def size() -> int:
    """Return the number of ranks. Raises ValueError before `hvd.init()`.

    Example: `lr = 0.01 * hvd.size()`.
    """
    return _number(topology.size)


def local_rank() -> int:
    """Return the rank of this process on its node, 0 to local_size() - 1. Raises ValueError before `hvd.init()`.

    Example: `torch.cuda.set_device(hvd.local_rank())`.
    """
    return _number(topology.local_rank)


def local_size() -> int:
    """Return the number of ranks on this node. Raises ValueError before `hvd.init()`.

    Example: `hvd.local_size()`.
    """
    return _number(topology.local_size)


def cross_rank() -> int:
    """Return the rank of this process among those of all nodes that have its local rank, 0 to cross_size() - 1. Raises
    ValueError before `hvd.init()`.

    Example: `hvd.cross_rank()`.
    """
    return _number(topology.cross_rank)


def cross_size() -> int:
    """Return the number of nodes that have a rank with this local rank. Raises ValueError before `hvd.init()`.

    Example: `hvd.cross_size()`.
    """
    return _number(topology.cross_size)


def is_homogeneous() -> bool:
    """Return whether all nodes have the same number of ranks.

    Example: `hvd.is_homogeneous()`.
    """
    _number(topology.rank)
    sets = PROCESS_SETS.of(world.current())
    nodes = [] if sets is None else [each.node for each in sets.facts]
    return len(set(collections.Counter(nodes).values())) <= 1


def mpi_threads_supported() -> bool:
    """Return whether MPI may be called from several threads. Raises ValueError before `hvd.init()`.

    Example: `hvd.mpi_threads_supported()`.
    """
    _number(topology.rank)
    MPI, _ = mpi.load()  # noqa: N806
    return MPI is not None and MPI.Query_thread() == MPI.THREAD_MULTIPLE


def _constant(name: str, value: bool, reason: str) -> Callable[[], bool]:
    """Return the function `name`, which returns `value`."""

    def function() -> bool:
        return value

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Return {value}: allred {reason}.\n\n    Example: `hvd.{name}()`.\n    "
    return function


mpi_enabled = _constant("mpi_enabled", True, "uses MPI")
mpi_built = _constant("mpi_built", True, "uses MPI")
gloo_enabled = _constant("gloo_enabled", False, "does not use gloo")
gloo_built = _constant("gloo_built", False, "does not use gloo")
ddl_built = _constant("ddl_built", False, "does not use IBM's DDL")
ccl_built = _constant("ccl_built", False, "does not use oneCCL")
rocm_built = _constant("rocm_built", False, "does not use ROCm")


def nccl_built() -> int:
    """Return NCCL's version as a number, such as 22703, if cupy can load NCCL; else 0.

    Example: `hvd.nccl_built()`.
    """
    try:
        from cupy.cuda import nccl

        return int(nccl.get_version())
    except (ImportError, AttributeError):
        return 0


def cuda_built() -> bool:
    """Return whether tensors on GPUs can be reduced without copies to the host: whether cupy can load NCCL.

    Example: `hvd.cuda_built()`.
    """
    return nccl_built() > 0
