"""`OptimizerAdapter`: gives a torch optimizer the interface of `allred.optim.Optimizer`, for modes and checkpoints.

Mode sync calls `step` with the reduced gradients at the end of a backward pass. `step` assigns them to `.grad`; the
program later calls `step()` of the torch optimizer. On a parameter server `step` also updates the parameters: the
parameters of the server's copy of the torch optimizer are views of the server's memory.
"""

import itertools
import json
import operator
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from allred.arrays import Array
from allred.comm.communicator import Communicator
from allred.errors import InputError
from allred.modes.detect.drift_window import remedy
from allred.optim.base import Optimizer
from allred.optim.step_input import Slots
from allred.ps import context
from allred.torch.optimizer_state import (
    OtherState,
    assign_in_place,
    from_slots,
    load_in_place,
    to_slots,
)
from allred.torch.pulled_parameters import PulledParameters
from allred.torch.replaced_methods import dereference, weak_method
from allred.torch.sparse import SparseGradients, coalesce_gradient
from allred.torch.tensors import as_array, as_tensor, copy_like

_NOT_HYPERPARAMETERS = ("params", "param_names")
_NUMPY_DTYPES = (torch.float32, torch.float64, torch.float16)


def detached_view(tensor: torch.Tensor) -> Any:
    """Return the memory of a tensor as a numpy array; for a GPU tensor the detached tensor. Complex tensors get a last
    dimension of 2 (real, imaginary)."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.detach())
    return tensor.detach() if tensor.is_cuda else as_array(tensor)


def is_trained(parameter: torch.Tensor) -> bool:
    """Whether torch may update a parameter: also a frozen one that still has a gradient."""
    return parameter.requires_grad or parameter.grad is not None


def layout_of(parameters: Mapping[str, torch.Tensor], overlaps: bool) -> tuple[Any, ...]:
    """Return what all ranks have agreed on: names, and with the order of gradients shapes and dtypes."""
    if not overlaps:
        return tuple(parameters)
    return tuple((name, parameter.shape, parameter.dtype) for name, parameter in parameters.items())


def _gradient_view(grad: torch.Tensor) -> Any:
    """As `detached_view`, in a quarter of the time for most gradients. Tensor.numpy() forbids to resize the storage;
    nobody resizes a gradient."""
    plain = type(grad) is torch.Tensor and grad.dtype in _NUMPY_DTYPES and not grad.is_cuda
    try:
        return grad.numpy() if plain else detached_view(grad)
    except (RuntimeError, TypeError):  # it requires a gradient itself, or is not dense
        return detached_view(grad)


_Group = tuple[list[torch.Tensor], list[str] | None]  # parameters and param_names of a group
_grad_of, _shape_of = operator.attrgetter("grad"), operator.attrgetter("shape")


def _is_unchanged(group: dict[str, Any], known: _Group) -> bool:
    params, (before, names) = group["params"], known
    return len(params) == len(before) and all(map(operator.is_, params, before)) and group.get("param_names") == names


def _copy(names: Any) -> list[str] | None:
    return None if names is None else list(names)


class _PlainInput(NamedTuple):
    """The parameters of a step, which numpy can view, and their gradients, without a conversion. views: of all
    parameters, by name."""

    named: list[tuple[str, torch.Tensor]]
    views: dict[str, Any]
    shapes: list[tuple[int, ...]]
    addresses: list[int]

    @classmethod
    def of(cls, named: list[tuple[str, torch.Tensor]], views: dict[str, Any]) -> "_PlainInput | None":
        """Return the record if all parameters are trained, on the host and of a dtype of numpy; else None."""
        parameters = [parameter for _, parameter in named]
        if len(views) < len(named) or any(p.is_cuda or p.dtype not in _NUMPY_DTYPES for p in parameters):
            return None
        return cls(named, views, list(map(_shape_of, views.values())), _addresses(parameters))

    def gradients(self, parameters: list[torch.Tensor]) -> list[Any] | None:
        """Return views of the gradients; None if a parameter has other memory, or a gradient needs a conversion."""
        grads = list(map(_grad_of, parameters))
        if _addresses(parameters) != self.addresses or set(map(type, grads)) != {torch.Tensor}:
            return None
        try:
            views = list(map(torch.Tensor.numpy, grads))
        except (RuntimeError, TypeError):  # as in `_gradient_view`
            return None
        same = list(map(_shape_of, views)) == self.shapes  # torch gives a gradient the shape of its parameter
        return views if same else None


def _addresses(parameters: list[torch.Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, parameters))


class OptimizerAdapter(Optimizer):
    """A torch optimizer with the interface of an optimizer of allred. Parameters are named as in `named_parameters()`
    if the torch optimizer was made with that, else as in `names` (by id), else "group.position". If that is the name of
    several, the later ones get a number, such as "weight#2". It does not keep the torch optimizer alive."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str] | None = None) -> None:
        self._reference, self.global_step = weakref.ref(optimizer), 0
        self._names_by_id = names or {}
        self.sparse, self._pulled, self._others = SparseGradients(), PulledParameters(), OtherState()
        # The methods of torch, which the hooked optimizer replaces.
        self._update, self._load = weak_method(optimizer, "step"), weak_method(optimizer, "load_state_dict")
        self._views: dict[str, tuple[torch.Tensor, Any, Any]] = {}  # by name: parameter, layout, view
        # By name: gradient and view, of the gradients that were sent with overlap.
        self._gradient_views: dict[str, tuple[torch.Tensor, Any]] = {}
        self._given: dict[str, Any] = {}  # the gradients of the last `step_input`
        self._plain: _PlainInput | None = None  # the parameters of the last `step_input`
        self._groups: list[_Group] = []
        self._named: list[tuple[str, torch.Tensor]] = []  # the parameters of `_groups`
        self._parameters: list[torch.Tensor] = []  # those of `_named`

    def __getstate__(self) -> dict[str, Any]:
        """The optimizer as its class pickles it: the object refuses to be pickled."""
        kind: Any = type(self.optimizer)
        return {"optimizer": kind.__reduce_ex__(self.optimizer, 4), "global_step": self.global_step}

    def __setstate__(self, state: dict[str, Any]) -> None:
        made, arguments, *content = state["optimizer"]
        self._owned = made(*arguments)  # on a parameter server
        if content:
            self._owned.__setstate__(content[0])
        self.__init__(self._owned)  # type: ignore[misc]
        self.global_step = state["global_step"]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer. Raises InputError if the program has dropped it."""
        optimizer: torch.optim.Optimizer = dereference(self._reference)
        return optimizer

    @property
    def calls_closure(self) -> bool:
        """Whether the optimizer must get the closure of `step`: LBFGS calls it repeatedly, and so may an optimizer that
        is not of torch. Those of torch call it once, before the update."""
        kind = type(self.optimizer)
        return issubclass(kind, torch.optim.LBFGS) or not kind.step.__module__.startswith("torch.optim.")

    # Parameters and gradients.

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Return the names and parameters of all groups: the same list while they are unchanged."""
        groups = self.optimizer.param_groups
        if len(groups) != len(self._groups) or not all(map(_is_unchanged, groups, self._groups)):
            self._groups = [(list(group["params"]), _copy(group.get("param_names"))) for group in groups]
            self._named = []
            for number, (params, given) in enumerate(self._groups):
                known = given or [self._names_by_id.get(id(each), f"{number}.{i}") for i, each in enumerate(params)]
                self._named += zip(known, params, strict=True)
            self._named = _with_unique_names(self._named)
            self._parameters = [parameter for _, parameter in self._named]
        return self._named

    @property
    def has_parts(self) -> bool:
        """Whether parameters are split over the ranks, as those of FSDP."""
        parameters = [parameter for _, parameter in self.named_parameters()]
        of_fsdp = ("_local_tensor", "_fqns", "_fsdp_flattened")  # of FSDP 2, and FSDP 1
        return any(hasattr(parameter, name) for parameter in parameters for name in of_fsdp)

    def views(self) -> dict[str, Any]:
        """Return {name: array over the memory} of all parameters."""
        return {name: self._view(name, parameter) for name, parameter in self.named_parameters()}

    def record_pull(self) -> None:
        """Mode ps, after a pull: store version and sample of each parameter, with which `check_pulled` compares."""
        self._pulled.record(self.named_parameters(), self.views())

    def check_pulled(self, title: str) -> None:
        """Mode ps: raise InputError if the program has changed a parameter since `record_pull`."""
        if (name := self._pulled.changed(self.named_parameters(), self.views())) is not None:
            raise InputError(
                f"{title}: the program has changed parameter '{name}' since the last pull. {remedy('optimizer.allred')}"
            )

    def _view(self, name: str, parameter: torch.Tensor) -> Any:
        known = self._views.get(name)
        layout = parameter.data_ptr(), parameter.dtype, parameter.shape, parameter.stride()  # `parameter.data = ...`
        if known is None or known[0] is not parameter or known[1] != layout:
            known = self._views[name] = parameter, layout, detached_view(parameter)
        return known[2]

    def gradient(self, name: str, parameter: torch.Tensor) -> Any:
        """Return an array over the memory of `.grad`; the same object for the same tensor. None without gradient."""
        grad = parameter.grad
        if grad is None:
            return None
        held = self._gradient_views.get(name)
        if held is None or held[0] is not grad:
            held = self._gradient_views[name] = grad, _gradient_view(grad)
        return held[1]

    @property
    def has_gradients(self) -> bool:
        """Whether a parameter has a gradient."""
        groups = self.optimizer.param_groups
        return any(parameter.grad is not None for group in groups for parameter in group["params"])

    def reduced_gradients(self, dense: bool = False) -> dict[str, Any]:
        """Return arrays over all gradients, by name; of a sparse one its values, or a dense copy."""
        found: dict[str, Any] = {}
        for name, parameter in self.named_parameters():
            if parameter.grad is not None:
                if parameter.grad.is_sparse:
                    values = parameter.grad.to_dense() if dense else coalesce_gradient(parameter).values()
                    found[name] = as_array(values)
                else:
                    found[name] = self.gradient(name, parameter)
        return found

    def step_input(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return {name: parameter} and {name: gradient} of the trained parameters. A sparse gradient is replaced by its
        largest magnitude, shape (1,)."""
        params: dict[str, Any] = {}
        grads: dict[str, Any] = {}
        for name, parameter in self.named_parameters():
            if not is_trained(parameter):
                continue
            params[name] = self._view(name, parameter)
            if name in self.sparse.names:
                params[name] = params[name].reshape(-1)[:1]
                grads[name] = self.sparse.largest_magnitude(parameter)
            elif self._gradient_views:
                grads[name] = self.gradient(name, parameter)
            else:
                grads[name] = None if (grad := parameter.grad) is None else _gradient_view(grad)
        self._given = grads
        self._plain = _PlainInput.of(self.named_parameters(), params) if not self.sparse.names else None
        return params, grads

    def repeated_gradients(self) -> list[Any] | None:
        """Return arrays over the gradients, if the parameters are those of the last `step_input`, in the same memory,
        and numpy can view all gradients; None otherwise."""
        named, plain = self.named_parameters(), self._plain
        return None if plain is None or plain.named is not named else plain.gradients(self._parameters)

    def unscale_gradients(self) -> bool:
        """Divide the gradients by the scale of torch's GradScaler, which leaves this to the update of fused optimizers.
        Returns False if the scaler has found gradients that are not finite: then the update must be skipped."""
        optimizer = self.optimizer
        scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        if found_inf is not None and float(found_inf):
            return False
        if scale is not None:
            with torch.no_grad():
                for _, parameter in self.named_parameters():
                    if parameter.grad is not None:
                        parameter.grad.div_(scale)
        return True

    def release_gradients(self) -> None:
        """Forget the views of gradients, so that torch can free their memory."""
        self._gradient_views.clear()
        self._given = {}

    # The interface of allred.optim.

    @property
    def kind(self) -> str:
        kind = getattr(self.optimizer, "kind", None)
        return kind if isinstance(kind, str) else f"torch.optim.{type(self.optimizer).__name__}"

    def hyperparameters(self) -> Any:
        """Return the parameter groups without their parameters; tensors of one element as numbers."""
        return [
            {
                key: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
                for key, value in group.items()
                if key not in _NOT_HYPERPARAMETERS
            }
            for group in self.optimizer.param_groups
        ]

    def check_hyperparameters(self) -> None:
        """Raise InputError if a checkpoint cannot hold the options of a parameter group."""
        for number, group in enumerate(self.hyperparameters()):
            for key, value in group.items():
                try:
                    json.dumps(value)
                except (TypeError, ValueError):
                    raise InputError(
                        f"{self.kind}: option '{key}' of parameter group {number} is {value!r}, which a checkpoint "
                        "cannot hold; expected numbers, text, None, lists or dicts of these"
                    ) from None

    pushed_hyperparameters = hyperparameters  # a program or scheduler changes them; mode ps sends them to the servers

    def set_hyperparameters(self, groups: list[dict[str, Any]]) -> None:
        """Restore a result of `hyperparameters`. Raises InputError if the number of groups differs."""
        own = self.optimizer.param_groups
        if len(groups) != len(own):
            raise InputError(
                f"{self.kind} has {len(own)} parameter groups, but {len(groups)} were given; add all groups on all "
                "ranks before the checkpoint is restored; in mode ps before allred.distributed(optimizer)"
            )
        for group, given in zip(own, groups, strict=True):
            for key, value in given.items():
                group[key] = assign_in_place(group.get(key), value)

    @property
    def lr(self) -> float:
        """The learning rate of the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    @lr.setter
    def lr(self, value: Any) -> None:
        pass  # a server assigns it in each step; set_hyperparameters has set the rates of all groups

    def slots(self, param: Array) -> Slots:
        return {}

    def check_state(self, params: Mapping[str, Array], state: Mapping[str, Any], is_same_kind: bool) -> None:
        """Raise InputError if a state is that of another optimizer. torch makes the state of a parameter in its first
        step, so the names of options are compared; later versions of torch have more options that are bool or None."""
        own = [name for name, value in self.optimizer.defaults.items() if type(value) in (int, float, tuple)]
        for number, group in enumerate(() if is_same_kind else state.get("groups", ())):
            if missing := sorted(set(own) - set(group)):
                raise InputError(
                    f"{self.kind} has the options {', '.join(missing)}, which parameter group {number} of the state "
                    "lacks; restore the state of the same optimizer, or make a new optimizer"
                )

    def update(self, param: Array, grad: Array, slots: Slots, lr: float, step: int) -> None:
        raise NotImplementedError("torch updates all parameters at once")

    def complete_reduction(
        self, communicator: Communicator, tensors: Any, values: list[Any], weight: float | None, average: bool
    ) -> list[Any]:
        """Reduce the sparse gradients. Collective. tensors, values: descriptors and reduced values of all gradients.
        Returns `values` with the placeholders of sparse gradients replaced by their reduced values."""
        if not self.sparse.names:
            return values
        parameters = dict(self.named_parameters())
        places = {tensor.name: index for index, tensor in enumerate(tensors) if tensor.name in self.sparse.names}
        values = list(values)
        for name, index in places.items():
            if values[index] is not None:  # some rank has this gradient
                values[index] = self.sparse.reduce(communicator, name, parameters[name], weight, average)
        return values

    def step(self, params: Any, grads: Any) -> None:
        """Assign gradients; on a parameter server, also update the parameters."""
        if context.serves():
            self._serve(params, grads)
            return
        if grads is self._given and not self.sparse.names:  # reduced in place
            return
        for name, parameter in self.named_parameters():
            if (value := grads.get(name)) is None:
                continue
            if name in self.sparse.names:
                self.sparse.assign(parameter, value)
            elif self._given.get(name) is not value:
                parameter.grad = copy_like(parameter, value)

    def _serve(self, params: dict[str, Array], grads: dict[str, Array | None]) -> None:
        """Make one update of the parameters on this server, in their memory."""
        for name, parameter in self.named_parameters():
            parameter.grad = None
            if name not in params:
                continue
            if parameter.data_ptr() != params[name].__array_interface__["data"][0]:
                parameter.data = as_tensor(params[name])
            if (grad := grads[name]) is not None:
                parameter.grad = as_tensor(grad).to(parameter.dtype)
        self.update_parameters()

    def update_parameters(self, *arguments: Any) -> Any:
        """Call the step of the torch optimizer and count it."""
        result = self._update(*arguments)
        self.global_step += 1
        return result

    # State.

    def live_state(self) -> dict[str, Any]:
        return self._state(copy=False)

    def state_dict(self) -> dict[str, Any]:
        """Return {"global_step", "slots": {parameter name: {slot: array}}, "groups": hyperparameters of each group}.
        With "others" (text) if the torch optimizer has state that belongs to no parameter."""
        return self._state(copy=True)

    def _state(self, copy: bool) -> dict[str, Any]:
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        slots = {names[id(p)]: to_slots(state, copy) for p, state in self.optimizer.state.items() if id(p) in names}
        return {
            "global_step": self.global_step,
            "slots": slots,
            "groups": self.hyperparameters(),
            **self._others.of(self.optimizer, self.kind),
        }

    def load_state_dict(self, state: Any) -> None:
        """Restore a result of `state_dict`. Without "groups" the hyperparameters stay. Raises InputError for the state
        of another optimizer."""
        if not isinstance(state, dict) or not {"global_step", "slots"} <= set(state):
            raise InputError(f"{self.kind}.load_state_dict: expected the result of opt.allred.state_dict()")
        numbers = {name: number for number, (name, _) in enumerate(self.named_parameters())}
        if odd := sorted(set(state["slots"]) - set(numbers)):
            raise InputError(f"{self.kind}.load_state_dict: the state has '{odd[0]}', which is no parameter here")
        if "groups" in state:
            self.set_hyperparameters(state["groups"])
        own = self.optimizer.state_dict()
        loaded = {numbers[name]: from_slots(slots) for name, slots in state["slots"].items()}
        own = self._others.merge(own, loaded, state.get("others"))
        load_in_place(self.optimizer, own, self._load)
        self.global_step = int(state["global_step"])


def _with_unique_names(named: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    found: dict[str, torch.Tensor] = {}
    for name, parameter in named:
        numbered = itertools.chain([name], (f"{name}#{number}" for number in itertools.count(2)))
        found[next(each for each in numbered if each not in found)] = parameter
    return list(found.items())
