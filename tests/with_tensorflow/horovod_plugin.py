"""A plugin of pytest for Horovod's tests: the private names that they use, their outcomes, ranks that stay together."""

import os
import sys
from types import SimpleNamespace


def pytest_configure():
    import horovod.common.util
    import horovod.tensorflow as hvd
    import tensorflow as tf
    from packaging.version import Version

    horovod.common.util.is_version_greater_equal_than = lambda one, other: Version(one) >= Version(other)
    private = SimpleNamespace(_executing_eagerly=tf.executing_eagerly, in_thread=None)
    private.get_env_rank_and_size = lambda: (int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"]))
    for name in ("tensorflow.util", "runner.util.threads", "runner.common.util.env"):
        sys.modules[f"horovod.{name}"] = private
    hvd.util, hvd._executing_eagerly = private, tf.executing_eagerly


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        with open(os.environ["OUTCOMES"], "a") as file:
            print(report.nodeid.rpartition("::")[2], report.outcome, file=file)


def pytest_runtest_logfinish(nodeid):
    """Wait for the other ranks. If this rank has failed, their collectives of the test fail here."""
    from allred import world
    from allred.comm import functions

    while world.is_initialized():
        try:
            functions.allgather_object(nodeid, f"the end of {nodeid}")
            return
        except Exception as error:
            print(error)


def pytest_sessionfinish(session):
    session.exitstatus = 0  # a rank with another one ends the job
