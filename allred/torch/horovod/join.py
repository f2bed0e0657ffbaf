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
    reducescatter of the other ranks raise HorovodInternalError. Afterwards each DistributedOptimizer has the
    parameters and the state of the rank that joined last; in Horovod the program has to broadcast them. If a rank joins
    before its first step, nothing is copied, and a warning names the rank.

    device: ignored.

    Example: after a loop over batches whose number differs between ranks, `last = hvd.join()`.
    """
    communicator_of(global_process_set)  # raises before init()
    with as_horovod_error():
        return functions.join(rank_set(global_process_set))
