"""Runs the programs of docs/jax.md, and the example; and the reference has every public name."""

import pathlib
import re

import pytest
from page_blocks import programs

from allred import testing

pytest.importorskip("jax")
pytest.importorskip("optax")

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
ENV = {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("index", "last"), [(0, "found [1. 2. 3. 4.]"), (1, "mean below 1e-5: True")], ids=["training", "collectives"]
)
def test_programs(index, last, tmp_path):
    found = programs("jax.md")
    assert len(found) == 2
    program = tmp_path / "train.py"
    program.write_text(found[index])
    result = testing.mpirun(2, program, env=ENV, timeout_s=60)
    assert result.code == 0, result.text
    assert result.out.splitlines()[-1] == last


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])
def test_the_example(ranks):
    env = {**ENV, "PYTHONPATH": str(EXAMPLES.parent / "tests/quick_digits")}  # without the import of scikit-learn
    result = testing.mpirun(ranks, EXAMPLES / "jax_digits.py", env=env, timeout_s=90)
    assert result.code == 0, result.text
    equal, accuracy = result.out.splitlines()[-2:]
    assert equal == "parameters equal on all ranks: yes"
    assert float(accuracy.removeprefix("test accuracy: ")) > 0.9


def test_every_public_name_has_an_entry_and_a_docstring():
    import allred.jax

    page = EXAMPLES.parent / "docs/reference/jax.md"
    entries = re.findall(r"^::: (\S+)$", page.read_text(), flags=re.MULTILINE)
    names = [entry.rpartition(".")[2] for entry in entries]
    assert sorted(names) == sorted([*allred.jax.__all__, "DistributedTransformation"])
    assert all(getattr(allred.jax, name).__doc__ for name in allred.jax.__all__)
