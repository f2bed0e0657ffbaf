"""Lines for the person at the terminal: on stderr, from one rank only, each beginning with `allred:`."""

import contextlib
import os
import sys
import warnings

from allred import world


def say(line: str) -> None:
    """Print a line if this rank is the chief."""
    here = world.current_or_none()
    if here is not None and here.topology.rank == 0:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a stream that is closed or gone
            sys.stderr.write(f"allred: {line}\n")  # at once; print would write the end of the line apart
            sys.stderr.flush()


def say_here(line: str) -> None:
    """Print a line on this rank, which need not be the one that speaks."""
    with contextlib.suppress(OSError):
        os.write(2, f"allred: {line}\n".encode())


def inform(line: str) -> None:
    """As `say`, unless banner=False."""
    if world.config().banner:
        say(line)


def warn(text: str) -> None:
    """Issue a RuntimeWarning, on the chief only; before init() in every process."""
    here = world.current_or_none()
    if here is None or here.topology.rank == 0:
        warnings.warn(f"allred: {text}", RuntimeWarning, stacklevel=3)
