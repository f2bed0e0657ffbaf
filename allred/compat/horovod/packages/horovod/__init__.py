"""Horovod's names, from allred. See allred.compat.horovod."""

from allred.compat import horovod_path

horovod_path.check()

from allred.compat.horovodrun.function import run  # noqa: E402

__all__ = ["run"]
__version__ = horovod_path.VERSION
