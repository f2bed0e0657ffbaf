"""Drivers of their own on a local-cluster and a standalone cluster: lost executors, killed drivers, too few slots."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyspark
import pytest
from harness import run
from spark_session import ENVIRONMENT

HERE = Path(__file__).parent
PROGRAM = HERE / "cluster_program.py"
LOCAL_CLUSTER = "local-cluster[2,1,1024]"
SPARK = Path(pyspark.__file__).parent
RESUMED = r"results \[\W*([5-9]|1\d)\W+20\.0\W+\1\W+20\.0\W*\]\n"  # both ranks, from a checkpoint


def start_daemon(directory, name, *words):
    """Start a master or a worker of a standalone cluster. Return the process, and its address from the log."""
    env = {**os.environ, **ENVIRONMENT, "SPARK_HOME": str(SPARK), "SPARK_DAEMON_MEMORY": "256m"}
    log = directory / f"{name}.log"
    command = [
        SPARK / "bin/spark-class",
        f"org.apache.spark.deploy.{name.partition('-')[0].lower()}.{name.partition('-')[0]}",
    ]
    with log.open("w") as file:
        daemon = subprocess.Popen([*command, "--host", "127.0.0.1", "--webui-port", "0", *words], env=env, stderr=file)
    until = time.monotonic() + 60
    while not (
        found := re.search(r"(?:Starting Spark master at|registered with master) (spark://\S+)", log.read_text())
    ):
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.1)
    return daemon, found[1]


@pytest.fixture(scope="module")
def standalone(tmp_path_factory):
    """The address of a master with two workers, each with one slot."""
    directory = tmp_path_factory.mktemp("standalone")
    daemons = []
    try:
        master, address = start_daemon(directory, "Master", "--port", "0")
        daemons.append(master)
        for number in range(2):
            words = ["--work-dir", directory / "work", "-c", "1", "-m", "2g", address]
            daemons.append(start_daemon(directory, f"Worker-{number}", *words)[0])
        yield address
    finally:
        for daemon in daemons:
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(30)


def drive(master, case, directory):
    return run([sys.executable, PROGRAM, master, case, directory], 100, {"PYTHONPATH": str(HERE)})


def test_too_few_slots_and_an_executor_that_is_lost(tmp_path):
    result = drive(LOCAL_CLUSTER, "lost", tmp_path)
    assert result.code == 0, result.text
    assert "9 ranks need 9 slots, and the cluster (local-cluster[2,1,1024]) has 2: ask for fewer ranks" in result.out
    assert re.search(r"attempt 1 failed: Spark ended the ranks: ExecutorLostFailure \(executor \d+ exited", result.err)
    assert re.search(RESUMED, result.out), result.text


def test_an_executor_of_a_cluster_that_is_fed_is_lost(standalone, tmp_path):
    result = drive(standalone, "fed_lost", tmp_path)
    assert result.code == 0, result.text
    assert re.search(r"attempt 1 failed: (rank 1 on \S+ is lost|Spark ended the )", result.err), result.text
    assert re.search(RESUMED, result.out), result.text


def test_no_process_remains_after_a_driver_was_killed(standalone, tmp_path):
    env = {**os.environ, "PYTHONPATH": str(HERE)}
    driver = subprocess.Popen(
        [sys.executable, PROGRAM, standalone, "feeding", tmp_path], env=env, stderr=subprocess.DEVNULL, process_group=0
    )
    files = [tmp_path / f"rank-{rank}" for rank in range(2)]
    until = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < until
        time.sleep(0.1)
    pids = [int(file.read_text()) for file in files]
    os.kill(driver.pid, signal.SIGKILL)
    assert driver.wait(30) != 0
    until = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.1)
