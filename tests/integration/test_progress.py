"""The progress line of a rank under mpirun, which has the terminal, while other ranks speak."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios

import pytest
from harness import BIN, MPIS, OPENMPI

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
        rates.record(step, 64, 0.0025)
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
        r"step 400/400  loss = 0\.0025  6400\.0 examples/s  0\.010 s/batch  25 % communication  ETA", output
    )
    for rank in range(2):
        whole = re.findall(rf"said (\d+) by {rank}\r*\n", output)  # nothing between its last letter and its end
        assert list(map(int, whole)) == list(range(10, 401, 10))


@pytest.mark.parametrize("mpi", MPIS)
def test_plain_lines_where_mpiruns_stderr_is_a_file(mpi, tmp_path):
    with open(tmp_path / "log", "w") as log:
        assert "step" not in run(mpi, log)
    lines = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("step ")]
    assert lines[-1] == "step 400, loss = 0.0025 (6400.0 examples/sec; 0.010 sec/batch)"
    assert len(lines) == 400
