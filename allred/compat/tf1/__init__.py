"""TensorFlow 1.x's names for training with parameter servers, with its arguments. There is no graph: what TensorFlow
finds there (variables, the optimizer) is given as params= and optimizer=, and what it calls an op is a function.

What has no effect here is accepted, and said once. docs/from-tensorflow.md has all names of the tutorials.
"""

from allred.compat.tf1.client_session import ConfigProto, Session
from allred.compat.tf1.device_setter import replica_device_setter
from allred.compat.tf1.hooks import StopAtStepHook
from allred.compat.tf1.supervisor import Supervisor
from allred.compat.tf1.sync_replicas import SyncReplicasOptimizer
from allred.compat.tf1.training_session import MonitoredSession, MonitoredTrainingSession

__all__ = [
    "ConfigProto",
    "MonitoredSession",
    "MonitoredTrainingSession",
    "Session",
    "StopAtStepHook",
    "Supervisor",
    "SyncReplicasOptimizer",
    "replica_device_setter",
]
