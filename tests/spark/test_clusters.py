"""Drivers of their own, on a local-cluster, and on a standalone cluster of two hosts: lost executors, killed drivers,
too few slots. The hosts are network namespaces; for other users than root the test with them is skipped.
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

pytestmark = pytest.mark.xdist_group("clusters")  # of the groups that xdist makes it is the largest, so it starts first


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


@pytest.mark.full  # by default an executor is lost in the test below
def test_too_few_slots_and_an_executor_that_is_lost(tmp_path):
    """And the end of a driver whose ranks were fed."""
    command = [sys.executable, PROGRAM, LOCAL_CLUSTER, "lost", tmp_path]
    result = run(command, 100, {**ENVIRONMENT, "PYTHONPATH": str(HERE)})
    assert result.code == 0, result.text
    assert re.search(r"9 ranks need 9 slots, and the cluster \(local-cluster\S+\) has [012]: ask for fewer", result.out)
    assert re.search(r"attempt 1 failed: Spark ended the ranks: ExecutorLostFailure \(executor \d+ exited", result.err)
    assert re.search(RESUMED, result.out), result.text


@pytest.mark.limit(150)
def test_two_hosts_an_executor_that_is_lost_and_then_a_killed_driver(standalone, tmp_path):
    """One driver. Its ranks, on both hosts, are fed and continue after the loss of an executor. Then it is killed while
    it feeds other ranks, and no process remains.
    """
    lost, feeding = tmp_path / "lost", tmp_path / "feeding"
    lost.mkdir()
    feeding.mkdir()
    command = list(map(str, standalone.driver("fed_lost_then_feeding", tmp_path)))
    output = tmp_path / "out", tmp_path / "err"
    with output[0].open("w") as out, output[1].open("w") as err:
        env = {**os.environ, **environment(0)}
        driver = subprocess.Popen(command, env=env, stdout=out, stderr=err, process_group=0)
    files = [feeding / f"rank-{rank}" for rank in range(2)]
    until = time.monotonic() + 100
    try:
        while not all(file.exists() and file.read_text() for file in files):
            text = "\n".join(file.read_text() for file in output)
            assert time.monotonic() < until, text
            assert driver.poll() is None, text
            time.sleep(0.1)
        assert standalone.processes()
    finally:
        driver.kill()
        driver.wait()
    out, err = (file.read_text() for file in output)
    assert re.search(r"attempt 1 failed: (rank 1 on \S+ is lost|Spark ended the )", err), out + err
    assert re.search(RESUMED, out), out + err
    for directory in (lost, feeding):
        assert len({(directory / f"host-{rank}").read_text() for rank in range(2)}) == 2
    until = time.monotonic() + 30
    while standalone.processes():
        assert time.monotonic() < until
        time.sleep(0.1)
