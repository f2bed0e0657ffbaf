"""Which of the ranks' operations belong together, when each rank arrived at them, and who waited for whom."""

import bisect
import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from allred.timeline.file import Rank, Span

_JOIN = "join"  # what a rank that has joined is in, while the others are in an operation


@dataclasses.dataclass(frozen=True)
class Collective:
    """An operation that all its members have completed. arrivals: when each started it."""

    kind: str
    name: str
    arrivals: dict[int, int]

    @property
    def last(self) -> int:
        """Who came last."""
        return max(self.arrivals, key=lambda rank: self.arrivals[rank])

    @property
    def late(self) -> int:
        """By how much that was after the last but one, in nanoseconds."""
        *_, before, last = sorted(self.arrivals.values())
        return last - before


def match(ranks: Sequence[Rank]) -> list[Collective]:
    """Those of several ranks, as far as their numbers and kinds agree."""
    found = []
    for members in sorted({each.members for rank in ranks for each in rank.operations}):
        by_rank = {
            rank.number: {each.number: each for each in own}
            for rank in ranks
            if (own := [each for each in rank.operations if each.members == members])
        }
        for number in sorted(set.intersection(*(set(each) for each in by_rank.values()))):
            here = {rank: each[number] for rank, each in by_rank.items() if each[number].kind != _JOIN}
            if len({each.kind for each in here.values()}) > 1:
                break  # the ranks were not in step any more
            if len(here) > 1:
                first = next(iter(here.values()))
                found.append(Collective(first.kind, first.name, {rank: each.start for rank, each in here.items()}))
    return sorted(found, key=lambda each: max(each.arrivals.values()))


def waits(collectives: Sequence[Collective], ranks: Sequence[Rank]) -> dict[int, list[Span]]:
    """When each rank did nothing but wait for another one, and for which: the time from its arrival to the last one's,
    while it was in a wait or a call that blocks. The name of a span is the number of the one that it waited for."""
    found: dict[int, list[Span]] = defaultdict(list)
    for rank in ranks:
        blocked = _blocked(rank)
        ends = [end for _, end in blocked]
        free = 0  # of several that it waited for at a time, one after the other counts
        for each in collectives:
            if rank.number not in each.arrivals or each.last == rank.number:
                continue
            begin, until = max(each.arrivals[rank.number], free), each.arrivals[each.last]
            at = bisect.bisect_right(ends, begin)
            while at < len(blocked) and blocked[at][0] < until:
                start, end = max(blocked[at][0], begin), min(blocked[at][1], until)
                if start < end:
                    found[rank.number].append(Span("", "wait", str(each.last), start, end, 0))
                    free = end
                at += 1
    return found


def _blocked(rank: Rank) -> list[tuple[int, int]]:
    """When it was in calls that wait for others, in order."""
    calls = [(each.start, each.end) for each in rank.operations if each.blocking]
    mine = sorted([*calls, *((span.start, span.end) for span in rank.spans if span.kind == "wait" and not span.row)])
    outer: list[tuple[int, int]] = []
    for start, end in mine:
        if not outer or start >= outer[-1][1]:
            outer.append((start, end))
    return outer
