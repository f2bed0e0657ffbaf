"""horovod.run, from allred."""

from allred.compat.horovodrun.function import run

__all__ = ["run"]
