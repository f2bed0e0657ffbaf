"""The model of click_through.py in PyTorch.

ALLRED_MODE=ps mpirun -np 3 python examples/click_through_torch.py     # 1 parameter server and 2 workers
mpirun -np 2 python examples/click_through_torch.py                    # mode sync: the ranks hold the tables
"""

import torch
from click_through import BATCH, DIM, HIDDEN, STEPS, TABLES, WIDTH, auc, clicks

import allred
import allred.torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.features = torch.nn.ModuleList(
            allred.torch.Embedding(f"feature {number}", DIM, optimizer=allred.optim.Adagrad(0.1, row_wise=True))
            for number in range(TABLES)
        )
        self.layers = torch.nn.Sequential(torch.nn.Linear(WIDTH, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, 1))

    def forward(self, ids, numbers):
        vectors = [feature(column) for feature, column in zip(self.features, ids.T, strict=True)]
        return self.layers(torch.cat([*vectors, numbers], 1))[:, 0]


def main():
    allred.init()
    torch.manual_seed(0)
    model = Model()
    tables = [feature.table for feature in model.features]
    optimizer = allred.distributed(torch.optim.Adagrad(model.parameters(), lr=0.05), tables=tables)
    optimizer.allred.broadcast(model)
    ids, numbers, y = map(torch.from_numpy, clicks(seed=1 + allred.rank(), count=BATCH * STEPS))
    for start in range(0, len(y), BATCH):
        part = slice(start, start + BATCH)
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(model(ids[part], numbers[part]), y[part]).backward()
        optimizer.step()
    optimizer.allred.finish()
    allred.barrier()
    optimizer.allred.pull(model)
    model.eval()
    ids, numbers, y = clicks(seed=1000, count=4096)
    with torch.no_grad():
        score = auc(y, model(torch.from_numpy(ids), torch.from_numpy(numbers)).numpy())
    if allred.rank() == 0:
        print(f"AUC {score:.3f} after {STEPS} steps of {allred.size()} workers")


if __name__ == "__main__":
    main()
