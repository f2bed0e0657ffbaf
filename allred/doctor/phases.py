"""The phases in which ranks wait for each other in C, and what the guard is to say if one does not come to an end."""

import os
import socket
from contextlib import AbstractContextManager
from typing import Any

from allred.cluster import launcher
from allred.doctor import launch, library, start, trials
from allred.doctor.guard import Guard
from allred.doctor.line import FAIL, WARN, Line, summary
from allred.doctor.printer import Printer
from allred.doctor.ranks import Rank
from allred.doctor.topics import judge


def starting(guard: Guard, printer: Printer, seen: dict[str, Any], limit_s: float) -> AbstractContextManager[None]:
    """The phase of MPI's start; what this rank has seen so far is printed where it does not come to an end."""
    host, launched = socket.gethostname(), launcher.launched_size(os.environ)
    fitting = seen["launcher"] if isinstance(seen["launcher"], launch.Launch) else None
    loaded = seen["MPI library"] if isinstance(seen["MPI library"], library.Library) else library.Library()
    typed = start.remedy(start.World(0, 0, host, launched), fitting, loaded.name)
    local = judge([Rank(0, host, seen)])

    def text(found: str, remedy: str) -> str:
        lines = [*local, Line(FAIL, "world", found, remedy)]
        return printer.text(lines) + ("" if printer.as_json else f"\n{summary(lines)}")

    late = f"MPI has not started within {limit_s:g} s, {launched} rank{'s' * (launched > 1)} of it: one has not come"
    look = "look with top or py-spy for it, and for a firewall between hosts; --limit-s 120 if it is only slow"
    gone = "this process, or another rank, ended while MPI started; its last words stand on stderr"
    if fitting and launcher.incompatible(fitting.launcher, loaded.text):
        why = f"{fitting.launcher} does not start ranks of {loaded.name}"
        late, gone, look = f"{late}; {why}", f"{gone}; {why}", typed
    return guard.phase(limit_s, text(late, look), text(gone, typed))


def warning(seen: dict[str, Any]) -> list[Line]:
    """What has to be said before MPI starts: MPICH ends ranks of Open MPI's mpirun, whose output may be lost then."""
    fitting, loaded = seen["launcher"], seen["MPI library"]
    if not isinstance(fitting, launch.Launch) or not isinstance(loaded, library.Library) or loaded.error:
        return []
    if not fitting.launcher.startswith("Open MPI") or not launcher.incompatible(fitting.launcher, loaded.text):
        return []
    found = f"{fitting.launcher} starts ranks of {loaded.name} only if that was built with PMIx"
    world = start.World(0, 0, socket.gethostname(), launcher.launched_size(os.environ))
    return [Line(WARN, "launcher", found, start.remedy(world, fitting, loaded.name))]


def waiting(guard: Guard, printer: Printer, title: str, limit_s: float) -> AbstractContextManager[None]:
    """A phase in which ranks wait for each other."""
    remedy = "see the lines above; look with top or py-spy for the rank that hangs; --limit-s 120 if it is only slow"
    late = Line(FAIL, title, f"not complete after {limit_s:g} s", remedy)
    typed = trials.NO_CMA if title == trials.MPI_SUMS else remedy
    gone = Line(FAIL, title, "a rank ended in it; its last words stand on stderr", typed)
    return guard.phase(limit_s, printer.text([late]), printer.text([gone]))
