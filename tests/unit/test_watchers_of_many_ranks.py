"""What the watchers of a job send, and how much work an event is, as a function of the number of ranks."""

import json
import pathlib
import subprocess
import sys

import pytest

from allred.watch.job_state import JobState
from allred.watch.records import Records

SIMULATION = pathlib.Path(__file__).parents[1] / "scale/watchers.py"


def test_a_simulated_job_sends_each_rank_one_verdict_and_samples_are_small():
    result = subprocess.run([sys.executable, SIMULATION, "--sample"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    size, of_host, hosts = 12, 4, 3
    # Ranks and the socket to which they connect; on the chief's host also the other hosts, and two listeners.
    assert found["connections"] == [of_host + 1 + (hosts - 1) + 2, of_host + 2, of_host + 2]
    snapshot = found["snapshot"]
    assert [rank["rank"] for rank in snapshot["ranks"]] == list(range(size))
    assert {rank["state"] for rank in snapshot["ranks"]} == {"in Python at train.py:87 (step)"}
    assert len(json.dumps(snapshot["ranks"])) < 350 * size
    assert found["bytes_of_a_sample"] < 60 + 12 * of_host  # an answer, or a heartbeat
    assert [late[:2] for late in found["late"]] == [[size - 1, size - 1]]
    assert found["received"] == {str(rank): ["v", "r"] for rank in range(size) if rank != 7}
    assert len(found["verdicts"]) == 1
    assert '"rank": 7' in found["verdicts"][0]


class CountedRecords(Records):
    """Counts the records that are looked at."""

    looks = 0

    def __getitem__(self, rank):
        self.looks += 1
        return super().__getitem__(rank)

    def items(self):
        self.looks += len(self)
        return super().items()

    def values(self):
        self.looks += len(self)
        return super().values()


@pytest.mark.parametrize("ends", [False, True])
def test_a_tick_looks_at_no_rank_while_nothing_happens(monkeypatch, ends):
    monkeypatch.setattr("allred.watch.job_state.Records", CountedRecords)
    size, now = 1024, 0.0
    job = JobState(size, 64, 30.0)
    events = ["joined", "waiting", "resumed", *(["left"] if ends else [])]
    for name in events:
        for rank in range(size - 1):
            now += 0.001
            more = {"host": "h", "what": "barrier()", "since_s": 1.0, "peers": True, "quiet": False}
            job.handle({"event": name, "rank": rank, **more}, now)
            job.tick(now)
    ranks = job._ranks
    assert ranks.looks <= 8 * len(events) * size, "for each event a few records, not all"
    ranks.looks = 0
    for _ in range(100):
        now += 0.01
        job.tick(now)
    assert ranks.looks == 0
