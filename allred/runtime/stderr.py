"""The standard error of this process."""

import contextlib
import os


def rank_warning(line: str) -> None:
    """Print a line on this rank."""
    with contextlib.suppress(OSError):
        os.write(2, f"allred: {line}\n".encode())
