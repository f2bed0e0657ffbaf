"""Tensor fusion: which gradients travel together (plan), and the memory they travel in (buffer)."""
