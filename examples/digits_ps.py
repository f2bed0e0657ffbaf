"""Handwritten digits, in every mode of allred: the script does not know in which.

    python examples/digits_ps.py                                        one rank
    mpirun -np 2 python examples/digits_ps.py                           mode sync: two ranks
    ALLRED_MODE=ps mpirun -np 4 python examples/digits_ps.py            mode ps: one server, three workers

ALLRED_CONSISTENCY is async, bounded or sync, and ALLRED_NUM_PS=2 makes the first two ranks servers. With a directory,
`digits_ps.py DIRECTORY`, it goes on from the newest checkpoint there, of whatever mode, and leaves one. The last lines
are, in mode ps after what has passed at the servers ("staleness (updates): 0: ... %, ..."):

    checkpoint: DIRECTORY/step-...
    test accuracy: 0.9...
"""

import sys

import numpy as np

try:
    from sklearn.datasets import load_digits
except ImportError:
    raise SystemExit("this example needs scikit-learn: pip install scikit-learn") from None

import allred

EPOCHS, BATCH = 30, 100


def new_parameters():
    rng = np.random.default_rng(0)
    return {
        "hidden": {"weight": rng.normal(0, 0.15, (64, 64)).astype(np.float32), "bias": np.zeros(64, np.float32)},
        "out": {"weight": rng.normal(0, 0.15, (64, 10)).astype(np.float32), "bias": np.zeros(10, np.float32)},
    }


def forward(p, x):
    hidden = np.maximum(x @ p["hidden"]["weight"] + p["hidden"]["bias"], 0)
    return hidden, hidden @ p["out"]["weight"] + p["out"]["bias"]


def gradients(p, x, y):
    """Of the mean cross-entropy of a batch, for each parameter."""
    hidden, z = forward(p, x)
    z = np.exp(z - z.max(axis=1, keepdims=True))
    dz = (z / z.sum(axis=1, keepdims=True) - np.eye(10, dtype=np.float32)[y]) / max(len(x), 1)
    dh = (dz @ p["out"]["weight"].T) * (hidden > 0)
    return {
        "hidden": {"weight": x.T @ dh, "bias": dh.sum(axis=0)},
        "out": {"weight": hidden.T @ dz, "bias": dz.sum(axis=0)},
    }


def main(directory=None):
    allred.init()
    digits = load_digits()
    x, y = (digits.data / 16).astype(np.float32), digits.target
    train, test = np.split(np.random.default_rng(0).permutation(len(x)), [1437])

    params = new_parameters()
    opt = allred.distributed(allred.optim.Adagrad(lr=0.05))  # a server stays in this line until the workers are done
    found = opt.restore(directory, params) if directory else opt.broadcast(params)
    if found is not None and allred.rank() == 0:
        print(f"goes on from step {found}")
    for images, labels in allred.data.batches(x[train], y[train], batch_size=BATCH, epochs=EPOCHS, seed=0):
        opt.step(params, gradients(params, images, labels))

    opt.finish()  # no more steps of this worker: the others need not wait for it;
    allred.barrier()  # all workers' steps are done;
    opt.pull(params)  # mode ps: what came of them
    if allred.rank() == 0:
        print(opt.summary())
        if directory:
            print(f"checkpoint: {opt.save(directory, params)}")
        accuracy = (forward(params, x[test])[1].argmax(axis=1) == y[test]).mean()
        print(f"test accuracy: {accuracy:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
