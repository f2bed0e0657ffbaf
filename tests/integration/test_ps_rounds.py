"""Mode ps with `every`: the cases of ps_rounds_program.py with real processes."""

import itertools
import json
import pathlib

import pytest
from harness import full, mpirun

PROGRAM = pathlib.Path(__file__).with_name("ps_rounds_program.py")


def check(cases, ranks, directory, **env):
    env |= {"ALLRED_BANNER": "0", "ALLRED_WATCHER": "0"}  # without watchers a case starts in 10 ms, not in 90 ms
    result = mpirun(ranks, PROGRAM, directory, json.dumps(cases), env=env, timeout_s=100)
    assert result.code == 0, result.text
    assert result.out.split() == [name for name, *_ in cases], result.text


def means_cases(servers):
    every = itertools.product(["nested", "bare", "list", "0-d"], ["momentum", "adamw"], [False, True])
    return [["means", servers, {"form": form, "inner": inner, "samples": samples}] for form, inner, samples in every]


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=full)])
def test_the_mean_of_all_workers_is_a_round_of_mode_local(every, tmp_path):
    check(means_cases(1)[::every], 3, tmp_path)


@pytest.mark.parametrize(("workers", "every"), [(2, 7), pytest.param(3, 1, marks=full)])
def test_several_servers_and_hosts(workers, every, tmp_path):
    """Each rank on a (pretended) host of its own."""
    cases = [["grace", 2, {}], ["quorum", 2, {"grace_s": None}]] if workers == 2 else []
    apart = ",".join("1" * (2 + workers))
    check([*means_cases(2)[::every], *cases], 2 + workers, tmp_path, ALLRED_PRETEND_NODES=apart)


@pytest.mark.parametrize("servers", [1, pytest.param(2, marks=full)])
def test_late_changes_policies_checkpoints_and_sessions(servers, tmp_path):
    cases = [
        ["quorum", servers, {"grace_s": None}],
        ["quorum", servers, {"grace_s": 0.05}],
        ["grace", servers, {}],
        ["applied_alone", servers, {"policy": "async"}],
        ["applied_alone", servers, {"policy": "bounded"}],
        ["not_finite", servers, {}],
        ["save", servers, {"name": "ps"}],
        ["restore", servers, {"name": "ps", "has_outer": True}],
        ["session", servers, {"begin": None, "max_steps": 7, "end": 9}],
        ["session", servers, {"begin": 9, "max_steps": 12, "end": 12}],
        ["restore", 0, {"mode": "local", "name": "ps", "has_outer": False}],  # with another number of ranks
        ["save", 0, {"mode": "sync", "name": "sync"}],
        ["restore", servers, {"name": "sync", "has_outer": False}],
    ]
    check(cases, servers + 2, tmp_path)
