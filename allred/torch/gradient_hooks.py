"""`GradientHooks`: the hooks of a hooked optimizer on its parameters."""

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch

from allred.torch import reduced_marks
from allred.torch.uncompiled import skip_frames


class GradientObserver(Protocol):
    """Receives the calls of the hooks, which hold a weak reference to it."""

    def on_gradient(self, name: str, parameter: Any) -> None:
        """Note that a gradient of the current backward pass is complete."""


class GradientHooks:
    """Hooks on the parameters of one optimizer. marks: whether each gradient may be reduced only once
    (reduced_marks.py)."""

    def __init__(self, marks: bool) -> None:
        self._marks = marks
        self._handles: dict[int, tuple[torch.Tensor, list[Any]]] = {}  # by id of the parameter, which is kept

    def add(self, observer: GradientObserver, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Attach hooks to parameters that have none, including frozen ones, which may be unfrozen later."""
        reference = weakref.ref(observer)
        for name, parameter in named:
            if id(parameter) not in self._handles and _can_train(parameter):

                def hook(parameter: torch.Tensor, name: str = name) -> None:
                    if (owner := reference()) is not None:
                        owner.on_gradient(name, parameter)

                with _requiring_gradient(parameter):
                    watching = reduced_marks.watch(parameter) if self._marks else []
                    handles = [parameter.register_post_accumulate_grad_hook(hook), *watching]
                self._handles[id(parameter)] = parameter, handles
                skip_frames(hook, type(observer).on_gradient)

    def remove(self) -> None:
        for _, handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles.clear()


def _can_train(parameter: torch.Tensor) -> bool:
    return (parameter.is_floating_point() or parameter.is_complex()) and not parameter.is_inference()


@contextlib.contextmanager
def _requiring_gradient(parameter: torch.Tensor) -> Iterator[None]:
    """Set `requires_grad` temporarily: torch accepts hooks only then, and keeps them after it is reset."""
    required = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        yield
    finally:
        parameter.requires_grad_(required)
