"""Calls of functions on tasks: the handle, the serialization, and the group of tasks that take part.

A message is a pickle and the arrays in it, which are sent without a copy. With cloudpickle, functions of the main
program, lambdas and closures are sent by value. Without it, a function is sent by name and must be importable on the
other task.
"""

import dataclasses
import os
import pickle
from collections.abc import Sequence
from typing import Any

from allred import world
from allred.cluster.device import Place
from allred.errors import InputError

REMEDY = (
    "define it in a module that both can import, or install cloudpickle for both (pip install cloudpickle), which "
    "sends functions by value"
)


@dataclasses.dataclass(eq=False)
class ClientGroup:
    """The tasks of a cluster with clients, for functions and their results. Created by init() on every task.

    comm: an MPI communicator of all tasks, for nothing else. tasks: names by rank; the last `clients` of them are
    clients. config: the settings. process: the id of this process, which differs in forked processes. dispatcher: the
    client's Dispatcher, after its first call.
    """

    comm: Any
    rank: int
    tasks: tuple[str, ...]
    clients: int
    config: Any
    process: int = dataclasses.field(default_factory=os.getpid)
    dispatcher: Any = None

    @property
    def is_client(self) -> bool:
        return self.rank >= len(self.tasks) - self.clients

    @property
    def workers(self) -> list[int]:
        """The ranks of the workers."""
        return [rank for rank in range(len(self.tasks) - self.clients) if not self.tasks[rank].startswith("/job:ps/")]

    @property
    def name(self) -> str:
        return self.tasks[self.rank]


CLIENT_GROUP = world.Slot[ClientGroup | None](lambda: None)  # None in a cluster without clients


class Call:
    """Handle of a function that a task runs; `ClientSession.start` returns it. The arguments of the function must not
    change before its end. Attribute `ended`: whether the result has been received.

        call = session.start(function, x)
        y = call.wait()
    """

    def __init__(self, name: str, place: Place, dispatcher: Any = None) -> None:
        self.name, self.place = name, place
        self.title = f"session.run({name}) on {place.task_name}"
        self.ended = False
        self._dispatcher = dispatcher  # None: the function runs on this task
        self._value: Any = None
        self._error: BaseException | None = None
        self._waited_for = False

    def end(self, value: Any = None, error: BaseException | None = None) -> None:
        """For the dispatcher: set the result."""
        self.ended, self._value, self._error = True, value, error

    @property
    def unretrieved_error(self) -> BaseException | None:
        """The received error of the function, if `wait` has not been called."""
        return None if self._waited_for else self._error

    @property
    def is_open(self) -> bool:
        """Whether `wait` is needed: the result or the error has not been retrieved."""
        return not self.ended or self.unretrieved_error is not None

    def done(self) -> bool:
        """Return whether the function has ended. Receives results, and does not wait."""
        if not self.ended and self._dispatcher is not None:
            self._dispatcher.poll()
        return self.ended

    def wait(self) -> Any:
        """Wait for the end of the function and return its result.

        Raises its exception, with the traceback of the task as a note; RemoteRankError if the task has died;
        CollectiveTimeout after ALLRED_TIMEOUT_S (see `allred.patience`)."""
        self._waited_for = True
        if not self.ended and self._dispatcher is not None:
            self._dispatcher.wait(self)
        if self._error is not None:
            raise self._error
        return self._value


def pack(value: Any, what: str) -> list[Any]:
    """Return the parts of a message. Raises InputError, which begins with `what`, for objects that cannot be sent."""
    try:
        from cloudpickle import dumps
    except ModuleNotFoundError:
        dumps = pickle.dumps
    buffers: list[pickle.PickleBuffer] = []
    try:
        data = dumps(value, protocol=5, buffer_callback=buffers.append)
    except Exception as error:  # pickling runs code of the user
        more = f"; {REMEDY}" if dumps is pickle.dumps else ""
        raise InputError(f"{what} cannot be sent ({type(error).__name__}: {error}){more}") from None
    return [data, *(buffer.raw() for buffer in buffers)]


def unpack(parts: Sequence[Any]) -> Any:
    """Return the object of a message. Raises any error of its classes."""
    return pickle.loads(parts[0], buffers=parts[1:])
