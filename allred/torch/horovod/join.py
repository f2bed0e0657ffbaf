"""barrier and join."""

from allred.comm import functions
from allred.torch.horovod.horovod_errors import as_horovod_error
from allred.torch.horovod.process_sets import ProcessSet, communicator_of, global_process_set, rank_set


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks have called this function.

    Example: `hvd.barrier()`.
    """
    with as_horovod_error():
        communicator_of(process_set).barrier().wait()


def join(device: int = -1) -> int:
    """Take part in the allreduces of the other ranks with zeros, until all ranks have called `join`. Returns the rank
    that joined last, the same on all ranks.

    Averages are divided by the number of all ranks, as in Horovod. Meanwhile allgather, broadcast, alltoall and
    reducescatter of the other ranks raise HorovodInternalError. Afterwards parameters and state of each
    DistributedOptimizer are those of the rank that joined last, unless a rank has joined before its first step, which a
    warning names; in Horovod the program has to broadcast them.

    device: ignored.

    Example: after a loop over batches whose number differs between ranks, `last = hvd.join()`.
    """
    communicator_of(global_process_set)  # raises before init()
    with as_horovod_error():
        return functions.join(rank_set(global_process_set))
