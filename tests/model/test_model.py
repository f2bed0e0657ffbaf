"""The scenarios of the model in threads, where hypothesis shrinks failures; model.py runs them under mpirun."""

import importlib
import pathlib
import random
import tempfile
import threading

import checkpoints
import pytest
import tables
from hypothesis import HealthCheck, given, settings, strategies

import allred
from allred import testing

SURFACES = ("optimizers", "collectives", "data")  # that can run in threads
EXAMPLES = 60


@pytest.mark.parametrize("name", SURFACES)
@settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(rng=strategies.randoms(use_true_random=False), size=strategies.integers(1, 3))
def test_every_action_has_the_result_of_the_oracle(name, rng, size):
    surface = importlib.import_module(name)
    scenario = surface.scenario(rng, size)
    barrier, results = threading.Barrier(size), [None] * size

    def run(rank, directory):
        try:
            for problem, shared in surface.check(scenario, directory):
                results[rank] = problem, shared
                barrier.wait(60)
                assert not any(problem for problem, _ in results), f"{scenario}\n{results}"
                assert len({shared for _, shared in results if shared is not None}) <= 1, f"{scenario}\n{results}"
                barrier.wait(60)
        except BaseException:
            barrier.abort()  # the others do not wait
            raise

    with tempfile.TemporaryDirectory() as directory:
        testing.threads(size, lambda: run(allred.rank(), pathlib.Path(directory)), timeout_s=60)


@settings(max_examples=EXAMPLES // 2, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(rng=strategies.randoms(use_true_random=False))
@pytest.mark.parametrize("surface", [checkpoints, tables], ids=lambda surface: surface.__name__)
def test_every_part_of_a_training_has_the_result_of_the_oracle(surface, rng):
    scenario = surface.scenario(rng, 1)  # whose parts start threads themselves
    with tempfile.TemporaryDirectory() as directory:
        for problem, _ in surface.check(scenario, pathlib.Path(directory)):
            assert not problem, f"{scenario}\n{problem}"


def test_a_scenario_follows_from_its_seed():
    for name in (*SURFACES, "checkpoints", "tables"):
        surface = importlib.import_module(name)
        assert str(surface.scenario(random.Random(7), 3)) == str(surface.scenario(random.Random(7), 3))
