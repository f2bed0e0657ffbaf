"""Parameter servers: they hold the parameters, apply the gradients that workers push, and give back what came of it."""

from allred.ps.account import Statistics
from allred.ps.consistency import Async, Bounded, Sync

__all__ = ["Async", "Bounded", "Statistics", "Sync"]
