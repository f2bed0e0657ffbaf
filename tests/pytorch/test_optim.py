"""allred.optim against torch.optim, live, and the record of torch's results that the default tests use.

Run this file to write tests/unit/optim/torch_record.json again: python tests/pytorch/test_optim.py
"""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allred import optim

torch = pytest.importorskip("torch")

RECORD = Path(__file__).parents[1] / "unit" / "optim" / "torch_record.json"
STEPS = 20
# what torch calls the hyper-parameters and optimizers that have another name here
TORCH_WORDS = {"decay": "alpha", "initial_accumulator": "initial_accumulator_value"}
TORCH_NAMES = {"RMSProp": "RMSprop"}


def grid(name: str, **choices: list[Any]) -> list[tuple[str, dict[str, Any]]]:
    """(optimizer, hyper-parameters) for every combination of the choices."""
    return [(name, dict(zip(choices, values, strict=True))) for values in itertools.product(*choices.values())]


CASES = [
    *grid("SGD", lr=[0.1], momentum=[0.0], weight_decay=[0.0, 0.1]),
    *grid("SGD", lr=[0.1], momentum=[0.5, 0.9], nesterov=[False, True], weight_decay=[0.0, 0.1]),
    *grid("Adagrad", lr=[0.1], eps=[1e-10, 0.1], initial_accumulator=[0.0, 0.1], weight_decay=[0.0, 0.1]),
    *grid("RMSProp", lr=[0.01], decay=[0.9, 0.99], eps=[1e-8, 0.1], momentum=[0.0, 0.9], centered=[False, True]),
    *grid("RMSProp", lr=[0.01], weight_decay=[0.1], centered=[False, True]),
    *grid("Adam", lr=[0.1], betas=[(0.9, 0.999), (0.5, 0.9), (0.0, 0.0)], eps=[1e-8, 0.1], weight_decay=[0.0, 0.1]),
    *grid("AdamW", lr=[0.1], betas=[(0.9, 0.999), (0.5, 0.9)], eps=[1e-8, 0.1], weight_decay=[0.0, 0.1]),
    ("SGD", {"lr": 0.01}),  # torch's own default is 0.001
    *((name, {}) for name in ("Adagrad", "RMSProp", "Adam", "AdamW")),  # the defaults
]
IDS = [f"{name}-{hyper}" for name, hyper in CASES]


def torch_optimizer(name: str, tensors: list[Any], hyper: dict[str, Any]) -> Any:
    words = {TORCH_WORDS.get(word, word): value for word, value in hyper.items()}
    return getattr(torch.optim, TORCH_NAMES.get(name, name))(tensors, **words)


def torch_steps(optimizer: Any, tensors: list[Any], grads: list[np.ndarray]) -> None:
    for tensor, grad in zip(tensors, grads, strict=True):
        tensor.grad = torch.from_numpy(np.array(grad))
    optimizer.step()


def start(dtype: Any) -> tuple[list[np.ndarray], list[Any], list[list[np.ndarray]]]:
    """Equal parameters for allred and torch, and the gradients of all steps."""
    rng = np.random.default_rng(7)

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        imaginary = 1j * rng.normal(size=shape) if np.dtype(dtype).kind == "c" else 0
        return np.asarray(rng.normal(size=shape) + imaginary).astype(dtype)

    params = [draw(shape) for shape in [(3, 4), (5,)]] + [np.array(0.5, dtype)]
    grads = [[draw(param.shape) for param in params] for _ in range(STEPS)]
    return params, [torch.from_numpy(param.copy()).requires_grad_() for param in params], grads


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (np.float64, {"rtol": 1e-12, "atol": 1e-13}),
        (np.float32, {"rtol": 2e-5, "atol": 2e-6}),
        (np.complex128, {"rtol": 1e-12, "atol": 1e-13}),
        (np.complex64, {"rtol": 2e-5, "atol": 2e-6}),
    ],
    ids=["float64", "float32", "complex128", "complex64"],
)
@pytest.mark.parametrize(("name", "hyper"), CASES, ids=IDS)
def test_steps_and_slots_are_torchs(name, hyper, dtype, tolerance):
    params, tensors, grads = start(dtype)
    ours, theirs = getattr(optim, name)(**hyper), torch_optimizer(name, tensors, hyper)
    for step in grads:
        ours.step(params, step)
        torch_steps(theirs, tensors, step)
        for param, tensor in zip(params, tensors, strict=True):
            np.testing.assert_allclose(param, tensor.detach().numpy(), **tolerance)
    for index, slots in ours.state_dict()["slots"].items():
        for slot, array in slots.items():
            np.testing.assert_allclose(array, theirs.state[tensors[int(index)]][slot].numpy(), **tolerance)


