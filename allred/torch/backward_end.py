"""Calls functions at the end of a backward pass: after the last gradient, before `loss.backward()` returns.

torch runs the callbacks of `queue_callback` when a graph task, one run of the autograd engine, has ended. Reentrant
checkpointing runs a graph task inside a node of another one; the end of the inner task is not the end of the backward
pass. Then the owners wait for the end of the outer task.

All owners of one graph task are called by one callback, in the order of their numbers: the order in which gradients
become ready may differ between ranks, and the owners make collective calls.
"""

from typing import Any, Protocol

import torch


class BackwardObserver(Protocol):
    """Something to call at the end of a backward pass. number: the position among all observers."""

    number: int

    def end_of_backward(self) -> None: ...


_waiting: dict[int, list[BackwardObserver]] = {}  # by graph task


def call_at_end(observer: BackwardObserver) -> bool:
    """Call `observer.end_of_backward()` once, at the end of the current backward pass. Called in a hook of it. Return
    whether this is the first call in the current graph task."""
    task = torch._C._current_graph_task_id()
    observers = _waiting.get(task)
    if observers is None:
        observers = _waiting[task] = []
        torch.autograd.Variable._execution_engine.queue_callback(lambda: _end(task))
    if observer in observers:
        return False
    observers.append(observer)
    return True


def _end(task: int) -> None:
    observers = _waiting.pop(task)
    outer: Any = torch._C._current_autograd_node()
    if outer is not None:  # the node of the outer graph task that runs this one
        outer.register_hook(lambda *_: [call_at_end(observer) for observer in observers] and None)
        return
    for observer in sorted(observers, key=lambda each: each.number):
        observer.end_of_backward()
