"""`ClusterSpec`: the jobs of a cluster and the addresses of their tasks, as in TensorFlow."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Union

from allred import world
from allred.cluster.launcher import launched_size
from allred.errors import ConfigError, InputError

SERVERS = "ps"  # the job whose tasks are parameter servers
CLIENT = "client"  # the job whose task sends functions to the workers
_MOST_TASKS = 2**16  # of a job that is given as a number
_ORDER = {SERVERS: 0, CLIENT: 2}  # order of ranks; workers between them

Tasks = Union[int, Sequence[str], Mapping[int, str]]  # noqa: UP007  (a value: evaluated at import)


class ClusterSpec:
    """The jobs of a cluster, each with its tasks.

        ClusterSpec({"ps": ["node1:2222"], "worker": ["node2:2222", "node3:2222"]})  # addresses, in task order
        ClusterSpec({"ps": {0: "node1:2222"}, "worker": {0: "node2:2222"}})  # the same, by task index
        ClusterSpec({"ps": 1, "worker": 4})  # numbers of tasks; mpirun chooses the hosts

    Job "ps" has the parameter servers, job "client" a program that sends functions to the workers (`allred.connect`).
    Two specs are equal if they have the same jobs with the same tasks.

    Raises InputError if a job has no tasks, or an address is not host:port or occurs twice.

    >>> cluster = ClusterSpec({"ps": ["a:2222"], "worker": ["b:2222", "c:2222"]})
    >>> cluster.jobs, cluster.num_tasks("worker"), cluster.task_address("worker", 1)
    (['ps', 'worker'], 2, 'c:2222')
    """

    def __init__(self, cluster: "Mapping[str, Tasks] | ClusterSpec") -> None:
        if isinstance(cluster, ClusterSpec):
            cluster = cluster.as_dict()
        if not isinstance(cluster, Mapping) or not cluster:
            raise InputError(f"ClusterSpec takes a dict from jobs to their tasks, got {cluster!r}")
        self._jobs = {job: _tasks(job, tasks) for job, tasks in cluster.items()}
        seen: dict[str, str] = {}
        for task, address in self.addresses().items():
            if address and address in seen:
                raise InputError(f"ClusterSpec: {seen[address]} and {task} have the same address, {address}")
            seen[address] = task

    @classmethod
    def from_world(cls, num_ps: int = 1) -> "ClusterSpec":
        """Return a cluster of `num_ps` servers, with the other processes of the MPI world as workers.

        Before allred.init() the launcher determines the number of processes; without a launcher it is 1. Raises
        InputError if no worker is left.
        """
        try:
            size = world.current().topology.world_size
        except RuntimeError:
            size = launched_size(os.environ)
        if not 0 <= num_ps < size:
            raise InputError(f"ClusterSpec.from_world(num_ps={num_ps}): of {size} processes no worker is left")
        return cls({SERVERS: num_ps, "worker": size - num_ps} if num_ps else {"worker": size})

    @classmethod
    def from_tf_config(cls, environ: Mapping[str, str] = os.environ) -> "ClusterSpec":
        """Return the cluster of the variable TF_CONFIG. A job "chief" or "master" becomes worker 0, as in TensorFlow.

        Raises ConfigError if the variable is not set, or does not have TensorFlow's format.
        """
        return tf_config(environ)[0]

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs."""
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """Return the number of tasks of a job."""
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the indices of the tasks of a job, ascending."""
        return list(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return host:port of a task; "" if only the number of tasks was given. Raises InputError if it is unknown."""
        tasks = self._job(job_name)
        if task_index not in tasks:
            raise InputError(f"job {job_name!r} has no task {task_index!r}; it has {', '.join(map(str, tasks))}")
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Return the addresses of the tasks of a job by index; None for a missing task or address."""
        tasks = self._job(job_name)
        return [tasks.get(index) or None for index in range(max(tasks) + 1)]

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for `ClusterSpec`: for each job a list, a dict if indices are missing, or a number."""
        return {job: _plain(tasks) for job, tasks in self._jobs.items()}

    def addresses(self) -> dict[str, str]:
        """Return the address of every task by its name, such as /job:worker/task:1, in rank order."""
        order = sorted(self._jobs, key=lambda job: _ORDER.get(job, 1))
        return {task_name(job, index): address for job in order for index, address in self._jobs[job].items()}

    def _job(self, job_name: str) -> dict[int, str]:
        if job_name not in self._jobs:
            raise InputError(f"the cluster has no job {job_name!r}; it has {', '.join(map(repr, self._jobs))}")
        return self._jobs[job_name]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClusterSpec) and self._jobs == other._jobs

    def __hash__(self) -> int:
        return hash(frozenset(self._jobs))

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"


def task_name(job_name: str, task_index: int) -> str:
    """Return the name of a task, as in TensorFlow."""
    return f"/job:{job_name}/task:{task_index}"


def tf_config(environ: Mapping[str, str]) -> tuple[ClusterSpec, str, int]:
    """Return the cluster of TF_CONFIG, and the job and index of this task. Raises ConfigError for another format."""
    text = environ.get("TF_CONFIG", "")
    try:
        found = json.loads(text)
        jobs, job, index = dict(found["cluster"]), found["task"]["type"], int(found["task"]["index"])
        for chief in ("chief", "master"):
            if chief in jobs:
                first = jobs.pop(chief)
                jobs["worker"] = [*first, *jobs.get("worker", ())]
                index += len(first) * (job == "worker")
                job = "worker" if job == chief else job
        return ClusterSpec(jobs), job, index
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"TF_CONFIG={text!r} cannot be used ({type(error).__name__}: {error}); it should look like "
            '{"cluster": {"ps": ["host:port"], "worker": ["host:port"]}, "task": {"type": "worker", "index": 0}}'
        ) from None


def _tasks(job: Any, tasks: Any) -> dict[int, str]:
    """Return the address of each task of a job by its index, "" if it has none. Raises InputError."""
    if not isinstance(job, str) or not job.isidentifier():
        raise InputError(f"ClusterSpec: a job's name is a word, such as worker, not {job!r}")
    if isinstance(tasks, int) and not isinstance(tasks, bool):
        if tasks > _MOST_TASKS:
            raise InputError(f"ClusterSpec: job {job!r} has {tasks} tasks; at most {_MOST_TASKS} are possible")
        found = dict.fromkeys(range(tasks), "")
    elif isinstance(tasks, Mapping):
        found = {index: _address(job, tasks[index]) for index in sorted(tasks)}
    elif isinstance(tasks, Sequence) and not isinstance(tasks, (str, bytes)):
        found = {index: _address(job, address) for index, address in enumerate(tasks)}
    else:
        raise InputError(f"ClusterSpec: job {job!r} takes addresses, a dict of them by index, or a number: {tasks!r}")
    if not found or not all(isinstance(index, int) and index >= 0 for index in found):
        raise InputError(f"ClusterSpec: job {job!r} needs at least one task, numbered from 0: {tasks!r}")
    return found


def _address(job: str, address: Any) -> str:
    host, colon, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
        raise InputError(f"ClusterSpec: an address of job {job!r} is not host:port: {address!r}")
    return str(address)


def _plain(tasks: dict[int, str]) -> Any:
    if list(tasks) != list(range(len(tasks))):
        return dict(tasks)
    return list(tasks.values()) if all(tasks.values()) else len(tasks)
