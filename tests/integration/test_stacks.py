"""ALLRED_STACKS: the Python stacks of all ranks in the table of a long wait and of a time-out. About 10 s."""

import re

import pytest
from harness import MPICH_BY_DEFAULT, mpirun

PROGRAM = """
import ctypes, os, signal, sys, threading, time

signals = []
signal.signal(signal.SIGRTMAX - 1, lambda *_: signals.append("of the program"))
import numpy as np
import allred

def read_batches():
    threading.Event().wait(60)

def block():
    mutex = ctypes.create_string_buffer(64)
    [*map(ctypes.PyDLL(None).pthread_mutex_lock, (mutex, mutex))]  # with the GIL

def descend(depth):
    if depth:
        return descend(depth - 1)
    while not signals:
        time.sleep(0.01)
    time.sleep(60)

def train(rank):
    if rank == 0:
        threading.Thread(target=read_batches, daemon=True).start()
        allred.allreduce(np.ones(4), name="loss")
    if rank == 1:
        parent = os.getpid()
        if os.fork() == 0:
            while os.getppid() == parent:
                time.sleep(0.05)
            os._exit(0)
        threading.Timer(0.2, os.kill, (parent, signal.SIGRTMAX - 1)).start()
        descend(20)
    if rank == 2:
        block()
    os.kill(os.getpid(), signal.SIGSTOP)

allred.init(banner=False)
try:
    train(allred.rank())
finally:
    print("signals", signals, flush=True)
"""
SETTINGS = {"ALLRED_STALL_WARNING_S": "1", "ALLRED_TIMEOUT_S": "2", "ALLRED_PRETEND_NODES": "2,2"}


def line(words):
    """The line of the program that begins with these words."""
    return next(n for n, text in enumerate(PROGRAM.splitlines(), 1) if text.strip().startswith(words))


def table(text):
    """Return the lines of each rank in the table that begins after `text`, without the numbers of seconds."""
    lines = text.splitlines()[1:]
    end = next((n for n, each in enumerate(lines) if not each.startswith("  ")), len(lines))
    found = {}
    for each in lines[:end]:
        if each.startswith("  rank"):
            rows = found[int(re.search(r"\d+", each)[0])] = []
        rows.append(each.strip())
    return found


@pytest.mark.parametrize("mpi", MPICH_BY_DEFAULT)
def test_the_table_shows_the_stacks_of_running_and_blocked_ranks(mpi):
    """Two nodes. Rank 0 waits, and has a second thread; rank 1 has a forked child and a signal handler; rank 2 holds
    the GIL in C; rank 3 is stopped."""
    result = mpirun(4, "-c", PROGRAM, mpi=mpi, env=SETTINGS | {"ALLRED_STACKS": "1"})
    assert result.code == 1, result.text
    assert "signals ['of the program']" in result.out, result.text
    main = [f"<string>:{line('train(allred.rank())')} (<module>)"]
    for start in ("allred: rank 0 has waited for ", "CollectiveTimeout: "):
        ranks = table(result.err[result.err.index(start) :])
        assert ranks[0][0].endswith(" s"), result.text
        assert "in allreduce(Average) #" in ranks[0][0], result.text
        waits = [f"<string>:{line('allred.allreduce')} (train)", *main]
        assert ranks[0][1:] == [*waits, "in another thread:", f"<string>:{line('threading.Event')} (read_batches)"], (
            result.text
        )
        descend = f"<string>:{line('return descend')} (descend)"
        assert ranks[1][1:] == [f"<string>:{line('time.sleep(60)')} (descend)", *7 * [descend], "and 15 more"], (
            result.text
        )
        block = f"<string>:{line('[*map')} (block)"
        assert ranks[2][1:] == [block, f"<string>:{line('block()')} (train)", *main], result.text
        assert re.search(r"stopped \(kill -CONT \d+ continues it\)$", ranks[3][0]), result.text
        assert ranks[3][1:] == [], result.text
