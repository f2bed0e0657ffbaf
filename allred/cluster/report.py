"""Lines for the person at the terminal: on stderr, from one rank only, each beginning with `allred:`."""

import contextlib
import os
import sys
import warnings

from allred.cluster import topology
from allred.errors import NotInitializedError

_speaking = _informing = False


def speak(chief: bool, banner: bool = False) -> None:
    """Let `say` print on this rank, or not; and `inform`."""
    global _speaking, _informing
    _speaking, _informing = chief, chief and banner


def say(line: str) -> None:
    """Print a line if this rank is the one that speaks."""
    if _speaking:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a stream that is closed or gone
            sys.stderr.write(f"allred: {line}\n")  # at once; print would write the end of the line apart
            sys.stderr.flush()


def say_here(line: str) -> None:
    """Print a line on this rank, which need not be the one that speaks."""
    with contextlib.suppress(OSError):
        os.write(2, f"allred: {line}\n".encode())


def inform(line: str) -> None:
    """The same for what is no warning: who does not want it has set banner=False."""
    if _informing:
        say(line)


def warn(text: str) -> None:
    """Issue a RuntimeWarning, on the chief only; before init() in every process."""
    try:
        chief = topology.rank() == 0
    except NotInitializedError:
        chief = True
    if chief:
        warnings.warn(f"allred: {text}", RuntimeWarning, stacklevel=3)
