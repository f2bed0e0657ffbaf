"""Ranks without which the others can go on: the workers of ps mode, with the setting worker_failure=go_on.

1  a spare rank fails or dies: that is no verdict, as long as there is a spare rank that has not. Every rank hears
   "gone"; the one that failed hears "linger", and waits at the end of its program, for as long as it takes
2  a rank that ends well from then on lingers too: with one gone, MPI can no longer be finalized by all
3  when all have ended, that is the verdict on the job, after all, and one of those that linger ends it as job.py
   has it: the rank that failed, so that its traceback comes last; else any, with the exit code of the one that died
4  another verdict may come before. Whoever lingers says on every verdict that it has unwound
"""

import dataclasses
from collections.abc import Collection

FOLLOW_S = 2.0  # after a death in which a launcher, that will not have the others go on, ends them


@dataclasses.dataclass
class Loss:
    """How a rank has ended: in words, its exit code, and its traceback."""

    how: str
    code: int
    traceback: str


class Spares:
    """`ranks`: those that are spare. `gone`: those of them that have failed or died, the first one first."""

    def __init__(self, ranks: Collection[int]) -> None:
        self.ranks = frozenset(ranks)
        self.gone: dict[int, Loss] = {}

    def can_lose(self, ranks: Collection[int]) -> bool:
        """Whether the others can go on without them. One that has ended well, or not yet begun, has not failed."""
        return self.ranks.issuperset(ranks) and not self.ranks.issubset({*self.gone, *ranks})
