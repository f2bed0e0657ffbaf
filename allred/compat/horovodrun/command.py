"""The command horovodrun: its options, and the job of `allred run` that follows from them.

If Horovod is installed, the command is Horovod's own.

Options of the operations set variables HOROVOD_* for the ranks, as with Horovod. There init() translates these, and
names those without effect (allred/horovod/variables.py).
"""

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from allred import __version__
from allred.command_line import Parser, fail, parse
from allred.compat.horovod_import import VERSION, find_installed, python_path
from allred.errors import AllredError, ConfigError
from allred.run import command, host_list, mpirun
from allred.run.host_list import HostList
from allred.run.runner import JobOptions, Runner

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
_DESCRIPTION = """\
Starts a command as ranks, as `allred run` does. In a Python program `import horovod.torch` finds allred.
"""
_UNLIMITED = 10**6
_DISCOVERY_S = 60.0  # time limit of the script that prints the hosts

# Options that set a variable to their value.
_VARIABLES = {
    "--cycle-time-ms": "HOROVOD_CYCLE_TIME",
    "--cache-capacity": "HOROVOD_CACHE_CAPACITY",
    "--autotune-log-file": "HOROVOD_AUTOTUNE_LOG",
    "--autotune-warmup-samples": "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
    "--autotune-steps-per-sample": "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
    "--autotune-bayes-opt-max-samples": "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
    "--autotune-gaussian-process-noise": "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
    "--timeline-filename": "HOROVOD_TIMELINE",
    "--stall-check-warning-time-seconds": "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "--stall-check-shutdown-time-seconds": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "--num-nccl-streams": "HOROVOD_NUM_NCCL_STREAMS",
    "--thread-affinity": "HOROVOD_THREAD_AFFINITY",
    "--gloo-timeout-seconds": "HOROVOD_GLOO_TIMEOUT_SECONDS",
    "--log-level": "HOROVOD_LOG_LEVEL",
}
# Options that set a variable to 1, and others to 0.
_SWITCHES = {
    "HOROVOD_HIERARCHICAL_ALLREDUCE": (["--hierarchical-allreduce"], ["--no-hierarchical-allreduce"]),
    "HOROVOD_HIERARCHICAL_ALLGATHER": (["--hierarchical-allgather"], ["--no-hierarchical-allgather"]),
    "HOROVOD_TORUS_ALLREDUCE": (["--torus-allreduce"], ["--no-torus-allreduce"]),
    "HOROVOD_AUTOTUNE": (["--autotune"], ["--no-autotune"]),
    "HOROVOD_TIMELINE_MARK_CYCLES": (["--timeline-mark-cycles"], ["--no-timeline-mark-cycles"]),
    "HOROVOD_STALL_CHECK_DISABLE": (["--no-stall-check"], ["--stall-check"]),
    "HOROVOD_MPI_THREADS_DISABLE": (["--mpi-threads-disable"], ["--no-mpi-threads-disable"]),
    "HOROVOD_LOG_HIDE_TIME": (
        ["--log-without-timestamp", "--log-hide-timestamp"],
        ["--log-with-timestamp", "--no-log-hide-timestamp"],
    ),
}
# Options without effect, and the number of their values. Those in _SILENT get no message: they match the behaviour of
# `allred run`.
_SILENT = {"--mpi": 0, "--verbose": 0, "--disable-cache": 0}
_IGNORED = {
    "--gloo": 0, "--jsrun": 0, "--prefix-output-with-timestamp": 0, "--start-timeout": 1, "--elastic-timeout": 1,
    "--blacklist-cooldown-range": 2,
}  # fmt: skip
# Options that a job cannot do without, and what to do instead.
_WITH_MPIRUN = "start the ranks with mpirun and its options: mpirun ... python -m allred.compat.horovod train.py"
_REFUSED = {
    "--mpi-args": _WITH_MPIRUN,
    "--binding-args": _WITH_MPIRUN,
    "--config-file": "pass the values of the file as options",
}


class _Set(argparse.Action):
    """Add to options.variables: the variables `const`, or the variable `const` with the value of the option."""

    def __call__(self, parser: Any, options: Any, values: Any, option: str | None = None) -> None:
        new = self.const if isinstance(self.const, dict) else {self.const: str(values)}
        options.variables = {**options.variables, **new}


