"""The state of a torch optimizer as arrays: {parameter name: {slot name: array}}, the format of allred.optim.

Checkpoints hold these arrays in safetensors files; they are not pickled. A slot is named by its path in the state of
the parameter ("exp_avg", "old_dirs.3"). A suffix marks 0-d tensors and values that are not tensors: "step:scalar" is a
0-d tensor, "exp_avg:complex" a complex tensor with a last dimension (real, imaginary), "t:float" a Python number,
"prev_loss:none" is None, "ro:list" the length of a list, "norms:dict" of a dict.
In a path "#3" is the integer key 3, and "%2E" a dot in a key (also %23, %25, %3A).

`OtherState` is the rest of what `state_dict()` of the optimizer returns, as text with a pickle.
"""

import base64
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from allred import log
from allred.arrays import Array
from allred.errors import InputError
from allred.ps import context
from allred.session import state_pickle
from allred.torch.tensors import as_array, copy_to_tensor

_NUMBERS: dict[str, type] = {"bool": bool, "int": int, "float": float}
_SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple}
_ESCAPES = {mark: f"%{ord(mark):02X}" for mark in "%.:#"}  # % is the first to be escaped, and the last to be restored


def to_slots(state: dict[Any, Any], copy: bool = True) -> dict[str, Array]:
    """Return the state of one parameter as arrays. copy: whether they are copies of the tensors on the host.

    Raises InputError for values other than tensors, numbers, None, lists, tuples and dicts, and for keys other than
    text and integers.

    >>> to_slots({"step": torch.tensor(2.0), "n": 3})
    {'step:scalar': array(2., dtype=float32), 'n:int': array(3)}
    """
    found: dict[str, Array] = {}
    for key, value in state.items():
        _add(found, _text_of(key), value, copy)
    return found


def _text_of(key: Any) -> str:
    if type(key) is int:
        return f"#{key}"
    if not isinstance(key, str):
        raise InputError(
            f"the optimizer's state has the key {key!r}, which cannot be saved; expected text or an integer"
        )
    text = str(key)
    for mark, escape in _ESCAPES.items():
        text = text.replace(mark, escape)
    return text


def _key_of(text: str) -> str | int:
    if text.startswith("#"):
        return int(text[1:])
    for mark, escape in reversed(_ESCAPES.items()):
        text = text.replace(escape, mark)
    return text


def _add(found: dict[str, Array], path: str, value: Any, copy: bool) -> None:
    if isinstance(value, torch.Tensor) and value.is_sparse:  # the momentum of sparse gradients; torch takes dense too
        value = value.to_dense()
    if isinstance(value, torch.Tensor) and value.is_complex():
        array = as_array(torch.view_as_real(value.detach().cpu().resolve_conj()))
        found[f"{path}:complex"] = np.array(array) if copy else array
    elif isinstance(value, torch.Tensor):
        array = as_array(value.detach().cpu())
        found[path if value.dim() else f"{path}:scalar"] = np.array(array) if copy else array
    elif value is None:
        found[f"{path}:none"] = np.zeros(0, np.uint8)
    elif type(value) in _NUMBERS.values():
        found[f"{path}:{type(value).__name__}"] = np.asarray(value)
    elif type(value) in _SEQUENCES.values():
        found[f"{path}:{type(value).__name__}"] = np.asarray(len(value))
        for index, each in enumerate(value):
            _add(found, f"{path}.{index}", each, copy)
    elif type(value) is dict:
        found[f"{path}:dict"] = np.asarray(len(value))
        for key, each in value.items():
            _add(found, f"{path}.{_text_of(key)}", each, copy)
    else:
        raise InputError(
            f"the optimizer's state '{path}' is a {type(value).__name__}, which cannot be saved; expected tensors, "
            "numbers, None, lists, tuples or dicts"
        )


def from_slots(slots: dict[str, Any]) -> dict[Any, Any]:
    """Return the state of one parameter; the reverse of `to_slots`. Tensors are copies on the host.

    >>> from_slots(to_slots({"betas": [0.5, None], "m": torch.ones(1)}))
    {'betas': [0.5, None], 'm': tensor([1.])}
    """
    kinds = {path: kind for path, _, kind in (name.partition(":") for name in slots)}
    return {_key_of(path): _value(slots, kinds, path) for path in kinds if "." not in path}


def _value(slots: dict[str, Any], kinds: dict[str, str], path: str) -> Any:
    kind = kinds[path]
    array = np.asarray(slots[f"{path}:{kind}" if kind else path])
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_value(slots, kinds, f"{path}.{index}") for index in range(int(array)))
    if kind == "dict":
        inside = [each for each in kinds if each.rpartition(".")[0] == path]
        return {_key_of(each.rpartition(".")[2]): _value(slots, kinds, each) for each in inside}
    if kind in _NUMBERS:
        return _NUMBERS[kind](array.item())
    if kind == "none":
        return None
    if kind == "complex":
        return torch.view_as_complex(copy_to_tensor(array))
    return copy_to_tensor(array.reshape(()) if kind == "scalar" else array)


