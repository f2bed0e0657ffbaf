"""The states of Horovod's elastic jobs, from allred.torch.elastic."""

from allred.torch.elastic import ObjectState, State

__all__ = ["ObjectState", "State"]
