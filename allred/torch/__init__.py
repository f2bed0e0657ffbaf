"""allred for PyTorch."""
