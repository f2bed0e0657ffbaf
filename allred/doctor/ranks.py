"""What was seen on which rank, and how ranks that differ are named.

Every rank looks at all topics for itself; rank 0 gets what all have seen, once, and judges it. A topic that a rank
could not look at is an `Unseen` there, and the other topics go on.
"""

import collections
import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, TypeVar

from allred.bench.setting import cores as numbers
from allred.doctor.line import Line, unseen, words

F = TypeVar("F")


@dataclasses.dataclass(frozen=True)
class Unseen:
    """Why something could not be looked at."""

    error: str


@dataclasses.dataclass(frozen=True)
class Seen(Generic[F]):
    """What a rank has seen of one topic."""

    rank: int
    host: str
    facts: F


@dataclasses.dataclass(frozen=True)
class Rank:
    """What a rank has seen: for every topic the facts, or an Unseen."""

    rank: int
    host: str
    topics: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Topic(Generic[F]):
    """Something to look at on every rank, and to judge from what all have seen. `judge` is a pure function."""

    name: str
    look: Callable[[], F]
    judge: Callable[[list[Seen[F]]], list[Line]]


def look(topics: list[Topic[Any]]) -> dict[str, Any]:
    """The facts of every topic on this rank. Whatever a probe raises is its own affair."""
    seen: dict[str, Any] = {}
    for topic in topics:
        try:
            seen[topic.name] = topic.look()
        except Exception as error:  # a probe that fails must not end the others
            seen[topic.name] = Unseen(words(error))
    return seen


def judge(topics: list[Topic[Any]], ranks: list[Rank]) -> list[Line]:
    """The lines about all topics."""
    lines: list[Line] = []
    for topic in topics:
        found = [(rank, rank.topics[topic.name]) for rank in ranks]
        blind = [(rank, facts.error) for rank, facts in found if isinstance(facts, Unseen)]
        seen = [Seen(rank.rank, rank.host, facts) for rank, facts in found if not isinstance(facts, Unseen)]
        try:
            lines += topic.judge(seen) if seen else []
        except Exception as error:
            lines.append(unseen(topic.name, words(error)))
        for reason in sorted({reason for _, reason in blind}):
            on = [rank for rank, its in blind if its == reason]
            lines.append(unseen(topic.name, reason + (f" ({who(on)})" if len(ranks) > 1 else "")))
    return lines


def who(ranks: list[Any]) -> str:
    """Ranks by their numbers, and by their host where that is one.

    >>> who([Seen(0, "a", None), Seen(1, "a", None)]), who([Seen(3, "a", None), Seen(5, "b", None)])
    ('ranks 0-1 on a', 'ranks 3,5')
    """
    named = f"rank{'s' * (len(ranks) > 1)} {numbers({rank.rank for rank in ranks})}"
    hosts = {rank.host for rank in ranks}
    return f"{named} on {hosts.pop()}" if len(hosts) == 1 else named


def compared(ranks: list[Seen[F]], text: Callable[[F], Hashable]) -> str:
    """`text` of what the ranks have seen: once if it is the same on all, else with the ranks that differ from most.

    >>> compared([Seen(0, "a", 1), Seen(1, "a", 1), Seen(2, "b", 16)], lambda threads: f"{threads} threads")
    'rank 2 on b: 16 threads; the others: 1 threads'
    """
    texts = [str(text(rank.facts)) for rank in ranks]
    ((most, count),) = collections.Counter(texts).most_common(1)
    if count == len(ranks):
        return most
    groups: dict[str, list[Seen[F]]] = {}
    for rank, own in zip(ranks, texts, strict=True):
        groups.setdefault(own, []).append(rank)
    others = [f"{who(group)}: {own}" for own, group in groups.items() if own != most or count == 1]
    return "; ".join([*others, f"the others: {most}"] if count > 1 else others)


def by_host(ranks: list[Seen[F]]) -> dict[str, list[Seen[F]]]:
    """The ranks of each host, in rank order."""
    hosts: dict[str, list[Seen[F]]] = {}
    for rank in ranks:
        hosts.setdefault(rank.host, []).append(rank)
    return hosts
