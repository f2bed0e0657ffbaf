"""Horovod's names, from allred: allred.compat.horovod_modules makes its modules. See allred.compat.horovod."""

from allred.compat import horovod_modules, horovod_path

horovod_path.check()
horovod_modules.activate()

from allred.compat.horovodrun.function import run  # noqa: E402

__all__ = ["run"]
__version__ = horovod_path.VERSION
