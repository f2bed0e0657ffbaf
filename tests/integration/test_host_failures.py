"""A host fails, or the network to it: what the ranks raise, and that every process of the job ends.

Each host is a network namespace. The output of a host that is cut off does not reach mpirun, so ranks also write what
they raise to files.
"""

import contextlib
import os
import signal
import socket
import threading
import time

import pytest
from harness import MPIS
from hosts import hosts
from test_shm import full

from allred.runtime import channel

PROGRAM = """
import os, pathlib, sys, time
os.environ.update(ALLRED_TRANSPORT="{transport}", ALLRED_TIMEOUT_S="10", ALLRED_STALL_WARNING_S="4")
import numpy as np
import allred
directory = pathlib.Path(sys.argv[1])
allred.init(banner=False)
rank, size = allred.rank(), allred.size()
{before}
try:
    for step in range(10**9):
        assert (allred.allreduce(np.full(300_000, step, "f4"), allred.Sum) == step * size).all()
        if step == 3 and rank == 0:
            (directory / "ready").touch()
        time.sleep({pause})
except Exception as error:
    (directory / f"rank{{rank}}").write_text(f"{{type(error).__name__}}: {{error}}")
    raise
"""


def program(transport="tcp", before="", pause=0.01):
    return PROGRAM.format(transport=transport, before=before, pause=pause)


@contextlib.contextmanager
def when_ready(directory, action):
    """Call `action` in a thread when the ranks have done some steps."""

    def wait():
        while not (directory / "ready").exists() and not over.is_set():
            time.sleep(0.05)
        if not over.is_set():
            action()

    over, thread = threading.Event(), threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def run_until(here, mpi, ranks, directory, action, code):
    """Run the program, with the action when it is ready. Return the result and what each rank raised."""
    with when_ready(directory, action):
        result = here.run(mpi, ranks, "-c", code, directory)
    here.wait_for_end()
    return result, {int(file.name[4:]): file.read_text() for file in directory.glob("rank*")}


def sends_again_every_second():
    with socket.socket() as probe, contextlib.suppress(OSError):
        channel.limit_resending(probe, 10.0)
        return probe.getsockopt(socket.IPPROTO_TCP, channel._TCP_RTO_MAX_MS) == 1000
    return False


def cut(here, number):
    return lambda: here.set_link(number, "down")


@pytest.mark.parametrize(
    ("mpi", "transport"),
    [("mpich", "tcp"), ("openmpi", "tcp"), pytest.param("mpich", "mpi", marks=full)],
)
def test_a_link_that_is_cut_for_good_ends_the_job_on_both_sides(mpi, transport, tmp_path):
    with hosts(2, tmp_path) as here:
        result, raised = run_until(here, mpi, [2, 1], tmp_path, cut(here, 1), program(transport))
    assert result.code != 0
    for rank, name, lost in ((0, here.names[1], "rank 2"), (1, here.names[1], "rank 2"), (2, here.names[0], "rank 0")):
        assert f"RemoteRankError: host {name} ({lost}) has been unreachable for " in raised[rank], raised
        assert "s: the host or the network to it has failed" in raised[rank]
    assert f"allred: host {here.names[1]} (rank 2) has been unreachable for 5 s: " in result.err, result.text


UNTIL_REPAIRED = """
for step in range(10**9):
    repaired = (directory / "repaired").exists()
    if allred.allreduce(np.full(300_000, repaired, "f4"), allred.Max)[0]:
        print("repaired after", step, "steps", flush=True)
        sys.exit()
    if step == 3 and rank == 0:
        (directory / "ready").touch()
"""


@full  # test_tcp.py has a shorter cut by default
@pytest.mark.parametrize("mpi", MPIS)
# @pytest.mark.skipif(not sends_again_every_second(), reason="this kernel has no TCP_RTO_MAX_MS")
def test_the_job_continues_after_a_cut_of_three_quarters_of_the_time_limit(mpi, tmp_path):
    def cut_and_repair():
        here.set_link(1, "down")
        time.sleep(15)
        here.set_link(1, "up")
        (tmp_path / "repaired").touch()

    with hosts(2, tmp_path) as here:
        code = program(before=UNTIL_REPAIRED).replace('ALLRED_TIMEOUT_S="10"', 'ALLRED_TIMEOUT_S="20"')
        result, raised = run_until(here, mpi, [1, 1], tmp_path, cut_and_repair, code)
    assert result.code == 0, result.text
    assert not raised
    assert result.out.count("repaired after") == 2, result.text
    assert f"allred: host {here.names[1]} (rank 1) answers again, after " in result.err, result.text


