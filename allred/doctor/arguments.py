"""The arguments of a command that every rank gets, and about which one rank speaks."""

import argparse
import contextlib
import os

from allred.bench import setting


def parsed(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace | int:
    """The options; or the exit code, where argparse has said on the first rank what there is to say."""
    with contextlib.ExitStack() as silence:
        if not setting.first_rank():
            null = silence.enter_context(open(os.devnull, "w"))
            silence.enter_context(contextlib.redirect_stdout(null))
            silence.enter_context(contextlib.redirect_stderr(null))
        try:
            return parser.parse_args(arguments)
        except SystemExit as stop:
            return setting.fail("") if stop.code else 0
