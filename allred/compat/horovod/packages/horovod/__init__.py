"""Horovod's names, from allred. See allred.compat.horovod and allred.compat.horovod_import."""

from allred.compat import horovod_import

horovod_import.check()
horovod_import.install_modules()

from allred.compat.horovodrun.function import run  # noqa: E402

__all__ = ["run"]
__version__ = horovod_import.VERSION
