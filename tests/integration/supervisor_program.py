"""A training loop with a session outside of a with statement. test_supervisor.py checks the files on disk.

supervisor_program.py DIRECTORY WAY    WAY: how the program of the last worker ends, see `act`
"""

import os
import signal
import sys

import numpy as np

import allred
from allred.compat import tf1


def act(way):
    """End the program of this worker, after three updates."""
    if way == "raise":
        raise ValueError("boom")
    if way == "raise, then stop":
        try:
            raise ValueError("boom")
        finally:
            supervisor.stop()
    if way.startswith("exit"):
        sys.exit(int(way.split()[1]))
    if way.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, way))


directory, way = sys.argv[1:]
allred.init(banner=False)
w = np.zeros(3)
opt = allred.distributed(allred.optim.SGD(lr=1.0))
supervisor = tf1.Supervisor(logdir=directory, save_summaries_secs=0, params=[w], optimizer=opt)
session = supervisor.prepare_or_wait_for_session()
made = 0
while not supervisor.should_stop() and made < 6:
    if made == 3 and allred.rank() == allred.size() - 1:
        act(way)
    opt.step([w], [np.ones(3)])
    made += 1
