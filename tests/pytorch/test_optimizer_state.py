"""The state of a torch optimizer as arrays and back, and options that a checkpoint cannot hold; without other ranks."""

import pytest

torch = pytest.importorskip("torch")

from allred.errors import InputError  # noqa: E402
from allred.torch.optimizer_adapter import OptimizerAdapter  # noqa: E402
from allred.torch.optimizer_state import from_slots, to_slots  # noqa: E402


@pytest.mark.parametrize(
    "state",
    [
        {"a": 1, "a.b": 2, "a.c": 3.0, "l": [1, [2.0, None], (True,)], "l.0": 5},
        {3: 1, "3": 2, "#3": 3, -1: 4},
        {"100%": 1, "%2E": 2, "a:b": 3, "a:float": None, "a": 1.5},
        {"nested": {"a.b": 1, 7: {"inner": [1, {}]}, "a": None}, "empty": {}},
    ],
)
def test_keys_and_nested_values_are_restored(state):
    assert from_slots(to_slots(state)) == state


@pytest.mark.parametrize("copy", [True, False])
def test_complex_tensors_are_restored(copy):
    """Regression: an InputError in the second step of Adam with complex parameters."""
    parameter = torch.nn.Parameter(torch.tensor([[1 + 2j, 3.0]]))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {**optimizer.state[parameter], "zero": torch.tensor(2j), "conjugate": torch.tensor([1j]).conj()}
    restored = from_slots(to_slots(state, copy))
    assert restored.keys() == state.keys()
    for key, value in state.items():
        torch.testing.assert_close(restored[key], value, rtol=0, atol=0)


def test_a_key_of_another_type_is_an_error():
    with pytest.raises(InputError, match=r"has the key \(1, 2\), which cannot be saved"):
        to_slots({(1, 2): 1})


def test_an_option_that_json_cannot_hold_is_named():
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "kind": torch.float32}]
    optimizer = torch.optim.SGD(groups, lr=torch.tensor(0.1))
    adapted = OptimizerAdapter(optimizer)
    with pytest.raises(InputError, match=r"SGD: option 'kind' of parameter group 1 is torch\.float32"):
        adapted.check_hyperparameters()
    del optimizer.param_groups[1]["kind"]
    adapted.check_hyperparameters()
    del optimizer
    with pytest.raises(InputError, match="was freed; keep a reference"):
        adapted.check_hyperparameters()
