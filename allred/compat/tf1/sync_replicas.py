"""`tf.train.SyncReplicasOptimizer`."""

from collections.abc import Callable, Iterable
from typing import Any

from allred import nest
from allred.cluster import topology
from allred.compat.tf1.training_session import warn_ignored
from allred.errors import InputError, NotInitializedError
from allred.modes.optimizer import DistributedOptimizer
from allred.ps import context
from allred.ps.consistency import Sync
from allred.session.hooks import Hook


class SyncReplicasOptimizer(DistributedOptimizer):
    """A distributed optimizer that applies the mean of `replicas_to_aggregate` fresh gradients in each step.

    Later gradients are dropped and counted (`opt.dropped`).

        opt = tf1.SyncReplicasOptimizer(allred.optim.Adagrad(lr=0.01), replicas_to_aggregate=3, total_num_replicas=4)
        opt.apply_gradients([(grad_w, w), (grad_b, b)])

    opt: an optimizer with step(params, grads). replicas_to_aggregate: any number with parameter servers; in mode sync
    the number of workers. total_num_replicas: the number of workers, if given. name: the prefix of errors.
    No effect: variable_averages and variables_to_average (use `allred.session.Averaging`), replica_id, use_locking
    (these steps always lock).
    Raises InputError for invalid numbers.
    """

    def __init__(
        self,
        opt: Any,
        replicas_to_aggregate: int,
        total_num_replicas: int | None = None,
        variable_averages: Any = None,
        variables_to_average: Any = None,
        use_locking: bool = False,
        name: str = "sync_replicas",
        *,
        replica_id: int | None = None,
    ) -> None:
        ignored = ("variable_averages", "variables_to_average", "replica_id")
        warn_ignored("SyncReplicasOptimizer", locals(), dict.fromkeys(ignored))
        if isinstance(opt, DistributedOptimizer) or not callable(getattr(opt, "step", None)):
            raise InputError(f"SyncReplicasOptimizer({opt!r}): expected an optimizer with step(params, grads)")
        policy = Sync(replicas_to_aggregate, total_num_replicas or None)
        self._tracked: Any = None  # the nest of parameters given to `broadcast`
        _check_without_servers(policy)
        super().__init__(opt, name=name, consistency=policy)

    def broadcast(self, params: Any, root: int | None = None) -> None:
        """See `allred.DistributedOptimizer.broadcast`."""
        super().broadcast(params, root)
        self._tracked = params

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], global_step: Any = None, name: str | None = None
    ) -> None:
        """Make a step, like `step(params, grads)`, from pairs of a gradient and its variable, an array.

        A gradient may be None. No effect: global_step, which the optimizer counts (`opt.global_step`), and name.
        Raises InputError for variables that are not among the parameters given to `broadcast` or to a session.
        """
        warn_ignored("apply_gradients", locals(), {"global_step": None, "name": None})
        pairs = list(grads_and_vars)
        if self._tracked is None:
            return self.step([variable for _, variable in pairs], [grad for grad, _ in pairs])
        grads = {id(variable): grad for grad, variable in pairs}
        leaves = [leaf for _, leaf in nest.leaves(self._tracked)]
        if strange := len(grads.keys() - {id(leaf) for leaf in leaves}):
            raise InputError(
                f"{self.name}.apply_gradients(): {strange} of {len(pairs)} variables are not among the parameters that "
                "training began with; give those arrays themselves, not copies"
            )
        self.step(self._tracked, nest.rebuild(self._tracked, [grads.get(id(leaf)) for leaf in leaves]))

    def get_init_tokens_op(self, num_tokens: int = -1) -> Callable[[], None]:
        """Return a function that does nothing: the servers count tokens themselves."""
        return lambda: None

    def get_chief_queue_runner(self) -> Callable[[], None]:
        """Return a function that does nothing, for `Supervisor.start_queue_runners`."""
        return lambda: None

    def make_session_run_hook(self, is_chief: bool | None = None, num_tokens: int = -1) -> Hook:
        """Return a hook that does nothing."""
        return Hook()


def _check_without_servers(policy: Sync) -> None:
    try:
        workers = topology.size()
    except NotInitializedError:
        return
    wanted, total = policy.replicas_to_aggregate, policy.total_num_replicas
    if not context.is_active() and (wanted != workers or total not in (None, workers)):
        raise InputError(
            f"SyncReplicasOptimizer(replicas_to_aggregate={wanted}, total_num_replicas={total}): without parameter "
            f"servers each step uses all workers ({workers}); for other numbers give the ClusterSpec a job 'ps'"
        )
