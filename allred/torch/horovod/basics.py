"""init and shutdown, the numbers of the ranks, and what the installation can do."""

import collections
import os
from collections.abc import Callable, Sequence
from typing import Any

from allred import startup, world
from allred.cluster import mpi, topology
from allred.errors import InputError
from allred.torch.horovod import handles, process_sets, rank_timeline, variables
from allred.torch.horovod.horovod_errors import HorovodNotInitializedError


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the other ranks, as `allred.init`; settings are the variables ALLRED_... and HOROVOD_... Repeated calls are
    allowed.

    comm: an mpi4py communicator, or a list of ranks of MPI.COMM_WORLD, which call init together; default: all.
    process_sets: a list of hvd.ProcessSet, the same on all ranks; "dynamic" and None: none. `hvd.add_process_set`
    needs no argument.

    Raises ValueError if an argument cannot be used, and the errors of `allred.init`.

    Example: `hvd.init()`.
    """
    if not world.is_initialized():
        variables.apply(os.environ)
        startup.init(_communicator(comm))
        if (path := os.environ.get("HOROVOD_TIMELINE", "")) and path != "DYNAMIC":
            rank_timeline.start_timeline(path)
    handles.forget_all()
    _register(process_sets)


def _register(given: Any) -> None:
    sets = [] if given is None or str(given).lower() == "dynamic" else list(given)
    if not all(isinstance(each, process_sets.ProcessSet) for each in sets):
        raise InputError(f"init(process_sets={given!r}): expected a list of hvd.ProcessSet")
    process_sets.register(sets)


def _communicator(comm: Any) -> Any:
    """Return the mpi4py communicator for `allred.init`."""
    if comm is None or hasattr(comm, "Get_group"):
        return comm
    ranks = list(comm)
    if not ranks:
        return None
    MPI, _ = mpi.load()  # noqa: N806  (mpi4py's spelling)
    everyone = None if MPI is None else MPI.COMM_WORLD
    number, size = (0, 1) if everyone is None else (everyone.Get_rank(), everyone.Get_size())
    if number not in ranks or not set(ranks) <= set(range(size)):
        raise InputError(f"init(comm={ranks}) on rank {number} of {size}: call it on these ranks only")
    return None if everyone is None else everyone.Create_group(everyone.Get_group().Incl(ranks))


def shutdown() -> None:
    """Leave the other ranks, as `allred.shutdown`. Does nothing before `hvd.init()`.

    Example: `hvd.shutdown()`.
    """
    if world.is_initialized():
        rank_timeline.stop_timeline()
        startup.shutdown()
    handles.forget_all()


def is_initialized() -> bool:
    """Return whether this process is a rank: after `init` and before `shutdown`.

    Example: `hvd.is_initialized()`.
    """
    return world.is_initialized()


def _number(number: Callable[[], int]) -> int:
    if not world.is_initialized():
        raise HorovodNotInitializedError("the ranks have no numbers yet: call hvd.init() before")
    return number()


def rank() -> int:
    """Return this rank's number, 0 to size() - 1. Raises ValueError before `hvd.init()`.

    Example: `if hvd.rank() == 0: print(loss)`.
    """
    return _number(topology.rank)


def size() -> int:
    """Return the number of ranks. Raises ValueError before `hvd.init()`.

    Example: `lr = 0.01 * hvd.size()`.
    """
    return _number(topology.size)


def local_rank() -> int:
    """Return this rank's number on its node. Raises ValueError before `hvd.init()`.

    Example: `torch.cuda.set_device(hvd.local_rank())`.
    """
    return _number(topology.local_rank)


def local_size() -> int:
    """Return the number of ranks on this node. Raises ValueError before `hvd.init()`.

    Example: `hvd.local_size()`.
    """
    return _number(topology.local_size)


def cross_rank() -> int:
    """Return this rank's number among the ranks of all nodes that have its local rank. Raises ValueError before
    `hvd.init()`.

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
    sets = world.current().process_sets
    nodes: Sequence[int] = [] if sets is None else sets.nodes
    return len(set(collections.Counter(nodes).values())) <= 1


def mpi_threads_supported() -> bool:
    """Return whether MPI may be called from several threads. Raises ValueError before `hvd.init()`.

    Example: `hvd.mpi_threads_supported()`.
    """
    _number(topology.rank)
    MPI, _ = mpi.load()  # noqa: N806
    return MPI is not None and MPI.Query_thread() == MPI.THREAD_MULTIPLE


def mpi_enabled() -> bool:
    """Return True: allred uses MPI.

    Example: `hvd.mpi_enabled()`.
    """
    return True


def mpi_built() -> bool:
    """Return True: allred uses MPI.

    Example: `hvd.mpi_built()`.
    """
    return True


def gloo_enabled() -> bool:
    """Return False: allred does not use gloo.

    Example: `hvd.gloo_enabled()`.
    """
    return False


def gloo_built() -> bool:
    """Return False: allred does not use gloo.

    Example: `hvd.gloo_built()`.
    """
    return False


def nccl_built() -> int:
    """Return NCCL's version as a number, such as 22703, if cupy can load NCCL; else 0.

    Example: `hvd.nccl_built()`.
    """
    try:
        from cupy.cuda import nccl

        return int(nccl.get_version())
    except (ImportError, AttributeError):
        return 0


def ddl_built() -> bool:
    """Return False: allred does not use IBM's DDL.

    Example: `hvd.ddl_built()`.
    """
    return False


def ccl_built() -> bool:
    """Return False: allred does not use oneCCL.

    Example: `hvd.ccl_built()`.
    """
    return False


def cuda_built() -> bool:
    """Return whether tensors on GPUs can be reduced without copies to the host: whether cupy can load NCCL.

    Example: `hvd.cuda_built()`.
    """
    return nccl_built() > 0


def rocm_built() -> bool:
    """Return False: allred does not use ROCm.

    Example: `hvd.rocm_built()`.
    """
    return False
