"""Calls observers at the end of a backward pass: after the last gradient, before `loss.backward()` returns.

torch runs the callbacks of `queue_callback` when a graph task, one run of the autograd engine, has ended. Reentrant
checkpointing runs a graph task inside a node of another one; the end of the inner task is not the end of the backward
pass. Then the observers are called at the end of the outer task.

One callback calls all observers of a graph task in a fixed order: observers make collective calls, and the order in
which gradients become ready differs between ranks.

If an exception ends a graph task, torch does not call its callbacks but deletes them. Only torch refers to a callback,
so its deletion tells the observers that the backward pass has failed.
"""

import weakref
from typing import Any, Protocol

import torch

from allred.torch.uncompiled import uncompiled


class BackwardObserver(Protocol):
    """Is called at the end of a backward pass. call_order: its position among all observers."""

    call_order: int

    def end_of_backward(self) -> None: ...
    def backward_failed(self) -> None:
        """Note that an exception has ended the backward pass. It may be called at any place of the program."""


class _Callback:
    """The callback at the end of one graph task."""

    def __init__(self, task: int) -> None:
        self._task = task
        self._was_called = False
        self.observers: list[BackwardObserver] = []

    @uncompiled
    def __call__(self) -> None:
        self._was_called = True
        _waiting.pop(self._task, None)
        outer: Any = torch._C._current_autograd_node()
        if outer is not None:  # the node of the outer graph task that runs this one
            outer.register_hook(_WaitForOuter(self.observers))
            return
        for observer in sorted(self.observers, key=lambda each: each.call_order):
            observer.end_of_backward()

    def __del__(self) -> None:
        if not self._was_called:
            for observer in self.observers:
                observer.backward_failed()


class _WaitForOuter:
    """A hook of the node that has run an inner graph task. The node may outlive the observers."""

    def __init__(self, observers: list[BackwardObserver]) -> None:
        self._observers = [weakref.ref(observer) for observer in observers]

    @uncompiled
    def __call__(self, *_: Any) -> None:
        for reference in self._observers:
            if (observer := reference()) is not None:
                call_after_backward(observer)


_waiting: "weakref.WeakValueDictionary[int, _Callback]" = weakref.WeakValueDictionary()  # by graph task


def call_after_backward(observer: BackwardObserver) -> bool:
    """Call `observer.end_of_backward()` once, at the end of the current backward pass. Called in a hook of it. Return
    whether this is the first call in the current graph task."""
    task = torch._C._current_graph_task_id()
    callback = _waiting.get(task)
    if callback is None:
        callback = _waiting[task] = _Callback(task)
        torch.autograd.Variable._execution_engine.queue_callback(callback)
    if observer in callback.observers:
        return False
    callback.observers.append(observer)
    return True
