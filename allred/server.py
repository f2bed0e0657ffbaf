"""`Server`: this process as a task of a cluster, as in TensorFlow. It calls init()."""

import os
import socket
from collections.abc import Mapping
from typing import Any

from allred import config, world
from allred.cluster import launcher, topology
from allred.cluster.spec import CLIENT, SERVERS, ClusterSpec, Tasks, task_name, tf_config
from allred.comm import functions
from allred.errors import AllredError, ConfigError, InputError
from allred.ps import context
from allred.startup import enter, join_in_init, joined_tasks
from allred.world_creation import Cluster

_NO_LIMIT_S = 1e9


class Server:
    """Task of a cluster that runs in this process. It replaces allred.init(), and waits until all tasks have started.

        cluster = allred.ClusterSpec({"ps": ["node1:2222"], "worker": ["node2:2222", "node3:2222"]})
        server = allred.Server(cluster, job_name="worker", task_index=0)

    A cluster with job "ps" uses mode ps, with these tasks as servers; without it, mode sync. A task of job "client"
    sends functions to the workers (`allred.connect`). The other job, of any name, has the workers.

    Under mpirun the rank of the process selects the task, servers first; job_name and task_index are optional, and
    addresses are not used. Without a launcher, start each task with its job_name and task_index, in any order. Mode ps
    and job "client" then need MPICH; mode sync needs no MPI. The tasks connect to the address of the first (the first
    server; without servers, worker 0), and report the tasks that they wait for, for at most ALLRED_START_TIMEOUT_S. If
    an address is not this machine's loopback, all tasks need the same ALLRED_SECRET or ALLRED_SECRET_FILE.

    Raises InputError for a task that is not in the cluster, ConfigError if the task cannot start or is rejected,
    CollectiveTimeout if other tasks do not start.
    """

    def __init__(
        self,
        cluster: ClusterSpec | Mapping[str, Tasks],
        job_name: str | None = None,
        task_index: int | None = None,
    ) -> None:
        self.cluster = ClusterSpec(cluster)
        workers_job = self._check()
        if world.is_initialized():
            raise AllredError("allred.Server() calls allred.init() itself; call only one of them, and once")
        launched = len(joined_tasks()) or launcher.launched_size(os.environ)
        tasks = self.cluster.addresses()
        here = Cluster(workers_job, tasks=tuple(tasks))
        servers = self.cluster.num_tasks(SERVERS) if SERVERS in self.cluster.jobs else 0
        modes = {"mode": "ps", "num_ps": servers} if servers else {"mode": "sync"}
        task = self._given(job_name, task_index)
        if launched > 1 and launched != len(tasks):
            raise ConfigError(
                f"allred.Server: this is one of {launched} processes, but the cluster has {len(tasks)} tasks"
            )
        if launched > 1 or len(tasks) == 1:
            enter(None, here, **modes)
        else:
            self._enter_rendezvous(task, here, modes)
        name = here.tasks[topology.world_rank()]
        if task not in (name, ""):
            raise InputError(f"allred.Server: this is rank {topology.world_rank()} of mpirun, {name}; got {task}")

    @classmethod
    def from_tf_config(cls, environ: Mapping[str, str] = os.environ) -> "Server":
        """Create the task that the variable TF_CONFIG describes; see `ClusterSpec.from_tf_config`."""
        return cls(*tf_config(environ))

    @classmethod
    def create_local_server(cls) -> "Server":
        """Create a cluster of this process alone."""
        return cls({"local": 1}, "local", 0)

    @property
    def target(self) -> str:
        """The URL of this task for clients."""
        job, index = topology.job_name(), topology.task_index()
        return f"allred://{self.cluster.task_address(job, index)}{task_name(job, index)}"

    def join(self) -> None:
        """Return when the workers are done.

        On a parameter server: serve the workers with the optimizer of worker 0, which is of allred.optim or of a class
        that can be imported here. On a worker: with a job "client" in the cluster, run the functions that clients send
        until their programs end; else wait until all workers have called it. Raises InputError on a client.
        """
        if context.serves():
            from allred.modes import ps_join  # imports MPI

            return ps_join.join()
        from allred.client.call import CLIENT_GROUP

        if (group := CLIENT_GROUP.of(world.current())) is not None:
            if group.is_client:
                raise InputError("server.join() is for servers and workers, and waits for clients; this is a client")
            from allred.client import rpc  # imports MPI

            return rpc.serve(group)
        functions.barrier_async().wait(_NO_LIMIT_S)  # a warning reports a long wait

    def _check(self) -> str:
        """Return the name of the job of workers. Raises InputError."""
        others = [job for job in self.cluster.jobs if job not in (SERVERS, CLIENT)]
        if len(others) != 1:
            words = ", ".join(map(repr, others)) or "none"
            raise InputError(f"allred.Server: a cluster has one job of workers besides 'ps' and 'client'; got {words}")
        for job in self.cluster.jobs:
            if self.cluster.task_indices(job) != list(range(self.cluster.num_tasks(job))):
                indices = self.cluster.task_indices(job)
                raise InputError(f"allred.Server: the tasks of job {job!r} are {indices}; none may be left out")
        return others[0]

    def _given(self, job_name: str | None, task_index: int | None) -> str:
        """Return the name of the requested task; "" for none."""
        if job_name is None and task_index is None:
            return ""
        if job_name is not None and task_index is None and self.cluster.num_tasks(job_name) == 1:
            task_index = 0
        if job_name is None or task_index is None:
            raise InputError("allred.Server: job_name and task_index go together; a job's only task has index 0")
        self.cluster.task_address(job_name, task_index)
        return task_name(job_name, task_index)

    def _enter_rendezvous(self, task: str, cluster: Cluster, modes: dict[str, Any]) -> None:
        addresses = self.cluster.addresses()
        if not task or not all(addresses.values()):
            missing = "job_name and task_index" if not task else "addresses, host:port, instead of numbers of tasks"
            raise InputError(
                f"allred.Server: without a launcher it needs {missing}; or start the {len(addresses)} processes with "
                f"mpirun -np {len(addresses)} ..."
            )
        enter_rendezvous(addresses, task, config.secret(os.environ), cluster, **modes)


def enter_rendezvous(
    addresses: Mapping[str, str],
    task: str,
    secret: str,
    cluster: Cluster,
    listener: socket.socket | None = None,
    **arguments: Any,
) -> None:
    """Join the other tasks without a launcher, as `init`; see `rendezvous_bootstrap.connect`."""
    from allred.launch.rendezvous_bootstrap import connect

    join_in_init(connect(addresses, task, secret, listener), cluster)
    enter(None, cluster, **arguments)
