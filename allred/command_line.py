"""Arguments of the commands `python -m allred ...`: one line for an error, printed by the first rank of a job only."""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import NoReturn

_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_EXIT_DELAY_S = 1.0


class Parser(argparse.ArgumentParser):
    """A parser that reports a wrong argument in one line and exits with code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help lists all options\n")


def launched_rank() -> int:
    """Return the rank of this process from the launcher's environment variables. Works before MPI has started."""
    return int(next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "0"))


def first_rank() -> bool:
    """Return whether launched_rank() is 0."""
    return launched_rank() == 0


def fail(line: str, code: int = 2) -> int:
    """Print an error on rank 0 and return the exit code. Other ranks wait a second: a launcher may kill rank 0 before
    it prints if another rank exits first."""
    if first_rank():
        print(line, end="\n" * bool(line), file=sys.stderr, flush=True)
    else:
        time.sleep(_EXIT_DELAY_S)
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
