"""The state of a module and of its hooked optimizer, for broadcasts and checkpoints.

`UntrainedState` is what `state_dict()` of a torch module returns beside the parameters that an optimizer trains.
Buffers and other parameters are copied in place. Everything else, such as the extra state of modules
(`get_extra_state`), is given to `load_state_dict` of the module, as torch does.
"""

import functools
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from allred import log, world
from allred.comm import functions
from allred.errors import InputError
from allred.modes.optimizer import DistributedOptimizer
from allred.ps import context
from allred.session import state_pickle
from allred.torch import elastic_group
from allred.torch.optimizer_adapter import OptimizerAdapter, detached_view
from allred.torch.tensors import as_array, as_raw_array


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
        entries = self._entries().items()
        return {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in entries}

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


class ModuleCheckpoints(DistributedOptimizer):
    """The methods of a hooked optimizer that take parameters: None stands for those of the optimizer, and a torch
    module for all that its `state_dict()` returns."""

    _adapter: OptimizerAdapter

    def leave_averaging(self, module: Any) -> None:
        """Internal: average no gradients any more, because this DistributedDataParallel does."""
        raise NotImplementedError

    def _begin_with_module(self, params: Any) -> Any:
        """Return the module inside of a DistributedDataParallel, which averages the gradients from now on; other
        parameters as they are."""
        if isinstance(params, DistributedDataParallel):
            self.leave_averaging(params)
            elastic_group.managed.add(params)
        module = _module_of(params)
        if isinstance(module, torch.nn.Module) and world.config().mode == "local":
            self._get_mode().buffers = functools.partial(_float_buffers, module)
        return module

    def nest_of(self, params: Any) -> Any:
        """Return parameters as a nest of arrays that share their memory. None: the parameters of this optimizer. A
        torch module: these, and in mode sync the buffers and other parameters of the module."""
        params = _module_of(params)
        if params is None:
            return self._adapter.views()
        if isinstance(params, torch.nn.Module):
            return self._adapter.views() | ({} if context.is_active() else self._others_of(params))
        return params

    def _others_of(self, module: torch.nn.Module) -> dict[str, Any]:
        """Return arrays over the tensors of a module that this optimizer does not train, named "module.<name>", with
        the buffers that are not persistent."""
        others = {**self._untrained(module).tensors(), **dict(module.named_buffers())}
        return dict(_named_memory(f"module.{name}", value.detach()) for name, value in others.items())

    def _untrained(self, module: torch.nn.Module) -> UntrainedState:
        return UntrainedState(module, (parameter for _, parameter in self._adapter.named_parameters()))

    def replicated(self, trained: dict[str, Any]) -> Any:
        """Internal: see `DistributedOptimizer`."""
        return self.nest_of(None)

    def session_parts(self, params: Any) -> tuple[Any, dict[str, Any]]:
        """Internal: see `DistributedOptimizer`."""
        params = self._begin_with_module(params)
        if not isinstance(params, torch.nn.Module):
            return self.nest_of(params), {}
        others = self._untrained(params)
        return self.nest_of(None), {"module": others} if others.state_dict() else {}

    def saving(self, params: Any, extra: Any, copy: bool = False) -> Callable[[str], str]:
        """Internal: as `DistributedOptimizer.saving`."""
        self._adapter.check_hyperparameters()
        return super().saving(params, extra, copy)

    def save(self, directory: str | os.PathLike[str], params: Any = None) -> str | None:
        """As `DistributedOptimizer.save`. params: None, or a module: all that its `state_dict()` returns is saved."""
        nest, others = self.session_parts(_module_of(params))
        if not self._begin_save():
            return None
        extra = {f"'{name}'": [state_pickle.dumps(each.state_dict())] for name, each in others.items()}
        return self.saving(nest, extra or None)(os.fspath(directory))

    def restore(self, directory: str | os.PathLike[str], params: Any = None) -> int | None:
        """As `DistributedOptimizer.restore`. params: None, or a module: all that its `state_dict()` returns is
        restored. Raises CheckpointError, before anything changes, if the checkpoint was saved without the module."""
        nest, others = self.session_parts(params)
        step, extra = self.restore_all(directory, nest, others)
        if step is None:
            self.broadcast_others(params)
            return None
        for name, each in others.items():
            each.load_state_dict(state_pickle.loads(extra[f"'{name}'"][0]))
        return step

    def broadcast(self, params: Any = None, root: int | None = None) -> None:
        """As `DistributedOptimizer.broadcast`. params: None, or a module: all that its `state_dict()` returns is
        copied, and its other buffers."""
        self._begin_with_module(params)
        if context.is_active():
            self.broadcast_others(params, root)
        super().broadcast(params, root)
        if context.is_active():
            self._adapter.record_pull()

    def complete_round(self, params: Any, has_state: bool) -> int | None:
        """Internal: see `DistributedOptimizer`."""
        return super().complete_round(self.nest_of(self._begin_with_module(params)), has_state)

    def copy_state(self, params: Any, root: int) -> None:
        params = self._begin_with_module(params)
        super().copy_state(self.nest_of(params), root)
        if not context.is_active():
            self._broadcast_objects(params, root)

    def broadcast_others(self, params: Any, root: int | None = None) -> None:
        params = self._begin_with_module(params)
        if isinstance(params, torch.nn.Module):
            for name, array in self._others_of(params).items():
                functions.broadcast_(array, 0 if root is None else root, name)
            self._broadcast_objects(params, root)

    def _broadcast_objects(self, params: Any, root: int | None) -> None:
        """Copy what `state_dict()` of a module returns beside its memory. Collective. Raises InputError on all ranks if
        it cannot be pickled."""
        params = _module_of(params)
        if not isinstance(params, torch.nn.Module):
            return
        untrained = self._untrained(params)
        if not (others := untrained.others()):
            return
        with functions.within(self.process_set):
            here = functions.current()
            root = here.ranks[0] if root is None else root
            data, problem = b"", ""
            if here.number == root:
                try:
                    data = state_pickle.dumps(others)
                except Exception as error:  # of any class: objects say how they are pickled
                    problem = f"{self.name}.broadcast(): {', '.join(others)} of the module's state_dict() cannot be "
                    problem += f"pickled: {type(error).__name__}: {error}"
            data, problem = functions.broadcast_object((data, problem), root, f"module.{', module.'.join(others)}")
            if problem:
                raise InputError(problem)
            if here.number != root:
                untrained.load_others(state_pickle.loads(data))

    def pull(self, params: Any = None) -> None:
        """As `DistributedOptimizer.pull`. params: None or a module, for the parameters of this optimizer. Mode ps:
        raises InputError for other parameters."""
        super().pull(self.nest_of(params) if context.is_active() else None)
        if context.is_active():
            self._adapter.record_pull()


def _float_buffers(module: torch.nn.Module) -> list[tuple[str, Any]]:
    """Return views of the buffers of floats of a module, by name."""
    return [(name, as_array(each.detach())) for name, each in module.named_buffers() if each.is_floating_point()]


def _module_of(params: Any) -> Any:
    """Return the module inside of a DistributedDataParallel; other parameters as they are."""
    return params.module if isinstance(params, DistributedDataParallel) else params


def _named_memory(name: str, tensor: torch.Tensor) -> tuple[str, Any]:
    """Return a name and an array over the memory of a tensor of any dtype, to be copied between ranks. The name says
    whether the memory has conjugate or negative values (torch's lazy ones), which must be equal on all ranks."""
    if tensor.is_conj() or tensor.is_neg():
        name += ", conjugate" * tensor.is_conj() + ", negative" * tensor.is_neg()
        place = tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        tensor = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(*place)
    return name, detached_view(tensor) if tensor.is_cuda else as_raw_array(tensor)
