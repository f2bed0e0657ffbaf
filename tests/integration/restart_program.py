"""Counts how often each sample was trained on: in the parameters, so that a lost update is a lost count.

restart_program.py DIRECTORY KILLS [SIZES]

The first KILLS starts are killed: a rank in a random step kills itself. SIZES, such as 2,3,4: before that, the host
file DIRECTORY/hosts gets one of these numbers of slots. At the end the chief writes the counts.
"""

import os
import pathlib
import random
import signal
import sys
import time

import numpy as np

import allred

ROWS, EPOCHS = 97, 6


def main(directory, kills, sizes=""):
    allred.init(banner=False)
    directory = pathlib.Path(directory)
    params = {"seen": np.zeros(ROWS)}
    opt = allred.distributed(allred.optim.SGD(lr=1.0), op=allred.Sum)
    batches = allred.data.batches(np.arange(ROWS), batch_size=7, epochs=EPOCHS, seed=1)
    with allred.Session(checkpoint_dir=directory / "checkpoints", save_steps=2, log_steps=None) as session:
        session.track(params=params, optimizer=opt, data=batches)
        chance = random.Random(session.starts)
        rank, after = chance.randrange(allred.size()), session.step + chance.randint(2, 5)
        size = chance.choice(sizes.split(",")) if sizes else ""
        for numbers in session.steps(batches):
            if session.starts <= int(kills) and session.step >= after and allred.rank() == rank:
                if size:
                    (directory / "hosts").write_text(f"localhost slots={size}\n")
                (directory / f"kill-{session.starts}").write_text(repr(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            opt.step(params, {"seen": -np.bincount(numbers, minlength=ROWS).astype(float)})
            first = directory / f"first-{session.starts}"
            if allred.rank() == 0 and not first.exists():
                first.write_text(f"{time.time()!r} {allred.size()} {session.step}")
    if allred.is_chief():
        np.savetxt(directory / "seen", params["seen"])
        print("starts", session.starts, "step", session.step, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
