"""`allred COMMAND`, or `python -m allred COMMAND`. A command's modules are imported only if it is used."""

import errno
import importlib
import os
import select
import signal
import sys

USAGE = """\
usage: {program} COMMAND ...

  doctor  finds problems of MPI, this host and allred, and suggests commands; alone or under mpirun
  info    versions, paths, backend; --config: all settings
  bench   speed of the collectives, also against raw MPI, and of the data readers
  checkpoint  ls, show, verify DIR: which checkpoints there are, what one holds, whether all bytes are right
  run     starts a program with mpirun, restarts it after failures: run -np 4 train.py
  top     shows the ranks of a running job, and which rank delays which; --web, --html FILE: as a page
  resize  changes the number of ranks of a running job of `run`: resize JOB 6
  model   how long the communication of a step takes on hosts that are given by numbers: model --hosts 512 ...
  timeline  merge DIR, show DIR: a trace, or a page, of what ALLRED_TIMELINE=DIR has written; who waited for whom

{program} --version prints the version, {program} COMMAND --help the options of a command.
"""

_MODULES = {
    "bench": "allred.bench.command",
    "checkpoint": "allred.checkpoint.command",
    "doctor": "allred.doctor.command",
    "info": "allred.doctor.info",
    "model": "allred.cost_model.command",
    "resize": "allred.run.command:resize",
    "run": "allred.run.command",
    "timeline": "allred.timeline.command",
    "top": "allred.monitor.top",
}


def main(arguments: list[str]) -> int:
    """Run the command that the arguments name. Return the exit code."""
    command, rest = (arguments or [""])[0], arguments[1:]
    if command in _MODULES:
        module, _, function = _MODULES[command].partition(":")
        code: int = getattr(importlib.import_module(module), function or "main")(rest)
        return code
    from allred.command_line import fail, program

    usage = USAGE.format(program=program())
    if command in ("-h", "--help"):
        print(usage, end="")
        return 0
    if command == "--version":
        from allred import __version__

        print(f"allred {__version__}")
        return 0
    return fail(f"{usage}{program()}: {f'unknown command {command!r}' if command else 'no command given'}")


def run(arguments: list[str]) -> int | str | None:
    """Call `main` and return the argument for sys.exit. The exit code is 128 + SIGPIPE = 141 if the reader of the
    output has closed it (`| head`), and 1 if the disk of the output is full.

    SIGPIPE stays ignored: its default action would also end a rank whose connection to another rank breaks.
    """
    try:
        try:
            code: int | str | None = main(arguments)
        except SystemExit as end:  # raised by argparse, also after --help
            code = end.code
        print(end="", flush=True)
        return code
    except BrokenPipeError:
        gone = [stream for stream in (sys.stdout, sys.stderr) if stream is not None and _has_no_reader(stream.fileno())]
        if not gone:
            raise
        for stream in gone:  # the rest of its buffer goes to /dev/null
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno != errno.ENOSPC or _can_flush():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return f"cannot write the output: {error.strerror}"


def _can_flush() -> bool:
    try:
        sys.stdout.flush()
    except OSError:
        return False
    return True


def _has_no_reader(file: int) -> bool:
    poll = select.poll()
    poll.register(file, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def script() -> int | str | None:
    """The command `allred`."""
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(script())
