"""Handwritten digits with PyTorch and parameter servers, or in mode sync: the script is the same.

    ALLRED_MODE=ps mpirun -np 3 python examples/torch_ps.py        one server, two workers, async
    mpirun -np 2 python examples/torch_ps.py                       mode sync: two ranks

ALLRED_CONSISTENCY is async, bounded or sync. The servers run the torch optimizer. The last line is:

    test accuracy: 0.9...
"""

import torch  # pip install torch; the CPU build: docs/install.md

try:
    from sklearn.datasets import load_digits
except ImportError:
    raise SystemExit("this example needs scikit-learn: pip install scikit-learn") from None
from torch import nn
from torch.nn.functional import cross_entropy

import allred

EPOCHS, BATCH = 20, 100


def main():
    allred.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    # A parameter server does not return from the next line: it serves until the workers have finished, then exits.
    optimizer = allred.distributed(torch.optim.SGD(model.named_parameters(), lr=0.05, momentum=0.5))

    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    order = torch.randperm(len(x))
    train, test = order[:1437], order[1437:]
    optimizer.allred.broadcast(model)
    for rows in allred.data.batches(train.numpy(), batch_size=BATCH, epochs=EPOCHS):
        optimizer.zero_grad()
        cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()

    optimizer.allred.finish()  # no more steps of this worker
    allred.barrier()  # wait for the last steps of the other workers
    optimizer.allred.pull()  # mode ps: the final parameters
    if allred.rank() == 0:
        with torch.no_grad():
            accuracy = (model(x[test]).argmax(dim=1) == y[test]).float().mean()
        print(f"test accuracy: {accuracy:.3f}")


if __name__ == "__main__":
    main()
