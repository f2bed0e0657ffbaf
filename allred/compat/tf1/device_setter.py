"""`tf.train.replica_device_setter`."""

from collections.abc import Callable
from typing import Any

from allred.compat.tf1 import ignored
from allred.ps import variable


def replica_device_setter(
    ps_tasks: int = 0,
    ps_device: str = "/job:ps",
    worker_device: str = "/job:worker",
    merge_devices: bool = True,
    cluster: Any = None,
    ps_ops: Any = None,
    ps_strategy: Callable[[Any], int] | None = None,
) -> Any:
    """`allred.replica_device_setter` with TensorFlow's arguments. ps_strategy: a function from a variable to a server's
    number; None: in turn. Of no effect: ps_device, which is job "ps" always, merge_devices, ps_ops."""
    ignored.tell("replica_device_setter", locals(), {"ps_device": "/job:ps", "merge_devices": True, "ps_ops": None})
    strategy = "round_robin" if ps_strategy is None else ps_strategy
    return variable.replica_device_setter(ps_tasks, worker_device=worker_device, cluster=cluster, ps_strategy=strategy)
