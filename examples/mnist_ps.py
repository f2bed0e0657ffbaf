"""Softmax regression on handwritten digits with parameter servers, in TensorFlow's words: two servers, two workers.

By hand, in four terminals, in any order (MPICH only; on several machines also with the same ALLRED_SECRET):

    python examples/mnist_ps.py --ps_hosts=localhost:2221,localhost:2222 --worker_hosts=localhost:2223,localhost:2224 \
        --job_name=ps --task_index=0
    python examples/mnist_ps.py ... --job_name=ps --task_index=1
    python examples/mnist_ps.py ... --job_name=worker --task_index=0
    python examples/mnist_ps.py ... --job_name=worker --task_index=1

With mpirun, where a process's rank says which task it is:

    mpirun -np 4 python examples/mnist_ps.py

--issync=1 makes a step of one gradient of each worker; otherwise each is applied when it arrives. --data_dir names a
directory with MNIST's four IDX files; without it the digits of scikit-learn are taken. Workers print "Step 100 in task
0" and so on; the last line of worker 0 is

    test accuracy: 0.9...
"""

import argparse
import pathlib

import numpy as np

import allred

BATCH, LEARNING_RATE = 100, 0.01


def load(directory):
    """Images and labels, to train and to test with."""
    if directory:
        files = [f"{part}-{kind}" for part in ("train", "t10k") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]
        found = [next(pathlib.Path(directory).glob(f"{name}*")) for name in files]
        x, y, test_x, test_y = (np.asarray(allred.data.idx(path)) for path in found)
        x, test_x = (images.reshape(len(images), -1).astype(np.float32) / 255 for images in (x, test_x))
        return x, y, test_x, test_y
    try:
        from sklearn.datasets import load_digits  # not for a server, nor with files
    except ImportError:
        raise SystemExit("this example needs scikit-learn: pip install scikit-learn") from None

    digits = load_digits()
    x, y = (digits.data / 16).astype(np.float32), digits.target
    train, test = np.split(np.random.default_rng(0).permutation(len(x)), [1437])
    return x[train], y[train], x[test], y[test]


def gradients(params, x, y):
    """Of the mean cross-entropy of a batch, for each parameter."""
    z = x @ params["weights"] + params["bias"]
    z = np.exp(z - z.max(axis=1, keepdims=True))
    dz = (z / z.sum(axis=1, keepdims=True) - np.eye(10, dtype=np.float32)[y]) / len(x)
    return {"weights": x.T @ dz, "bias": dz.sum(axis=0)}


def train(args):
    x, y, test_x, test_y = load(args.data_dir)
    params = {"weights": np.zeros((x.shape[1], 10), np.float32), "bias": np.zeros(10, np.float32)}
    opt = allred.distributed(
        allred.optim.Adagrad(lr=LEARNING_RATE), consistency="sync" if args.issync else "async"
    )  # the servers, in join(), hear of it from worker 0
    rng = np.random.default_rng(allred.task_index())
    opt.broadcast(params)
    for step in range(1, args.steps + 1):
        batch = rng.integers(len(x), size=BATCH)
        opt.step(params, gradients(params, x[batch], y[batch]))
        if step % 100 == 0:
            print(f"Step {step} in task {allred.task_index()}", flush=True)

    opt.finish()  # no more steps of this worker;
    allred.barrier()  # all workers' steps are done;
    opt.pull(params)  # what came of them
    if allred.is_chief():
        accuracy = ((test_x @ params["weights"] + params["bias"]).argmax(axis=1) == test_y).mean()
        print(f"test accuracy: {accuracy:.3f}")


def main():
    parser = argparse.ArgumentParser(description="Softmax regression with parameter servers")
    parser.add_argument("--ps_hosts", default="localhost:2221,localhost:2222", help="host:port,host:port")
    parser.add_argument("--worker_hosts", default="localhost:2223,localhost:2224", help="host:port,host:port")
    parser.add_argument("--job_name", choices=["ps", "worker"], help="may be left out under mpirun")
    parser.add_argument("--task_index", type=int, help="may be left out under mpirun")
    parser.add_argument("--issync", type=int, default=0, help="1: synchronous steps")
    parser.add_argument("--steps", type=int, default=500, help="of each worker")
    parser.add_argument("--data_dir", help="with MNIST's four IDX files, gzip-compressed or not")
    args = parser.parse_args()

    cluster = allred.ClusterSpec({"ps": args.ps_hosts.split(","), "worker": args.worker_hosts.split(",")})
    server = allred.Server(cluster, job_name=args.job_name, task_index=args.task_index)
    if allred.job_name() == "ps":
        server.join()
    else:
        train(args)


if __name__ == "__main__":
    main()
