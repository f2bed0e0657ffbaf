"""Arguments of the commands `allred ...`: one line for an error, printed by the first rank of a job only."""

import argparse
import contextlib
import math
import os
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from allred import launcher_variables
from allred.runtime.timings import PRINT_FIRST_S


def program(command: str = "") -> str:
    """Return the name of this program or of one of its commands as the user has typed it: `allred top` or `python -m
    allred top`."""
    name = "allred" if os.path.basename(sys.argv[0]) == "allred" else "python -m allred"
    return f"{name} {command}".rstrip()


class Parser(argparse.ArgumentParser):
    """A parser that reports a wrong argument in one line and exits with code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help lists all options\n")


def seconds(text: str) -> float:
    """Return the value of an option that is a finite time > 0."""
    with contextlib.suppress(ValueError):
        if 0.0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"expected a number of seconds > 0, got {text!r}")


def first_rank() -> bool:
    """Return whether this process is rank 0, or no rank. Works before MPI has started."""
    return not launcher_variables.rank(os.environ)


def fail(line: str, code: int = 2) -> int:
    """Print an error on rank 0 and return the exit code. Other ranks wait a second: a launcher may kill rank 0 before
    it prints if another rank exits first."""
    if first_rank():
        print(line, end="\n" * bool(line), file=sys.stderr, flush=True)
    else:
        time.sleep(PRINT_FIRST_S)
    return code


def parse(parser: Callable[[list[str]], argparse.Namespace], arguments: list[str]) -> argparse.Namespace | int:
    """The options, or the exit code after --help or an error. Only the first rank prints."""
    with contextlib.ExitStack() as silence:
        if not first_rank():
            null = silence.enter_context(open(os.devnull, "w"))
            silence.enter_context(contextlib.redirect_stdout(null))
            silence.enter_context(contextlib.redirect_stderr(null))
        try:
            return parser(arguments)
        except SystemExit as stop:  # argparse has printed the message
            return fail("") if stop.code else 0
