"""ElasticSampler: distributes the samples of an epoch that are left over the ranks."""

import random
from collections.abc import Iterator, Sized
from typing import Any

import torch.utils.data

from allred.torch.horovod.basics import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Sampler of a DataLoader. After a restart it skips the samples that were recorded in this epoch; the number of
    ranks may change. Order and distribution are those of Horovod for the same seed.

    Order of an epoch: the processed samples; then the remaining ones, dealt to ranks 0, 1, 2, 0, 1, 2, ...; then the
    first remaining ones again, until all ranks have the same number.

    dataset: an object with a length. shuffle: whether each epoch has another order, from `seed` plus the epoch; the
    seed must be equal on all ranks.

    Give the object to TorchState, call `record_batch` after each batch, and `set_epoch` at the end of each epoch.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: no sample of it is processed. Call it at the end of the epoch before, not at the beginning:
        that would discard the progress of a restored epoch."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that each rank has processed a batch. batch_size: of one rank. batch_idx is not used."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of processed samples."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Distribute the samples that are left over the ranks. A running iteration is not changed."""
        self.num_replicas, self.rank = size(), rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        self.indices = [left[place % len(left)] for place in range(self.rank, self.total_size, self.num_replicas)]
        return iter(self.indices)

    def __len__(self) -> int:
        """Return the number of samples of this rank that are left."""
        return self.num_samples
