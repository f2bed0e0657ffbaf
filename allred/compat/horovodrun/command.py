"""The command horovodrun. If Horovod is installed, it is Horovod's own."""

import importlib.util
import os
import sys

from allred import __version__
from allred.command_line import fail, parse
from allred.compat.horovod_import import VERSION, find_installed
from allred.compat.horovodrun import translation
from allred.errors import AllredError
from allred.run import mpirun
from allred.run.runner import Runner

_BUILD = """\
Horovod v{version} (allred {allred}):

Available Frameworks:
    [ ] TensorFlow
    [{torch}] PyTorch
    [ ] MXNet

Available Controllers:
    [X] MPI
    [ ] Gloo

Available Tensor Operations:
    [{nccl}] NCCL
    [ ] DDL
    [ ] CCL
    [X] MPI
    [ ] Gloo"""


def script() -> int:
    """Run the command with the arguments of this process. Return the argument for sys.exit."""
    if find_installed():
        from horovod.runner.launch import run_commandline

        run_commandline()
        return 0
    return main(sys.argv[1:])


def run_commandline() -> None:
    """Run the command with the arguments of this process, and exit: horovod.runner.launch of allred."""
    sys.exit(main(sys.argv[1:]))


def main(arguments: list[str]) -> int:
    """Run the command. Return the exit code."""
    given = parse(translation.parse, arguments)
    if isinstance(given, int):
        return given
    if given.check_build:
        print(_BUILD.format(version=VERSION, allred=__version__, torch=_mark("torch"), nccl=_mark("cupy")))
        return 0
    if ignored := translation.ignored(given):
        print(f"horovodrun: without effect in allred: {', '.join(ignored)}", file=sys.stderr, flush=True)
    try:
        return Runner(translation.make_job(given, os.environ), mpirun.find()).run()
    except AllredError as error:
        return fail(f"horovodrun: {error}")


def _mark(package: str) -> str:
    return "X" if importlib.util.find_spec(package) else " "
