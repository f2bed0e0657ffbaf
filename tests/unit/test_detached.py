"""Background processes that are launched before they are needed, and end if they are not."""

import subprocess
import sys

import pytest

from allred import detached
from allred.watch import start

MODULE = "allred.watch.process"


@pytest.fixture(autouse=True)
def first_of_two(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "0")
    yield
    start.discard()


def test_without_settings_it_ends():
    launched = detached.launch(MODULE)
    assert (*launched.communicate(""), launched.returncode) == ("", "", 0)


def test_it_ends_if_its_rank_is_killed():
    code = f"from allred import detached; detached.launch({MODULE!r}); import os; os.kill(os.getpid(), 9)"
    rank = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, timeout=60, check=False)
    assert (rank.returncode, rank.stderr) == (-9, b"")  # stderr has ended: no process holds it


def test_a_service_starts_in_the_launched_process():
    launched = detached.launch(MODULE)
    pid = launched.pid
    answer = detached.start("allred.no_such_module", {"wrong": "settings"}, launched=launched)
    assert "KeyError: 'chief'" in answer["problem"]
    assert launched.returncode == 1
    assert launched.pid == pid


@pytest.mark.parametrize(
    ("settings", "variables"),
    [
        ({"watcher": False}, {}),
        ("a problem", {}),
        ({}, {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}),
        ({}, {"OMPI_COMM_WORLD_LOCAL_RANK": ""}),
        ({}, {"OMPI_COMM_WORLD_SIZE": "1"}),
    ],
)
def test_ranks_that_start_no_watcher_launch_none(monkeypatch, settings, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    start.launch(settings)
    assert start._take_launched() is None


def test_a_watcher_that_is_not_started_ends():
    start.launch({})
    launched = start._launched
    start.discard()
    assert launched.returncode == 0


def test_a_launched_process_that_was_killed_is_not_used():
    launched = detached.launch(MODULE)
    launched.kill()
    launched.wait()
    assert "KeyError" in detached.start(MODULE, {"wrong": "settings"}, launched=launched)["problem"]
