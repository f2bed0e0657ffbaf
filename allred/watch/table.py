"""What all ranks are doing, as a table for a person: a line for each, or for those that do the same."""

from collections.abc import Mapping

TABLE_LINES, TABLE_CHARS = 40, 200  # at most, and of each line
NAME_CHARS = 40  # of ranks, to which the others are aligned


def table(size: int, hosts: Mapping[int, str], roles: Mapping[int, str], states: Mapping[int, str]) -> str:
    """Ranks that do the same share a line: on one host; anywhere, if that makes too many lines.

    hosts, roles, states: by rank, as far as they are known. The role stands where a line is of one rank.
    """
    alike: dict[tuple[str, str], list[int]] = {}
    anywhere: dict[tuple[str, str], list[int]] = {}
    for rank in range(size):
        state = states.get(rank, "not heard from")
        alike.setdefault((hosts.get(rank, "?"), state), []).append(rank)
        anywhere.setdefault(("", state), []).append(rank)
    rows = list(alike.items())
    if len(rows) > TABLE_LINES:  # those that differ from most are what it is about
        rows = sorted(anywhere.items(), key=lambda row: len(row[1]))[:TABLE_LINES]
    names = [_name(ranks, roles) for _, ranks in rows]
    width = max([10, *(len(name) for name in names if len(name) <= NAME_CHARS)])
    lines = [f"  {name:<{width}} {host:<12} {state}" for name, ((host, state), _) in zip(names, rows, strict=True)]
    return "\n".join(line[:TABLE_CHARS] for line in lines)


def _name(ranks: list[int], roles: Mapping[int, str]) -> str:
    role = roles.get(ranks[0], "") if len(ranks) == 1 else ""
    return ranks_text(ranks) + (f" ({role})" if role else "")


def ranks_text(ranks: list[int]) -> str:
    """Ranks in short.

    >>> ranks_text([0, 1, 2, 5])
    'ranks 0-2,5'
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'s' * (len(ranks) > 1)} {text}"
