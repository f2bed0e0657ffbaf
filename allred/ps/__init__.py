"""Parameter servers: they hold the parameters, apply the gradients that workers push, and send the result back."""

from allred.ps.consistency import Async, Bounded, Sync
from allred.ps.protocol import Statistics

__all__ = ["Async", "Bounded", "Statistics", "Sync"]
