"""`tf.Session`, `tf.ConfigProto`, `tf.train.replica_device_setter`; warnings of arguments without effect in allred."""

from collections.abc import Callable, Mapping
from typing import Any

from allred.client.client_session import ClientSession, connect
from allred.cluster import report, topology
from allred.errors import InputError
from allred.ps import variable

_warned: set[str] = set()


def warn_ignored(who: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Warn once, on the chief, of the arguments in `defaults` that differ from their defaults. Ignores other names."""
    names = [name for name, default in defaults.items() if given[name] is not None and given[name] is not default]
    odd = [name for name in names if not (isinstance(given[name], (int, float, str)) and given[name] == defaults[name])]
    line = f"{who}: these arguments have no effect: {', '.join(odd)} (docs/from-tensorflow.md)"
    if odd and line not in _warned:
        _warned.add(line)
        report.say(line)


def check_chief(who: str, is_chief: bool | None) -> None:
    """Raise InputError if the argument is_chief is wrong for this rank."""
    if is_chief is not None and bool(is_chief) != topology.is_chief():
        raise InputError(
            f"{who}(is_chief={is_chief!r}) on {topology.role()}: the chief is worker 0; leave is_chief out, or give "
            "task_index == 0"
        )


class ConfigProto:
    """Settings of a session.

        config = tf1.ConfigProto(allow_soft_placement=True, log_device_placement=True)
        session = tf1.Session(server.target, config=config)

    allow_soft_placement, log_device_placement: see `allred.connect`. more: TensorFlow's other settings; no effect.
    """

    def __init__(self, *, allow_soft_placement: bool = False, log_device_placement: bool = False, **more: Any) -> None:
        self.allow_soft_placement, self.log_device_placement = allow_soft_placement, log_device_placement
        warn_ignored("ConfigProto", more, dict.fromkeys(more))


def Session(  # noqa: N802  (TensorFlow's name)
    target: str = "", graph: Any = None, config: ConfigProto | None = None
) -> ClientSession:
    """Call `allred.connect` with TensorFlow's arguments. Returns a session that runs functions. `graph` has no effect.

        session = tf1.Session(server.target)
        y = session.run(function, x)

    Raises InputError for a wrong target or config, NotInitializedError in a process that is not a task of a cluster.
    """
    warn_ignored("Session", locals(), {"graph": None})
    if not isinstance(config, ConfigProto | None):
        raise InputError(f"Session(config={config!r}): expected a tf1.ConfigProto or None")
    config = config or ConfigProto()
    return connect(
        target,
        log_device_placement=config.log_device_placement,
        allow_soft_placement=config.allow_soft_placement,
    )


def replica_device_setter(
    ps_tasks: int = 0,
    ps_device: str = "/job:ps",
    worker_device: str = "/job:worker",
    merge_devices: bool = True,
    cluster: Any = None,
    ps_ops: Any = None,
    ps_strategy: Callable[[Any], int] | None = None,
) -> Any:
    """Call `allred.replica_device_setter` with TensorFlow's arguments.

        with allred.device(tf1.replica_device_setter(cluster=cluster)): ...

    ps_strategy: a function that returns the number of the server for a variable; None: round robin. No effect:
    ps_device, which is always job "ps", merge_devices, ps_ops."""
    warn_ignored("replica_device_setter", locals(), {"ps_device": "/job:ps", "merge_devices": True, "ps_ops": None})
    strategy = "round_robin" if ps_strategy is None else ps_strategy
    return variable.replica_device_setter(ps_tasks, worker_device=worker_device, cluster=cluster, ps_strategy=strategy)
