"""Runs the programs of docs/keras.md, and the example; and the reference has every public name."""

import pathlib
import re

import pytest
from page_blocks import programs

from allred import testing

pytest.importorskip("tensorflow")

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
ENV = {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("index", [0, 1], ids=["Keras", "TensorFlow"])
def test_programs(index, tmp_path):
    found = programs("keras.md")
    assert len(found) == 2
    program = tmp_path / "train.py"
    program.write_text(found[index])
    result = testing.mpirun(2, program, env=ENV, timeout_s=90)
    assert result.code == 0, result.text
    assert result.out.splitlines()[-1] == "found [1. 2. 3. 4.]"


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "backend"),
    [
        (2, "torch"),
        (1, "jax"),
        (3, "tensorflow"),
    ],
)
def test_the_example(ranks, backend):
    env = {**ENV, "KERAS_BACKEND": backend, "PYTHONPATH": str(EXAMPLES.parent / "tests/quick_digits")}
    result = testing.mpirun(ranks, EXAMPLES / "keras_digits.py", env=env, timeout_s=90)
    assert result.code == 0, result.text
    equal, accuracy = result.out.splitlines()[-2:]
    assert equal == "parameters equal on all ranks: yes"
    assert float(accuracy.removeprefix("test accuracy: ")) > 0.85


def test_every_public_name_has_an_entry_and_a_docstring():
    import allred.keras
    import allred.tensorflow as hvd

    for module, page in ((allred.keras.callbacks, "keras"), (hvd, "tensorflow")):
        text = (EXAMPLES.parent / f"docs/reference/{page}.md").read_text()
        entries = {entry.rpartition(".")[2] for entry in re.findall(r"^::: (\S+)$", text, flags=re.MULTILINE)}
        of_framework = re.compile(r"allred\.(keras|tensorflow)\.")
        values = {name: getattr(module, name) for name in module.__all__}
        own = {name for name, value in values.items() if of_framework.match(getattr(value, "__module__", ""))}
        assert own - {"Compression"} <= entries, own - entries
        assert all(values[name].__doc__ for name in own)
