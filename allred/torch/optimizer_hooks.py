"""The hooks of a hooked optimizer on its parameters, the end of a backward pass, and the marks of reduced gradients.

`call_after_backward` calls observers after the last gradient, before `loss.backward()` returns. torch runs the
callbacks of `queue_callback` when a graph task, one run of the autograd engine, has ended. Reentrant checkpointing runs
a graph task inside a node of another one; the end of the inner task is not the end of the backward pass. Then the
observers are called at the end of the outer task.

One callback calls all observers of a graph task in a fixed order: observers make collective calls, and the order in
which gradients become ready differs between ranks.

If an exception ends a graph task, torch does not call its callbacks but deletes them. Only torch refers to a callback,
so its deletion tells the observers that the backward pass has failed.

Marks are for gradients that must not be reduced again: sums over the ranks, results of Horovod's other operators, and
gradients that were divided by the scale. The mean of means is the mean, so a hooked optimizer may average a gradient
again after each backward pass. With another operator or `scaler` it may not. The mark is an attribute of the gradient
tensor, so it ends with the tensor and is valid for all optimizers that have the parameter.

    no mark        a gradient of this rank, such as after zero_grad()
    MARK_REDUCED   by all ranks; equal on all. It is not reduced again
    MARK_MIXED     a later backward pass has added the gradient of this rank: an error in the next reduction
"""

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch

from allred.comm.ops import ReduceOp

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """Return a function that torch.compile does not compile, nor what it calls. `torch._disable_dynamo` does it by the
    import of torch._dynamo and several calls of Python and C, which are needed only inside of a compiled function."""
    disabled = torch._disable_dynamo(function)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:  # `GradientHooks.add` makes torch.compile skip it
        return function(*arguments, **named) if _compiler() is None else disabled(*arguments, **named)

    vars(call)["_torchdynamo_disable"] = True  # it is not inlined
    return call  # type: ignore[return-value]


# Returns None if nothing in this thread is being compiled.
_compiler: Callable[[], Any] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", object)


def skip_frames(*functions: Any) -> None:
    """Make torch.compile skip functions, but not those that they call. Unlike `uncompiled`, a call takes no time."""
    from torch._dynamo.eval_frame import skip_code  # torch.optim imports it too

    for function in functions:
        skip_code(function.__code__)


# Marks.

MARK_REDUCED, MARK_MIXED = BOTH_MARKS = "reduced", "mixed"
_NAME = "_allred_mark"


def mark_reduced(parameters: dict[str, torch.Tensor]) -> None:
    """Give the gradients of all parameters the mark MARK_REDUCED."""
    for parameter in parameters.values():
        if parameter.grad is not None:
            setattr(parameter.grad, _NAME, MARK_REDUCED)


def marked(parameters: dict[str, torch.Tensor], *which: str) -> list[str]:
    """Return the names of the parameters whose gradient has one of these marks."""
    return [name for name, parameter in parameters.items() if _mark_of(parameter.grad) in which]


def mark_refusal(parameters: dict[str, torch.Tensor], op: ReduceOp) -> str:
    """Return why the gradients cannot be reduced again, or ""."""
    mixed = marked(parameters, MARK_MIXED)
    if not mixed:
        return ""
    cause = f"op=allred.{op.value}: '{mixed[0]}' was reduced over the ranks already"
    if op is ReduceOp.AVERAGE:
        cause = f"scaler: '{mixed[0]}' was divided by the scale already"
    return (
        f"{cause}, and a later backward() has added a gradient of each rank; pass accumulate=2 to allred.distributed "
        "(backward_passes_per_step=2 to hvd.DistributedOptimizer), use opt.allred.no_sync() for all but the last "
        "backward(), or call opt.zero_grad() in between"
    )


def watch_marks(parameter: torch.Tensor) -> list[Any]:
    """Give the gradient of a parameter the mark MARK_MIXED when a backward pass adds to a marked one. Return the
    handles of the hooks."""
    reference, adds = weakref.ref(parameter), False

    @uncompiled
    def before(_: torch.Tensor) -> None:  # torch.autograd.grad calls it too, and nothing is added
        nonlocal adds
        parameter = reference()
        adds = parameter is not None and bool(_mark_of(parameter.grad))

    @uncompiled
    def after(parameter: torch.Tensor) -> None:
        if adds:
            setattr(parameter.grad, _NAME, MARK_MIXED)

    return [parameter.register_hook(before), parameter.register_post_accumulate_grad_hook(after)]


def _mark_of(grad: torch.Tensor | None) -> str:
    """Return the mark of a gradient; "" if it has none, or all its elements are zero."""
    found: str = getattr(grad, _NAME, "")
    if found and grad is not None:
        values = grad.coalesce().values() if grad.is_sparse else grad
        if not values.count_nonzero():
            delattr(grad, _NAME)
            return ""
    return found


# Hooks on parameters.

_graph_task = torch._C._current_graph_task_id


class GradientObserver(Protocol):
    """Receives the calls of the hooks, which hold a weak reference to it. idle_task: the graph task whose other hooks
    need not call it."""

    idle_task: int

    def on_gradient(self, name: str, parameter: Any) -> None:
        """Note that a gradient of the current backward pass is complete."""


class GradientHooks:
    """Hooks on the parameters of one optimizer. marks: whether each gradient may be reduced only once
    (`mark_reduced`)."""

    def __init__(self, marks: bool) -> None:
        self._marks = marks
        self._handles: dict[int, tuple[torch.Tensor, list[Any]]] = {}  # by id of the parameter, which is kept
        self._added: Iterable[tuple[str, torch.Tensor]] = ()  # in the last call of `add`

    def add(self, observer: GradientObserver, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Attach hooks to parameters that have none, including frozen ones, which may be unfrozen later. The same
        `named` again means that nothing has changed."""
        if named is self._added:
            return
        self._added, reference = named, weakref.ref(observer)
        for name, parameter in named:
            if id(parameter) not in self._handles and _can_train(parameter):

                def hook(parameter: torch.Tensor, name: str = name) -> None:
                    if (owner := reference()) is not None and owner.idle_task != _graph_task():
                        owner.on_gradient(name, parameter)

                with _requiring_gradient(parameter):
                    watching = watch_marks(parameter) if self._marks else []
                    handles = [parameter.register_post_accumulate_grad_hook(hook), *watching]
                self._handles[id(parameter)] = parameter, handles
                skip_frames(hook, type(observer).on_gradient, _Callback.__call__)

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


# The end of a backward pass.


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
        self.observers.sort(key=_call_order)
        for observer in self.observers:
            observer.end_of_backward()

    def __del__(self) -> None:
        if not self._was_called:
            _waiting.pop(self._task, None)
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


_call_order = operator.attrgetter("call_order")
_waiting: dict[int, list[BackwardObserver]] = {}  # the observers of the callback of a graph task


def call_after_backward(observer: BackwardObserver) -> bool:
    """Call `observer.end_of_backward()` once, at the end of the current backward pass. Called in a hook of it. Return
    whether this is the first call in the current graph task."""
    task = _graph_task()
    observers = _waiting.get(task)
    if observers is None:
        callback = _Callback(task)
        observers = _waiting[task] = callback.observers
        torch.autograd.Variable._execution_engine.queue_callback(callback)
    if observer in observers:
        return False
    observers.append(observer)
    return True
