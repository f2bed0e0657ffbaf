"""`UntrainedState`, what `state_dict()` of a module returns beside trained parameters, and states of other optimizers,
without other ranks."""

import pytest

torch = pytest.importorskip("torch")

from allred.errors import InputError  # noqa: E402
from allred.optim.base import optimizer_kind  # noqa: E402
from allred.torch import module_checkpoints  # noqa: E402
from allred.torch.module_checkpoints import UntrainedState  # noqa: E402
from allred.torch.optimizer_adapter import OptimizerAdapter  # noqa: E402


def other_tensors(size):
    module = torch.nn.Sequential(torch.nn.Linear(2, size), torch.nn.BatchNorm1d(size))
    return UntrainedState(module, module.parameters())


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


def test_integer_buffers_do_not_take_floats():
    """batch_norm counts its passes."""
    tensors = other_tensors(3)
    state = {name: value.clone() for name, value in tensors.state_dict().items()}
    state["1.num_batches_tracked"] = torch.tensor(2.5)
    state["1.running_mean"] += 1
    with pytest.raises(
        InputError, match=r"'1.num_batches_tracked' is torch.int64 in the module, .* the torch.float32 values"
    ):
        tensors.load_state_dict(state)
    assert tensors.state_dict()["1.running_mean"].sum() == 0
    state["1.num_batches_tracked"] = torch.tensor(2, dtype=torch.int32)
    state["1.running_mean"] = state["1.running_mean"].double()
    tensors.load_state_dict(state)
    assert tensors.state_dict()["1.num_batches_tracked"] == 2


def test_entries_that_the_module_does_not_load_are_named(monkeypatch):
    printed = []
    monkeypatch.setattr(module_checkpoints.log, "warning", printed.append)
    module = torch.nn.Linear(2, 1)
    module.register_state_dict_post_hook(lambda module, state, prefix, _: state.update({f"{prefix}version": 3}))
    state = UntrainedState(module, module.parameters())
    assert state.state_dict() == {"version": 3}
    state.load_state_dict({"version": 2})
    assert printed == [
        "'version' of the module's state_dict() is not restored or broadcast, because load_state_dict() of Linear "
        "does not know it"
    ]
    state.load_state_dict({})
    assert "the checkpoint has no 'version' of the module's state_dict()" in printed[1]


class RenamedSGD(torch.optim.SGD):
    kind = "torch.optim.SGD"


def adapter_of(cls, **options):
    optimizer = cls([torch.nn.Parameter(torch.ones(2))], lr=0.1, **options)
    adapter = OptimizerAdapter(optimizer)
    adapter.keeps = optimizer
    return adapter


@pytest.mark.parametrize(
    ("saved", "restoring", "missing"),
    [
        ("SGD", "Adam", "betas, eps"),
        ("Adam", "SGD", "dampening, momentum"),
        ("Adagrad", "RMSprop", "alpha, momentum"),
        ("SGD", "SGD", ""),
        ("Adam", "Adam", ""),
    ],
)
def test_options_are_compared_if_a_checkpoint_does_not_name_the_optimizer(saved, restoring, missing):
    """As those of earlier versions. Options that are bool or None are new in some version of torch."""
    state = adapter_of(getattr(torch.optim, saved)).state_dict()
    for name in ("foreach", "fused", "maximize", "amsgrad", "nesterov"):
        state["groups"][0].pop(name, None)
    state["groups"][0]["initial_lr"] = 0.1
    own = adapter_of(getattr(torch.optim, restoring))
    own.check_state({}, state, is_same_kind=True)
    if not missing:
        own.check_state({}, state, is_same_kind=False)
        own.load_state_dict(state)
        return
    with pytest.raises(InputError, match=f"torch.optim.{restoring} has the options {missing}, which parameter group 0"):
        own.check_state({}, state, is_same_kind=False)


def test_a_class_can_have_the_kind_of_another_one():
    assert optimizer_kind(adapter_of(torch.optim.SGD)) == "torch.optim.SGD"
    assert optimizer_kind(adapter_of(RenamedSGD)) == "torch.optim.SGD"
