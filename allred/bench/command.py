"""`python -m allred bench`: arguments, setup, and the choice of the benchmark.

    parse arguments -> set malloc's tunables (restarts the process) -> set MPI's settings -> init -> run the benchmark

A wrong argument is reported before MPI starts, with exit code 2 on all ranks; a wrong result has exit code 1.
benchmarks/bench.py adds the benchmarks and baselines of developers.
"""

import argparse
import importlib
import os
import shlex
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import allred
from allred import command_line
from allred.bench import data, job_start, measure, output
from allred.bench.command_options import (
    add_allreduce,
    add_fused,
    add_ps,
    add_seconds,
    add_start,
    add_step,
    add_torch,
    check_collective,
    check_ps,
    check_start,
    check_step,
    check_torch,
    init,
    init_ps,
    init_sync,
    no_check,
)
from allred.bench.verify import WrongResultError
from allred.cluster import mpi
from allred.command_line import Parser
from allred.errors import ConfigError

_PROGRAM = "python -m allred bench"
_MPI_PREFIXES = ("OMPI_MCA_", "MPIR_CVAR_", "I_MPI_", "UCX_", "FI_")
_SET_BY_LAUNCHER = {f"OMPI_MCA_{name}" for name in ("PREFIXES", "num_procs", "initial_wdir", "cpu_type")}


class Benchmark(NamedTuple):
    """A sub-command.

    add: adds its options. check: converts and checks them; raises ValueError. init: the arguments of allred.init().
    module: it has `run(options, comm, conditions)`, or without `init`, for which MPI does not start, `run(options,
    command)`. It is imported when it is needed, because it may need torch, or MPI.
    """

    module: str
    help: str
    add: Callable[[argparse.ArgumentParser], None]
    check: Callable[[argparse.Namespace], None]
    init: Callable[[argparse.Namespace], dict[str, Any]] | None = init
    description: str | None = None


def main(arguments: list[str], program: str = _PROGRAM) -> int:
    """Run the benchmark that the arguments name. Returns the exit code: 0, 1 (wrong result) or 2 (wrong argument)."""
    options = command_line.parse(lambda words: parse(words, program), arguments)
    if isinstance(options, int):
        return options
    if options.malloc_tuned:
        tune_malloc()
    try:
        _run(options, shlex.join([*program.split(), *arguments]))
    except ConfigError as error:  # the same on every rank
        return command_line.fail(f"{program}: {error}")
    except WrongResultError as error:
        return command_line.fail(f"{program}: {error}", code=1)
    return 0


def _run(options: argparse.Namespace, command: str) -> None:
    benchmark = BENCHMARKS[options.bench]
    if benchmark.init is None:
        return importlib.import_module(benchmark.module).run(options, command)  # type: ignore[no-any-return]
    mpi_settings = before_mpi(against_mpi=options.against == "mpi")
    allred.init(banner=False, **benchmark.init(options))
    MPI, _ = mpi.load()  # noqa: N806  (mpi4py's spelling)
    if MPI is None:
        raise ConfigError("bench uses MPI's barriers, and no MPI could be loaded; pip install 'allred[mpich]'")
    comm = MPI.COMM_WORLD.Dup()
    conditions = {
        **output.describe(comm, mpi_settings),
        "allred": allred.__version__,
        "command": f"mpirun -np {comm.Get_size()} {command}" if comm.Get_size() > 1 else command,
    }
    importlib.import_module(benchmark.module).run(options, comm, conditions)


def tune_malloc() -> None:
    """Restart this process with TUNABLES added to the user's, unless it has them.

    glibc reads GLIBC_TUNABLES when a process starts, so this process replaces itself. It does so before MPI starts and
    keeps the launcher's sockets open, also MPICH's, which watch/exit.py closes for programs that a rank starts.
    """
    if output.tuned():
        return
    descriptor = os.environ.get("PMI_FD", "")
    if descriptor.isdigit():
        os.set_inheritable(int(descriptor), True)
    _restart(
        {**os.environ, "GLIBC_TUNABLES": ":".join(filter(None, (os.environ.get("GLIBC_TUNABLES"), output.TUNABLES)))}
    )


def _restart(environ: dict[str, str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)


def before_mpi(against_mpi: bool) -> dict[str, str]:
    """The settings that MPI will start with: the user's and allred's. Call it before MPI starts. against_mpi: also sets
    mpi_yield_when_idle if this host has more ranks than cores: else raw Open MPI busy-waits."""
    ranks = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "")
    if against_mpi and ranks.isdigit() and int(ranks) > (os.cpu_count() or 1):
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    environ = {**os.environ, **mpi.settings(os.environ)}
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(_MPI_PREFIXES) and name not in _SET_BY_LAUNCHER
    }


def parse(arguments: list[str], program: str = _PROGRAM) -> argparse.Namespace:
    """The checked options. On a wrong argument, prints one line and raises SystemExit.

    >>> parse(["allreduce", "--sizes", "4,1KiB"]).items
    [4, 1024]
    """
    parser = Parser(
        prog=program,
        description="Measure collectives on all ranks that mpirun started. Results are verified.",
        epilog=measure.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(
        seconds=0.0, against=None, backend=None, device="cpu", malloc_tuned=False, compression=None, arena=None
    )
    commands = parser.add_subparsers(dest="bench", required=True, metavar="|".join(BENCHMARKS))
    for name, benchmark in BENCHMARKS.items():
        command = commands.add_parser(
            name,
            help=benchmark.help,
            description=benchmark.description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        benchmark.add(command)
        command.add_argument("--json", action="store_true", help="print one JSON object per line and nothing else")
    options = parser.parse_args(arguments)
    try:
        BENCHMARKS[options.bench].check(options)
        if not 0 <= options.seconds < float("inf"):
            raise ValueError(f"--seconds must be a finite number of at least 0, got {options.seconds:g}")
    except ValueError as error:
        commands.choices[options.bench].error(str(error))
    return options


_SERVERS = "steps with parameter servers; the first ranks are the servers"
_TRAINING = "training steps of torch, against DistributedDataParallel over gloo"
_CHECK_FOR_NAN = "steps of an optimizer, with and without the check for NaN"
_READERS = "records per second of each reader, of shuffled and of prefetch"
_ALLREDUCE, _STEP, _START = "allred.bench.allreduce", "allred.bench.step", "allred.bench.job_start"
BENCHMARKS = {
    "allreduce": Benchmark(_ALLREDUCE, "one array in place, at several sizes", add_allreduce, check_collective),
    "fused": Benchmark(_ALLREDUCE, "all gradients of a model in one call", add_fused, check_collective),
    "ps": Benchmark("allred.bench.ps", _SERVERS, add_ps, check_ps, init_ps),
    "torch": Benchmark("allred.bench.torch", _TRAINING, add_torch, check_torch),
    "data": Benchmark("allred.bench.data", _READERS, add_seconds, no_check, None, data.__doc__),
    "step": Benchmark(_STEP, _CHECK_FOR_NAN, add_step, check_step, init_sync),
    "start": Benchmark(
        _START, "complete jobs, and the parts of their start", add_start, check_start, None, job_start.__doc__
    ),
}
