"""Handwritten digits (the 1797 real scans that scikit-learn ships), trained by all ranks together.

    python examples/digits_sync.py                  one rank
    mpirun -np 2 python examples/digits_sync.py     two ranks, the same result

The last lines are:

    parameters equal on all ranks: yes (hash ...)
    same as one rank on the global batch: yes (max difference ...)
    test accuracy: 0.9...
"""

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
        "hidden.weight": rng.normal(0, 0.15, (64, 64)).astype(np.float32),
        "hidden.bias": np.zeros(64, np.float32),
        "out.weight": rng.normal(0, 0.15, (64, 10)).astype(np.float32),
        "out.bias": np.zeros(10, np.float32),
    }


def logits(p, x):
    hidden = np.maximum(x @ p["hidden.weight"] + p["hidden.bias"], 0)
    return hidden, hidden @ p["out.weight"] + p["out.bias"]


def loss_and_grads(p, x, y):
    """Mean cross-entropy of a batch, and its gradient for each parameter."""
    hidden, z = logits(p, x)
    z -= z.max(axis=1, keepdims=True)
    log_prob = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    dz = (np.exp(log_prob) - np.eye(10, dtype=np.float32)[y]) / max(len(x), 1)
    dh = (dz @ p["out.weight"].T) * (hidden > 0)
    grads = {
        "hidden.weight": x.T @ dh,
        "hidden.bias": dh.sum(axis=0),
        "out.weight": hidden.T @ dz,
        "out.bias": dz.sum(axis=0),
    }
    return -log_prob[np.arange(len(y)), y].sum() / max(len(x), 1), grads


def fit(opt, params, batches, progress=False):
    for step, (x, y) in enumerate(batches, start=1):
        loss, grads = loss_and_grads(params, x, y)
        opt.step(params, grads)
        if progress and step % (5 * batches.steps_per_epoch) == 0:
            print(f"epoch {step // batches.steps_per_epoch:2d} of {EPOCHS}, loss on this rank {loss:.4f}", flush=True)


def main():
    allred.init()
    digits = load_digits()
    x, y = (digits.data / 16).astype(np.float32), digits.target
    train, test = np.split(np.random.default_rng(0).permutation(len(x)), [1437])
    chief = allred.rank() == 0

    params = new_parameters()
    opt = allred.distributed(allred.optim.Adagrad(lr=0.05))
    opt.broadcast(params)
    batches = allred.data.batches(x[train], y[train], batch_size=BATCH, epochs=EPOCHS, seed=0)
    fit(opt, params, batches, progress=chief)

    hashes = allred.allgather_object(allred.digest(params))
    if chief:
        alone = new_parameters()  # the same training by one rank, without allred's help
        whole = allred.data.batches(x[train], y[train], batch_size=BATCH, epochs=EPOCHS, seed=0, rank=0, size=1)
        fit(allred.optim.Adagrad(lr=0.05), alone, whole)
        difference = max(abs(params[name] - alone[name]).max() for name in params)
        accuracy = (logits(params, x[test])[1].argmax(axis=1) == y[test]).mean()
        print(opt.summary())
        print(f"parameters equal on all ranks: {'yes' if len(set(hashes)) == 1 else 'NO'} (hash {hashes[0]})")
        same = "yes" if difference < 1e-3 else "NO"
        print(f"same as one rank on the global batch: {same} (max difference {difference:.1e})")
        print(f"test accuracy: {accuracy:.3f}")


if __name__ == "__main__":
    main()
