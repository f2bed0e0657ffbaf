"""Restoring: reads the newest checkpoint on one rank, and checks that it is of this model and this optimizer."""

import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from allred import arrays, checkpoint, log, nest
from allred.checkpoint import SavedTensors
from allred.errors import AllredError, CheckpointError, InputError
from allred.gpu import device_arrays as gpu
from allred.optim.base import Optimizer, optimizer_kind
from allred.ps.variable import checkpoint_names


def load_newest(
    directory: str | os.PathLike[str],
    optimizer: Any,
    params: Any,
    load_state: Callable[[Any], None],
    check_extra: Callable[[Any, pathlib.Path], None],
) -> tuple[int, Any] | None:
    """Load the newest undamaged checkpoint: the state of the optimizer by `load_state`, then the parameters. Return its
    step, and the object that was passed to `saving`; None if there is no checkpoint. check_extra: called with that
    object and the path, before anything changes.

    Raises CheckpointError, and errors of allred of `load_state` and `check_extra`; `params` have not changed then.
    """
    found, damaged = checkpoint.read_newest(directory)
    if damaged and found is None:
        raise CheckpointError(
            f"no checkpoint in {os.fspath(directory)} can be read; the newest one: {damaged[0]}. To start without a "
            "checkpoint, move these checkpoints to another directory"
        )
    for text in damaged:
        log.warning(f"a later checkpoint is skipped: {text}")
    if found is None:
        return None
    path, content = found
    _check_optimizer(optimizer, content, path)
    named, paths = _named_as_in(content, nest.leaves(params))
    slots, state = {paths.get(name, name): part for name, part in content.slots.items()}, content.meta["optimizer"]
    _check_parameters(named, content.params, path)
    try:
        extra = checkpoint.unpickle_extra(content.pickled)
        check_extra(extra, path)
        load_state(checkpoint.unpickle_state(content.pickled) if state is None else {**state, "slots": slots})
    except AllredError:
        raise
    except Exception as error:  # of load_state_dict or __setstate__ of the program's classes
        raise CheckpointError(
            f"{path}: loading the state of {optimizer_kind(optimizer)} and the program's objects failed: "
            f"{type(error).__name__}: {error}"
        ) from error
    for name, leaf in named:
        gpu.fill(leaf, content.params[name])
    return content.step, extra


def _named_as_in(content: SavedTensors, named: list[nest.Leaf]) -> tuple[list[nest.Leaf], dict[str, str]]:
    """Return the parameters with their names in a checkpoint, and {name: path} where these differ. Earlier versions
    saved variables under their paths."""
    names = checkpoint_names(named)
    if content.params.keys().isdisjoint(names.values()):
        return named, {}
    return [(names.get(path, path), leaf) for path, leaf in named], {name: path for path, name in names.items()}


def _check_optimizer(optimizer: Any, content: SavedTensors, path: pathlib.Path) -> None:
    """Raise CheckpointError if a checkpoint is of another kind of optimizer. Those of earlier versions do not name the
    kind: then their slots and options are compared."""
    kind, own = content.meta.get("kind"), optimizer_kind(optimizer)
    if kind is not None and kind != own:
        raise CheckpointError(
            f"{path} is of another optimizer: it was saved with {kind}, but this one is {own}; restore it with {kind}. "
            f"If {own} is {kind} under another name, give its class the attribute kind = {kind!r}. To use only its "
            "parameters, copy them from allred.checkpoint.read_checkpoint(path).params"
        )
    is_ours, state = isinstance(optimizer, Optimizer), content.meta["optimizer"]
    if is_ours != (state is not None):
        theirs = "an optimizer that is not of allred.optim" if is_ours else "an optimizer of allred.optim"
        raise CheckpointError(
            f"{path} is of another optimizer: it was saved with {theirs}, but this one is {own}; restore it with the "
            "optimizer that saved it"
        )
    if is_ours:
        try:
            optimizer.check_state(content.params, {**state, "slots": content.slots}, kind is not None)
        except InputError as error:
            raise CheckpointError(f"{path} is of another optimizer: {error}") from None


def _check_parameters(named: list[nest.Leaf], values: dict[str, Any], path: pathlib.Path) -> None:
    """Raise CheckpointError if the values of a checkpoint are of another model."""
    for name, leaf in named:
        if name not in values or values[name].shape != leaf.shape:
            got = f"has shape {values[name].shape} in it" if name in values else "is not in it"
            raise CheckpointError(
                f"{path} is of another model: parameter '{name}' of this model has shape {leaf.shape}, but {got}; "
                "pass the directory of this model's checkpoints"
            )
        if isinstance(leaf, np.ndarray) and not leaf.flags.writeable:
            raise InputError(f"restore: parameter '{name}' is a read-only array; pass a copy")
        dtype = gpu.shape_and_dtype(leaf)[1] if gpu.is_device(leaf) else leaf.dtype
        try:
            arrays.dtype_code(dtype)
        except InputError as error:
            raise InputError(f"restore: parameter '{name}': {error}") from None
        if not arrays.can_hold(dtype, values[name]):
            raise CheckpointError(
                f"{path}: parameter '{name}' is {dtype} in this model, which cannot hold the {values[name].dtype} "
                f"values of the checkpoint; create the parameter with dtype {values[name].dtype}"
            )
    if odd := sorted(set(values) - {name for name, _ in named}):
        raise CheckpointError(
            f"{path} is of another model: it has the parameter '{odd[0]}', which this model lacks; pass the directory "
            "of this model's checkpoints"
        )
