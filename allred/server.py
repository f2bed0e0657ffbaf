"""`Server`: this process as a task of a cluster, in TensorFlow's words. It stands above init(), which it calls."""

import dataclasses
import os
import socket
from collections.abc import Mapping
from typing import Any

from allred import config, native, world
from allred.cluster import launcher, mpi, topology
from allred.cluster.spec import CLIENT, SERVERS, ClusterSpec, Tasks, task_name, tf_config
from allred.comm import functions
from allred.errors import AllredError, ConfigError, InputError
from allred.launch import by_hand
from allred.ps import running
from allred.startup import Cluster, enter

_NO_END_S = 1e9  # thirty years


class Server:
    """Make this process a task of a cluster. It stands for allred.init(), and waits until all tasks are there.

        cluster = allred.ClusterSpec({"ps": ["node1:2222"], "worker": ["node2:2222", "node3:2222"]})
        server = allred.Server(cluster, job_name="worker", task_index=0)

    With job "ps" in the cluster it is mode ps, of which these tasks are the servers; without, mode sync. A task of job
    "client" has the workers run functions (`allred.connect`). The other job, of any name, is that of the workers.

    Started by mpirun, the process's rank says which task it is, servers first; job_name and task_index may be left out,
    and addresses are not used. Started by hand, each task with its own job_name and task_index, in any order, it takes
    MPICH: the tasks meet at the address of the first (the first server; without servers, worker 0), and say for whom
    they wait, for ALLRED_START_TIMEOUT_S at most. If an address is not this machine's loopback, all need the same
    ALLRED_SECRET, or ALLRED_SECRET_FILE.

    Raises InputError for a task that is not in the cluster, ConfigError if the task cannot start or is not let in,
    CollectiveTimeout if others do not come.
    """

    def __init__(
        self,
        cluster: ClusterSpec | Mapping[str, Tasks],
        job_name: str | None = None,
        task_index: int | None = None,
    ) -> None:
        self.cluster = ClusterSpec(cluster)
        self._check()
        if world.is_initialized():
            raise AllredError("allred.Server() calls allred.init() itself; call only one of them, and once")
        launched = launcher.launched_size(os.environ)
        tasks = self.cluster.addresses()
        here = Cluster(self._workers_job(), tasks=tuple(tasks))
        servers = self.cluster.num_tasks(SERVERS) if SERVERS in self.cluster.jobs else 0
        modes = {"mode": "ps", "num_ps": servers} if servers else {"mode": "sync"}
        self._listener: socket.socket | None = None  # kept, so that no other program takes the address
        task = self._given(job_name, task_index)
        if launched > 1:
            if launched != len(tasks):
                raise ConfigError(
                    f"allred.Server: the launcher started {launched} processes, but the cluster has {len(tasks)} tasks"
                )
            enter(None, here, **modes)
        elif len(tasks) == 1:
            enter(None, here, **modes)
        else:
            self._enter_by_hand(task, here, modes)
        name = here.tasks[topology.world_rank()]
        if task not in (name, ""):
            raise InputError(f"allred.Server: this is rank {topology.world_rank()} of mpirun, {name}; got {task}")

    @classmethod
    def from_tf_config(cls, environ: Mapping[str, str] = os.environ) -> "Server":
        """The task that the variable TF_CONFIG describes; see `ClusterSpec.from_tf_config`."""
        return cls(*tf_config(environ))

    @classmethod
    def create_local_server(cls) -> "Server":
        """A cluster of this process alone."""
        return cls({"local": 1}, "local", 0)

    @property
    def target(self) -> str:
        """How a client names this task."""
        job, index = topology.job_name(), topology.task_index()
        return f"allred://{self.cluster.task_address(job, index)}{task_name(job, index)}"

    def join(self) -> None:
        """Return when the workers are done.

        On a parameter server: serve them until then, with the optimizer of worker 0, of allred.optim or of a class that
        can be imported here. On a worker: in a cluster with a job "client", run the functions that it sends until its
        program has ended; else wait until all workers have called it. Raises InputError on a client.
        """
        if running.serves():
            from allred.modes import joined  # imports MPI

            return joined.serve()
        if (group := world.current().client_group) is not None:
            if group.is_client:
                raise InputError("server.join() is for servers and workers; this is a client, which they wait for")
            from allred.client import rpc  # imports MPI

            return rpc.serve(group)
        functions.barrier_async().wait(_NO_END_S)  # a warning reports a long wait

    def _check(self) -> None:
        others = [job for job in self.cluster.jobs if job not in (SERVERS, CLIENT)]
        if len(others) != 1:
            words = ", ".join(map(repr, others)) or "none"
            raise InputError(f"allred.Server: a cluster has one job of workers besides 'ps' and 'client'; got {words}")
        for job in self.cluster.jobs:
            if self.cluster.task_indices(job) != list(range(self.cluster.num_tasks(job))):
                indices = self.cluster.task_indices(job)
                raise InputError(f"allred.Server: the tasks of job {job!r} are {indices}; none may be left out")

    def _workers_job(self) -> str:
        return next(job for job in self.cluster.jobs if job not in (SERVERS, CLIENT))

    def _given(self, job_name: str | None, task_index: int | None) -> str:
        """The name of the task that this is meant to be; empty if nothing was said."""
        if job_name is None and task_index is None:
            return ""
        if job_name is not None and task_index is None and self.cluster.num_tasks(job_name) == 1:
            task_index = 0
        if job_name is None or task_index is None:
            raise InputError("allred.Server: job_name and task_index go together; a job's only task has index 0")
        self.cluster.task_address(job_name, task_index)
        return task_name(job_name, task_index)

    def _enter_by_hand(self, task: str, cluster: Cluster, modes: dict[str, Any]) -> None:
        addresses = self.cluster.addresses()
        if not task or not all(addresses.values()):
            missing = "job_name and task_index" if not task else "addresses, host:port, instead of numbers of tasks"
            raise InputError(
                f"allred.Server: no launcher has started {len(addresses)} processes (mpirun -np {len(addresses)} ...), "
                f"and to be started by hand it takes {missing}"
            )
        settings = config.explicit_settings(os.environ, {})
        limit_s = settings.get("start_timeout_s", config.Config.start_timeout_s)
        library, problem = _mpi()
        meeting = by_hand.meet(addresses, task, config.secret(os.environ), limit_s, library, problem)
        self._listener = meeting.listener
        os.environ.update(meeting.environment)
        try:
            enter(None, dataclasses.replace(cluster, life=meeting.life), **modes)
        finally:
            for name in meeting.environment:  # not for programs that this one starts
                os.environ.pop(name, None)
        meeting.up()


def _mpi() -> tuple[str, str]:
    """Which MPI this Python has; and why tasks cannot be started with it by hand, empty if they can."""
    library, is_running = mpi.look()
    if is_running:
        return library, "MPI was started before allred.Server(); make that first, and leave MPI_Init to it"
    if not library or library.startswith("Open MPI"):
        return library, (
            f"tasks that are started by hand need MPICH, and this Python has {library or 'no MPI'}: "
            "pip install 'allred[mpich]', or use mpirun"
        )
    if native.arm_exit is None:
        return library, f"tasks that are started by hand need allred's C extension: {native.reason}"
    return library, ""
