"""`ModuleCheckpoints`: the parameters, buffers and state of a hooked optimizer, for broadcasts and checkpoints."""

import os
from collections.abc import Callable
from typing import Any

import torch

from allred.comm import functions
from allred.errors import CheckpointError
from allred.modes.optimizer import DistributedOptimizer
from allred.ps import context
from allred.session import state_pickle
from allred.torch.optimizer_adapter import OptimizerAdapter, UntrainedTensors, detached_view
from allred.torch.tensors import as_raw_array


class ModuleCheckpoints(DistributedOptimizer):
    """The methods of a hooked optimizer that take parameters: None stands for those of the optimizer, and a torch
    module for its parameters and buffers."""

    _adapter: OptimizerAdapter

    def nest_of(self, params: Any) -> Any:
        """Return parameters as a nest of arrays that share their memory. None: the parameters of this optimizer. A
        torch module: these, and in mode sync the buffers and other parameters of the module."""
        if params is None:
            return self._adapter.views()
        if isinstance(params, torch.nn.Module):
            return self._adapter.views() | ({} if context.is_active() else self._others_of(params))
        return params

    def _others_of(self, module: torch.nn.Module) -> dict[str, Any]:
        """Return arrays over the tensors of a module that this optimizer does not train, named "module.<name>", with
        the buffers that are not persistent."""
        own = {id(parameter) for _, parameter in self._adapter.named_parameters()}
        others = {**UntrainedTensors(module, own).state_dict(), **dict(module.named_buffers())}
        return dict(_named_memory(f"module.{name}", value.detach()) for name, value in others.items())

    def replicated(self, trained: dict[str, Any]) -> Any:
        """Internal: see `DistributedOptimizer`."""
        return self.nest_of(None)

    def session_parts(self, params: Any) -> tuple[Any, dict[str, Any]]:
        """Internal: see `DistributedOptimizer`."""
        if not isinstance(params, torch.nn.Module):
            return self.nest_of(params), {}
        others = UntrainedTensors(params, {id(parameter) for _, parameter in self._adapter.named_parameters()})
        return self.nest_of(None), {"module": others} if others.state_dict() else {}

    def saving(self, params: Any, extra: Any, copy: bool = False) -> Callable[[str], str]:
        """Internal: as `DistributedOptimizer.saving`."""
        self._adapter.check_hyperparameters()
        return super().saving(params, extra, copy)

    def save(self, directory: str | os.PathLike[str], params: Any = None) -> str | None:
        """As `DistributedOptimizer.save`. params: None, or a module, whose buffers are saved too."""
        nest, others = self.session_parts(params)
        if functions.current(self.process_set).rank != 0:
            return None
        extra = {f"'{name}'": [state_pickle.dumps(each.state_dict())] for name, each in others.items()}
        return self.saving(nest, extra or None)(os.fspath(directory))

    def restore(self, directory: str | os.PathLike[str], params: Any = None) -> int | None:
        """As `DistributedOptimizer.restore`. params: None, or a module, whose buffers are restored too. Raises
        CheckpointError if the checkpoint has no buffers of the module."""
        nest, others = self.session_parts(params)
        step, extra = self.restore_all(directory, nest)
        if step is None:
            self.broadcast_others(params)
            return None
        for name, each in others.items():
            pickled = (extra or {}).get(f"'{name}'", [None])[0]
            if pickled is None:
                raise CheckpointError(
                    f"{os.fspath(directory)}, step {step} has no buffers of the module, because it was saved without "
                    "the module; call restore(directory) without the module, and broadcast(module)"
                )
            each.load_state_dict(state_pickle.loads(pickled))
        return step

    def broadcast(self, params: Any = None, root: int | None = None) -> None:
        """As `DistributedOptimizer.broadcast`. params: None, or a module, whose buffers are copied too."""
        if context.is_active():
            self.broadcast_others(params, root)
        super().broadcast(self.nest_of(params), root)
        if context.is_active():
            self._adapter.record_pull()

    def broadcast_others(self, params: Any, root: int | None = None) -> None:
        if isinstance(params, torch.nn.Module):
            for name, array in self._others_of(params).items():
                functions.broadcast_(array, 0 if root is None else root, name)

    def pull(self, params: Any = None) -> None:
        """As `DistributedOptimizer.pull`. params: None or a module, for the parameters of this optimizer. Mode ps:
        raises InputError for other parameters."""
        super().pull(self.nest_of(params) if context.is_active() else None)
        if context.is_active():
            self._adapter.record_pull()


def _named_memory(name: str, tensor: torch.Tensor) -> tuple[str, Any]:
    """Return a name and an array over the memory of a tensor of any dtype, to be copied between ranks. The name says
    whether the memory has conjugate or negative values (torch's lazy ones), which must be equal on all ranks."""
    if tensor.is_conj() or tensor.is_neg():
        name += ", conjugate" * tensor.is_conj() + ", negative" * tensor.is_neg()
        place = tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        tensor = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(*place)
    return name, detached_view(tensor) if tensor.is_cuda else as_raw_array(tensor)
