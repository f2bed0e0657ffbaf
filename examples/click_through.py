"""A click-through model: 8 categorical features in embedding tables, 13 numbers, and one hidden layer.

ALLRED_MODE=ps mpirun -np 3 python examples/click_through.py     # 1 parameter server and 2 workers
mpirun -np 2 python examples/click_through.py                    # mode sync: the ranks hold the tables
"""

import numpy as np

import allred

TABLES, DIM, NUMBERS, HIDDEN, BATCH, STEPS = 8, 8, 13, 16, 256, 150
WIDTH = TABLES * DIM + NUMBERS


def clicks(seed, count):
    """Samples of a hidden model: ids of 8 features, most of them of frequent values; 13 numbers; clicked or not."""
    rng, model = np.random.default_rng(seed), np.random.default_rng(0)
    ids = np.minimum(rng.zipf(1.3, size=(count, TABLES)), 20_000)
    numbers = rng.normal(size=(count, NUMBERS)).astype(np.float32)
    score = (
        model.normal(size=(TABLES, 20_001))[np.arange(TABLES), ids].sum(1) + numbers @ model.normal(size=NUMBERS) / 4
    )
    return ids, numbers, (score + rng.logistic(size=count) > 0).astype(np.float32)


def forward(params, vectors, numbers):
    inputs = np.concatenate([*vectors, numbers], axis=1)
    hidden = np.maximum(inputs @ params["w1"] + params["b1"], 0)
    return inputs, hidden, hidden @ params["w2"] + params["b2"]


def gradients(params, vectors, numbers, y):
    """Gradients of the mean cross-entropy: of the parameters, and of the vectors."""
    inputs, hidden, logit = forward(params, vectors, numbers)
    error = (1 / (1 + np.exp(-logit)) - y) / len(y)
    of_hidden = np.outer(error, params["w2"]) * (hidden > 0)
    grads = {"w1": inputs.T @ of_hidden, "b1": of_hidden.sum(0), "w2": hidden.T @ error, "b2": error.sum()[None]}
    return grads, np.split((of_hidden @ params["w1"].T)[:, : TABLES * DIM], TABLES, axis=1)


def auc(y, logit):
    """The probability that a sample with a click has a higher score than one without."""
    rank = np.argsort(np.argsort(logit)) + 1
    positive = y.sum()
    return (rank[y == 1].sum() - positive * (positive + 1) / 2) / (positive * (len(y) - positive))


def main():
    allred.init()
    tables = [
        allred.Embedding(f"feature {number}", DIM, optimizer=allred.optim.Adagrad(0.1, row_wise=True))
        for number in range(TABLES)
    ]
    opt = allred.distributed(allred.optim.Adagrad(0.05), tables=tables)  # a parameter server serves here
    rng = np.random.default_rng(0)
    params = {
        "w1": rng.normal(0, WIDTH**-0.5, (WIDTH, HIDDEN)).astype(np.float32), "b1": np.zeros(HIDDEN, np.float32),
        "w2": rng.normal(0, HIDDEN**-0.5, HIDDEN).astype(np.float32), "b2": np.zeros(1, np.float32),
    }  # fmt: skip
    opt.broadcast(params)
    ids, numbers, y = clicks(seed=1 + allred.rank(), count=BATCH * STEPS)
    for start in range(0, len(y), BATCH):
        part = slice(start, start + BATCH)
        vectors = [table.lookup(column) for table, column in zip(tables, ids[part].T, strict=True)]
        grads, of_vectors = gradients(params, vectors, numbers[part], y[part])
        for table, gradient in zip(tables, of_vectors, strict=True):
            table.gradient(gradient)
        opt.step(params, grads)
    opt.finish()
    allred.barrier()
    opt.pull(params)
    ids, numbers, y = clicks(seed=1000, count=4096)
    vectors = [table.lookup(column, train=False) for table, column in zip(tables, ids.T, strict=True)]
    score = auc(y, forward(params, vectors, numbers)[-1])
    rows = sum(table.size() for table in tables)
    if allred.rank() == 0:
        print(f"AUC {score:.3f} with {rows} rows in {TABLES} tables, after {STEPS} steps of {allred.size()} workers")


if __name__ == "__main__":
    main()
