"""Handwritten digits with JAX and optax: the gradients are averaged inside of `jax.jit`.

    python examples/jax_digits.py                   one rank
    mpirun -np 2 python examples/jax_digits.py      two ranks

Each rank reads its share of each global batch. The last lines are:

    parameters equal on all ranks: yes
    test accuracy: 0.9...
"""

import jax
import jax.numpy as jnp
import optax  # pip install jax optax

try:
    from sklearn.datasets import load_digits
except ImportError:
    raise SystemExit("this example needs scikit-learn: pip install scikit-learn") from None

import allred
import allred.jax  # before the first computation of JAX

EPOCHS, BATCH, TRAINING = 20, 100, 1437


def new_parameters(key):
    hidden, out = jax.random.split(key)
    return {
        "hidden": {"weight": jax.random.normal(hidden, (64, 64)) / 8, "bias": jnp.zeros(64)},
        "out": {"weight": jax.random.normal(out, (64, 10)) / 8, "bias": jnp.zeros(10)},
    }


def logits(params, x):
    hidden = jax.nn.relu(x @ params["hidden"]["weight"] + params["hidden"]["bias"])
    return hidden @ params["out"]["weight"] + params["out"]["bias"]


def main():
    allred.init()
    digits = load_digits()
    order = jax.random.permutation(jax.random.key(0), len(digits.data))
    x, y = (digits.data / 16).astype("float32")[order], digits.target[order]

    optimizer = allred.jax.distributed(optax.adam(0.003))
    params = new_parameters(jax.random.key(allred.rank()))
    params = allred.jax.broadcast_params(params)  # all ranks start from the parameters of rank 0
    state = optimizer.init(params)

    @jax.jit
    def train_step(params, state, images, labels):
        def loss(params):
            return optax.softmax_cross_entropy_with_integer_labels(logits(params, images), labels).mean()

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)  # averages the gradients
        return optax.apply_updates(params, updates), state

    for images, labels in allred.data.batches(x[:TRAINING], y[:TRAINING], batch_size=BATCH, epochs=EPOCHS):
        params, state = train_step(params, state, images, labels)

    digests = allred.allgather_object(allred.digest(params))
    if allred.rank() == 0:
        accuracy = (logits(params, x[TRAINING:]).argmax(1) == y[TRAINING:]).mean()
        print(f"parameters equal on all ranks: {'yes' if len(set(digests)) == 1 else 'no'}")
        print(f"test accuracy: {accuracy:.3f}")


if __name__ == "__main__":
    main()