class OtherState:
    """State of a torch optimizer that belongs to no parameter: entries of `optimizer.state` whose key is no tensor, and
    those that a `state_dict` of its class, or a hook, adds."""

    def __init__(self) -> None:
        self._has_warned = False

    def of(self, optimizer: torch.optim.Optimizer, kind: str) -> dict[str, str]:
        """Return {"others": pickled entries}, or {} without entries. What cannot be saved is named in one warning."""
        saved, failed, reason = {}, [], ""
        for key, value in _other_entries(optimizer):
            try:
                if context.is_active() and context.current().servers > 1:
                    raise InputError("each of several parameter servers has its own")
                saved[key] = state_pickle.dumps(value)
            except Exception as error:  # of any class: objects say how they are pickled
                failed.append(key[-1])
                reason = f"{type(error).__name__}: {error}"
        if failed and not self._has_warned:
            self._has_warned = True
            names = ", ".join(map(repr, failed))
            log.rank_warning(f"{kind}: its state {names} is neither saved nor broadcast: {reason}")
        return {"others": base64.b64encode(state_pickle.dumps(saved)).decode()} if saved else {}

    @staticmethod
    def merge(own: dict[str, Any], slots: dict[int, Any], others: str | None) -> dict[str, Any]:
        """Return the state dict `own` with the state `slots` of parameters, by number, and a result of `of`."""
        kept: dict[Any, Any] = {key: value for key, value in own.get("state", {}).items() if type(key) is not int}
        merged = {**own, "state": {**kept, **slots}}
        for (place, key), value in state_pickle.loads(base64.b64decode(others)).items() if others else ():
            (merged["state"] if place == "state" else merged)[key] = state_pickle.loads(value)
        return merged


def _other_entries(optimizer: torch.optim.Optimizer) -> list[tuple[tuple[str, Any], Any]]:
    """Return ((place, key), value) of each entry. place: "state" or ""."""
    found = [(("state", key), value) for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)]
    is_plain = getattr(optimizer.state_dict, "__func__", None) is torch.optim.Optimizer.state_dict
    if not is_plain or getattr(optimizer, "_optimizer_state_dict_post_hooks", None):
        own = optimizer.state_dict().items()
        found += [(("", key), value) for key, value in own if key not in ("state", "param_groups")]
    return found


def load_in_place(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], load: Callable[[Any], None] | None = None
) -> None:
    """Load a state dict into the existing tensors. load: the function that loads it, by default
    `optimizer.load_state_dict`. Tensors of parameter groups and state, and the dicts of the groups, keep their
    identity. Fused optimizers read parameter, gradient and state in memory order, so all must have the same strides."""
    groups, before = optimizer.param_groups, dict(optimizer.state)
    (load or optimizer.load_state_dict)(state)
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        for key in set(group) - set(loaded):
            del group[key]
        for key, value in loaded.items():
            group[key] = value if key == "params" else assign_in_place(group.get(key), value)
    optimizer.param_groups = groups
    used = {_memory(parameter) for group in groups for parameter in group["params"]}
    for parameter in filter(optimizer.state.__contains__, itertools.chain(*(group["params"] for group in groups))):
        old, slots = before.get(parameter, {}), optimizer.state[parameter]
        for key, value in slots.items():
            if isinstance(old.get(key), torch.Tensor) and (memory := _memory(old[key])) not in used:  # not shared
                used.add(memory)
                slots[key] = assign_in_place(old[key], value)
            if slots[key] is value:
                slots[key] = _laid_out_like(parameter, value)


def _laid_out_like(parameter: torch.Tensor, value: Any) -> Any:
    """Return a tensor with the shape of a parameter with its strides; other values as they are."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.shape != parameter.shape:
        return value
    if value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value)


def _memory(tensor: torch.Tensor) -> int | None:
    """Return the address of the storage of a tensor; None if it is empty or not dense."""
    return (tensor.untyped_storage().data_ptr() or None) if tensor.layout is torch.strided else None


def assign_in_place(old: Any, new: Any) -> Any:
    """Copy `new` into the tensor `old`, also within lists and tuples, and return `old`. Return `new` where `old` is no
    tensor, or shape or dtype differ.

    >>> rate = torch.tensor(1.0)
    >>> assign_in_place((rate, 2), [0.5, 3]), rate
    ((tensor(0.5000), 3), tensor(0.5000))
    """
    if isinstance(old, torch.Tensor):
        is_tensor = isinstance(new, torch.Tensor)
        if is_tensor and (old.shape, old.dtype, old.layout) == (new.shape, new.dtype, torch.strided):
            old.detach().copy_(new)
            return old
        if isinstance(new, (float, int)) and old.layout is torch.strided:
            old.detach().fill_(new)
            return old
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        made = [assign_in_place(*pair) for pair in itertools.zip_longest(old[: len(new)], new)]
        return tuple(made) if isinstance(old, tuple) else made
    return new


state_pickle.register_tensor("torch", torch.Tensor, lambda tensor: as_array(tensor.detach().cpu()), copy_to_tensor)
