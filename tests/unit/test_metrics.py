"""The metrics of a snapshot, and the dashboard that shows them."""

import json
import pathlib
import re

import pytest

from allred.counters import Values
from allred.monitor import metrics

pytest.importorskip("prometheus_client")
DASHBOARD = pathlib.Path(__file__).parents[2] / "docs/grafana.json"


def samples(delays=((0, 1, 2.5),)):
    values = Values(step=9, steps=8, examples=64, seconds=10, waiting_s=2, communicating_s=1, bytes=5)
    ranks = [{"rank": rank, "host": "n", **values._asdict()} for rank in range(2)]
    now = {"job": "j", "size": 2, "starts": 3, "ranks": ranks, "delays": delays, "late": [[1, 1, 2.5]]}
    found = [sample for family in metrics.families(now) for sample in family.samples]
    return {(each.name, *sorted(each.labels.items())): each.value for each in found}


def test_each_number_is_a_metric():
    found = samples()
    of_rank = (("host", "n"), ("job_name", "j"))
    assert found["allred_ranks",] == 2
    assert found["allred_starts_total",] == 3
    assert found["allred_steps_total", *of_rank, ("rank", "1")] == 8
    assert found["allred_delay_seconds_total", ("late", "1"), ("rank", "0")] == 2.5
    assert samples(delays=())["allred_delay_seconds_total", ("late", "1"), ("rank", "all")] == 2.5
    phases = {dict(key[1:])["phase"]: value for key, value in found.items() if key[0] == "allred_phase_seconds_total"}
    assert phases == {"waiting": 2, "communicating": 1, "computing": 7}


def test_the_dashboard_uses_metrics_and_labels_that_exist():
    text = DASHBOARD.read_text()
    names, labels = {key[0] for key in samples()}, {label for key in samples() for label, _ in key[1:]}
    queries = [target["expr"] for panel in json.loads(text)["panels"] for target in panel["targets"]]
    used = set(re.findall(r"allred_\w+", " ".join(queries)))
    assert used <= names
    assert {name for name in names if name not in used} == set()
    assert set(re.findall(r"(\w+)=\"", " ".join(queries))) <= labels
