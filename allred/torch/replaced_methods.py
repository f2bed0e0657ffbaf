"""Replaces methods of a torch optimizer by methods of its hooked optimizer, and refuses copies and pickles.

The new methods do not keep the optimizer alive, like those of torch's learning rate schedulers. So the optimizer and
its hooks end where the program drops its last reference, at the same line on all ranks. In a cycle of references they
would end when Python's garbage collector runs, at other moments on other ranks.
"""

import weakref
from collections.abc import Callable
from typing import Any

from allred.errors import InputError
from allred.torch.optimizer_hooks import uncompiled

_NAMES = ("step", "add_param_group", "load_state_dict", "__reduce_ex__")  # copy and pickle call the last one
NO_COPY = (
    "a distributed optimizer cannot be copied or pickled: the copy would not average gradients. Copy or save "
    "optimizer.state_dict(), and pass a new optimizer to allred.distributed (or hvd.DistributedOptimizer)"
)


def dereference(reference: "weakref.ref[Any]") -> Any:
    """Return the torch optimizer. Raises InputError if the program has dropped it."""
    if (optimizer := reference()) is None:
        raise InputError("the torch optimizer of this hooked optimizer was freed; keep a reference to it")
    return optimizer


def weak_method(optimizer: Any, name: str) -> Callable[..., Any]:
    """Return the current method of an optimizer as a function that does not keep the optimizer alive."""
    method = getattr(optimizer, name)
    function, reference = getattr(method, "__func__", None), weakref.ref(optimizer)
    if function is None:  # a function that a learning rate scheduler has set; it has a weak reference
        return method  # type: ignore[no-any-return]
    return lambda *arguments, **options: function(dereference(reference), *arguments, **options)


def replace_methods(optimizer: Any) -> dict[str, Any]:
    """Replace the methods of an optimizer, whose attribute `allred` is or will be a HookedOptimizer. Return the
    argument of `restore_methods`."""
    saved = {name: vars(optimizer)[name] for name in _NAMES if name in vars(optimizer)}
    add_group, load = weak_method(optimizer, "add_param_group"), weak_method(optimizer, "load_state_dict")
    reference = weakref.ref(optimizer)

    @uncompiled
    def step(closure: Callable[[], Any] | None = None) -> Any:
        optimizer = dereference(reference)
        optimizer._opt_called = True  # for torch's learning rate schedulers
        return optimizer.allred.step_torch_optimizer(closure)

    def add_param_group(param_group: dict[str, Any]) -> None:
        hooked = dereference(reference).allred
        hooked.check_new_group()
        add_group(param_group)
        hooked.add_hooks()

    def load_state_dict(state_dict: dict[str, Any]) -> None:
        load(state_dict)
        dereference(reference).allred.forget_gradients()

    def refuse(_protocol: Any) -> Any:
        raise TypeError(NO_COPY)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers made later keep this method
    optimizer.step, optimizer.add_param_group = step, add_param_group
    optimizer.load_state_dict, optimizer.__reduce_ex__ = load_state_dict, refuse
    return saved


def restore_methods(optimizer: Any, saved: dict[str, Any]) -> None:
    """Undo `replace_methods`."""
    for name in _NAMES:
        vars(optimizer).pop(name, None)
    vars(optimizer).update(saved)
