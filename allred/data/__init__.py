"""Data for every rank: its share of each global batch."""

from allred.data.batches import Batches, batches

__all__ = ["Batches", "batches"]
