"""The common part of Horovod's interfaces for PyTorch and TensorFlow: ranks, process sets, errors, variables."""
