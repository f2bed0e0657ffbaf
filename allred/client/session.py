"""`allred.connect`: what a program of job "client" holds to have the other tasks run its functions."""

import dataclasses
import re
import sys
from collections.abc import Callable
from typing import Any, Self

from allred import world
from allred.cluster import device, topology
from allred.cluster.device import Place
from allred.cluster.spec import SERVERS
from allred.errors import InputError, NotInitializedError


def connect(
    target: str = "", *, log_device_placement: bool = False, allow_soft_placement: bool = False
) -> "ClientSession":
    """A session in which the cluster's tasks run this program's functions. It is for the task of job "client".

        cluster = allred.ClusterSpec({"worker": ["node1:2222", "node2:2222"], "client": ["node1:2223"]})
        server = allred.Server(cluster, "client", 0)      # the workers call server.join()
        session = allred.connect(server.target)
        with allred.device("/job:worker/task:1"):
            y = session.run(function, x)

    target: of a task (`Server.target`), which runs what no `allred.device` sends elsewhere; "": this task.
    log_device_placement: a line on stderr for each function, `name: /job:worker/task:1/cpu:0`.
    allow_soft_placement: a function inside allred.device("/job:worker/task:1/gpu:0") runs on that task as for /cpu:0,
        with or without a GPU. Without allow_soft_placement such a function is an InputError.

    Whoever is a task of the cluster can have others run anything: for networks that you trust, with ALLRED_SECRET.
    Raises InputError for a target in another form, NotInitializedError in a process that is not a task of a cluster.
    """
    if not _in_cluster() and (target or not world.is_initialized()):
        raise NotInitializedError(
            f"allred.connect({target!r}): this process is not a task of a cluster, and a client must be one. Add a job "
            "'client' with the host:port of this program to the ClusterSpec of all tasks, and call "
            "allred.Server(cluster, 'client', 0) before allred.connect"
        )
    found = _this_task()
    if target:
        match = re.fullmatch(r"allred://[^/]*(/job:\w+/task:\d+)", target) if isinstance(target, str) else None
        if match is None:
            raise InputError(
                f"allred.connect({target!r}): expected server.target, such as allred://node1:2222/job:worker/task:0"
            )
        found = device.parse(match[1])
    return ClientSession(found, log_device_placement, allow_soft_placement)


def _in_cluster() -> bool:
    """Whether this process is a task of a cluster: after allred.Server(), before allred.shutdown()."""
    here = world.current_or_none()
    return here is not None and here.in_cluster


def _this_task() -> Place:
    return Place(topology.job_name(), topology.task_index())


class Call:
    """A function that a task runs: what `ClientSession.start` gives. Its arguments are not to be changed before it has
    ended."""

    def __init__(self, name: str, place: Place) -> None:
        self.name, self.place = name, place
        self.title = f"session.run({name}) on {place.task_name}"
        self._ended = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._waited_for = False

    def end(self, value: Any = None, error: BaseException | None = None) -> None:
        """For the caller: what has come of it."""
        self._ended, self._value, self._error = True, value, error

    @property
    def ended(self) -> bool:
        """Whether it has, as far as is known here."""
        return self._ended

    @property
    def unheard(self) -> BaseException | None:
        """What it raised, as far as is known here, and nobody has waited for it."""
        return None if self._waited_for else self._error

    @property
    def is_open(self) -> bool:
        """Whether it is still to be waited for: it has not ended, or nobody has heard what it raised."""
        return not self._ended or self.unheard is not None

    def done(self) -> bool:
        """Whether it has ended; takes what has come, and does not wait."""
        if not self._ended:
            from allred.client import caller  # imports MPI

            caller.look()
        return self._ended

    def wait(self) -> Any:
        """What it returned, once it has ended. Raises what it raised, with its traceback there as a note; or
        RemoteRankError if the task has died, CollectiveTimeout after ALLRED_TIMEOUT_S (see `allred.patience`)."""
        self._waited_for = True
        if not self._ended:
            from allred.client import caller

            caller.wait(self)
        if self._error is not None:
            raise self._error
        return self._value


class ClientSession:
    """What `allred.connect` gives. In a with statement its end waits for all that was started in it."""

    def __init__(self, target: Place, log_device_placement: bool, allow_soft_placement: bool = False) -> None:
        self._target, self._logs, self._soft = target, log_device_placement, allow_soft_placement
        self._calls: list[Call] = []

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function where `allred.device` says, and return what it returns. See `Call.wait` for what it raises.

        The function and its arguments are sent there: by name if it can be imported there, else by value, which takes
        cloudpickle. Raises InputError for what cannot be sent, and for tasks that do not exist or run no functions.
        """
        return self.start(function, *args, **kwargs).wait()

    def start(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
        """The same without waiting for its end: tasks work at the same time, each at one function after the other.
        Functions on all workers may use collectives among them."""
        place = self._place()
        name = str(getattr(function, "__name__", type(function).__name__))
        if not callable(function):
            raise InputError(f"session.run({function!r}): expected a function and its arguments")
        if self._logs:
            sys.stderr.write(f"{name}: {place}\n")
            sys.stderr.flush()
        call = Call(name, place)
        if place.task_name == _this_task().task_name:
            call.end(function(*args, **kwargs))
            return call
        from allred.client import caller  # imports MPI

        caller.start(call, function, args, kwargs)
        self._calls = [each for each in self._calls if each.is_open] + [call]
        return call

    def _place(self) -> Place:
        """Where a function is to run. Raises InputError if that cannot be."""
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
        calling = world.current().calling
        if place.task_name == here:
            return place
        if calling is None or not calling.is_client:
            raise InputError(
                f"session.run: {here} cannot have {place.task_name} run a function; a task of job 'client' can: give "
                "the ClusterSpec a job 'client', and connect there"
            )
        if place.job == SERVERS:
            raise InputError(
                f"session.run: {place.task_name} is a parameter server, which runs no functions; variables live there "
                "(allred.variable)"
            )
        if place.task_name not in calling.tasks or place.job == "client":
            others = ", ".join(task for task in calling.tasks if not task.startswith(("/job:ps/", "/job:client/")))
            raise InputError(f"session.run: there is no {place.task_name}; functions run on {others}")
        return place

    def close(self) -> None:
        """Wait for what was started and not waited for. The workers' join() returns at the end of this program."""
        calls, self._calls = self._calls, []
        for call in calls:
            if call.is_open:
                call.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            self.close()
