"""Data for every rank: its share of each global batch."""

from allred.data.batches import Batches, batches
from allred.data.prefetching import Prefetch, prefetch

__all__ = ["Batches", "Prefetch", "batches", "prefetch"]
