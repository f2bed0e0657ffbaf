"""The collectives of horovod.torch, its basic functions, and all its other names, from allred.torch."""

from allred.torch import *  # noqa: F403
