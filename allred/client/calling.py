"""What init() made for clients, on every task of a cluster that has some."""

import dataclasses
import os
from typing import Any


@dataclasses.dataclass(eq=False)
class Calling:
    """`comm`: of all tasks, for nothing but functions and what they return. `tasks`: their names, by rank; the last
    `clients` of them are clients. `config`: the settings."""

    comm: Any
    rank: int
    tasks: tuple[str, ...]
    clients: int
    config: Any
    process: int = dataclasses.field(default_factory=os.getpid)  # of this task: not that of its forks
    caller: Any = None  # the client's end (caller.py), from its first call on

    @property
    def is_client(self) -> bool:
        """Whether this task is one."""
        return self.rank >= len(self.tasks) - self.clients

    @property
    def workers(self) -> list[int]:
        """The ranks of the workers."""
        return [rank for rank in range(len(self.tasks) - self.clients) if not self.tasks[rank].startswith("/job:ps/")]

    @property
    def name(self) -> str:
        """Of this task."""
        return self.tasks[self.rank]
