"""Statistics of parameter servers: gradients, updates, bytes, staleness, dropped gradients."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from allred.arrays import amount

_ROWS = 8  # of a histogram


@dataclasses.dataclass
class ServerStatistics:
    """Statistics of one server.

    gradients   number of gradients that were applied or added to the sum of their step, without dropped ones
    updates     of the parameters: one for each gradient; with policy sync one for each step
    staleness   {updates: gradients}: how many updates the parameters of each gradient lacked when it arrived
    dropped     {worker: gradients that were too late for their step}; only at server 0
    torn        gradients that were applied in part, because their worker died
    unused      policy sync: gradients of the last step, if it was incomplete when the last worker left; `gradients`
                includes them
    """

    server: int
    gradients: int = 0
    updates: int = 0
    pulls: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    torn: int = 0
    unused: int = 0
    staleness: Counter[int] = dataclasses.field(default_factory=Counter)
    dropped: Counter[int] = dataclasses.field(default_factory=Counter)


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Statistics of all servers, as returned by `opt.statistics()`.

    servers: those of each server. policy, placement: descriptions of the consistency policy and of the placement.
    """

    servers: tuple[ServerStatistics, ...]
    policy: str
    placement: str

    @property
    def staleness(self) -> Counter[int]:
        """{updates: gradients}: how many updates the parameters of each gradient lacked, over all servers."""
        return sum((each.staleness for each in self.servers), Counter())

    @property
    def dropped(self) -> Counter[int]:
        """{worker: number of its gradients that were dropped}."""
        return self.servers[0].dropped

    @property
    def updates(self) -> int:
        """Number of updates of the parameters; equal on all servers while no step is in progress."""
        return self.servers[0].updates

    def __str__(self) -> str:
        first = self.servers[0]
        dropped = ", ".join(f"worker {worker}: {count}" for worker, count in sorted(self.dropped.items()))
        lines = [
            f"parameter servers, {self.policy}: {first.gradients} gradients, {first.updates} updates; "
            f"dropped {sum(self.dropped.values())}{f' ({dropped})' * bool(dropped)}",
            f"staleness (updates): {histogram(self.staleness)}",
        ]
        if first.unused:
            count = f"{first.unused} gradient{'s' * (first.unused > 1)}"
            lines.append(f"{count} of a step that was not complete {'were' if first.unused > 1 else 'was'} not used")
        for each in self.servers:
            torn = f", {each.torn} gradients torn" if each.torn else ""
            lines.append(
                f"server {each.server}: {amount(each.bytes_in)} in, {amount(each.bytes_out)} out, "
                f"{each.updates} updates, {each.pulls} pulls{torn}"
            )
        return "\n".join(lines)


def histogram(counts: Counter[int]) -> str:
    """Return counts as percentages, in at most 8 groups of neighbouring values.

    >>> histogram(Counter({0: 90, 1: 9, 4: 1}))
    '0: 90 %, 1: 9 %, 4: 1 %; mean 0.13, largest 4'
    """
    total = sum(counts.values())
    if not total:
        return "none"
    values = sorted(counts)
    size = -(-len(values) // _ROWS)
    rows: Sequence[list[int]] = [values[at : at + size] for at in range(0, len(values), size)]
    texts = [
        f"{row[0]}{f'-{row[-1]}' if len(row) > 1 else ''}: {_percent(sum(counts[v] for v in row) / total)}"
        for row in rows
    ]
    mean = sum(value * count for value, count in counts.items()) / total
    return f"{', '.join(texts)}; mean {mean:.3g}, largest {values[-1]}"


def _percent(share: float) -> str:
    """
    >>> _percent(0.28), _percent(0.0004), _percent(1)
    ('28 %', '0.04 %', '100 %')
    """
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1g} %"


def named(workers: list[int]) -> str:
    """Return the names of workers.

    >>> named([0, 2])
    'workers 0,2'
    """
    return f"worker{'s' * (len(workers) > 1)} {','.join(map(str, workers))}"
