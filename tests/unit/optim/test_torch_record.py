"""allred.optim gives what torch.optim gave: against the recorded numbers, so that this needs no torch.

torch_record.json holds parameters, gradients and the parameters after every step, for each optimizer and set of
hyper-parameters; the command that wrote it stands in it. tests/pytorch compares with torch itself.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from allred import optim

RECORD = json.loads((Path(__file__).parent / "torch_record.json").read_text())


@pytest.mark.parametrize("case", RECORD["cases"], ids=lambda case: f"{case['optimizer']}-{case['hyper']}")
def test_every_step_is_torchs(case):
    optimizer = getattr(optim, case["optimizer"])(**case["hyper"])
    params = {name: np.array(value) for name, value in RECORD["params"].items()}
    for grads, after in zip(RECORD["grads"], case["after"], strict=True):
        optimizer.step(params, {name: np.array(value) for name, value in grads.items()})
        for name, expected in after.items():
            np.testing.assert_allclose(params[name], expected, rtol=1e-12, atol=1e-14, err_msg=name)


def test_the_record_covers_every_optimizer_and_moves_every_element(cases):
    assert {case["optimizer"] for case in RECORD["cases"]} == {case.name for case in cases}
    assert RECORD["recorded_by"] == "python tests/pytorch/test_optim.py"
    for case in RECORD["cases"]:
        for name, value in RECORD["params"].items():
            assert (np.array(case["after"][-1][name]) != np.array(value)).all()
