"""Background processes that are spawned before they are needed, and end if they are not."""

import subprocess
import sys

import pytest

from allred.runtime import detached
from allred.watch import start

MODULE = "allred.watch.process"


@pytest.fixture(autouse=True)
def as_local_rank_0_of_2(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "0")
    yield
    start.discard_spawned()


def test_without_settings_it_ends():
    spawned = detached.spawn(MODULE)
    assert (*spawned.communicate(""), spawned.returncode) == ("", "", 0)


def test_it_ends_if_its_rank_is_killed():
    code = f"from allred.runtime import detached; detached.spawn({MODULE!r}); import os; os.kill(os.getpid(), 9)"
    rank = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, timeout=60, check=False)
    assert (rank.returncode, rank.stderr) == (-9, b"")  # stderr has ended: no process holds it


def test_a_process_that_fails_is_replaced():
    spawned = detached.spawn(MODULE)
    answer = detached.start("allred.no_such_module", {"wrong": "settings"}, process=spawned)
    assert (spawned.returncode, answer["problem"]) == (
        1,
        "ModuleNotFoundError: No module named 'allred.no_such_module'",
    )


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
def test_ranks_that_start_no_watcher_spawn_none(monkeypatch, settings, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    start.spawn_early(settings)
    assert start._take_spawned() is None


def test_a_watcher_that_is_not_started_ends():
    start.spawn_early({})
    spawned = start._spawned
    start.discard_spawned()
    assert spawned.returncode == -9


def test_a_spawned_process_that_was_killed_is_not_used():
    spawned = detached.spawn(MODULE)
    spawned.kill()
    spawned.wait()
    assert "WatcherSettings" in detached.start(MODULE, {"wrong": "settings"}, process=spawned)["problem"]
