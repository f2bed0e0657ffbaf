"""Handwritten digits with PyTorch and a hooked optimizer: a standard training loop.

    python examples/torch_digits.py                     one rank
    mpirun -np 2 python examples/torch_digits.py        two ranks: the gradients are averaged in loss.backward()

Each rank reads its share of each global batch. The last line is:

    test accuracy: 0.9...
"""

import torch  # pip install torch; the CPU build: docs/install.md

try:
    from sklearn.datasets import load_digits
except ImportError:
    raise SystemExit("this example needs scikit-learn: pip install scikit-learn") from None
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import allred

EPOCHS, BATCH = 20, 100


def main():
    allred.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    order = torch.randperm(len(x))
    train, test = order[:1437], order[1437:]

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.named_parameters(), lr=0.003)
    optimizer = allred.distributed(optimizer)  # the same object
    optimizer.allred.broadcast(model)

    data = TensorDataset(x[train], y[train])
    sampler = allred.data.DistributedBatchSampler(data, batch_size=BATCH)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in DataLoader(data, batch_sampler=sampler):
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()

    if allred.rank() == 0:
        print(optimizer.allred.summary())
        with torch.no_grad():
            accuracy = (model(x[test]).argmax(dim=1) == y[test]).float().mean()
        print(f"test accuracy: {accuracy:.3f}")


if __name__ == "__main__":
    main()
