"""What has passed at one server: gradients, updates, bytes, staleness, what was dropped; and the words for it."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from allred.arrays import amount


@dataclasses.dataclass
class Account:
    """Of one server.

    gradients   applied, or added to the sum of their step; dropped ones are not among them
    updates     of the parameters: one for each gradient; with policy sync one for each step
    staleness   of each gradient, how many updates its parameters lacked when it came: {updates: gradients}
    dropped     {worker: gradients that came too late for their step}; counted by server 0
    torn        gradients whose worker was gone before they were applied to the end; a part of them was
    unused      gradients of the last step of policy sync, if that was not complete when the last worker had left: they
                are among the gradients, but were not used
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
    """Of all servers; `opt.statistics()` gives it."""

    servers: tuple[Account, ...]
    policy: str
    placement: str

    @property
    def staleness(self) -> Counter[int]:
        """Of every gradient at the servers that took it: {updates it lacked: how often}."""
        return sum((account.staleness for account in self.servers), Counter())

    @property
    def dropped(self) -> Counter[int]:
        """{worker: gradients of it that were dropped}."""
        return self.servers[0].dropped

    @property
    def updates(self) -> int:
        """Updates of the parameters, the same at each server when nothing is under way."""
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
        for account in self.servers:
            torn = f", {account.torn} gradients torn" if account.torn else ""
            lines.append(
                f"server {account.server}: {amount(account.bytes_in)} in, {amount(account.bytes_out)} out, "
                f"{account.updates} updates, {account.pulls} pulls{torn}"
            )
        return "\n".join(lines)


_ROWS = 8


def histogram(counts: Counter[int]) -> str:
    """Counts as shares, neighbours together where there are many.

    >>> histogram(Counter({0: 90, 1: 9, 4: 1}))
    '0: 90 %, 1: 9 %, 4: 1 %; mean 0.13, largest 4'
    """
    total = sum(counts.values())
    if not total:
        return "none"
    values = sorted(counts)
    size = -(-len(values) // _ROWS)
    rows: Sequence[list[int]] = [values[at : at + size] for at in range(0, len(values), size)]
    words = [
        f"{row[0]}{f'-{row[-1]}' if len(row) > 1 else ''}: {_percent(sum(counts[v] for v in row) / total)}"
        for row in rows
    ]
    mean = sum(value * count for value, count in counts.items()) / total
    return f"{', '.join(words)}; mean {mean:.3g}, largest {values[-1]}"


def _percent(share: float) -> str:
    """
    >>> _percent(0.28), _percent(0.0004), _percent(1)
    ('28 %', '0.04 %', '100 %')
    """
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1g} %"
