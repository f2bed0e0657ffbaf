"""A convolutional network on images of MNIST's size, in PyTorch with an optimizer of its own: on GPUs, else on CPUs.

    python examples/mnist_torch.py                        one rank
    mpirun -np 2 python examples/mnist_torch.py           two, with a GPU each, or with none
    python examples/mnist_torch.py --data_dir DIRECTORY   MNIST, from its four files; else digits, enlarged

Gradients go by NCCL, or through shared memory; for ranks that share a GPU: ALLRED_GPU_OVERSUBSCRIBE=1. It needs torch,
and cupy where there are GPUs (docs/gpus.md). The last lines are like these:

    ... examples/s on 2 ranks, on cuda
    parameters equal on all ranks: yes (hash ...)
    test accuracy: 0.9...
"""

import argparse
import time

import mnist_towers
import numpy as np
import torch  # pip install torch; the CPU build: docs/install.md
from torch.nn.functional import cross_entropy

import allred

BATCH, SIDE, WARM = 64, 28, 5  # samples of all ranks, pixels, steps before the time is taken


def enlarged(images):
    """The digits' 8 x 8 pixels as 28 x 28: each three times as large, within a frame."""
    if images.shape[-1] == SIDE:
        return images
    return np.pad(images.repeat(3, axis=2).repeat(3, axis=3), ((0, 0), (0, 0), (2, 2), (2, 2)))


def shared(tensors):
    """What allred takes: tensors on GPUs as they are, others as numpy arrays that share their memory."""
    return [tensor if tensor.is_cuda else tensor.numpy() for tensor in tensors]


def main():
    parser = argparse.ArgumentParser(description="A convolutional network on GPUs, or CPUs")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--data_dir", help="with MNIST's four IDX files, gzip-compressed or not")
    args = parser.parse_args()

    place = "cuda" if torch.cuda.is_available() else "cpu"
    allred.init(backend="nccl" if place == "cuda" else "auto")  # nccl: an error where it cannot be
    if place == "cpu":
        torch.set_num_threads(1)  # ranks are what runs at the same time
    x, y, test_x, test_y = mnist_towers.load(args.data_dir)
    x, test_x = enlarged(x), enlarged(test_x)

    model = mnist_towers.new_model(SIDE).to(place)
    parameters = list(model.parameters())
    for values in shared([parameter.detach() for parameter in parameters]):
        allred.broadcast_(values)
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    def settle():
        if place == "cuda":
            torch.cuda.synchronize()

    start = done = 0
    for images, labels in allred.data.batches(x, y, batch_size=BATCH, epochs=-(-args.steps * BATCH // len(x)), seed=0):
        if done == WARM:
            settle()
            start = time.perf_counter()
        predicted = model(torch.from_numpy(images).to(place))
        loss = cross_entropy(predicted, torch.from_numpy(labels).to(place), reduction="sum") / BATCH
        optimizer.zero_grad(set_to_none=False)  # gradients stay where they are, and allred knows the place
        loss.backward()
        allred.grouped_allreduce_(shared([parameter.grad for parameter in parameters]), allred.Sum)
        optimizer.step()
        done += 1
        if done == args.steps:
            break
    settle()
    seconds = time.perf_counter() - start

    trained = {name: value.cpu().numpy() for name, value in model.state_dict().items()}
    hashes = allred.allgather_object(allred.digest(trained))
    if allred.rank() == 0:
        with torch.no_grad():
            right = model(torch.from_numpy(test_x).to(place)).argmax(axis=1).cpu().numpy() == test_y
        ranks = f"{allred.size()} rank{'s' * (allred.size() > 1)}"
        print(f"{BATCH * (done - WARM) / seconds:.0f} examples/s on {ranks}, on {place}")
        print(f"parameters equal on all ranks: {'yes' if len(set(hashes)) == 1 else 'NO'} (hash {hashes[0]})")
        print(f"test accuracy: {right.mean():.3f}")
    if len(set(hashes)) > 1:
        raise SystemExit("the ranks have parted")


if __name__ == "__main__":
    main()
