"""Messages to the user, on stderr; each line begins with `allred: `.

info             on the chief, unless banner=False
warning          on the chief
rank_warning     on the rank that calls it
runtime_warning  a RuntimeWarning of Python, on the chief; before init() in every process
"""

import contextlib
import sys
import warnings

from allred import world
from allred.runtime.stderr import rank_warning as rank_warning


def warning(line: str) -> None:
    """Print a line if this rank is the chief."""
    here = world.current_or_none()
    if here is not None and here.topology.rank == 0:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a stream that is closed or gone
            sys.stderr.write(f"allred: {line}\n")  # at once; print would write the end of the line apart
            sys.stderr.flush()


def info(line: str) -> None:
    """Print a line if this rank is the chief, unless banner=False."""
    if world.config().banner:
        warning(line)


def runtime_warning(text: str) -> None:
    """Issue a RuntimeWarning, on the chief only; before init() in every process."""
    here = world.current_or_none()
    if here is None or here.topology.rank == 0:
        warnings.warn(f"allred: {text}", RuntimeWarning, stacklevel=3)
