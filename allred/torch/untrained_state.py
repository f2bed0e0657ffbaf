"""`UntrainedState`: what `state_dict()` of a torch module returns beside the parameters that an optimizer trains.

Buffers and other parameters are copied in place. Everything else, such as the extra state of modules
(`get_extra_state`), is given to `load_state_dict` of the module, as torch does.
"""

from collections.abc import Iterable
from typing import Any

import torch

from allred import log
from allred.errors import InputError


class UntrainedState:
    """The buffers of a module, its parameters that the optimizer does not train, and its other entries.

    trained: the parameters that the optimizer trains."""

    def __init__(self, module: torch.nn.Module, trained: Iterable[torch.Tensor]) -> None:
        self._module, self._trained_ids = module, {id(parameter) for parameter in trained}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the buffers and untrained parameters in `state_dict()`, by name; they share the module's memory."""
        return {name: value.detach() for name, value in self._entries().items() if self._is_memory(value)}

    def others(self) -> dict[str, Any]:
        """Return the entries of `state_dict()` that are not memory of the module, by name."""
        return {name: value for name, value in self._entries().items() if not self._is_memory(value)}

    def _entries(self) -> dict[str, Any]:
        state = self._module.state_dict(keep_vars=True)
        held = [*self._module.parameters(), *self._module.buffers()]
        self._memory_ids = {id(tensor) for tensor in held}
        return {name: value for name, value in state.items() if id(value) not in self._trained_ids}

    def _is_memory(self, value: Any) -> bool:
        return id(value) in self._memory_ids

    def state_dict(self) -> dict[str, Any]:
        """Return all entries by name."""
        return {name: _detached(value) for name, value in self._entries().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a result of `state_dict`. Entries that it lacks and that are not memory of the module stay, with a
        warning. Raises InputError for the state of another module."""
        own, others = self.tensors(), self.others()
        saved = {name: value for name, value in state.items() if name not in others}
        _check(own, saved)
        for name, value in saved.items():
            own[name].copy_(value)
        self.load_others({name: value for name, value in state.items() if name in others})
        if missing := sorted(others.keys() - state.keys()):
            log.warning(
                f"the checkpoint has no {', '.join(map(repr, missing))} of the module's state_dict(), because it was "
                "saved by an earlier version of allred, or from another module; the module keeps its own"
            )

    def load_others(self, others: dict[str, Any]) -> None:
        """Load a part of a result of `others`. A warning names entries that the module does not take."""
        if not others:
            return
        result = self._module.load_state_dict({**self._entries(), **others}, strict=False)
        if ignored := sorted(others.keys() & set(getattr(result, "unexpected_keys", ()))):
            log.warning(
                f"{', '.join(map(repr, ignored))} of the module's state_dict() is not restored or broadcast, because "
                f"load_state_dict() of {type(self._module).__name__} does not know it"
            )


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _check(own: dict[str, torch.Tensor], saved: dict[str, Any]) -> None:
    """Raise InputError unless the saved tensors fit the module's tensors."""
    here, there = ({name: _shape(value) for name, value in each.items()} for each in (own, saved))
    if odd := sorted(name for name in {**here, **there} if here.get(name) != there.get(name)):
        ours, theirs = ({name: shapes[name] for name in odd if name in shapes} for shapes in (here, there))
        raise InputError(
            f"buffers or untrained parameters differ: the module has {ours}, but the checkpoint has {theirs}"
        )
    for name, value in saved.items():
        if not torch.can_cast(value.dtype, own[name].dtype):
            raise InputError(
                f"buffer or untrained parameter '{name}' is {own[name].dtype} in the module, which cannot hold the "
                f"{value.dtype} values of the checkpoint; create it in the module with dtype {value.dtype}"
            )


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
