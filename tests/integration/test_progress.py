"""The progress line of a rank under mpirun, which has the terminal, while other ranks speak."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import termios

import pytest
from harness import BIN, MPICH_BY_DEFAULT, MPIS, OPENMPI, mpirun

PROGRAM = r"""
import sys, time
from mpi4py import MPI
from allred.session.progress import display
from allred.session.progress import Rates
rank = MPI.COMM_WORLD.Get_rank()
now = iter(range(10**6))
rates = Rates(clock=lambda: next(now) / 100)
MPI.COMM_WORLD.Barrier()
shown = display() if rank == 0 else None
for step in range(1, 401):
    if rank == 0:
        rates.record(step, 64, 0.003, 0.0025)
        shown._drawn = 0  # as often as can be
        shown.show(step, 400, {"loss": 1 / step}, rates)
    if step % 10 == 0:
        sys.stderr.write(f"said {step} by {rank}\n")
    time.sleep(0.001)
if rank == 0:
    shown.close()
"""


def run(mpi, stderr=None):
    """What appears on the terminal on which mpirun was started."""
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 110, 0, 0))
    away = ("NO_COLOR", "COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE")
    environment = {**{name: os.environ[name] for name in os.environ if name not in away}, **OPENMPI, "TERM": "xterm"}
    command = [BIN[mpi] / "mpirun", "-np", "2", BIN[mpi] / "python", "-c", PROGRAM]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=stderr or terminal, env=environment) as job:
        os.close(terminal)
        output = b""
        try:
            while got := os.read(screen, 10000):
                output += got
        except OSError:  # all have closed it
            pass
        finally:
            job.kill()
    os.close(screen)
    return output.decode()


@pytest.mark.parametrize("mpi", MPIS)
def test_a_line_on_mpiruns_terminal_and_no_word_of_others_lost(mpi):
    output = run(mpi)
    assert re.search(
        r"step 400/400  loss = 0\.0025  6400\.0 examples/s  0\.010 s/batch  ETA 0:00:00  45 % computing", output
    )
    for rank in range(2):
        whole = re.findall(rf"said (\d+) by {rank}\r*\n", output)  # nothing between its last letter and its end
        assert list(map(int, whole)) == list(range(10, 401, 10))


@pytest.mark.parametrize("mpi", MPICH_BY_DEFAULT)
def test_plain_lines_where_mpiruns_stderr_is_a_file(mpi, tmp_path):
    with open(tmp_path / "log", "w") as log:
        assert "step" not in run(mpi, log)
    lines = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("step ")]
    assert lines[-1] == "step 400, loss = 0.0025 (6400.0 examples/sec; 0.010 sec/batch)"
    assert len(lines) == 400


TIMES = r"""
import json, sys, time
import numpy as np
import allred
from allred import world
from allred.session import Summary

allred.init(banner=False)
opt = allred.distributed(allred.optim.SGD(0.1))
params = [np.ones(1000, np.float32)]
with allred.Session(hooks=[Summary(sys.argv[1], every_steps=10)], max_steps=20, log_steps=None) as session:
    session.track(params=params, optimizer=opt)
    for _ in session.steps(range(100)):
        time.sleep(0.03 * allred.rank())
        if session.step % 2:
            allred.allreduce(np.ones(1))  # rank 0 waits here or in opt.step
        opt.step(params, [np.ones_like(params[0])])
        session.log(loss=1.0)
    shares = session.rates.shares
line = opt.summary().partition("of a step ")[2].partition("\n")[0]
print(json.dumps([allred.rank(), shares, line, world.current().counters.times]) + "\n", end="", flush=True)
"""


def test_waiting_for_a_slow_rank_is_no_communication_anywhere(tmp_path):
    """Rank 1 is slower, before an allreduce of the program, or before the step. 2 s."""
    result = mpirun(2, "-c", TIMES, tmp_path)
    (_, shares, line, times), (_, slow, _, _) = sorted(json.loads(text) for text in result.out.splitlines())
    assert sum(shares) == pytest.approx(1), result.text
    computing, waiting, communicating = shares
    assert waiting > max(computing, communicating), result.text
    assert slow[0] > max(slow[1:]), result.text
    parts = re.fullmatch(r"(\d+) % computing, (\d+) % waiting, (\d+) % communicating", line)
    assert sum(map(int, parts.groups())) == 100, result.text
    assert int(parts[2]) > max(int(parts[1]), int(parts[3])), result.text
    assert times[0] > times[1], result.text  # those of the metrics and of top
    last = json.loads((tmp_path / "scalars.jsonl").read_text().splitlines()[-1])
    assert [last[f"time/{name}"] for name in ("computing", "waiting", "communicating")] == pytest.approx(shares)
