"""Handwritten digits with DistributedDataParallel: a program as for gloo, with the backend "allred".

    mpirun -np 2 python examples/torch_ddp.py                  two ranks
    torchrun --nproc-per-node 2 examples/torch_ddp.py          the same, with MPICH
    python examples/torch_ddp.py                               one rank

The last line is:

    test accuracy: 0.9...
"""

import torch  # pip install torch; the CPU build: docs/install.md
import torch.distributed as dist

try:
    from sklearn.datasets import load_digits
except ImportError:
    raise SystemExit("this example needs scikit-learn: pip install scikit-learn") from None
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH = 20, 50  # BATCH: of each rank


def main():
    dist.init_process_group("allred")  # the only line that differs from a program for gloo
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    order = torch.randperm(len(x))
    train, test = order[:1437], order[1437:]

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

    data = TensorDataset(x[train], y[train])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()

    if dist.get_rank() == 0:
        with torch.no_grad():
            accuracy = (model.module(x[test]).argmax(dim=1) == y[test]).float().mean()
        print(f"test accuracy: {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
