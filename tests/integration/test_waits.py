"""Waits without a time limit (docs/assumptions.md): a long one is reported, with the table of states."""

import re

from harness import mpirun

SLEEPS = "if allred.rank() == 1: time.sleep(3)\n"
INIT = f"allred.init(banner=False)\nallred.barrier()\n{SLEEPS}"
CLIENT = """
server = allred.Server({"worker": 1, "client": 1})
def function(): time.sleep(3)
if allred.job_name() == "worker":
    server.join()
else:
    with allred.device("/job:worker/task:0"): allred.connect("").start(function)
"""
# One after another in the same ranks, in which "ended" is the last.
WAITS = {
    "join": (INIT + "allred.join()", r"rank 0 has waited for \d+ s in join\(\) #\d+\n  rank 0.*\n  rank 1"),
    "server": (
        f"server = allred.Server({{'worker': 2}})\n{SLEEPS}server.join()",
        r"rank 0 has waited for \d+ s in barrier\(\) #\d+\n  rank 0.*\n  rank 1",
    ),
    "client": (
        CLIENT,
        r"rank 1 has waited for \d+ s in the functions that this client has started\n  rank 0 \(worker 0\)",
    ),
    "ended": (
        INIT,
        r"rank 0 ended \d+ s ago, and cannot leave MPI before the other ranks end\n  rank 0 +\S+ +has ended\n  rank 1",
    ),
}


def test_each_wait_without_a_limit_is_reported():
    env = {"ALLRED_BANNER": "0", "ALLRED_STALL_WARNING_S": "1", "ALLRED_TIMEOUT_S": "2"}
    program = "\nallred.shutdown()\n".join(program for program, _ in WAITS.values())
    result = mpirun(2, "-c", f"import time, allred\n{program}", timeout_s=40, env=env)
    assert result.code == 0, result.text
    for wait, (_, words) in WAITS.items():
        assert re.search(rf"allred: {words} +\S+ +in Python at <[a-z-]+>:\d+", result.err), (wait, result.text)
