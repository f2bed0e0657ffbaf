"""All that every rank looks at for itself before MPI starts, in the order of the report; and what it comes to."""

from typing import Any

from allred.doctor import cores, gpu, installation, launch, library, memory, network, ranks, start
from allred.doctor.line import Line
from allred.doctor.ranks import Rank, Seen, Topic

TOPICS: list[Topic[Any]] = [
    Topic("software", installation.look, installation.judge),
    Topic("MPI library", library.look, library.judge),
    Topic("launcher", launch.look, launch.judge),
    Topic("processors", cores.look, cores.judge),
    Topic("memory", memory.look, memory.judge),
    Topic("network", network.look, network.judge),
    Topic("GPU", gpu.look, gpu.judge),
]


def judge(found: list[Rank]) -> list[Line]:
    """The lines about what all ranks have seen. A pure function."""
    first = found[0].topics
    launched = first["launcher"] if isinstance(first["launcher"], launch.Launch) else None
    loaded = first["MPI library"] if isinstance(first["MPI library"], library.Library) else None
    lines = ranks.judge(TOPICS, found)
    if "world" not in first:
        return lines
    worlds: list[Seen[Any]] = [Seen(rank.rank, rank.host, rank.topics["world"]) for rank in found]
    if launched and loaded and not loaded.error:
        lines += launch.fits(launched, loaded.name)
    if not (loaded and loaded.error and worlds[0].facts.error):  # the same, said better by its own line
        lines += start.judge(worlds, launched, loaded)
    return lines
