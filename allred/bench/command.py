"""`python -m allred bench`: arguments, setup, and the choice of the benchmark.

    parse arguments -> set malloc's tunables (restarts the process) -> set MPI's settings -> init -> run the benchmark

A wrong argument is reported before MPI starts, with exit code 2 on all ranks; a wrong result has exit code 1.
`add_*` adds the options of a benchmark to a parser; `check_*` converts and checks them, and raises ValueError.
benchmarks/bench.py adds the benchmarks and baselines of developers.
"""

import argparse
import importlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

import numpy as np

import allred
from allred import arrays, command_line, config
from allred.bench import data, job_start, measure, output, verify
from allred.bench.allreduce import BASELINES, Arenas
from allred.bench.verify import WrongResultError
from allred.cluster import mpi
from allred.comm.backends.nccl import TYPES
from allred.comm.ops import Compression, narrows
from allred.command_line import Parser
from allred.errors import ConfigError

_MPI_PREFIXES = ("OMPI_MCA_", "MPIR_CVAR_", "I_MPI_", "UCX_", "FI_")
_SET_BY_LAUNCHER = {f"OMPI_MCA_{name}" for name in ("PREFIXES", "num_procs", "initial_wdir", "cpu_type")}


class Benchmark(NamedTuple):
    """A sub-command.

    add: adds its options. check: converts and checks them; raises ValueError. It may set `options.init`, the arguments
    of allred.init(). module: it has `run(options, comm, conditions)`, or without `starts_mpi` `run(options, command)`.
    It is imported when it is needed, because it may need torch, or MPI.
    """

    module: str
    help: str
    add: Callable[[argparse.ArgumentParser], None]
    check: Callable[[argparse.Namespace], None]
    starts_mpi: bool = True
    description: str | None = None


def main(arguments: list[str], program: str = "") -> int:
    """Run the benchmark that the arguments name. Returns the exit code: 0, 1 (wrong result) or 2 (wrong argument)."""
    program = program or command_line.program("bench")
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
    if not benchmark.starts_mpi:
        return importlib.import_module(benchmark.module).run(options, command)  # type: ignore[no-any-return]
    mpi_settings = before_mpi(against_mpi=options.against == "mpi")
    allred.init(banner=False, **(options.init or {"backend": options.backend}))
    MPI, _ = mpi.load()  # noqa: N806  (mpi4py's spelling)
    if MPI is None:
        raise ConfigError("bench uses MPI's barriers, and no MPI could be loaded; pip install mpich")
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


