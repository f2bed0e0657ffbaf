"""`distributed`: transformations of optax whose gradients are averaged over the ranks.

In programs of mode sync the optimizer is a transformation (`update`), and gradients are averaged in the program. Its
method `step` works in every mode, outside of programs: the parameters are copied to numpy arrays, which a distributed
optimizer trains (`OptaxOptimizer`), and which parameter servers and rounds can change in place.
"""

import operator
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from allred import log, world
from allred.arrays import Array
from allred.comm import functions
from allred.comm.ops import Compression, ReduceOp
from allred.comm.process_set import ProcessSet
from allred.errors import InputError
from allred.jax.averaging import average
from allred.jax.primitive import isolated
from allred.jax.training_state import TrainingState, with_arrays
from allred.jax.trees import Arrays, arrays_of, names_of
from allred.modes.gradient_averager import GradientAverager, GradientReceiver
from allred.session import state_pickle


class OptaxUpdate(GradientReceiver):
    """A transformation of optax with the interface of an optimizer for numpy arrays, which are given by name.

    averages: whether the next step only returns the averaged gradients, because JAX makes the update.
    rebuild: makes the pytree of the program from arrays; a parameter server has no pytree, and uses dicts.
    """

    kind = "optax"

    def __init__(self, transformation: Any) -> None:
        self.transformation = optax.with_extra_args_support(transformation)
        self.averages, self.state, self.params = False, None, None
        self.rebuild: Callable[[dict[str, Any]], Any] = dict
        self._loaded: dict[str, Array] | None = None

        def update(params: Any, state: Any, grads: Any) -> Any:
            updates, state = self.transformation.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        self._program = jax.jit(update)

    def step(self, params: dict[str, Array], mean: dict[str, Array]) -> None:
        if self.averages:
            return super().step(params, mean)
        before = self.rebuild({name: jnp.array(value) for name, value in params.items()})
        grads = {name: jnp.zeros_like(params[name]) if grad is None else jnp.array(grad) for name, grad in mean.items()}
        if self.state is None:
            self.state = self.transformation.init(before)
        if self._loaded is not None:
            self.state, self._loaded = with_arrays("the state of optax", self.state, self._loaded), None
        self.params, self.state = self._program(before, self.state, self.rebuild(grads))
        after = arrays_of(self.params)
        for name, value in zip(after.names, after.values, strict=True):
            params[name][...] = value
        return None

    def state_dict(self) -> dict[str, Any]:
        if self.averages:  # the program has the state
            return {}
        return {"arrays": arrays_of(self.state, numbers=True).to_numpy() if self._loaded is None else self._loaded}

    def load_state_dict(self, state: Any) -> None:
        if not isinstance(state, dict) or "arrays" not in state:
            raise InputError("the state is not of allred.jax.distributed; restore a checkpoint of the same optimizer")
        if self.state is None:  # made in the first step, when the parameters are known
            self._loaded = state["arrays"]
        else:
            self.state = with_arrays("the state of optax", self.state, state["arrays"])