class _Ignore(argparse.Action):
    """Note an option without effect."""

    def __call__(self, parser: Any, options: Any, values: Any, option: str | None = None) -> None:
        options.ignored = [*options.ignored, option]


class _Refuse(argparse.Action):
    def __call__(self, parser: Any, options: Any, values: Any, option: str | None = None) -> None:
        parser.error(f"{option} is not supported; {self.const}")


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the options of horovodrun. Attributes: `variables` of the ranks, and the names of `ignored` options."""
    parser = Parser(prog="horovodrun", description=_DESCRIPTION)
    parser.set_defaults(variables={}, ignored=[])
    add = functools.partial(parser.add_argument, dest="_", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    for option, variable in _VARIABLES.items():
        add(option, action=_Set, const=variable)
    add("--fusion-threshold-mb", action=_Set, const="HOROVOD_FUSION_THRESHOLD", type=lambda text: int(text) << 20)
    for variable, options in _SWITCHES.items():
        for value, names in zip("10", options, strict=True):
            add(*names, action=_Set, const={variable: value}, nargs=0)
    add("--tcp", action=_Set, const={"ALLRED_TRANSPORT": "tcp", "NCCL_IB_DISABLE": "1"}, nargs=0)
    for option, count in (_SILENT | _IGNORED).items():
        names = [option, "-prefix-timestamp"] if option == "--prefix-output-with-timestamp" else [option]
        add(*names, action=_Ignore, nargs=count)
    for option, remedy in _REFUSED.items():
        add(option, action=_Refuse, const=remedy)
    _add_main_options(parser.add_argument)
    found = parser.parse_args(arguments)
    found.command = found.command[found.command[:1] == ["--"] :]
    return found


def _ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _add_main_options(add: Callable[..., Any]) -> None:
    add("-np", "--num-proc", type=_ranks, metavar="N", help="number of ranks")
    add("-H", "--hosts", default="", metavar="LIST", help="hosts and their slots: node1:4,node2:4; default: this host")
    add("-hostfile", "--hostfile", default="", metavar="FILE", help="a line for each host: node1 slots=4")
    add("--host-discovery-script", default="", metavar="FILE", help="prints the hosts; a change resizes the job")
    add("--slots-per-host", type=_ranks, metavar="N", help="slots of hosts for which the script prints none")
    add("--min-np", "--min-num-proc", type=_ranks, metavar="N", help="fewest ranks after hosts were lost")
    add("--max-np", "--max-num-proc", type=_ranks, metavar="N", help="most ranks after hosts were added")
    add("--reset-limit", type=int, metavar="N", help="restarts after failures; default: without limit")
    add("--network-interfaces", "--network-interface", action="append", default=[], metavar="LIST",
        help="interfaces for TCP connections: eth0,eth1")  # fmt: skip
    add("--output-filename", default="", metavar="DIR", help="write the output of each rank: DIR/rank-0.log")
    add("-p", "--ssh-port", metavar="PORT", help="for ssh; other hosts need it in ~/.ssh/config instead")
    add("-i", "--ssh-identity-file", metavar="FILE", help="for ssh; other hosts need it in ~/.ssh/config instead")
    add("-cb", "--check-build", action="store_true", help="print the available frameworks, controllers and operations")
    add("--name", default="", help=argparse.SUPPRESS)  # of the job, for horovod.run
    add("-v", "--version", action="version", version=VERSION)
    add("command", nargs=argparse.REMAINDER, help="python train.py, or another program, with its arguments")


def ignored_options(options: argparse.Namespace) -> list[str]:
    """Return the options without effect that a message names."""
    return [name for name in options.ignored if name not in _SILENT]


def make_job(options: argparse.Namespace, environ: Mapping[str, str]) -> JobOptions:
    """Return the job. Raises ConfigError if the options do not fit together."""
    if not options.command:
        raise ConfigError("no command given; example: horovodrun -np 4 python train.py")
    script = options.host_discovery_script
    is_elastic = bool(script) or options.min_np is not None  # as Horovod decides it
    if not is_elastic and (options.max_np, options.reset_limit) != (None, None):
        raise ConfigError("--max-np and --reset-limit need --min-np or --host-discovery-script")
    hosts = options.hosts
    if not (hosts or options.hostfile or script or "LSB_JOBID" in environ):
        hosts = f"{host_list.LOCAL}:{options.num_proc}" if options.num_proc else ""
    given = argparse.Namespace(
        np=options.num_proc, hosts=hosts, hostfile=options.hostfile, mode=None, num_ps=None, is_module=False, tag=False,
        min_np=(options.min_np or options.num_proc) if is_elastic else None,
        max_np=(options.max_np or _UNLIMITED) if is_elastic else None,
        restarts=0 if not is_elastic else _UNLIMITED if options.reset_limit is None else options.reset_limit,
        logs=options.output_filename, name=f"{options.name or _program_name(options.command)}-{os.getpid()}",
        program=options.command[0], arguments=options.command[1:], elastic=False, spares=0,
    )  # fmt: skip
    discover = HostDiscovery(script, options.slots_per_host) if script else None
    job = command.make_options(given, discover)
    if options.ssh_port or options.ssh_identity_file:
        _check_local(job.find_hosts())
    settings = {**job.settings, **options.variables, "PYTHONPATH": python_path(environ)}
    if options.network_interfaces:
        settings["ALLRED_NETWORK"] = ",".join(options.network_interfaces)
    return dataclasses.replace(job, settings=settings, forwards_all=True)


def _program_name(words: Sequence[str]) -> str:
    """Return a name for the job of a command: the Python file without .py, else the module, else the program."""
    for before, word in itertools.pairwise(["", *words]):
        if word.endswith(".py") or before == "-m":
            return Path(word).stem if before != "-m" else re.sub(r"[^\w.-]", "", word)
    return Path(words[0]).stem


def _check_local(hosts: HostList) -> None:
    others = [name for name in hosts.slots if not host_list.is_local(name)]
    if others:
        raise ConfigError(
            f"--ssh-port and --ssh-identity-file are not supported; write Port and IdentityFile of {', '.join(others)} "
            "into ~/.ssh/config, which mpirun's ssh reads"
        )


class HostDiscovery:
    """Returns the hosts that a script prints, one in a line, such as `node1:4` or `node1`. slots: of a host without a
    number.

    The first call waits for the script. Later ones return the last answer, and run the script in the background for the
    next call: `allred run` asks every second, and must not wait.
    """

    def __init__(self, script: str, slots: int | None) -> None:
        self._script, self._slots, self._title = script, slots or 1, f"--host-discovery-script {script}"
        self._hosts: HostList | None = None
        self._running: tuple[subprocess.Popen[str], float] | None = None  # with the time of its start

    def __call__(self) -> HostList:
        """Return the hosts. Raises ConfigError if the script has failed."""
        process, started = self._running = self._running or (self._start(), time.monotonic())
        left_s = started + _DISCOVERY_S - time.monotonic()
        if self._hosts is not None and process.poll() is None and left_s > 0:
            return self._hosts
        self._running = None
        try:
            out, problem = process.communicate(timeout=max(left_s, 0))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise ConfigError(f"{self._title} did not end after {_DISCOVERY_S:g} s") from None
        if process.returncode:
            raise ConfigError(f"{self._title} failed with exit code {process.returncode}: {problem.strip()}")
        text = re.sub(r"^\s*([\w.-]+)\s*$", rf"\1:{self._slots}", out, flags=re.MULTILINE)
        self._hosts = HostList(host_list.parse_file(text, self._title), self._title)
        return self._hosts

    def _start(self) -> "subprocess.Popen[str]":
        # In a group of its own: `sh` may start processes, and Ctrl-C is for the job.
        pipe = subprocess.PIPE
        return subprocess.Popen(self._script, shell=True, stdout=pipe, stderr=pipe, text=True, process_group=0)


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
    given = parse(parse_options, arguments)
    if isinstance(given, int):
        return given
    if given.check_build:
        print(_BUILD.format(version=VERSION, allred=__version__, torch=_mark("torch"), nccl=_mark("cupy")))
        return 0
    if ignored := ignored_options(given):
        print(f"horovodrun: without effect in allred: {', '.join(ignored)}", file=sys.stderr, flush=True)
    try:
        return Runner(make_job(given, os.environ), mpirun.find()).run()
    except AllredError as error:
        return fail(f"horovodrun: {error}")


def _mark(package: str) -> str:
    return "X" if importlib.util.find_spec(package) else " "