def parse(arguments: list[str], program: str = "") -> argparse.Namespace:
    """The checked options. On a wrong argument, prints one line and raises SystemExit.

    >>> parse(["allreduce", "--sizes", "4,1KiB"]).items
    [4, 1024]
    """
    parser = Parser(
        prog=program or command_line.program("bench"),
        description="Measure collectives on all ranks that mpirun started. Results are verified.",
        epilog=measure.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(
        seconds=0.0,
        against=None,
        backend=None,
        device="cpu",
        malloc_tuned=False,
        compression=None,
        arena=None,
        init=None,
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


SIZES = "4,1KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB,256MiB"
DTYPES = [name for name in arrays.DTYPES if name != "bool"]  # bool has no sum
_NOT_IN_MPI = ("float16", "bfloat16")


# Options and checks that several benchmarks share.


def add_seconds(command: argparse.ArgumentParser) -> None:
    command.add_argument("--seconds", type=float, default=3.0, help="measuring time per line; default 3")


def add_arrays(command: argparse.ArgumentParser) -> None:
    """Add the options of benchmarks on arrays of one dtype."""
    command.add_argument("--dtype", default="float32", help=f"one of {', '.join(DTYPES)}; default float32")
    command.add_argument("--malloc-tuned", action="store_true", help="glibc keeps freed memory and uses huge pages")
    add_seconds(command)


def no_check(options: argparse.Namespace) -> None:
    pass


def add_backend(command: argparse.ArgumentParser) -> None:
    command.add_argument("--backend", help="as in allred.init(); default: ALLRED_BACKEND")


def _add_arena(command: argparse.ArgumentParser) -> None:
    command.add_argument("--arena", help="on, off, or on,off: with and without reductions in place, interleaved")


def dtype_of(name: str, against: str | None) -> np.dtype[Any]:
    """Return the dtype. Raises ValueError."""
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}; choose from {', '.join(DTYPES)}")
    if against == "nccl" and name not in TYPES:
        raise ValueError(f"NCCL in cupy has no dtype {name}; omit --against, or choose another dtype")
    if against == "mpi" and name in _NOT_IN_MPI:
        raise ValueError(f"MPI has no dtype {name}; omit --against, or choose another dtype")
    if name == "bfloat16":
        try:
            import ml_dtypes
        except ImportError:
            raise ValueError("bfloat16 needs ml_dtypes: pip install ml_dtypes") from None
        return np.dtype(ml_dtypes.bfloat16)  # type: ignore[no-any-return]
    return np.dtype(name)


def check_sets(names: Iterable[str], known: Iterable[str]) -> None:
    """Raise ValueError for a name that is not known."""
    for name in names:
        if name not in known:
            raise ValueError(f"unknown set {name!r}; choose from {', '.join(known)}")


def _check_arena(options: argparse.Namespace) -> None:
    options.arena = Arenas.parse(options.arena) if options.arena is not None else []
    if options.arena and (options.device == "cuda" or options.compression):
        raise ValueError("--arena is for arrays of the host without --compression; others are not reduced in place")


# allreduce, fused


def add_allreduce(command: argparse.ArgumentParser) -> None:
    command.add_argument("--sizes", help=f"bytes per array, for example 4,64KiB,1MiB; default {SIZES}")
    _add_collective(command)


def add_fused(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set", dest="sets", default=",".join(verify.SETS), help="default: all, which are %(default)s"
    )
    _add_collective(command)


def _add_collective(command: argparse.ArgumentParser) -> None:
    _add_arena(command)
    add_backend(command)
    add_compression(command)
    command.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: arrays on each rank's GPU")
    command.add_argument(
        "--against", choices=list(BASELINES), help="also time raw MPI (mpi) on the same arrays, interleaved"
    )
    add_arrays(command)


def add_compression(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--compression",
        choices=[each.name for each in Compression],
        help="how floats travel; other than none: also timed without compression, interleaved",
    )


def check_collective(options: argparse.Namespace) -> None:
    options.dtype = dtype_of(options.dtype, options.against)
    _check_device(options)
    _check_arena(options)
    options.compression = Compression[options.compression or "none"]
    quantizes = options.compression.is_quantized and options.dtype.kind == "f"
    if options.compression.value and not quantizes and not narrows(options.dtype, options.compression.value):
        raise ValueError(f"--compression needs --dtype float32 or float64, got {options.dtype}")
    if options.bench == "allreduce":
        options.items = _sizes(options.sizes, options.dtype)
    else:
        options.items = options.sets.split(",")
        check_sets(options.items, verify.SETS)


def _check_device(options: argparse.Namespace) -> None:
    if options.device == "cpu" and options.against == "nccl":
        raise ValueError("--against nccl needs arrays on GPUs: --device cuda")
    if options.device == "cuda":
        if options.against == "mpi":
            raise ValueError("--against mpi needs host arrays, and --device is cuda")
        if options.backend not in (None, "nccl"):
            raise ValueError(f"--device cuda needs backend nccl, got --backend {options.backend}")
        options.backend = "nccl"


def _sizes(text: str | None, dtype: np.dtype[Any]) -> list[int]:
    if text is None:
        return [max(config.parse_bytes(word), dtype.itemsize) for word in SIZES.split(",")]
    found = [config.parse_bytes(word) for word in text.split(",")]
    for nbytes in found:
        if nbytes == 0 or nbytes % dtype.itemsize:
            name = arrays.name_of(dtype)
            raise ValueError(f"--sizes: expected a positive multiple of {dtype.itemsize} bytes ({name}), got {nbytes}")
    return found


# step


def add_step(command: argparse.ArgumentParser) -> None:
    names = ", ".join(verify.SETS)
    command.add_argument("--set", dest="sets", default="resnet50", help=f"of {names}; default %(default)s")
    command.add_argument("--momentum", type=float, default=0.0, help="of SGD, from 0 to less than 1; default 0")
    command.add_argument("--sharded", action="store_true", help="also time sharded=True, without and with opt.share")
    _add_arena(command)
    add_backend(command)
    add_arrays(command)


def check_step(options: argparse.Namespace) -> None:
    options.dtype = dtype_of(options.dtype, None)
    if options.dtype not in (np.float32, np.float64):
        raise ValueError("bench step needs --dtype float32 or float64")
    if not 0 <= options.momentum < 1:
        raise ValueError(f"--momentum must be at least 0 and less than 1, got {options.momentum:g}")
    _check_arena(options)
    options.items = options.sets.split(",")
    check_sets(options.items, verify.SETS)
    options.init = {"mode": "sync", "backend": options.backend, "check_steps": 0}


# ps


def add_ps(command: argparse.ArgumentParser) -> None:
    command.add_argument("--set", default="resnet50", help=f"one of {', '.join(verify.PS_SETS)}; default %(default)s")
    command.add_argument("--servers", type=int, default=1, help="number of servers; default 1")
    command.add_argument("--consistency", choices=["async", "bounded", "sync"], help="default: ALLRED_CONSISTENCY")
    add_arrays(command)


def check_ps(options: argparse.Namespace) -> None:
    check_sets([options.set], verify.PS_SETS)
    options.dtype = dtype_of(options.dtype, options.against)
    if options.dtype not in (np.float32, np.float64):
        raise ValueError("bench ps needs --dtype float32 or float64")  # it verifies exact sums after many steps
    if options.servers < 1:
        raise ValueError(f"--servers must be at least 1, got {options.servers}")
    options.init = {"mode": "ps", "num_ps": options.servers}


# torch


def add_models(command: argparse.ArgumentParser) -> None:
    """Add the options of benchmarks that train models of torch."""
    command.add_argument(
        "--batches", default="4,32,128", help="batch sizes of the MLP; the middle one is also the ResNet's"
    )
    command.add_argument("--width", type=int, default=2048, help="of the MLP's layers; default %(default)s")
    add_seconds(command)


def add_torch(command: argparse.ArgumentParser) -> None:
    command.add_argument("--against", choices=["ddp"], default="ddp", help="default %(default)s")
    command.add_argument(
        "--tensors", default="resnet50", help=f"one of {', '.join(verify.PS_SETS)}; default %(default)s"
    )
    add_models(command)


def check_models(options: argparse.Namespace) -> None:
    """Convert and check the options of `add_models`. Raises ValueError."""
    sizes = options.batches.split(",")
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise ValueError(f"--batches: expected numbers of at least 1, such as 4,32, got {options.batches!r}")
    options.batches = [int(size) for size in sizes]
    if options.width < 1:
        raise ValueError(f"--width must be at least 1, got {options.width}")
    if importlib.util.find_spec("torch") is None:
        raise ValueError(
            f"bench {options.bench} needs PyTorch: pip install torch ml_dtypes (the CPU build: docs/install.md)"
        )


def check_torch(options: argparse.Namespace) -> None:
    check_sets([options.tensors], verify.PS_SETS)
    check_models(options)


# start


def add_start(command: argparse.ArgumentParser) -> None:
    command.add_argument("--ranks", type=int, default=2, help="default %(default)s")
    command.add_argument("--runs", type=int, default=10, help="jobs of each program; default %(default)s")


def check_start(options: argparse.Namespace) -> None:
    if min(options.ranks, options.runs) < 1:
        raise ValueError(f"--ranks and --runs must be at least 1, got {options.ranks} and {options.runs}")


# The benchmarks.

_SERVERS = "steps with parameter servers; the first ranks are the servers"
_TRAINING = "training steps of torch, against DistributedDataParallel over gloo"
_CHECK_FOR_NAN = "steps of an optimizer, with and without the check for NaN"
_READERS = "records per second of each reader, of shuffled and of prefetch"
_ALLREDUCE, _STEP, _START = "allred.bench.allreduce", "allred.bench.step", "allred.bench.job_start"
BENCHMARKS = {
    "allreduce": Benchmark(_ALLREDUCE, "one array in place, at several sizes", add_allreduce, check_collective),
    "fused": Benchmark(_ALLREDUCE, "all gradients of a model in one call", add_fused, check_collective),
    "ps": Benchmark("allred.bench.ps", _SERVERS, add_ps, check_ps),
    "torch": Benchmark("allred.bench.torch", _TRAINING, add_torch, check_torch),
    "data": Benchmark("allred.bench.data", _READERS, add_seconds, no_check, False, data.__doc__),
    "step": Benchmark(_STEP, _CHECK_FOR_NAN, add_step, check_step),
    "start": Benchmark(
        _START, "complete jobs, and the parts of their start", add_start, check_start, False, job_start.__doc__
    ),
}
