"""Matches the operations of all ranks, and computes when each rank arrived and which rank it waited for."""

import bisect
import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from allred.timeline.rank_file import RankTimeline, Span

_JOIN = "join"  # the operation of a rank that has joined


@dataclasses.dataclass(frozen=True)
class Collective:
    """An operation that all its members have completed. arrivals: start time in ns, by rank."""

    kind: str
    name: str
    arrivals: dict[int, int]

    @property
    def last(self) -> int:
        """The rank that arrived last."""
        return max(self.arrivals, key=lambda rank: self.arrivals[rank])

    @property
    def lateness(self) -> int:
        """Nanoseconds between the last two arrivals."""
        *_, before, last = sorted(self.arrivals.values())
        return last - before


def match(ranks: Sequence[RankTimeline]) -> list[Collective]:
    """Collectives of at least two ranks, in order of completion; operations match by members, number and kind."""
    found = []
    for members in sorted({each.members for rank in ranks for each in rank.operations}):
        by_number = {
            rank.number: {each.number: each for each in mine}
            for rank in ranks
            if (mine := [each for each in rank.operations if each.members == members])
        }
        for number in sorted(set.intersection(*(set(each) for each in by_number.values()))):
            matching = {rank: each[number] for rank, each in by_number.items() if each[number].kind != _JOIN}
            if len({each.kind for each in matching.values()}) > 1:
                break  # from here on the ranks made different calls
            if len(matching) > 1:
                first = next(iter(matching.values()))
                found.append(Collective(first.kind, first.name, {rank: each.start for rank, each in matching.items()}))
    return sorted(found, key=lambda each: max(each.arrivals.values()))


def waits(collectives: Sequence[Collective], ranks: Sequence[RankTimeline]) -> dict[int, list[Span]]:
    """Spans in which a rank only waited, by rank; the name of a span is the number of the rank that it waited for.

    A rank waits from its own arrival to the last arrival, as long as it is in Work.wait or in a blocking call.
    """
    found: dict[int, list[Span]] = defaultdict(list)
    for rank in ranks:
        blocked = _blocked(rank)
        ends = [end for _, end in blocked]
        free = 0  # end of the last span: overlapping waits are counted once
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


def _blocked(rank: RankTimeline) -> list[tuple[int, int]]:
    """The outermost intervals in which the rank was in waits and blocking calls, in order."""
    calls = [(each.start, each.end) for each in rank.operations if each.blocking]
    mine = sorted([*calls, *((span.start, span.end) for span in rank.spans if span.kind == "wait" and not span.row)])
    outer: list[tuple[int, int]] = []
    for start, end in mine:
        if not outer or start >= outer[-1][1]:
            outer.append((start, end))
    return outer
