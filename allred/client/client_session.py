"""`allred.connect` and `ClientSession`: a program of job "client" runs functions on the other tasks."""

import dataclasses
import re
import sys
from collections.abc import Callable
from typing import Any, Self

from allred import world
from allred.client.call import CLIENT_GROUP, Call, ClientGroup
from allred.cluster import device, topology
from allred.cluster.device import Place
from allred.cluster.spec import SERVERS
from allred.errors import InputError, NotInitializedError


def connect(
    target: str = "", *, log_device_placement: bool = False, allow_soft_placement: bool = False
) -> "ClientSession":
    """Return a session that runs functions of this program, the task of job "client", on the tasks of the cluster.

        cluster = allred.ClusterSpec({"worker": ["node1:2222", "node2:2222"], "client": ["node1:2223"]})
        server = allred.Server(cluster, "client", 0)      # the workers call server.join()
        session = allred.connect(server.target)
        with allred.device("/job:worker/task:1"):
            y = session.run(function, x)

    target: the default task (`Server.target`), for functions outside of `allred.device`; "": this task.
    log_device_placement: print a line on stderr for each function, `name: /job:worker/task:1/cpu:0`.
    allow_soft_placement: a function inside allred.device("/job:worker/task:1/gpu:0") runs on that task as for /cpu:0,
        with or without a GPU. Without allow_soft_placement such a function is an InputError.

    Any task of the cluster can run any code on the others: use clients only in trusted networks, with ALLRED_SECRET.
    Raises InputError for a malformed target; NotInitializedError for a target in a process that is not a task of a
    cluster, and before init().
    """
    here = world.current_or_none()
    if not (here is not None and here.in_cluster) and (target or here is None):
        raise NotInitializedError(
            f"allred.connect({target!r}): this process is not a task of a cluster, and a client must be one. Add a job "
            "'client' with the host:port of this program to the ClusterSpec of all tasks, and call "
            "allred.Server(cluster, 'client', 0) before allred.connect"
        )
    place = _this_task()
    if target:
        match = re.fullmatch(r"allred://[^/]*(/job:\w+/task:\d+)", target) if isinstance(target, str) else None
        if match is None:
            raise InputError(
                f"allred.connect({target!r}): expected server.target, such as allred://node1:2222/job:worker/task:0"
            )
        place = device.parse(match[1])
    return ClientSession(place, log_device_placement, allow_soft_placement)


def _this_task() -> Place:
    return Place(topology.job_name(), topology.task_index())


class ClientSession:
    """Runs functions on tasks; `allred.connect` returns it. The end of a with statement waits for all its functions."""

    def __init__(self, target: Place, log_device_placement: bool, allow_soft_placement: bool = False) -> None:
        self._target, self._logs, self._soft = target, log_device_placement, allow_soft_placement
        self._calls: list[Call] = []

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function on the task of `allred.device`, and return its result. For its errors see `Call.wait`.

            with allred.device("/job:worker/task:1"):
                total = session.run(np.sum, x)

        The function and its arguments are sent by name if they can be imported there, else by value, which requires
        cloudpickle. Raises InputError for objects that cannot be sent, and for tasks that do not exist or run no
        functions.
        """
        return self.start(function, *args, **kwargs).wait()

    def start(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
        """Start a function like `run`, and return its Call. Tasks work in parallel; each runs one function at a time.
        Functions on all workers may use collectives."""
        place, group = self._place()
        name = str(getattr(function, "__name__", type(function).__name__))
        if not callable(function):
            raise InputError(f"session.run({function!r}): expected a function and its arguments")
        if self._logs:
            sys.stderr.write(f"{name}: {place}\n")
            sys.stderr.flush()
        if group is None:
            call = Call(name, place)
            call.end(function(*args, **kwargs))
            return call
        from allred.client.rpc import Dispatcher  # imports MPI

        call = Dispatcher.of(group).start(name, place, function, args, kwargs)
        self._calls = [each for each in self._calls if each.is_open] + [call]
        return call

    def _place(self) -> tuple[Place, ClientGroup | None]:
        """Return the place of a function, and the group to send it in; None for this task. Raises InputError."""
        place = device.of_function().within(self._target)
        if not world.is_initialized():
            raise NotInitializedError(
                "session.run: allred.shutdown() has ended the session; call it after the last session.run"
            )
        here = _this_task().task_name
        if place.unit.startswith("gpu"):
            if not self._soft:
                raise InputError(
                    f"session.run: allred sends functions to tasks, not to GPUs; remove /{place.unit} from "
                    "allred.device and choose the GPU in the function, or pass allow_soft_placement=True to "
                    "allred.connect, which ignores the GPU"
                )
            place = dataclasses.replace(place, unit="cpu:0")
        if place.task_name == here:
            return place, None
        group = CLIENT_GROUP.of(world.current())
        if group is None or not group.is_client:
            raise InputError(
                f"session.run: {here} cannot run a function on {place.task_name}; only a task of job 'client' can: "
                "give the ClusterSpec a job 'client', and connect there"
            )
        if place.job == SERVERS:
            raise InputError(
                f"session.run: {place.task_name} is a parameter server, which runs no functions; it holds variables "
                "(allred.variable)"
            )
        if place.task_name not in group.tasks or place.job == "client":
            others = ", ".join(task for task in group.tasks if not task.startswith(("/job:ps/", "/job:client/")))
            raise InputError(f"session.run: there is no {place.task_name}; functions run on {others}")
        return place, group

    def close(self) -> None:
        """Wait for all functions that were started. The workers return from join() at the end of this program."""
        calls, self._calls = self._calls, []
        for call in calls:
            if call.is_open:
                call.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            self.close()