class OptaxOptimizer(GradientAverager):
    """The attribute `allred` of a distributed transformation, with the methods of `DistributedOptimizer`; `broadcast`,
    `save` and `restore` take a `TrainingState`."""

    def __init__(self, transformation: Any, **options: Any) -> None:
        self._optax = OptaxUpdate(transformation)
        self._copies: dict[str, Array] = {}  # of the parameters
        self._copied: list[Any] = []  # the arrays of JAX that were copied last
        self._training: TrainingState | None = None  # of a session
        super().__init__("JAX", self._optax, **options)

    def average(
        self, title: str, grads: dict[str, Array], params: dict[str, Array] | None, samples: int | None
    ) -> bool:
        self._optax.averages = True
        try:
            return super().average(title, grads, params, samples)
        finally:
            self._optax.averages = False

    def step_trees(self, params: Any, state: Any, grads: Any, samples: int | None) -> tuple[Any, Any]:
        """Return parameters and state after a step. Collective in mode sync."""
        given, own, update = arrays_of(grads), arrays_of(params), self._optax
        if given.names != own.names:
            raise InputError(f"{self.name}.step: the gradients are {given.names}, but the parameters are {own.names}")
        if not self._copies and world.config().mode == "ps" and world.config().num_ps > 1:
            log.warning(
                f"{self.name}: each of the {world.config().num_ps} parameter servers updates its own parameters; a "
                "transformation that combines all of them, such as optax.clip_by_global_norm, needs one server"
            )
        copies = self._copy(own)
        update.rebuild = lambda arrays: own.rebuild([arrays[name] for name in own.names])
        update.state, update.params = state, None
        self.step(copies, dict(zip(given.names, map(_unshared, given.values), strict=True)), samples)
        if world.config().mode == "sync":
            after = params if update.params is None else update.params  # None: the step was skipped
        else:  # the servers, or the end of a round, have changed the copies
            after = own.from_numpy(copies)
        self._copied = arrays_of(after).values
        return after, update.state

    def _copy(self, params: Arrays) -> dict[str, Array]:
        """Return numpy arrays with the values of parameters: the same arrays in each step."""
        known = {name: (copy.shape, copy.dtype) for name, copy in self._copies.items()}
        given = zip(params.names, map(jnp.asarray, params.values), strict=True)
        if known != {name: (value.shape, value.dtype) for name, value in given}:
            self._copies = params.to_numpy()
        elif not all(map(operator.is_, params.values, self._copied)) or len(params.values) != len(self._copied):
            for name, value in zip(params.names, params.values, strict=True):
                self._copies[name][...] = value
        is_constant = all(isinstance(value, jax.Array) for value in params.values)
        self._copied = params.values if is_constant else []
        return self._copies

    # Checkpoints and sessions.

    def _take(self, training: TrainingState) -> dict[str, Array]:
        """Return copies of the parameters, and take the state of the optimizer."""
        names_of(training.opt_state)  # on all ranks, before one of them sends it
        self._optax.state = training.opt_state
        return self._copy(arrays_of(training.params))

    def _give(self, training: TrainingState) -> None:
        """Assign parameters and state, which were restored or received."""
        training.params = arrays_of(training.params).from_numpy(self._copies)
        self._copied = arrays_of(training.params).values
        training.opt_state = self._optax.state

    def session_parts(self, params: Any) -> tuple[Any, dict[str, Any]]:
        if not isinstance(params, TrainingState):
            raise InputError(
                f"{self.name}: got parameters of class {type(params).__name__}; sessions and checkpoints take an "
                "allred.jax.TrainingState(params=..., opt_state=...)"
            )
        if world.config().mode == "local":
            raise InputError(f"{self.name}: allred.jax has sessions and checkpoints in modes sync and ps only")
        self._training = params
        return self._take(params), {"trees": params}

    def save(self, directory: str | os.PathLike[str], params: Any) -> str | None:
        """As `DistributedOptimizer.save`, of all trees of a `TrainingState`."""
        copies, others = self.session_parts(params)
        if functions.current(self.process_set).rank != 0:
            return None
        extra = {f"'{name}'": [state_pickle.dumps(each.state_dict())] for name, each in others.items()}
        return str(self.saving(copies, extra)(os.fspath(directory)))

    def restore(self, directory: str | os.PathLike[str], params: Any) -> int | None:
        """As `DistributedOptimizer.restore`, of all trees of a `TrainingState`."""
        copies, others = self.session_parts(params)
        step, extra = self.restore_all(directory, copies, others)
        if step is None:
            self.broadcast_others(params)
        else:
            for name, each in others.items():
                each.load_state_dict(state_pickle.loads(extra[f"'{name}'"][0]))
        return step

    def broadcast(self, params: Any, root: int | None = None) -> None:
        """As `DistributedOptimizer.broadcast`, of all trees of a `TrainingState`."""
        if not isinstance(params, TrainingState):  # the copies, in `restore_all`
            return super().broadcast(params, root)
        super().broadcast(self._take(params), root)
        self._give(params)
        return self.broadcast_others(params, root)

    def broadcast_others(self, params: TrainingState, root: int | None = None) -> None:
        with functions.within(self.process_set):
            root = functions.current().ranks[0] if root is None else root
            params.load_state_dict(functions.broadcast_object(params.state_dict(), root))

    def restore_all(self, directory: Any, params: Any, others: Any = ()) -> tuple[int | None, Any]:
        assert self._training is not None
        result = super().restore_all(directory, params, others)
        self._give(self._training)
        return result

    def saving(self, params: Any, extra: Any, copy: bool = False) -> Any:
        assert self._training is not None
        return super().saving(self._take(self._training), extra, copy)

    def pull(self, params: Any) -> None:
        """As `DistributedOptimizer.pull`, of the parameters of a `TrainingState`."""
        training = params if isinstance(params, TrainingState) else self._training
        if training is None:
            raise InputError(f"{self.name}.pull() takes an allred.jax.TrainingState")
        super().pull(self._take(training) if training is params else self._copies)
        self._give(training)


