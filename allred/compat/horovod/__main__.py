"""python -m allred.compat.horovod: starts Python again, with the packages `horovod` of allred in PYTHONPATH.

So the program is started by Python itself, and the processes that it starts find these packages, too.
"""

import os
import sys

from allred.command_line import fail
from allred.compat.horovod_import import python_path
from allred.watch.exit import before_exec

MODULE = "allred.compat.horovod"
USAGE = f"usage: python -m {MODULE} train.py [arguments], or -m package.train [arguments]"


def command(original: list[str], arguments: list[str]) -> list[str]:
    """Return the words of the new command line after `python`: the options of the old one and the program.

    >>> command(["python", "-u", "-m", MODULE, "train.py", "3"], ["train.py", "3"])
    ['-u', 'train.py', '3']
    """
    options = original[1 : len(original) - len(arguments)]
    if options[-1] == MODULE:  # -m MODULE, else -mMODULE
        options.pop()
        options[-1] += MODULE
    options[-1] = options[-1].removesuffix(f"m{MODULE}")  # -um MODULE: -u
    return [*options[:-1], *(word for word in options[-1:] if word != "-"), *arguments]


def main(arguments: list[str]) -> int:
    """Start the program in this process. Returns only the exit code of an error."""
    if not arguments or arguments[0] in ("-h", "--help"):
        return fail(USAGE, 0 if arguments else 2)
    if sys.flags.ignore_environment:
        return fail(f"python -m {MODULE} needs PYTHONPATH, which Python ignores with -E and -I; drop this option")
    before_exec()
    environ = {**os.environ, "PYTHONPATH": python_path(os.environ)}
    os.execve(sys.executable, [sys.executable, *command(sys.orig_argv, arguments)], environ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
