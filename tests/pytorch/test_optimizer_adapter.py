"""`UntrainedTensors`, the buffers and untrained parameters of a module, without other ranks."""

import pytest

torch = pytest.importorskip("torch")

from allred.errors import InputError  # noqa: E402
from allred.torch.optimizer_adapter import UntrainedTensors  # noqa: E402


def other_tensors(size):
    module = torch.nn.Sequential(torch.nn.Linear(2, size), torch.nn.BatchNorm1d(size))
    return UntrainedTensors(module, {id(parameter) for parameter in module.parameters()})


def test_buffers_of_another_shape_are_an_error_with_both_shapes():
    state = other_tensors(3).state_dict()
    other_tensors(3).load_state_dict(state)
    with pytest.raises(InputError) as error:
        other_tensors(4).load_state_dict(state)
    assert str(error.value) == (
        "buffers or untrained parameters differ: the module has {'1.running_mean': (4,), '1.running_var': (4,)}, "
        "but the checkpoint has {'1.running_mean': (3,), '1.running_var': (3,)}"
    )


def test_missing_buffers_are_an_error():
    state = other_tensors(3).state_dict()
    del state["1.num_batches_tracked"]
    with pytest.raises(InputError, match=r"the module has {'1.num_batches_tracked': \(\)}, but the checkpoint has {}"):
        other_tensors(3).load_state_dict(state)
