"""python -m allred run and resize (changes the number of ranks of a running job of `allred run`): their options."""

import argparse
import errno
import functools
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from allred.command_line import Parser, fail, parse, program
from allred.errors import AllredError, ConfigError
from allred.run import host_list, mpirun
from allred.run.runner import RESIZE_PURPOSE, JobOptions, Runner
from allred.runtime.channel import HandshakeError, connect
from allred.runtime.timings import RESIZE_S
from allred.watch import job_directory

_DESCRIPTION = """\
Starts a program with the mpirun of the MPI that mpi4py loads. The hosts are those of --hosts or --hostfile, else those
of the batch job (Slurm, PBS, LSF, SGE), else this one. The exit code is 0 only if every rank that called allred.init()
reported success.
"""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)  # no more files, memory or processes


def _parser(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(prog=program("run"), description=_DESCRIPTION)
    add = parser.add_argument
    add("-np", "-n", type=_number, metavar="N", help="number of ranks; default: the slots of the hosts")
    add("--hosts", default="", metavar="LIST", help="hosts and their slots: node1:4,node2:4")
    add("--hostfile", default="", metavar="FILE", help="a line for each host: node1 slots=4")
    add("--restarts", type=_count, default=0, metavar="N", help="restarts after failures, from the newest checkpoint")
    add("--min-np", type=_number, metavar="N", help="fewest ranks after hosts were lost; default: as many as -np")
    add("--max-np", type=_number, metavar="N", help="most ranks; a changed host file resizes the job up to it")
    add("--elastic", action="store_true", help="ranks that survive another go on in the same processes")
    add("--spares", type=_count, default=0, metavar="N", help="with --elastic: processes that wait to replace a rank")
    add("--mode", choices=("sync", "local", "ps"), help="ALLRED_MODE of the ranks")
    add("--num-ps", type=_number, metavar="N", help="number of parameter servers in mode ps")
    add("--tag", action="store_true", help="print the rank before each line of output")
    add("--logs", default="", metavar="DIR", help="write the output of each rank to a file too: DIR/rank-0.log")
    add("--name", type=_name, help="name for `allred resize` and `top`; default: the program and the process id")
    add("--dry-run", action="store_true", help="print the command, and do not run it")
    add("-m", action="store_true", dest="is_module", help="the program is a module: -m package.train")
    add("program", help="a Python file (train.py), or another program")
    add("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser.parse_args(arguments)


def _name(text: str) -> str:
    if not re.fullmatch(r"[\w.-]+", text) or text.startswith(("-", ".")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name of letters, digits, '-', '_' and '.'")
    return text


def _number(text: str, least: int = 1) -> int:
    if not re.fullmatch("[0-9]{1,9}", text) or (number := int(text)) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to 999999999")
    return number


def _count(text: str) -> int:
    return _number(text, least=0)


def main(arguments: list[str]) -> int:
    """Run the command. Return the exit code."""
    options = parse(_parser, arguments)
    if isinstance(options, int):
        return options
    try:
        wanted = make_options(options)
        launch = mpirun.Launcher("", "") if options.elastic else mpirun.find()
        if options.dry_run:
            assigned = wanted.find_hosts().assign(wanted.target)
            settings = {**wanted.settings, **mpirun.torch_variables(assigned, os.environ)}
            environ = {**os.environ, **settings}
            rank_words = mpirun.with_rank(wanted.program)
            words = mpirun.command(launch, assigned, rank_words, environ, mpirun.is_root())
            print(mpirun.describe(settings, words))
            return 0
        return Runner(wanted, launch).run()
    except AllredError as error:
        return fail(f"{program('run')}: {error}")
    except OSError as error:
        if error.errno not in _EXHAUSTED:
            raise
        return fail(f"{program('run')}: cannot start or watch the job: {error.strerror}; `ulimit -a` prints the limits")


def make_options(options: argparse.Namespace, find_hosts: Callable[[], host_list.HostList] | None = None) -> JobOptions:
    """Check the options of the command. find_hosts: reads the hosts, instead of --hosts, --hostfile and the batch job.

    Raises ConfigError if they do not fit together."""
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(f"the working directory cannot be used ({error.strerror}): cd to one that exists") from None
    watches = bool(options.hostfile or find_hosts) and (options.min_np is not None or options.max_np is not None)
    if find_hosts is None:
        find_hosts = functools.partial(host_list.find, options.hosts, options.hostfile, os.environ)
    found = find_hosts()
    if options.hosts and options.hostfile:
        raise ConfigError("--hosts and --hostfile name the hosts twice; drop one of them")
    if not found.slots and options.np is None:
        raise ConfigError("how many ranks? Add -np N; there is no --hosts, no --hostfile and no batch job")
    target = options.np or min(found.total, options.max_np or found.total)
    if found.slots and target > found.total:
        raise ConfigError(
            f"-np {target} needs {target} slots, but {found.source} has {found.total}: {_slots(found)}; add slots, "
            "such as --hosts node1:8"
        )
    least, most = options.min_np, options.max_np
    if target < (least or 1) or (most is not None and target > most):
        limits = [f"--{name}-np {value}" for name, value in (("min", least), ("max", most)) if value is not None]
        raise ConfigError(f"{target} ranks are not within {' and '.join(limits)}")
    if options.elastic:
        _check_elastic(options, found)
    elif options.spares:
        raise ConfigError("--spares needs --elastic")
    if options.num_ps and options.mode != "ps":
        raise ConfigError("--num-ps needs --mode ps")
    words = _with_output(options, mpirun.program_words([options.program, *options.arguments], options.is_module))
    settings: dict[str, str] = {}
    if options.mode:
        settings["ALLRED_MODE"] = options.mode
    if options.num_ps:
        settings["ALLRED_NUM_PS"] = str(options.num_ps)
    name = options.name or f"{Path(options.program).stem}-{os.getpid()}"
    return JobOptions(
        name, words, target, least, most, options.restarts, settings, find_hosts, watches, elastic=options.elastic,
        spares=options.spares,
    )  # fmt: skip


def _check_elastic(options: argparse.Namespace, found: host_list.HostList) -> None:
    """Raise ConfigError for options that --elastic does not have."""
    if options.mode == "ps":
        raise ConfigError("--elastic is for modes sync and local, not --mode ps (ALLRED_WORKER_FAILURE=go_on)")
    remote = [name for name in found.slots if not host_list.is_local(name)]
    if remote and not host_list.agent(os.environ):
        raise ConfigError(
            f"--elastic starts processes on {remote[0]} by ssh, or in Slurm by srun; in this batch system it cannot"
        )


def _slots(found: host_list.HostList) -> str:
    return ", ".join(f"{name}:{slots}" for name, slots in found.slots.items())


def _with_output(options: argparse.Namespace, words: list[str]) -> list[str]:
    """Return the command of a rank, with the filter of its output if --tag or --logs is given."""
    if not options.tag and not options.logs:
        return words
    logs = os.path.abspath(options.logs) if options.logs else ""
    return [sys.executable, str(Path(__file__).with_name("rank_output.py")), str(int(options.tag)), logs, *words]


# python -m allred resize.


def _resize_parser(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog=program("resize"),
        description="Changes the number of ranks of a job that `allred run` has started on this host: its "
        "session writes a checkpoint after the current step, and the job starts again with the new number.",
    )
    parser.add_argument("job", nargs="?", default="", help="its name; not needed if one job runs")
    parser.add_argument("np", type=int, help="the new number of ranks")
    return parser.parse_args(arguments)


def resize(arguments: list[str]) -> int:
    """Run `python -m allred resize`. Return the exit code."""
    options = parse(_resize_parser, arguments)
    if isinstance(options, int):
        return options
    try:
        job = job_directory.choose(options.job, job_directory.entries(job_directory.RUN), "`allred run`")
        channel = connect(("127.0.0.1", job["port"]), RESIZE_PURPOSE, job["secret"])
        channel.send({"np": options.np})
        reply = channel.receive_one(time.monotonic() + RESIZE_S)
    except (AllredError, HandshakeError, OSError, ValueError) as error:
        return fail(f"{program('resize')}: {error}", 1)
    if reply["code"]:
        return fail(f"{program('resize')}: {reply['text']}", 1)
    print(reply["text"])
    return 0
