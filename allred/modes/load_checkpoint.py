"""Restoring: chooses the newest undamaged checkpoint, reads it, and checks that it is of this model and optimizer.

Rank 0 chooses the newest checkpoint. In mode sync each rank reads it if all see it in their file systems, and verifies
the bytes that it reads. Otherwise rank 0 reads it, and the caller broadcasts. If a rank finds damage, rank 0 chooses
the next older checkpoint.
"""

import os
import pathlib
import socket
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from allred import arrays, checkpoint, log, nest
from allred.checkpoint import MissingPackageError, SavedTensors
from allred.checkpoint.table_rows import tables_in
from allred.comm import functions
from allred.errors import AllredError, CheckpointError, InputError
from allred.gpu import device_arrays as gpu
from allred.optim.base import Optimizer, optimizer_kind
from allred.ps.variable import checkpoint_names


class Restored(NamedTuple):
    """step: of the checkpoint. extra: the object that was passed to `saving`. everywhere: whether all ranks have loaded
    it; else only rank 0 has. tables: see `checkpoint.tables_in`."""

    step: int
    extra: Any
    everywhere: bool
    path: pathlib.Path
    tables: dict[str, Any]


def load_newest(
    directory: str | os.PathLike[str],
    optimizer: Any,
    params: Any,
    load_state: Callable[[Any], None],
    check: Callable[[SavedTensors, Any, pathlib.Path], None],
    everywhere: bool,
) -> Restored | None:
    """Load the newest undamaged checkpoint: the state of the optimizer by `load_state`, then the parameters. Returns
    None if there is none. Collective.

    check: called with the content, the `extra` and the path, before anything changes. everywhere: whether all ranks
    load it if they see it.
    Raises CheckpointError, and errors of allred of `load_state` and `check`, the same on all ranks; `params` have
    not changed then.
    """
    found = _read_newest(directory, everywhere)
    if found is None:
        return None
    path, content, failure, shared = found
    loaded = None
    if content is not None:
        try:
            loaded = _Loaded(path, content, optimizer, params, check)
        except AllredError as error:
            failure = error
    _raise_first(failure)
    if loaded is not None:
        try:
            loaded.load_state(load_state)
        except AllredError as error:
            failure = error
    _raise_first(failure)
    if loaded is not None:
        loaded.copy_params()
    result = None
    if loaded is not None and content is not None:
        result = Restored(loaded.step, loaded.extra, shared, path, tables_in(content.meta))
    return result if shared else functions.broadcast_object(result, functions.current().ranks[0])


class _Read(NamedTuple):
    """path: of the checkpoint. content: None on a rank that has not read it. failure: why this rank could not read it.
    everywhere: whether all ranks have tried to read it; else only rank 0."""

    path: pathlib.Path
    content: SavedTensors | None
    failure: AllredError | None
    everywhere: bool


def _read_newest(directory: str | os.PathLike[str], everywhere: bool) -> _Read | None:
    """Read the newest checkpoint in which no rank finds damage. Return None if there is no checkpoint. Collective.

    Raises CheckpointError, the same on all ranks: none can be read. Another job may replace or delete the checkpoint
    meanwhile; then the newest one is chosen again.
    """
    here = functions.current()
    first, is_first = here.ranks[0], here.rank == 0
    damaged: dict[pathlib.Path, str] = {}
    while True:
        chosen = _choose(directory, damaged) if is_first else None
        path, manifest_crc, failure = functions.broadcast_object(chosen, first)
        if failure is not None:
            raise failure
        if path is None:
            return None
        shared = everywhere and here.size > 1 and all(functions.allgather_object(_manifest_crc(path) == manifest_crc))
        content = None
        if is_first or shared:
            try:
                content = checkpoint.read_committed(path)
            except CheckpointError as error:
                failure = error
        where = "" if is_first else f" (rank {here.rank} on {socket.gethostname()})"
        is_damaged = failure is not None and not isinstance(failure, MissingPackageError)
        found = functions.allgather_object((content and content.checksum, f"{failure}{where}" if is_damaged else ""))
        problems = [problem for _, problem in found if problem]
        if not problems and len({checksum for checksum, _ in found if checksum is not None}) < 2:
            break
        if problems and path.exists():
            damaged[path] = problems[0]
    if is_first:
        for text in damaged.values():
            log.warning(f"a newer checkpoint, which is damaged, is skipped: {text}")
    return _Read(path, content, failure, shared)


