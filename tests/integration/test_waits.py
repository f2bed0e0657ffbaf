"""Waits that have no time limit on purpose (docs/assumptions.md): a long one is told, with the table."""

import re

import pytest
from harness import mpirun

INIT = "import time, allred\nallred.init(banner=False)\nallred.barrier()\n"
SLEEPS = "if allred.rank() == 1: time.sleep(4)\n"
CLIENT = """
import time, allred
server = allred.Server({"worker": 1, "client": 1})
def function(): time.sleep(4)
if allred.job_name() == "worker":
    server.join()
else:
    with allred.device("/job:worker/task:0"): allred.connect("").start(function)
"""
WAITS = {
    "ended": (
        INIT + SLEEPS,
        r"rank 0 ended \d+ s ago, and cannot leave MPI before the other ranks end\n  rank 0 +\S+ +has ended\n  rank 1",
    ),
    "join": (INIT + SLEEPS + "allred.join()", r"rank 0 has waited for \d+ s in join\(\) #\d+\n  rank 0.*\n  rank 1"),
    "server": (
        f"import time, allred\nserver = allred.Server({{'worker': 2}})\n{SLEEPS}server.join()",
        r"rank 0 has waited for \d+ s in barrier\(\) #\d+\n  rank 0.*\n  rank 1",
    ),
    "client": (
        CLIENT,
        r"rank 1 has waited for \d+ s in the functions that this client has started\n  rank 0 \(worker 0\)",
    ),
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_without_a_limit_is_told(wait):
    program, words = WAITS[wait]
    env = {"ALLRED_BANNER": "0", "ALLRED_STALL_WARNING_S": "1", "ALLRED_TIMEOUT_S": "2"}
    result = mpirun(2, "-c", program, timeout_s=40, env=env)
    assert result.code == 0, result.text
    assert re.search(rf"allred: {words} +\S+ +in Python at <string>:\d+", result.err), result.text
