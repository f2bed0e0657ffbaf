"""Handwritten digits by a network like LeNet, in PyTorch on CPUs, with towers: TensorFlow's tutorial of that name.

    python examples/mnist_towers.py                              one tower
    python examples/mnist_towers.py --towers 2                   two towers: a batch in two parts, in threads
    mpirun -np 2 python examples/mnist_towers.py                 two ranks, with --towers 2 of two towers each
    python examples/mnist_towers.py --data_dir DIRECTORY         MNIST, from its four files; else scikit-learn's digits
    python examples/mnist_towers.py --checkpoint_dir DIRECTORY   goes on from the newest checkpoint there

It needs torch: pip install '/path/to/clone[mpich,examples,torch]'. However the batches are split, there is one set of
parameters, and the losses are the same but for rounding. The lines are like these, and the last one like the last:

    step 20, loss = 37.97 (18758.3 examples/sec; 0.005 sec/batch)
    test accuracy: 0.9..., with averaged parameters: 0.9...
"""

import argparse
import pathlib

import numpy as np
import torch  # pip install torch; the CPU build: docs/install.md

try:
    from sklearn.datasets import load_digits
except ImportError:
    raise SystemExit("this example needs scikit-learn: pip install scikit-learn") from None
from torch.nn import Conv2d, Flatten, Linear, MaxPool2d, ReLU, Sequential
from torch.nn.functional import cross_entropy

import allred
from allred.session import Averaging, MovingAverage, Session

BATCH, L2 = 64, 5e-4


def load(directory):
    """Training images, their labels, test images, their labels. Images: float32 (samples, 1, side, side), 0 to 1."""
    if directory:
        names = ("train-images", "train-labels", "t10k-images", "t10k-labels")
        paths = [sorted(pathlib.Path(directory).glob(f"{name}*")) for name in names]
        if not all(paths):
            raise FileNotFoundError(f"{directory} has not all of {', '.join(f'{name}*' for name in names)}")
        x, y, test_x, test_y = (allred.data.idx(path[0]) for path in paths)
        brightest = 255
    else:
        digits = load_digits()
        train, test = np.split(np.random.default_rng(0).permutation(len(digits.images)), [1437])
        x, y, test_x, test_y = (of[part] for part in (train, test) for of in (digits.images, digits.target))
        brightest = 16
    scaled = [images[:, None].astype(np.float32) / brightest for images in (x, test_x)]
    return scaled[0], y.astype(np.int64), scaled[1], test_y.astype(np.int64)


def new_model(side):
    torch.manual_seed(0)  # the same values on all ranks
    return Sequential(
        *(Conv2d(1, 16, 5, padding=2), ReLU(), MaxPool2d(2)),
        *(Conv2d(16, 32, 5, padding=2), ReLU(), MaxPool2d(2)),
        *(Flatten(), Linear(32 * (side // 4) ** 2, 128), ReLU(), Linear(128, 10)),
    )


def loss_and_grads_of(model):
    """What each tower calls: mean cross-entropy of its part of a batch, with an L2 term, and the gradients."""
    dense = [parameter for layer in model if isinstance(layer, Linear) for parameter in layer.parameters()]

    def loss_and_grads(params, x, y):
        loss = cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y))
        loss = loss + L2 * sum((parameter**2).sum() / 2 for parameter in dense)
        return loss, dict(zip(params, torch.autograd.grad(loss, list(model.parameters())), strict=True))

    return loss_and_grads


def accuracy(model, x, y):
    with torch.no_grad():
        return (model(torch.from_numpy(x)).argmax(axis=1).numpy() == y).mean()


def main(arguments=None, hooks=()):
    parser = argparse.ArgumentParser(description="Handwritten digits by a network like LeNet, with towers")
    parser.add_argument("--towers", type=int, default=1, help="parts of a rank's batch, each in a thread")
    parser.add_argument("--max_steps", type=int, default=300)
    parser.add_argument("--data_dir", help="with MNIST's four IDX files, gzip-compressed or not")
    parser.add_argument("--checkpoint_dir")
    args = parser.parse_args(arguments)

    allred.init()
    torch.set_num_threads(1)  # towers and ranks are what runs at the same time
    x, y, test_x, test_y = load(args.data_dir)
    epoch = -(-len(x) // BATCH)  # in steps

    model = new_model(x.shape[-1])
    params = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}  # the same memory
    lr = allred.optim.schedules.exponential_decay(0.05, decay_steps=epoch, decay_rate=0.95, staircase=True)
    opt = allred.distributed(allred.optim.SGD(lr, momentum=0.9))
    batches = allred.data.batches(x, y, batch_size=BATCH, epochs=-(-args.max_steps // epoch), seed=0)
    average = MovingAverage(params, decay=0.99)
    towers = allred.Towers(args.towers, loss_and_grads_of(model))

    hooks = [Averaging(average), *hooks]
    with Session(args.checkpoint_dir, max_steps=args.max_steps, hooks=hooks, log_steps=20) as session:
        session.track(params=params, optimizer=opt, data=batches)
        for images, labels in session.steps(batches):
            loss, grads = towers(params, images, labels)
            opt.step(params, grads)
            session.log(loss=loss, examples=len(images))

    if allred.rank() == 0:
        last = accuracy(model, test_x, test_y)
        with average.swapped():
            print(f"test accuracy: {last:.3f}, with averaged parameters: {accuracy(model, test_x, test_y):.3f}")


if __name__ == "__main__":
    main()
