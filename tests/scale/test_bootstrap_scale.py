"""The starts of small jobs: how many messages and bytes."""

import json
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
EXCHANGES = 13  # of init() with several hosts


def measured(program, hosts, ranks):
    command = [sys.executable, HERE / program, "--hosts", str(hosts), "--ranks", str(ranks)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=100).stdout)


def test_the_rendezvous_of_tasks():
    found = measured("bootstrap.py", 8, 8)
    assert found["connections_tried"] == 2 * 64
    assert found["lines_in"] == 64 * (2 + EXCHANGES)  # the first line of each connection, and the values
    least = 64 * (2 * 2 + 2 + EXCHANGES)  # two lines of each handshake, "go" and "connected", and the values of all
    assert least <= found["lines_out"] <= least + 64 * 10, "missing tasks, when one connects and at intervals"
    assert found["bytes_in"] < 64 * 3000
    assert found["bytes_out"] < 64 * 64 * 400, "all values of a task take 1 kB; compressed, 200 bytes"


def test_the_start_of_an_elastic_job():
    found = measured("elastic_bootstrap.py", 4, 8)
    assert found["is_complete"], found
    beats = 4 * 2 * (found["all_s"] + 1)
    assert found["exchange_lines_out"] <= 4 * EXCHANGES + beats, "one message to each agent for each exchange"
    assert found["lines_in"] <= 32 * (EXCHANGES + 2) + 4 * 3 + beats
