"""The exceptions of Horovod, from allred."""

from allred.torch.horovod.horovod_errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HorovodVersionMismatchError(ImportError):
    """Horovod was built for another version of a framework. allred never raises it."""
