"""`tf.Session` and `tf.ConfigProto` for a client: a session that runs functions on tasks."""

from typing import Any

from allred.client.session import ClientSession, connect
from allred.compat.tf1 import ignored
from allred.errors import InputError


class ConfigProto:
    """Settings of a session.

        config = tf1.ConfigProto(allow_soft_placement=True, log_device_placement=True)
        session = tf1.Session(server.target, config=config)

    allow_soft_placement, log_device_placement: see `allred.connect`. more: TensorFlow's other settings; no effect.
    """

    def __init__(self, *, allow_soft_placement: bool = False, log_device_placement: bool = False, **more: Any) -> None:
        self.allow_soft_placement, self.log_device_placement = allow_soft_placement, log_device_placement
        ignored.tell("ConfigProto", more, dict.fromkeys(more))


def Session(  # noqa: N802  (TensorFlow's name)
    target: str = "", graph: Any = None, config: ConfigProto | None = None
) -> ClientSession:
    """`allred.connect` with TensorFlow's arguments: a session that runs functions. `graph` has no effect.

    Raises InputError for a wrong target or config, NotInitializedError in a process that is not a task of a cluster.
    """
    ignored.tell("Session", locals(), {"graph": None})
    if not isinstance(config, ConfigProto | None):
        raise InputError(f"Session(config={config!r}): expected a tf1.ConfigProto or None")
    config = config or ConfigProto()
    return connect(
        target,
        log_device_placement=config.log_device_placement,
        allow_soft_placement=config.allow_soft_placement,
    )
