"""Lines for the person at the terminal: on stderr, from one rank only, each beginning with `allred:`."""

import sys

_speaking = False


def speak(chief: bool) -> None:
    """Let `say` print on this rank, or not."""
    global _speaking
    _speaking = chief


def say(line: str) -> None:
    """Print a line if this rank is the one that speaks."""
    if _speaking:
        print(f"allred: {line}", file=sys.stderr, flush=True)
