"""The state machine of the rendezvous: which tasks are connected. It has no clock, socket or process.

The hello of a task has `task`, its name; `addresses` of all tasks by name; `mpi`, name and version; `node`, `host`,
`pid`, `user` (a number); or `problem`, if it cannot take part. The reason of a refusal is sent to the refused task and
to the waiting tasks, because these may be wrong. The job continues, because the user may start the right task.
"""

import dataclasses
from typing import Any

Message = dict[str, Any]

PURPOSE = "rendezvous"  # of the channels to this process (allred.runtime.channel)


@dataclasses.dataclass
class _Task:
    host: str
    pid: int
    node: str
    mpi: str
    user: int
    is_connected: bool = True
    mpi_is_up: bool = False  # MPI has started, and the watchers run
    ended: str = ""  # "left" after success, "gone" after a failure


class RendezvousState:
    """The tasks at `addresses`, by name, in rank order."""

    def __init__(self, addresses: dict[str, str]) -> None:
        self._addresses, self._names = addresses, list(addresses)
        self._tasks: dict[str, _Task] = {}
        self.all_connected = False
        self._end_reported = False

    # Until all tasks have connected.

    def connect(self, hello: Message) -> str:
        """Handle a hello. Return why it is refused; "" if it is accepted."""
        name = str(hello.get("task"))
        who = f"{name} (pid {hello.get('pid')} on {hello.get('host')})"
        if hello.get("problem"):
            return f"{who} cannot start: {hello['problem']}"
        if name not in self._addresses or hello.get("addresses") != self._addresses:
            return f"{who} has another cluster than {self._names[0]}: {self._difference(name, hello)}"
        if name in self._tasks:
            other = self._tasks[name]
            return (
                f"{who} was started a second time; pid {other.pid} on {other.host} is {name} already. Give each task "
                "its own task_index"
            )
        task = _Task(str(hello["host"]), int(hello["pid"]), str(hello["node"]), str(hello["mpi"]), int(hello["user"]))
        for there, other in self._tasks.items():
            if other.mpi != task.mpi:
                return f"{who} has {task.mpi}, but {there} has {other.mpi}; install the same in all environments"
            if other.node == task.node and other.user != task.user:
                return (
                    f"{who} is of user {task.user}, but {there} of user {other.user}; on one machine they share "
                    "memory, so start them as the same user"
                )
        self._tasks[name] = task
        self.all_connected = len(self._tasks) == len(self._names)
        return ""

    def wait_of_restarted(self, hello: Message) -> str:
        """Return what a restarted task of a running job has to wait for; "" for other tasks."""
        task = self._tasks.get(str(hello.get("task"))) if self.all_connected else None
        if task is None or task.is_connected or hello.get("problem") or hello.get("addresses") != self._addresses:
            return ""
        first, address = next(iter(self._addresses.items()))
        return f"the end of the job at {first} ({address}), in which pid {task.pid} on {task.host} was {hello['task']}"

    def _difference(self, name: str, hello: Message) -> str:
        theirs = hello.get("addresses")
        theirs = theirs if isinstance(theirs, dict) else {}
        for task in [*self._addresses, *theirs]:
            ours, other = (tasks.get(task, "nothing") for tasks in (self._addresses, theirs))
            if ours != other:
                return f"there {task} is {other}, here it is {ours}. Give all tasks exactly the same addresses"
        return "the order of the tasks differs" if theirs != self._addresses else f"it has no {name}"

    def missing(self) -> list[str]:
        """Return the tasks that have not connected, with addresses."""
        return [f"{name} ({self._addresses[name]})" for name in self._names if name not in self._tasks]

    def nodes(self) -> list[str]:
        return [self._tasks[name].node for name in self._names]

    # Afterwards.

    def mpi_started(self, name: str) -> None:
        """A task has finished MPI_Init."""
        self._tasks[name].mpi_is_up = True

    def finished(self, name: str) -> None:
        """A task has ended without an error, and waits in MPI_Finalize for the others."""
        self._tasks[name].ended = "left"

    def disconnect(self, name: str) -> tuple[list[str], str]:
        """A task has disconnected. Return the tasks that block in MPI_Init because of it, and the message for them."""
        task = self._tasks[name]
        task.is_connected = False
        if not self.all_connected:
            del self._tasks[name]
            return [], ""
        if not task.ended:
            task.ended = "gone"
        start = [each for each, other in self._tasks.items() if not (other.mpi_is_up or other.ended)]
        what = f"{name} (pid {task.pid} on {task.host}) has ended while MPI started; this task ends, too"
        return (start, what) if task.ended == "gone" else ([], "")

    def blocked_in_finalize(self) -> list[str]:
        """Return the tasks to end, which block in MPI_Finalize: those that left, if all have ended and one failed."""
        lost = any(task.ended == "gone" for task in self._tasks.values())
        if not lost or self._end_reported or not all(task.ended for task in self._tasks.values()):
            return []
        self._end_reported = True
        return [name for name, task in self._tasks.items() if task.ended == "left"]
