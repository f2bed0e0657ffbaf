"""Horovod's class of its basic functions, from allred.torch."""

from allred import torch as hvd


class HorovodBasics:
    """The basic functions as methods. The arguments name a library of Horovod and are not used."""

    def __init__(self, pkg_path: str = "", *args: str) -> None: ...

    init = staticmethod(hvd.init)
    shutdown = staticmethod(hvd.shutdown)
    is_initialized = staticmethod(hvd.is_initialized)
    rank = staticmethod(hvd.rank)
    size = staticmethod(hvd.size)
    local_rank = staticmethod(hvd.local_rank)
    local_size = staticmethod(hvd.local_size)
    cross_rank = staticmethod(hvd.cross_rank)
    cross_size = staticmethod(hvd.cross_size)
    is_homogeneous = staticmethod(hvd.is_homogeneous)
    start_timeline = staticmethod(hvd.start_timeline)
    stop_timeline = staticmethod(hvd.stop_timeline)
    mpi_threads_supported = staticmethod(hvd.mpi_threads_supported)
    mpi_enabled = staticmethod(hvd.mpi_enabled)
    mpi_built = staticmethod(hvd.mpi_built)
    gloo_enabled = staticmethod(hvd.gloo_enabled)
    gloo_built = staticmethod(hvd.gloo_built)
    nccl_built = staticmethod(hvd.nccl_built)
    ddl_built = staticmethod(hvd.ddl_built)
    ccl_built = staticmethod(hvd.ccl_built)
    cuda_built = staticmethod(hvd.cuda_built)
    rocm_built = staticmethod(hvd.rocm_built)
