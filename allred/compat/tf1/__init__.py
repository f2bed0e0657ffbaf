"""TensorFlow 1.x's names for training with parameter servers, with its arguments. There is no graph: the variables and
the optimizer are given as params= and optimizer=, and functions take the place of ops.

Arguments that have no effect are accepted, with one warning. docs/from-tensorflow.md lists all names of the tutorials.
"""

from allred.compat.tf1.sync_replicas import SyncReplicasOptimizer
from allred.compat.tf1.training_session import (
    ConfigProto,
    MonitoredSession,
    MonitoredTrainingSession,
    Session,
    StopAtStepHook,
    Supervisor,
    replica_device_setter,
)

__all__ = [
    "ConfigProto", "MonitoredSession", "MonitoredTrainingSession", "Session", "StopAtStepHook", "Supervisor",
    "SyncReplicasOptimizer", "replica_device_setter",
]  # fmt: skip
