"""Processors: which cores each rank may use, how many of them there are for how many ranks, and BLAS's threads.

More busy threads than cores is the most frequent reason for slow training on CPU hosts: BLAS takes a thread for every
core of the machine, in each rank, unless it is told otherwise.
"""

from allred.bench.setting import cores as numbers
from allred.cluster.processors import Cores, look, usable_cores
from allred.doctor.line import NOTE, OK, WARN, Line
from allred.doctor.ranks import Seen, by_host, compared, who

__all__ = ["Cores", "judge", "look"]


def judge(ranks: list[Seen[Cores]]) -> list[Line]:
    """Binding, ranks against cores, quota, BLAS's threads."""
    hosts = by_host(ranks)
    room = [line for host, there in hosts.items() for line in _room(host, there)]
    if len(hosts) > 1:  # one line for all that is good
        bad = [line for line in room if line.verdict != OK]
        room = bad or [Line(OK, "cores", f"enough for the ranks of each of the {len(hosts)} hosts")]
    return [_binding(ranks), *room, *_blas(ranks)]


def _binding(ranks: list[Seen[Cores]]) -> Line:
    found = compared(ranks, lambda facts: f"cores {numbers(set(facts.allowed))} of {facts.of_machine}")
    for there in by_host(ranks).values():
        for i, one in enumerate(there):
            for other in there[i + 1 :]:
                mine, its = one.facts.allowed, other.facts.allowed
                if mine & its and (mine != its or len(mine) == 1):
                    both = f"{who([one, other])} are bound to the same core {numbers(set(mine & its))}"
                    return Line(WARN, "binding", f"{both}; {found}", "mpirun --bind-to core, or --bind-to none")
    return Line(OK, "binding", found)


def _room(host: str, ranks: list[Seen[Cores]]) -> list[Line]:
    lines = []
    room = _usable(ranks)
    found = f"{len(ranks)} rank{'s' * (len(ranks) > 1)} on {room} core{'s' * (room > 1)} of {host}"
    if len(ranks) > room:
        remedy = f"mpirun -np {room} here: ranks that share a core wait for each other"
        lines.append(Line(WARN, "cores", found, remedy))
    else:
        lines.append(Line(OK, "cores", found))
    quota = ranks[0].facts.quota
    if quota is not None and quota < len(ranks[0].facts.allowed):
        found = f"the cgroup of {host} has time for {quota:g} cores, but {len(ranks[0].facts.allowed)} are visible"
        remedy = f"docker run --cpuset-cpus=0-{room - 1}, or ask for whole cores; export OMP_NUM_THREADS={_each(ranks)}"
        lines.append(Line(WARN, "cpu quota", found, remedy))
    return lines


def _usable(ranks: list[Seen[Cores]]) -> int:
    return usable_cores([rank.facts for rank in ranks])


def _each(ranks: list[Seen[Cores]]) -> int:
    return max(1, _usable(ranks) // len(ranks))


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count != 1)}"


def _blas(ranks: list[Seen[Cores]]) -> list[Line]:
    found = compared(ranks, lambda facts: f"{_threads(facts.blas_threads)} ({facts.blas})")
    lines = []
    if not all(rank.facts.measured for rank in ranks):
        remedy = "pip install 'allred[doctor]' brings it"
        lines.append(Line(NOTE, "BLAS threads", "from variables only: threadpoolctl is not installed", remedy))
    for host, there in by_host(ranks).items():
        threads = sum(rank.facts.blas_threads for rank in there)
        squeezed = [rank for rank in there if rank.facts.blas_threads > len(rank.facts.allowed)]
        remedy = f"export OMP_NUM_THREADS={_each(there)} before mpirun"
        if threads > max(_usable(there), len(there)):  # with one thread each it is the ranks that are too many
            text = f"{found}; together {threads} on {_usable(there)} core{'s' * (_usable(there) > 1)} of {host}"
            return [*lines, Line(WARN, "BLAS threads", text, remedy)]
        if squeezed:
            cores = numbers(set(squeezed[0].facts.allowed))
            text = f"{found}; {who(squeezed[:1])} has only core{'s' * ('-' in cores or ',' in cores)} {cores}"
            return [*lines, Line(WARN, "BLAS threads", text, f"{remedy}, or mpirun --bind-to none")]
    if len(ranks) == 1 and ranks[0].facts.blas_threads > 1:
        remedy = f"under mpirun -np N give each rank its share: export OMP_NUM_THREADS=$(({_usable(ranks)} / N))"
        return [*lines, Line(NOTE, "BLAS threads", found, remedy)]
    different = len({rank.facts.blas_threads for rank in ranks}) > 1
    remedy = "export OMP_NUM_THREADS alike on all ranks: the slowest sets the pace" if different else ""
    return [*lines, Line(WARN if different else OK, "BLAS threads", found, remedy)]
