"""Lines for the person at the terminal: on stderr, from one rank only, each beginning with `allred:`."""

import sys

_speaking = _informing = False


def speak(chief: bool, banner: bool = False) -> None:
    """Let `say` print on this rank, or not; and `inform`."""
    global _speaking, _informing
    _speaking, _informing = chief, chief and banner


def say(line: str) -> None:
    """Print a line if this rank is the one that speaks."""
    if _speaking:
        sys.stderr.write(f"allred: {line}\n")  # at once; print would write the end of the line apart
        sys.stderr.flush()


def inform(line: str) -> None:
    """The same for what is no warning: who does not want it has set banner=False."""
    if _informing:
        say(line)
