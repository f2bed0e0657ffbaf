"""Who of a cluster's tasks is there: a state machine without clock, socket or process. The task at the first address
has it run by a process (process.py).

A task's hello says `task` (its name), `addresses` (of all tasks, by name), `mpi` (which, with its version), `node`,
`host`, `pid`, `user` (a number); or `problem`, if it cannot take part. One that cannot be accepted is told why, and so
are those who wait: it may be theirs that is wrong. It is not the end of the job, for somebody may start the right one.
"""

import dataclasses
from typing import Any

Message = dict[str, Any]

PURPOSE = "meeting"  # of the channels to this process (allred.channel)


@dataclasses.dataclass
class _Task:
    host: str
    pid: int
    node: str
    mpi: str
    user: int
    is_there: bool = True
    is_up: bool = False  # MPI has started, and the watchers watch
    ended: str = ""  # "left", after a good end; "gone", without


class RendezvousState:
    """Of tasks at `addresses`, by name, in the order of ranks."""

    def __init__(self, addresses: dict[str, str]) -> None:
        self._addresses, self._names = addresses, list(addresses)
        self._tasks: dict[str, _Task] = {}
        self.began = False  # all were there
        self._told_end = False

    # Before all are there.

    def come(self, hello: Message) -> str:
        """Take a hello: why it is refused, in words; empty if this task is there now."""
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
        self.began = len(self._tasks) == len(self._names)
        return ""

    def late(self, hello: Message) -> str:
        """What a task has to wait for whose job runs already, begun with another process; empty for all others."""
        task = self._tasks.get(str(hello.get("task"))) if self.began else None
        if task is None or task.is_there or hello.get("problem") or hello.get("addresses") != self._addresses:
            return ""
        first, address = next(iter(self._addresses.items()))
        return f"the end of the job at {first} ({address}), in which pid {task.pid} on {task.host} was {hello['task']}"

    def _difference(self, name: str, hello: Message) -> str:
        theirs = hello.get("addresses")
        theirs = theirs if isinstance(theirs, dict) else {}
        for task in [*self._addresses, *theirs]:
            ours, other = (tasks.get(task, "nothing") for tasks in (self._addresses, theirs))
            if ours != other:
                return (
                    f"there {task} is {other}, here it is {ours}. Give all tasks the same addresses, letter by letter"
                )
        return "the tasks come in another order" if theirs != self._addresses else f"it has no {name}"

    def missing(self) -> list[str]:
        """Who is not there yet, with addresses."""
        return [f"{name} ({self._addresses[name]})" for name in self._names if name not in self._tasks]

    def nodes(self) -> list[str]:
        """The node of each rank."""
        return [self._tasks[name].node for name in self._names]

    def rank(self, name: str) -> int:
        """The number of a task in the world."""
        return self._names.index(name)

    # Afterwards.

    def up(self, name: str) -> None:
        """A task has come through MPI's start."""
        self._tasks[name].is_up = True

    def left(self, name: str) -> None:
        """A task has ended well, and waits in MPI_Finalize for the others."""
        self._tasks[name].ended = "left"

    def go(self, name: str) -> tuple[list[str], str]:
        """A task is gone. To whom that has to be told, and in which words: those who wait for it in MPI's start."""
        task = self._tasks[name]
        task.is_there = False
        if not self.began:
            del self._tasks[name]
            return [], ""
        if not task.ended:
            task.ended = "gone"
        start = [each for each, other in self._tasks.items() if not (other.is_up or other.ended)]
        what = f"{name} (pid {task.pid} on {task.host}) has ended while MPI started; this task ends, too"
        return (start, what) if task.ended == "gone" else ([], "")

    def end(self) -> list[str]:
        """Who is to be told that nobody else will come to MPI_Finalize: all that have left, since one is gone without
        it, and the rest have ended, too."""
        lost = any(task.ended == "gone" for task in self._tasks.values())
        if not lost or self._told_end or not all(task.ended for task in self._tasks.values()):
            return []
        self._told_end = True
        return [name for name, task in self._tasks.items() if task.ended == "left"]
