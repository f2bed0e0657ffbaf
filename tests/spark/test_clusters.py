"""Drivers of their own, on a local-cluster, and on a standalone cluster of two hosts: lost executors, killed drivers,
too few slots. The hosts are network namespaces; for other users than root the tests with them are skipped.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pyspark
import pytest
from harness import run
from hosts import hosts
from spark_session import ENVIRONMENT

HERE = Path(__file__).parent
PROGRAM = HERE / "cluster_program.py"
LOCAL_CLUSTER = "local-cluster[2,1,1024]"
SPARK = Path(pyspark.__file__).parent
RESUMED = r"results \[\W*([5-9]|1\d)\W+20\.0\W+\1\W+20\.0\W*\]\n"  # both ranks, from a checkpoint

ADDRESS = "10.99.0.{}"  # of a host


class Standalone:
    """A standalone cluster on two hosts: a master on the first one, and a worker with one slot on each."""

    def __init__(self, here, directory):
        self.hosts, self._directory = here, directory
        self.daemons = []
        self.master = self._start("Master", 0, "--port", "0")
        for number in range(2):
            words = ["--work-dir", directory / "work", "-c", "1", "-m", "2g", self.master]
            self._start("Worker", number, *words)

    def _start(self, kind, number, *words):
        """Start a daemon on a host. Return the address of the master, from its log."""
        log = self._directory / f"{kind}-{number}.log"
        program = [SPARK / "bin/spark-class", f"org.apache.spark.deploy.{kind.lower()}.{kind}"]
        env = {**os.environ, **environment(number), "SPARK_HOME": str(SPARK), "SPARK_DAEMON_MEMORY": "256m"}
        options = ["--host", ADDRESS.format(number + 1), "--webui-port", "0", *words]
        with log.open("w") as file:
            self.daemons.append(
                subprocess.Popen([*self.hosts.inside(number), *program, *options], env=env, stderr=file)
            )
        until = time.monotonic() + 60
        pattern = r"(?:Starting Spark master at|registered with master) (spark://\S+)"
        while not (found := re.search(pattern, log.read_text())):
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        return found[1]

    def driver(self, case, directory):
        """Return the command of a driver on the first host."""
        return [*self.hosts.inside(0), sys.executable, PROGRAM, self.master, case, directory]

    def processes(self):
        """Return the processes on both hosts, without the daemons."""
        found = {pid for number in range(2) for pid in self.hosts.processes(number)}
        return found - {daemon.pid for daemon in self.daemons}

    def stop(self):
        for daemon in self.daemons:
            daemon.terminate()
        for daemon in self.daemons:
            daemon.wait(30)


def environment(number):
    return {**ENVIRONMENT, "SPARK_LOCAL_IP": ADDRESS.format(number + 1), "PYTHONPATH": str(HERE)}


@pytest.fixture(scope="module")
def standalone(tmp_path_factory):
    directory = tmp_path_factory.mktemp("standalone")
    with hosts(2, directory) as here:
        cluster = Standalone(here, directory)
        try:
            yield cluster
        finally:
            cluster.stop()


def test_too_few_slots_and_an_executor_that_is_lost(tmp_path):
    command = [sys.executable, PROGRAM, LOCAL_CLUSTER, "lost", tmp_path]
    result = run(command, 100, {**ENVIRONMENT, "PYTHONPATH": str(HERE)})
    assert result.code == 0, result.text
    assert re.search(r"9 ranks need 9 slots, and the cluster \(local-cluster\S+\) has [012]: ask for fewer", result.out)
    assert re.search(r"attempt 1 failed: Spark ended the ranks: ExecutorLostFailure \(executor \d+ exited", result.err)
    assert re.search(RESUMED, result.out), result.text


def test_ranks_on_two_hosts_that_are_fed_and_an_executor_that_is_lost(standalone, tmp_path):
    result = run(standalone.driver("fed_lost", tmp_path), 100, environment(0))
    assert result.code == 0, result.text
    assert re.search(r"attempt 1 failed: (rank 1 on \S+ is lost|Spark ended the )", result.err), result.text
    assert re.search(RESUMED, result.out), result.text
    assert len({(tmp_path / f"host-{rank}").read_text() for rank in range(2)}) == 2


def test_no_process_remains_after_a_driver_was_killed(standalone, tmp_path):
    command = list(map(str, standalone.driver("feeding", tmp_path)))
    driver = subprocess.Popen(command, env={**os.environ, **environment(0)}, stderr=subprocess.DEVNULL, process_group=0)
    files = [tmp_path / f"rank-{rank}" for rank in range(2)]
    until = time.monotonic() + 60
    try:
        while not all(file.exists() and file.read_text() for file in files):
            assert time.monotonic() < until
            time.sleep(0.1)
    finally:
        driver.kill()
        driver.wait()
    until = time.monotonic() + 30
    while standalone.processes():
        assert time.monotonic() < until
        time.sleep(0.1)
