"""Starting MPI, as allred.init() would, and what came of it: one world of all ranks, or N worlds of one."""

import dataclasses
import os
import socket
from typing import Any

from allred.cluster import launcher, mpi
from allred.doctor.launch import Launch
from allred.doctor.library import Library
from allred.doctor.line import FAIL, NOTE, OK, Line
from allred.doctor.ranks import Seen, by_host, compared
from allred.errors import ConfigError

_HOSTS_NAMED = 8


@dataclasses.dataclass(frozen=True)
class World:
    """The world as a rank sees it. size 0: there is no MPI, or `error` says why it did not start."""

    rank: int
    size: int
    host: str
    launched: int
    thread_level: str = ""
    error: str = ""

    @property
    def worlds_of_one(self) -> bool:
        """The trap: several processes, each of which believes that it is alone."""
        return self.size <= 1 < self.launched


def start(library: str) -> tuple[Any, World]:
    """mpi4py.MPI, or None, and the world. Blocks in C until all ranks are there: call it under a guard.

    library: the text of MPI_Get_library_version; "" if it is unknown.
    """
    host, launched = socket.gethostname(), launcher.launched_size(os.environ)
    if launched > 1 and launcher.incompatible(launcher.name(os.environ), library):
        return None, World(0, 0, host, launched)
    try:
        MPI, _ = mpi.load()  # noqa: N806  (mpi4py's spelling)
    except ConfigError as error:
        return None, World(0, 0, host, launched, error=str(error))
    if MPI is None:
        return None, World(0, 0, host, launched)
    levels = {getattr(MPI, f"THREAD_{word.upper()}"): word for word in ("single", "funneled", "serialized", "multiple")}
    comm = MPI.COMM_WORLD
    return MPI, World(comm.Get_rank(), comm.Get_size(), host, launched, levels[MPI.Query_thread()])


def judge(ranks: list[Seen[World]], launch: Launch | None, library: Library | None) -> list[Line]:
    """Whether there is one world of all ranks, and its thread level. launch, library: rank 0's, where seen."""
    world = ranks[0].facts
    if world.worlds_of_one and not world.error:
        name = library.name if library else "this MPI"
        found = f"{world.launched} processes were started, but {name} sees {world.launched} worlds of one rank: "
        return [Line(FAIL, "world", f"{found}the launcher belongs to another MPI", remedy(world, launch, name))]
    if world.error:
        return [Line(FAIL, "world", world.error, remedy(world, launch, library.name if library else ""))]
    if not world.size:
        return [Line(NOTE, "world", "one process without MPI: it trains alone")]
    there = by_host(ranks)
    hosts = ", ".join(f"{len(ranks)} on {host}" for host, ranks in there.items())
    hosts = hosts if len(there) <= _HOSTS_NAMED else f"on {len(there)} hosts"
    lines = [Line(OK, "world", f"{world.size} rank{'s' * (world.size > 1)}: {hosts}")]
    return [*lines, _threads(ranks)]


def remedy(world: World, launch: Launch | None, library: str) -> str:
    """The launcher that fits this Python's MPI, as it is typed."""
    name, beside = (launch.launcher, launch.beside) if launch else ("", "")
    return launcher.remedy(name, library.startswith("Open MPI"), world.launched, beside)


def _threads(ranks: list[Seen[World]]) -> Line:
    found = compared(ranks, lambda facts: facts.thread_level)
    if all(rank.facts.thread_level == "multiple" for rank in ranks):
        return Line(OK, "thread level", found)
    fix = "unset MPI4PY_RC_THREADS MPI4PY_RC_THREAD_LEVEL, or an MPI built with threads, if you call MPI from threads"
    return Line(NOTE, "thread level", f"{found}; allred itself needs no more", fix)
