"""Messages whose other end does not come: the time limit with its table, and a peer that fails."""

import re

import pytest
from harness import mpirun

SEND = """
import sys, time
import numpy as np
import allred
allred.init(timeout_s=1, banner=False)
comm = allred.ProcessSet([0, 1]).communicator()
if allred.rank() == 0:
    try:
        comm.recv(np.zeros(3), 1, tag=4).wait()
    except allred.AllredError as error:
        sys.exit(f"{type(error).__name__}: {error}")
elif sys.argv[1] == "late":
    time.sleep(60)
else:
    raise ValueError("no message from me")
"""


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            "late",
            r"CollectiveTimeout: recv\(from 1, tag 4\): not complete after 1 s\n"
            r" +rank 0 .* in recv\(from 1, tag 4\) .*\n +rank 1 .* in Python at <string>:\d+ ",
        ),
        ("fails", r"RemoteRankError: rank 1 on \S+ failed with exit code 1: ValueError: no message from me"),
    ],
)
def test_a_receiver_does_not_wait_forever(how, words):
    result = mpirun(2, "-c", SEND, how)
    assert result.code != 0
    assert re.search(words, result.err), result.text
