"""A program for Horovod: it names no part of allred. Trains a linear model; all ranks together use every sample once.

Prints, for each rank: the arguments, and whether the parameters are those of training with one process.
"""

import argparse

import horovod
import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError, HorovodVersionMismatchError, HostsUpdatedInterrupt
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.util import check_extension, gpu_available, nccl_built, split_list
from horovod.torch.compression import Compression, Compressor, FP16Compressor, NoneCompressor
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import TorchState
from horovod.torch.functions import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from horovod.torch.mpi_ops import Average, Sum, allgather_async, allreduce_async_, poll, rank, size, synchronize
from horovod.torch.optimizer import DistributedOptimizer
from horovod.torch.sync_batch_norm import SyncBatchNorm
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SAMPLES, FEATURES, BATCH, EPOCHS = 32, 4, 8, 3


def data():
    torch.manual_seed(1)
    x = torch.randn(SAMPLES, FEATURES)
    return x, x @ torch.arange(1.0, 1 + FEATURES).reshape(FEATURES, 1)


def make():
    torch.manual_seed(2)
    model = torch.nn.Linear(FEATURES, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def alone():
    """The parameters after training with one process, whose batches are those of all ranks."""
    model, optimizer = make()
    for _ in range(EPOCHS):
        for x, y in zip(*(each.split(BATCH) for each in data()), strict=True):
            step(model, optimizer, x, y)
    return torch.nn.utils.parameters_to_vector(model.parameters())


def train(method=None):
    """Train with all ranks. Return whether the parameters are those of one process. method: of the loader's worker."""
    hvd.init()
    torch.set_num_threads(1)
    dataset = TensorDataset(*data())
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
    workers = {"num_workers": 1, "multiprocessing_context": method, "persistent_workers": True} if method else {}
    loader = DataLoader(dataset, batch_size=BATCH // hvd.size(), sampler=sampler, **workers)
    model, optimizer = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += hvd.rank()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.none, op=hvd.Average
    )
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            step(model, optimizer, x, y)
    found = torch.nn.utils.parameters_to_vector(model.parameters())
    return bool(torch.allclose(found, alone(), atol=1e-5))


def check_names():
    """Compare the names of the modules with those of hvd, and use some."""
    assert (horovod.__version__, callable(horovod.run)) == ("0.28.1", True)
    assert (Compression, SyncBatchNorm, ProcessSet) == (hvd.Compression, hvd.SyncBatchNorm, hvd.ProcessSet)
    assert (hvd.Compression.fp16, hvd.Compression.none) == (FP16Compressor, NoneCompressor)
    assert issubclass(FP16Compressor, Compressor)
    assert hvd.mpi_ops.allreduce_ is hvd.allreduce_
    assert (DistributedOptimizer, global_process_set) == (hvd.DistributedOptimizer, hvd.global_process_set)
    assert (ElasticSampler, TorchState) == (hvd.elastic.ElasticSampler, hvd.elastic.TorchState)
    assert broadcast_parameters is hvd.broadcast_parameters
    assert broadcast_optimizer_state is hvd.broadcast_optimizer_state
    assert issubclass(HorovodInternalError, RuntimeError)
    assert issubclass(HostsUpdatedInterrupt, RuntimeError)
    assert issubclass(HorovodVersionMismatchError, ImportError)
    check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    assert (nccl_built(), gpu_available("torch")) == (bool(hvd.nccl_built()), torch.cuda.is_available())
    assert split_list([1, 2, 3], 2) == [[1, 2], [3]]
    tensor = torch.full((2,), float(rank()))
    handle = allreduce_async_(tensor, op=Sum)
    assert isinstance(poll(handle), bool)
    assert synchronize(handle).tolist() == [sum(range(size()))] * 2
    assert synchronize(allgather_async(torch.tensor([rank()]))).tolist() == list(range(size()))
    assert hvd.allreduce(torch.tensor(float(rank())), op=Average).item() == (size() - 1) / 2
    assert allgather_object(rank()) == list(range(size()))
    assert broadcast_object(rank(), root_rank=0) == 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--method")
    parser.add_argument("--exit-code", type=int, default=0)
    args = parser.parse_args()
    trained = train(args.method)
    check_names()
    print(f"rank {hvd.rank()} of {hvd.size()}: {args.method}, {trained}", flush=True)
    hvd.shutdown()
    raise SystemExit(args.exit_code)
