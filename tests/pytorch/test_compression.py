"""Compression between hosts with torch: the cases of compression_program.py on two pretended nodes, 9 s."""

import functools
import pathlib

import optimizer_case_runner as cases
import pytest

from allred import testing

pytest.importorskip("torch")

PROGRAM = pathlib.Path(__file__).with_name("compression_program.py")


@functools.cache
def results(nodes):
    env = {"OMP_NUM_THREADS": "1", "ALLRED_TRANSPORT": "tcp", "ALLRED_PRETEND_NODES": nodes, "ALLRED_TIMEOUT_S": "60"}
    result = testing.mpirun(sum(map(int, nodes.split(","))), PROGRAM, env=env, timeout_s=150)
    return cases.results(result.out), result.text


@pytest.mark.parametrize("name", cases.names(PROGRAM))
@pytest.mark.parametrize("nodes", ["1,1", pytest.param("2,1", marks=pytest.mark.full)])
def test_cases(nodes, name):
    found, text = results(nodes)
    assert found.get(name, f"the job ended before this case:\n{text}") == "ok"
