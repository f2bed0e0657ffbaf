"""Handwritten digits, as in digits_sync.py, with parameters and data on GPUs (cupy): the same decorator, over NCCL.

    python examples/digits_nccl.py                  one GPU
    mpirun -np 2 python examples/digits_nccl.py     two; on a machine with one: ALLRED_GPU_OVERSUBSCRIBE=1

The last lines are:

    parameters equal on all ranks: yes (hash ...)
    same as on the CPU: yes (max difference ...)
    test accuracy: 0.9...
"""

import cupy as cp
import digits_sync as cpu  # the same model in numpy
import numpy as np

try:
    from sklearn.datasets import load_digits
except ImportError:
    raise SystemExit("this example needs scikit-learn: pip install scikit-learn") from None

import allred


def loss_and_grads(p, x, y):
    """Mean cross-entropy of a batch, and its gradient for each parameter."""
    x, y = cp.asarray(x), cp.asarray(y)
    hidden = cp.maximum(x @ p["hidden.weight"] + p["hidden.bias"], 0)
    z = hidden @ p["out.weight"] + p["out.bias"]
    z -= z.max(axis=1, keepdims=True)
    log_prob = z - cp.log(cp.exp(z).sum(axis=1, keepdims=True))
    dz = (cp.exp(log_prob) - cp.eye(10, dtype=np.float32)[y]) / max(len(x), 1)
    dh = (dz @ p["out.weight"].T) * (hidden > 0)
    grads = {
        "hidden.weight": x.T @ dh,
        "hidden.bias": dh.sum(axis=0),
        "out.weight": hidden.T @ dz,
        "out.bias": dz.sum(axis=0),
    }
    return grads


def main():
    allred.init(backend="nccl")  # an error where that cannot be; with auto it goes on without GPUs
    digits = load_digits()
    x, y = (digits.data / 16).astype(np.float32), digits.target
    train, test = np.split(np.random.default_rng(0).permutation(len(x)), [1437])

    params = {name: cp.asarray(value) for name, value in cpu.new_parameters().items()}
    opt = allred.distributed(allred.optim.Adagrad(lr=0.05))
    opt.broadcast(params)
    for batch in allred.data.batches(x[train], y[train], batch_size=cpu.BATCH, epochs=cpu.EPOCHS, seed=0):
        opt.step(params, loss_and_grads(params, *batch))

    trained = {name: value.get() for name, value in params.items()}
    hashes = allred.allgather_object(allred.digest(trained))
    if allred.rank() == 0:
        alone = cpu.new_parameters()
        whole = allred.data.batches(x[train], y[train], batch_size=cpu.BATCH, epochs=cpu.EPOCHS, seed=0, rank=0, size=1)
        cpu.fit(allred.optim.Adagrad(lr=0.05), alone, whole)
        difference = max(abs(trained[name] - alone[name]).max() for name in trained)
        accuracy = (cpu.logits(trained, x[test])[1].argmax(axis=1) == y[test]).mean()
        print(opt.summary())
        print(f"parameters equal on all ranks: {'yes' if len(set(hashes)) == 1 else 'NO'} (hash {hashes[0]})")
        print(f"same as on the CPU: {'yes' if difference < 1e-2 else 'NO'} (max difference {difference:.1e})")
        print(f"test accuracy: {accuracy:.3f}")


if __name__ == "__main__":
    main()