@pytest.mark.parametrize("mpi", ["mpich", pytest.param("openmpi", marks=full)])
def test_a_link_that_is_cut_in_one_direction_ends_the_job_too(mpi, tmp_path):
    with hosts(2, tmp_path) as here:
        result, raised = run_until(here, mpi, [1, 1], tmp_path, lambda: here.drop_sent(1), program())
    assert result.code != 0
    assert f"host {here.names[1]} (rank 1) has been unreachable for " in raised[0], raised
    assert set(raised) == {0, 1}


@full  # by default with two hosts, above
@pytest.mark.parametrize("mpi", MPIS)
def test_three_hosts_end_if_one_is_cut_off(mpi, tmp_path):
    with hosts(3, tmp_path) as here:
        result, raised = run_until(here, mpi, [1, 1, 1], tmp_path, cut(here, 2), program())
    assert result.code != 0
    for rank in (0, 1):
        assert f"host {here.names[2]} (rank 2) has been unreachable for " in raised[rank], raised
    assert f"host {here.names[0]} (rank 0) has been unreachable for " in raised[2], raised


IN_THE_MIDDLE = """
whole, part = np.ones(2**23, "f4"), np.ones(2**23 // size, "f4")
from allred.comm.functions import current
calls = dict(
    reducescatter=lambda: current().reducescatter(whole, allred.Max, out=part).wait(),
    allgather=lambda: current().allgather(part, out=whole).wait(),
)
try:
    for step in range(10**9):
        calls["{operation}"]()
        if step == 3 and rank == 0:
            (directory / "ready").touch()
except Exception as error:
    (directory / f"rank{rank}").write_text(f"{type(error).__name__}: {error}")
    raise
"""


@pytest.mark.parametrize(
    ("mpi", "operation"), [("mpich", "reducescatter"), pytest.param("openmpi", "allgather", marks=full)]
)
def test_the_job_ends_if_all_processes_of_a_host_are_killed_at_once(mpi, operation, tmp_path):
    """In the middle of an operation: each takes longer than all that is between two of them."""

    def kill():
        for pid in here.processes(1):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    with hosts(2, tmp_path) as here:
        code = program(before=IN_THE_MIDDLE.replace("{operation}", operation))
        result, raised = run_until(here, mpi, [1, 1], tmp_path, kill, code)
    if mpi == "mpich":
        assert result.code != 0
        assert f"allred: rank 1 on {here.names[1]} has ended without a report: all processes" in result.err, result.text
    else:
        # mpirun names the host and ends in milliseconds, often with code 0. Rank 0 has been ended by it, or is left
        # without a reader of its output. Which of the two losses it notices first depends on the scheduler.
        assert here.names[1] in result.text, result.text
        lost = f"the TCP connection to host {here.names[1]} (rank 1) was lost"
        found = raised.get(0, lost)
        assert lost in found or "has lost its launcher: prterun" in found, (raised, result.text)


@pytest.mark.parametrize("mpi", MPIS)
def test_a_host_that_cannot_be_reached_ends_the_job_before_a_rank_runs(mpi, tmp_path):
    with hosts(2, tmp_path) as here:
        here.names[1] += "x"
        result = here.run(mpi, [1, 1], "-c", program(), tmp_path)
        here.names.pop()
        here.wait_for_end()
    assert result.code != 0
    assert not (tmp_path / "ready").exists(), result.text
    if mpi == "openmpi":  # MPICH's mpirun may end before it has read what ssh wrote
        assert f"{here.names[0][:-1]}1x" in result.text, result.text


# The data passes eth1, and everything else eth0. Packets that a port of the listener should send are dropped: as a
# firewall that drops; `prohibit` answers as one that rejects.
@pytest.mark.parametrize(
    ("host", "route", "words"),
    [pytest.param(0, "blackhole", "timed out", marks=full), (1, "prohibit", "Permission denied")],
)
def test_a_firewall_between_hosts_is_one_clear_error(host, route, words, tmp_path):
    with hosts(2, tmp_path, networks=2) as here:
        here.route(host, f"{route} 10.99.1.{2 - host}/32")
        before = 'os.environ["ALLRED_NETWORK"] = "eth1"\n'
        result = here.run(
            "mpich", [1, 1], "-c", program().replace("import allred", before + "import allred", 1), tmp_path
        )
    assert result.code != 0
    line = f"rank 1 on {here.names[1]} cannot connect to rank 0 on {here.names[0]}: 10.99.1.1 port "
    assert line in result.text, result.text
    assert words in result.text, result.text
    assert "; set ALLRED_NETWORK to the interface between the hosts, or ALLRED_TRANSPORT=mpi" in result.text
