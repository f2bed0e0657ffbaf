"""A training whose session no with statement ends: what is on disk at the end is judged by test_supervisor.py.

supervisor_program.py DIRECTORY WAY    WAY: how the program ends on the last worker, see `act`
"""

import os
import signal
import sys

import numpy as np

import allred
from allred.compat import tf1


def act(way):
    """This worker has made three updates."""
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
