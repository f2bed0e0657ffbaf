"""Ranks with uneven data in a session: rank r has 3 + 2 r batches. test_join_session.py checks the files on disk.

join_program.py DIRECTORY [BROADCASTS FAILS BREAKS]...    three digits for each training, in DIRECTORY/DIGITS. 0 or 1:
whether the program broadcasts the parameters of the last rank, which all ranks have then in mode sync; whether rank 0
then raises; whether a rank leaves the loop by a break, and not at the end of its data
"""

import os
import sys

import numpy as np

import allred


def train(directory, broadcasts, fails, breaks):
    w = np.zeros(3)
    opt = allred.distributed(allred.optim.SGD(lr=1.0))
    with allred.Session(directory, save_steps=3) as session:
        print(f"from step {session.track(params=[w], optimizer=opt)} with {w[0]}\n", end="", flush=True)
        with allred.Join() as joined:
            for number in session.steps(range(3 + 2 * allred.rank() + breaks)):
                opt.step([w], [np.ones(3)])
                if breaks and number == 2 + 2 * allred.rank():
                    break
        if os.environ["ALLRED_MODE"] == "sync":
            assert session.step == opt.global_step == -w[0] == 1 + 2 * allred.size(), (session.step, opt.global_step, w)
        if broadcasts:
            opt.broadcast([w], root=joined.last)
        if fails and allred.rank() == 0:
            raise ValueError("boom")


allred.init(banner=False)
for digits in sys.argv[2:]:
    train(f"{sys.argv[1]}/{digits}", *map(int, digits))
