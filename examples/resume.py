"""A training that may be killed at any moment, and goes on where it was, on any number of ranks.

    mpirun -np 2 python examples/resume.py DIRECTORY        kill it, with Ctrl-C or kill -9
    mpirun -np 3 python examples/resume.py DIRECTORY        and start it again

A checkpoint is written every few steps, also in the middle of an epoch. No sample is lost and none comes twice, so in
the end the loss is that of a training which was never killed: the chief makes that one too, alone, to compare. The last
lines are:

    started ... times, the last time at step ... of 540
    same loss as if it had never been killed: yes (0.0... and 0.0...)
"""

import sys
import time

import numpy as np
from digits_sync import BATCH, EPOCHS, fit, loss_and_grads, new_parameters

try:
    from sklearn.datasets import load_digits
except ImportError:
    raise SystemExit("this example needs scikit-learn: pip install scikit-learn") from None

import allred


class Starts:
    """How often this training was started: a small thing that is kept with the checkpoints."""

    def __init__(self):
        self.count = 1

    def state_dict(self):
        return self.count

    def load_state_dict(self, count):
        self.count = count + 1


def main(directory, pause_s=0.0):
    allred.init()
    digits = load_digits()
    x, y = (digits.data / 16).astype(np.float32), digits.target

    params, starts = new_parameters(), Starts()
    opt = allred.distributed(allred.optim.Adagrad(lr=0.05))
    batches = allred.data.batches(x, y, batch_size=BATCH, epochs=EPOCHS, seed=0)
    with allred.Session(directory, save_steps=7) as session:
        first = session.track(params=params, optimizer=opt, data=batches, starts=starts) or 0
        for images, labels in session.steps(batches):
            loss, grads = loss_and_grads(params, images, labels)
            opt.step(params, grads)
            session.log(loss=loss, examples=len(images))
            time.sleep(pause_s)  # so that there is time to kill it

    if allred.rank() == 0:
        alone = new_parameters()
        whole = allred.data.batches(x, y, batch_size=BATCH, epochs=EPOCHS, seed=0, rank=0, size=1)
        fit(allred.optim.Adagrad(lr=0.05), alone, whole)
        (loss, _), (expected, _) = (loss_and_grads(p, x, y) for p in (params, alone))
        print(f"started {starts.count} times, the last time at step {first} of {len(batches)}")
        same = "yes" if abs(loss - expected) < 1e-4 else "NO"
        print(f"same loss as if it had never been killed: {same} ({loss:.6f} and {expected:.6f})")


if __name__ == "__main__":
    main(sys.argv[1], *map(float, sys.argv[2:]))