def _unshared(gradient: Any) -> Array:
    """Return a numpy array that a step may overwrite; a view of an array of JAX is read-only, and is not."""
    return np.array(gradient) if isinstance(gradient, np.ndarray) else np.asarray(gradient)


class DistributedTransformation(optax.GradientTransformationExtraArgs):
    """The result of `distributed`: a transformation of optax, and the distributed optimizer `allred`."""

    allred: OptaxOptimizer

    def step(self, params: Any, state: Any, grads: Any, samples: int | None = None) -> tuple[Any, Any]:
        """Make a step outside of `jax.jit`, in any mode. Returns (parameters, state).

            params, state = optimizer.step(params, state, grads)

        Mode sync: averages the gradients, then makes the update. Mode ps: the parameter servers have the state, and
        `state` is returned unchanged. Mode local: each rank makes its own update, and a round averages the parameters.

        params, grads: pytrees of arrays of floats, of one structure. Pass the parameters that the last call returned.
        samples: see `allred.jax.average_gradients`. Errors: as of `allred.DistributedOptimizer.step`.
        """
        return self.allred.step_trees(params, state, grads, samples)


def distributed(
    transformation: Any,
    op: ReduceOp = ReduceOp.AVERAGE,
    *,
    name: str = "opt",
    nonfinite: str | None = None,
    compression: Compression = Compression.none,
    process_set: ProcessSet | None = None,
    ordered: bool = True,
    **options: Any,
) -> DistributedTransformation:
    """Wrap an `optax.GradientTransformation`: its `update` first averages the gradients over all ranks.

        optimizer = allred.jax.distributed(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)))

    The result is an `optax.GradientTransformationExtraArgs` with the state of `transformation`. Use its `update` inside
    or outside of `jax.jit`, in mode sync:

        updates, state = optimizer.update(grads, state, params, samples=len(batch))

    With `params` the parameters are compared between ranks. `samples` and the other arguments: see
    `allred.jax.average_gradients`. nonfinite='skip': a step with gradients that are not finite has updates of zero, and
    does not change the state. The method `step` works in every mode, outside of `jax.jit`. The attribute `allred` is
    the `DistributedOptimizer`: `optimizer.allred.summary()`.

    options: arguments of `allred.distributed` for the method `step`, such as `consistency` and `every`.

    Raises InputError if `transformation` is not an optax transformation, or for the options accumulate, clip_norm,
    scaler and sharded: use optax. `update` raises InputError in modes ps and local, and MismatchError, DriftError and
    NonFiniteError; in a compiled function see `allred.jax.raise_allred_errors`.
    """
    if wrong := sorted(options.keys() & {"accumulate", "scaler", "sharded", "clip_norm"}):
        raise InputError(f"allred.jax.distributed: {wrong[0]} is not available with JAX; optax clips and accumulates")
    if isinstance(transformation, optax.MultiSteps):
        transformation = transformation.gradient_transformation()
    if not isinstance(transformation, optax.GradientTransformation):
        raise InputError(f"allred.jax.distributed takes an optax.GradientTransformation, got {transformation!r}")
    inner = optax.with_extra_args_support(transformation)
    own = OptaxOptimizer(
        transformation, op=op, name=name, nonfinite=nonfinite, compression=compression, process_set=process_set,
        **options,
    )  # fmt: skip

    def update(grads: Any, state: Any, params: Any = None, *, samples: Any = None, **more: Any) -> Any:
        mean, used = average(own, grads, params, samples, ordered)

        updates, after = inner.update(mean, state, params, **more)
        if functions.current(process_set).size > 1:
            updates, after = isolated((updates, after))
        if used is None:
            return updates, after
        updates = jax.tree_util.tree_map(lambda value: jnp.where(used, value, jnp.zeros_like(value)), updates)
        return updates, jax.tree_util.tree_map(lambda new, old: jnp.where(used, new, old), after, state)

    result = DistributedTransformation(inner.init, update)
    result.allred = own
    return result
