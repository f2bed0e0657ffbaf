"""The names of horovod.torch.elastic, from allred.torch.elastic."""

from allred.torch.elastic import *  # noqa: F403
