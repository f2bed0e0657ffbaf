"""Mode ps with torch optimizers: ps_torch_program.py. One job takes about 8 s of CPU time, the import of torch."""

import pathlib
import re

import pytest

from allred import testing

pytest.importorskip("torch")

PROGRAM = pathlib.Path(__file__).with_name("ps_torch_program.py")


def run(ranks, how, kind, **settings):
    env = {"OMP_NUM_THREADS": "1", "ALLRED_MODE": "ps", "ALLRED_TIMEOUT_S": "200"}
    env |= {f"ALLRED_{name.upper()}": value for name, value in settings.items()}
    result = testing.mpirun(ranks, PROGRAM, how, kind, env=env, timeout_s=280)
    assert result.code == 0, result.text
    found = re.search(r"equal: (\w+); loss (\S+) -> (\S+); (\d+) updates", result.out)
    assert found, result.text
    assert float(found[3]) < float(found[2])
    return found[1] == "True", int(found[4])


@pytest.mark.limit(300)
@pytest.mark.parametrize(
    ("servers", "kind"),
    [(1, "groups"), *(pytest.param(n, kind, marks=pytest.mark.full)
                      for n, kind in ((1, "sgd"), (1, "adam"), (2, "adam"), (1, "halves")))],
)  # fmt: skip
def test_one_worker_has_the_bits_of_one_process(servers, kind):
    """With a schedule of the learning rate, momentum and clipping of the worker."""
    assert run(servers + 1, "serial", kind, num_ps=str(servers)) == (True, 10)


@pytest.mark.full  # test_torch_examples.py has two workers by default
@pytest.mark.limit(300)
@pytest.mark.parametrize(("consistency", "updates"), [("sync", 10), ("async", 20), ("bounded", 20)])
def test_two_workers_learn(consistency, updates):
    assert run(3, "workers", "adam", consistency=consistency) == (True, updates)
