"""The exceptions of Horovod, from allred."""

from allred.torch.horovod.horovod_errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]