TORCH = torch.optim.lr_scheduler
SCHEDULES = [
    (optim.constant(0.1), lambda o: TORCH.ConstantLR(o, factor=1.0)),
    (optim.exponential_decay(0.1, 1, 0.9), lambda o: TORCH.ExponentialLR(o, 0.9)),
    (optim.exponential_decay(0.1, 6, 0.5, staircase=True), lambda o: TORCH.StepLR(o, 6, 0.5)),
    (optim.step_decay(0.1, (3, 11, 12)), lambda o: TORCH.MultiStepLR(o, [3, 11, 12], 0.1)),
    (optim.cosine(0.1, STEPS), lambda o: TORCH.CosineAnnealingLR(o, STEPS)),
    (optim.cosine(0.1, STEPS, final=0.02), lambda o: TORCH.CosineAnnealingLR(o, STEPS, 0.02)),
    (optim.linear_warmup(0.1, 8), lambda o: TORCH.LinearLR(o, 1 / 8, total_iters=7)),
    (
        optim.linear_warmup(optim.exponential_decay(0.1, 1, 0.9), 8),
        lambda o: TORCH.ChainedScheduler([TORCH.ExponentialLR(o, 0.9), TORCH.LinearLR(o, 1 / 8, total_iters=7)]),
    ),
]


@pytest.mark.parametrize(("schedule", "make"), SCHEDULES, ids=[str(schedule) for schedule, _ in SCHEDULES])
def test_schedules_match_torch(schedule, make):
    params, tensors, grads = start(np.float64)
    ours, theirs = optim.SGD(lr=schedule, momentum=0.9), torch.optim.SGD(tensors, lr=0.1, momentum=0.9)
    scheduler = make(theirs)
    for step in grads:
        assert ours.learning_rate == pytest.approx(scheduler.get_last_lr()[0], rel=1e-12, abs=1e-15)
        ours.step(params, step)
        torch_steps(theirs, tensors, step)
        scheduler.step()
    for param, tensor in zip(params, tensors, strict=True):
        np.testing.assert_allclose(param, tensor.detach().numpy(), rtol=1e-12, atol=1e-13)


def test_clipping_matches_torch_except_epsilon():
    grads, tensors, _ = start(np.float64)
    for tensor, grad in zip(tensors, grads, strict=True):
        tensor.grad = torch.from_numpy(grad.copy())
    norm = torch.nn.utils.clip_grad_norm_(tensors, 1.0)
    assert optim.clip_by_global_norm_(grads, 1.0) == pytest.approx(float(norm), rel=1e-14)
    for tensor, grad in zip(tensors, grads, strict=True):
        np.testing.assert_allclose(grad, tensor.grad.numpy(), rtol=1e-6)  # torch divides by norm + 1e-6
    torch.nn.utils.clip_grad_value_(tensors, 0.1)
    optim.clip_by_value_(grads, 0.1)
    for tensor, grad in zip(tensors, grads, strict=True):
        np.testing.assert_allclose(grad, tensor.grad.numpy(), rtol=1e-6)


RECORDED = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("Adagrad", {"lr": 0.1}),
    ("Adagrad", {"lr": 0.1, "eps": 0.1, "initial_accumulator": 0.1, "weight_decay": 0.1}),
    ("RMSProp", {"lr": 0.1}),
    ("RMSProp", {"lr": 0.1, "decay": 0.9, "eps": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    ("RMSProp", {"lr": 0.1, "decay": 0.9, "centered": True}),
    ("Adam", {"lr": 0.1}),
    ("Adam", {"lr": 0.1, "betas": [0.5, 0.9], "eps": 0.1, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.1, "eps": 0.1}),
    ("AdamW", {"lr": 0.1, "betas": [0.5, 0.9], "weight_decay": 0.5}),
]


def record() -> dict[str, Any]:
    """What torch gives for a few steps of each recorded case, in float64; JSON keeps every digit."""
    params = {"w": [[1.0, -2.0], [0.5, 0.25]], "b": 0.75}
    grads = [{"w": [[0.5, k - 1.0], [-0.125 * (k + 1), 2.0]], "b": 0.25 - k} for k in range(4)]
    cases = []
    for name, hyper in RECORDED:
        tensors = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in params.values()]
        optimizer, after = torch_optimizer(name, tensors, hyper), []
        for step in grads:
            torch_steps(optimizer, tensors, [np.array(step[key]) for key in params])
            after.append({key: tensor.tolist() for key, tensor in zip(params, tensors, strict=True)})
        cases.append({"optimizer": name, "hyper": hyper, "after": after})
    version = torch.__version__.partition("+")[0]
    recorded_by = "python tests/pytorch/test_optim.py"
    return {"recorded_by": recorded_by, "torch": version, "params": params, "grads": grads, "cases": cases}


def test_the_record_is_what_torch_gives_now():
    recorded, now = json.loads(RECORD.read_text()), json.loads(json.dumps(record()))
    for case, fresh in zip(recorded.pop("cases"), now.pop("cases"), strict=True):
        assert (case["optimizer"], case["hyper"]) == (fresh["optimizer"], fresh["hyper"])
        for before, after in zip(case["after"], fresh["after"], strict=True):
            assert before.keys() == after.keys()
            for name in before:  # a last digit may differ between processors
                np.testing.assert_allclose(before[name], after[name], rtol=1e-14, atol=1e-15)
    assert recorded.pop("torch").count(".") == now.pop("torch").count(".") == 2
    assert recorded == now


def write(path: Path) -> None:
    whole = record()
    cases = ",\n".join(f"  {json.dumps(case)}" for case in whole.pop("cases"))
    head = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in whole.items())
    path.write_text(f'{{\n{head},\n "cases": [\n{cases}\n ]\n}}\n')


if __name__ == "__main__":
    write(RECORD)