def _choose(
    directory: str | os.PathLike[str], damaged: dict[pathlib.Path, str]
) -> tuple[pathlib.Path | None, int | None, AllredError | None]:
    """Return (path, checksum of the manifest file, error). path: the newest checkpoint that is not in `damaged`; None
    if there is none, or with an error."""
    try:
        paths = [pathlib.Path(os.path.abspath(path)) for path in checkpoint.newest_first(directory)]
    except AllredError as error:
        return None, None, error
    if path := next((path for path in paths if path not in damaged), None):
        return path, _manifest_crc(path), None
    if not damaged:
        return None, None, None
    newest = next(iter(damaged.values()))
    text = f"no checkpoint in {os.fspath(directory)} can be read; the newest one: {newest}. To start without a "
    return None, None, CheckpointError(f"{text}checkpoint, move these checkpoints to another directory")


def _raise_first(failure: AllredError | None) -> None:
    """Raise the error of the first rank that has one. Collective."""
    everyone = functions.allgather_object(failure)
    for rank, found in enumerate(everyone):
        if found is not None:
            raise failure if failure is not None and rank == functions.current().rank else found


def _manifest_crc(path: pathlib.Path) -> int | None:
    """Return the checksum of the manifest in a directory; None if there is none."""
    try:
        return zlib.crc32((path / checkpoint.MANIFEST).read_bytes())
    except OSError:
        return None


class _Loaded:
    """A checkpoint that was read and fits the optimizer and the parameters. Raises an error of allred."""

    def __init__(
        self,
        path: pathlib.Path,
        content: SavedTensors,
        optimizer: Any,
        params: Any,
        check: Callable[[SavedTensors, Any, pathlib.Path], None],
    ) -> None:
        self._path, self._optimizer, self._content = path, optimizer, content
        self.step = content.step
        _check_optimizer(optimizer, content, path)
        self._named, self._paths = _named_as_in(content, nest.leaves(params))
        _check_parameters(self._named, content.params, path)
        self.extra = self._call(lambda: checkpoint.unpickle_extra(content.pickled))
        check(content, self.extra, path)

    def load_state(self, load_state: Callable[[Any], None]) -> None:
        content = self._content
        slots = {self._paths.get(name, name): part for name, part in content.slots.items()}
        state = content.meta["optimizer"]
        self._call(
            lambda: load_state(
                checkpoint.unpickle_state(content.pickled) if state is None else {**state, "slots": slots}
            )
        )

    def copy_params(self) -> None:
        for name, leaf in self._named:
            gpu.fill(leaf, self._content.params[name])

    def _call(self, function: Callable[[], Any]) -> Any:
        """Call code of the program: load_state_dict or __setstate__ of its classes."""
        try:
            return function()
        except AllredError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{self._path}: loading the state of {optimizer_kind(self._optimizer)} and the program's objects "
                f"failed: {type(error).__name__}: {error}"
            ) from error


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
        title = nest.quoted(name, "parameter")
        if name not in values or values[name].shape != leaf.shape:
            got = f"has shape {values[name].shape} in it" if name in values else "is not in it"
            raise CheckpointError(
                f"{path} is of another model: {title} of this model has shape {leaf.shape}, but {got}; "
                "pass the directory of this model's checkpoints"
            )
        if isinstance(leaf, np.ndarray) and not leaf.flags.writeable:
            raise InputError(f"restore: {title} is a read-only array; pass a copy")
        dtype = gpu.shape_and_dtype(leaf)[1] if gpu.is_device(leaf) else leaf.dtype
        try:
            arrays.dtype_code(dtype)
        except InputError as error:
            raise InputError(f"restore: {title}: {error}") from None
        if not arrays.can_hold(dtype, values[name]):
            raise CheckpointError(
                f"{path}: {title} is {dtype} in this model, which cannot hold the {values[name].dtype} "
                f"values of the checkpoint; create the parameter with dtype {values[name].dtype}"
            )
    if odd := sorted(set(values) - {name for name, _ in named}):
        raise CheckpointError(
            f"{path} is of another model: it has the parameter '{odd[0]}', which this model lacks; pass the directory "
            "of this model's checkpoints"
        )
