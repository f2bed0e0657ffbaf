"""`allred top` and the metrics endpoint on running jobs: slow, stopped and hanging ranks, several nodes. About 20 s."""

import json
import os
import re
import signal
import socket
import stat
import subprocess
import time
import urllib.request

import pytest
from harness import BIN, MPIS, environment, full, mpirun
from ports import reserved_ports

PROGRAM = """
import os, pathlib, signal, sys, time
import numpy as np
import allred
directory, what = pathlib.Path(sys.argv[1]), sys.argv[2]
allred.init(banner=False)
rank, params, opt = allred.rank(), {{"w": np.zeros(1000)}}, allred.distributed(allred.optim.SGD(lr=0.1))
batches = allred.data.batches(np.arange(10**6), batch_size=8, seed=0)
for step, x in enumerate(batches):
    opt.step(params, {{"w": np.full(1000, x.sum() * 1.0)}})
    if allred.allreduce(np.array([float((directory / "end").exists())]), allred.Sum)[0]:
        break
    if what == "slow" and rank == 1:
        time.sleep(0.05)
    if what == "stopped" and rank == 1 and step == 10:
        os.kill(os.getpid(), signal.SIGSTOP)
    if step == 10 and rank == 0:
        (directory / "ready").touch()
"""


class Job:
    """A job in the background. Its file in the job directory is in `directory`/allred."""

    def __init__(self, directory, ranks, what, mpi="mpich", **env):
        self.directory, program = directory, directory / "train.py"
        program.write_text(PROGRAM.format())
        own = {"XDG_RUNTIME_DIR": str(directory), "OMP_NUM_THREADS": "1", **env}
        self._env = {k: v for k, v in {**os.environ, **environment(own)}.items() if v is not None}
        words = [BIN[mpi] / "mpirun", "-np", ranks, BIN[mpi] / "python", program, directory, what]
        self.process = subprocess.Popen(
            [str(word) for word in words], env=self._env, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def __enter__(self):
        while not (self.directory / "ready").exists():
            assert self.process.poll() is None, self.process.stderr.read()
            time.sleep(0.05)
        return self

    def __exit__(self, *error):
        (self.directory / "end").touch()
        if self.process.poll() is None and not error[0]:
            with self.process.stderr:
                self.text = self.process.stderr.read()
            assert self.process.wait(60) == 0, self.text
        else:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process.stderr.close()

    def top(self, *options):
        command = [BIN["mpich"] / "python", "-m", "allred", "top", *map(str, options)]
        result = subprocess.run(command, env=self._env, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def json(self):
        return json.loads(self.top("--json"))


def test_top_shows_speed_waits_and_the_line_of_each_rank_and_the_last_state_after_the_end(tmp_path):
    with Job(tmp_path, 3, "slow") as job:
        text, found = job.top(), job.json()
        [entry] = (tmp_path / "allred").glob("*.job")
        assert stat.S_IMODE(entry.stat().st_mode) == 0o600
        assert stat.S_IMODE(entry.parent.stat().st_mode) == 0o700
    assert not entry.exists()
    assert "3 ranks, mode sync" in text, text
    assert re.search(r"rank 1 delayed (2 ranks, [\d.]+ s each|rank [02], [\d.]+ s)", text), text
    ranks = found["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1, 2]
    assert all(rank["step"] >= 10 and rank["examples"] > 0 and rank["bytes"] > 0 for rank in ranks)
    assert all(rank["seconds"] >= rank["waiting_s"] + rank["communicating_s"] for rank in ranks)
    assert ranks[0]["waiting_s"] > ranks[1]["waiting_s"]
    assert all(re.fullmatch(r"in (Python|MPI \w+) at train.py:\d+ \(<module>\)", rank["state"]) for rank in ranks), (
        ranks
    )
    assert (found["state"], found["ended"], found["messages"], found["history"]) == ("running", False, [], [])
    last = json.loads(job.top(entry.stem, "--json"))
    assert (last["state"], last["ended"], [rank["state"] for rank in last["ranks"]]) == (
        "ended",
        True,
        3 * ["has ended"],
    )
    assert all(rank["steps"] > before["steps"] for rank, before in zip(last["ranks"], ranks, strict=True))
    assert entry.with_suffix(".ended").stat().st_mode & 0o777 == 0o600
    page = tmp_path / "page.html"
    assert str(page) in job.top(entry.stem, "--html", page)
    assert f'"job":"{entry.stem}"' in page.read_text()


def test_top_answers_while_a_rank_is_stopped(tmp_path):
    with Job(tmp_path, 2, "stopped", ALLRED_STALL_WARNING_S="1.2", ALLRED_JOB="stopped") as job:
        time.sleep(1.5)  # rank 0 reports a wait of this length
        text = job.top()
        stopped = job.json()["ranks"][1]["state"]
        assert stopped.startswith("stopped (kill -CONT "), text
        assert "in opt.step() #" in text, text
        assert "rank 1 delayed rank 0" in text, text
        while not (messages := job.json()["messages"]):
            time.sleep(0.1)
        assert re.search(r"rank 0 has waited for \d s in opt.step.*\n.*\n.*stopped \(kill", messages[0]["text"]), (
            messages
        )
        os.kill(int(stopped.split("-CONT ")[1].split()[0]), signal.SIGCONT)


@full
@pytest.mark.parametrize("mpi", MPIS)
def test_the_ranks_of_all_nodes_are_shown(mpi, tmp_path):
    with Job(tmp_path, 3, "slow", mpi, ALLRED_PRETEND_NODES="2,1", ALLRED_JOB="nodes") as job:
        found = job.json()
    last = json.loads(job.top("nodes", "--json"))
    assert [rank["state"] for rank in last["ranks"]] == 3 * ["has ended"]
    assert last["ranks"][2]["steps"] > found["ranks"][2]["steps"]
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2]
    assert all(rank["step"] > 0 and rank["state"] for rank in found["ranks"])


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        return page.read().decode()


@full
def test_the_metrics_end_with_the_job(tmp_path):
    [port] = reserved_ports(1)
    with Job(tmp_path, 2, "slow", ALLRED_METRICS=str(port), ALLRED_JOB="measured") as job:
        time.sleep(7)  # longer than the watcher keeps a connection that sends nothing
        first = scrape(port)
        time.sleep(0.5)
        second = scrape(port)
    assert "allred_ranks 2.0" in first
    assert 'allred_delay_seconds_total{late="1",rank="0"}' in second
    label = 'allred_steps_total{host="' + socket.gethostname() + '",job_name="measured",rank="1"} '
    steps = [float(page.split(label)[1].split()[0]) for page in (first, second)]
    assert 0 < steps[0] < steps[1]
    assert 'phase="waiting"' in first
    assert f"allred: metrics at http://127.0.0.1:{port}/metrics\n" in job.text
    for _ in range(100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                break
        time.sleep(0.05)
    else:
        raise AssertionError("the endpoint is still there")


def test_a_port_that_is_busy_is_a_warning(tmp_path):
    with (
        socket.create_server(("127.0.0.1", 0)) as busy,
        Job(tmp_path, 2, "slow", ALLRED_METRICS=str(busy.getsockname()[1])) as job,
    ):
        pass
    assert "no metrics: cannot listen on 127.0.0.1 port" in job.text


@pytest.mark.parametrize(
    "value", [*(pytest.param(value, marks=pytest.mark.full) for value in ("many", "0")), "127.0.0.1:99999"]
)
def test_a_wrong_port_is_a_warning(value, tmp_path):
    result = mpirun(2, "-c", "import allred; allred.init()", env={"ALLRED_METRICS": value})
    assert result.code == 0, result.text
    assert f"ALLRED_METRICS={value}: no metrics: '{value}' is not a port, or host:port" in result.err, result.text


def test_without_a_job_top_says_so(tmp_path):
    command = [BIN["mpich"] / "python", "-m", "allred", "top", "nobody"]
    env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "no job 'nobody'; no job of this user runs on this host" in result.stderr
