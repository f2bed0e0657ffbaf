"""`python -m allred bench`: arguments, setup, and the choice of the benchmark.

    parse arguments -> set malloc's tunables (restarts the process) -> set MPI's settings -> init -> run the benchmark

A wrong argument is reported before MPI starts, with exit code 2 on all ranks; a wrong result has exit code 1.
"""

import argparse
import importlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np

import allred
from allred import arrays, command_line, config
from allred.bench import arenas, baselines, data, gpu, job_start, measure, output, save_restore, verify
from allred.bench.verify import WrongResultError
from allred.cluster import launcher, mpi
from allred.comm import functions
from allred.comm.backends.nccl import TYPES
from allred.comm.communicator import Communicator
from allred.comm.ops import Compression, narrows
from allred.command_line import Parser
from allred.errors import ConfigError

SIZES = "4,1KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB,256MiB"
DTYPES = [name for name in arrays.DTYPES if name != "bool"]  # bool has no sum
_NOT_IN_MPI = ("float16", "bfloat16")
_PROGRAM = "python -m allred bench"
_MPI_PREFIXES = ("OMPI_MCA_", "MPIR_CVAR_", "I_MPI_", "UCX_", "FI_")
Baseline = baselines.MpiBaseline | gpu.NcclBaseline
_SET_BY_LAUNCHER = {f"OMPI_MCA_{name}" for name in ("PREFIXES", "num_procs", "initial_wdir", "cpu_type")}


def main(arguments: list[str]) -> int:
    """Run the benchmark that the arguments name. Returns the exit code: 0, 1 (wrong result) or 2 (wrong argument)."""
    options = command_line.parse(parse, arguments)
    if isinstance(options, int):
        return options
    if options.malloc_tuned:
        tune_malloc()
    try:
        _run(options, shlex.join([*_PROGRAM.split(), *arguments]))
    except ConfigError as error:  # the same on every rank
        return command_line.fail(f"{_PROGRAM}: {error}")
    except WrongResultError as error:
        return command_line.fail(f"{_PROGRAM}: {error}", code=1)
    return 0


def _run(options: argparse.Namespace, command: str) -> None:
    if options.bench == "data":
        return data.run(options, command)
    if options.bench == "start":
        return job_start.run(options, command)
    ranks = launcher.launched_size(os.environ)
    if options.bench == "ps" and options.against and (options.servers, ranks) != (1, 2):
        raise ConfigError("--against mpi compares one server and one worker: mpirun -np 2, and --servers 1")
    mpi_settings = before_mpi(against_mpi=options.against == "mpi")
    if options.bench == "overlap":
        os.environ["ALLRED_PROGRESS"] = options.progress
        allred.init(backend=options.backend, banner=False, check_steps=0)
    elif options.bench in ("step", "checkpoint"):
        allred.init(mode="sync", backend=options.backend, banner=False, check_steps=0)
    elif options.bench == "ps":
        allred.init(mode="ps", num_ps=options.servers, banner=False)
    else:
        allred.init(backend=options.backend, banner=False)
    MPI, _ = mpi.load()  # noqa: N806  (mpi4py's spelling)
    if MPI is None:
        raise ConfigError("bench uses MPI's barriers, and no MPI could be loaded; pip install 'allred[mpich]'")
    comm = MPI.COMM_WORLD.Dup()
    conditions = {
        **output.describe(comm, mpi_settings),
        "allred": allred.__version__,
        "command": f"mpirun -np {comm.Get_size()} {command}" if comm.Get_size() > 1 else command,
    }
    if options.bench in ("allreduce", "fused"):
        return _run_allreduce(options, comm, conditions)
    module = "save_restore" if options.bench == "checkpoint" else options.bench
    return importlib.import_module(f"allred.bench.{module}").run(options, comm, conditions)  # type: ignore[no-any-return]


def _run_allreduce(options: argparse.Namespace, comm: Any, conditions: dict[str, Any]) -> None:
    """Measure all sizes or sets; rank 0 prints. Raises WrongResultError on all ranks. Calls allred.shutdown()."""
    labels = {"ranks": comm.Get_size(), "dtype": arrays.name_of(options.dtype), "backend": functions.current().name}
    if options.compression is not Compression.none:
        labels["compression"] = options.compression.name
    with_arenas = arenas.communicators(options.arena) if options.arena else {}
    if options.arena:
        labels["arena"] = options.arena[0]
    on_gpu = {"device": "cuda", **gpu.describe()} if options.device == "cuda" else {}
    conditions = {"op": "Sum", **on_gpu, **conditions}
    writer = output.ResultWriter(options.json, enabled=comm.Get_rank() == 0)
    against = options.against or ",".join(options.arena[1:]) or labels.get("compression")
    writer.header(options.bench, labels, conditions, against)
    baseline: Baseline | None = None
    if options.against:
        baseline = baselines.MpiBaseline(comm) if options.against == "mpi" else gpu.NcclBaseline(comm, options.dtype)
    for item in options.items:
        what, results = _measure(item, options, comm, baseline, with_arenas)
        for result in results:
            thread = {"progress_thread": functions.current().queue.engine.has_progress_thread}
            writer.line({"bench": options.bench, **what, **labels, **result, **conditions, **thread})
    writer.footer(functions.current().queue.engine.has_progress_thread)
    if isinstance(baseline, gpu.NcclBaseline):
        baseline.close()
    comm.Free()
    allred.shutdown()


def _measure(
    item: Any, options: argparse.Namespace, comm: Any, baseline: Baseline | None, with_arenas: dict[str, Communicator]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Size or set of `item`, and one record per compared implementation. with_arenas: those of --arena."""
    single, on_gpu = options.bench == "allreduce", options.device == "cuda"
    shapes = [(item // options.dtype.itemsize,)] if single else verify.SETS[item]()
    calls: arenas.Calls = arenas.calls(with_arenas, shapes, options.dtype, single)
    own = [] if calls else (gpu if on_gpu else baselines).allocate(shapes, options.dtype)
    group = next(reversed(calls.values()))[1] if calls else own
    nbytes, title = sum(array.nbytes for array in group), f"{options.bench} {item}"
    what = {"bytes": nbytes} if single else {"set": item, "bytes": nbytes, "tensors": len(group)}
    on_group = {} if calls else baselines.allred_calls(group, single, options.compression)
    if baseline is not None:
        on_group |= baseline.array_calls(group[0]) if single else baseline.group_calls(group)
    calls |= {name: (call, group) for name, call in on_group.items()}
    for name, (call, its_group) in calls.items():
        verify.check(f"{title} by {name}", call, its_group, comm)
    synchronize = gpu.synchronize if on_gpu else measure.no_synchronize
    timed = {name: call for name, (call, _) in calls.items()}
    times = measure.interleave(timed, comm, options.seconds * max(1, len(calls) - 1), synchronize)
    for name, (_, its_group) in calls.items():
        verify.check_zeros(f"{title} by {name}" if with_arenas else title, its_group, comm)
    ours = times.pop("allred")
    details = gpu.enqueue_and_pack(group, comm, options.seconds) if on_gpu and not single else {}
    others = times.items() or [(None, None)]
    size = comm.Get_size()
    return what, [{**output.result(ours, name, other, nbytes, size), **details} for name, other in others]


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


def parse(arguments: list[str]) -> argparse.Namespace:
    """The checked options. On a wrong argument, prints one line and raises SystemExit.

    >>> parse(["allreduce", "--sizes", "4,1KiB"]).items
    [4, 1024]
    """
    parser, commands = _parser()
    options = parser.parse_args(arguments)
    try:
        _check(options)
    except ValueError as error:
        commands[options.bench].error(str(error))
    return options


def _parser() -> tuple[Parser, dict[str, argparse.ArgumentParser]]:
    text: Any = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = Parser(
        prog=_PROGRAM,
        description="Measure collectives on all ranks that mpirun started. Results are verified.",
        epilog=measure.__doc__,
        **text,
    )
    parser.set_defaults(
        seconds=0.0, against=None, backend=None, device="cpu", malloc_tuned=False, compression=None, arena=None
    )
    commands = parser.add_subparsers(
        dest="bench", required=True, metavar="allreduce|fused|overlap|ps|torch|data|step|checkpoint|start"
    )
    allreduce = commands.add_parser("allreduce", help="one array in place, at several sizes")
    allreduce.add_argument("--sizes", help=f"bytes per array, for example 4,64KiB,1MiB; default {SIZES}")
    fused = commands.add_parser("fused", help="all gradients of a model in one call")
    fused.add_argument("--set", dest="sets", default=",".join(verify.SETS), help="default: all, which are %(default)s")
    overlap = commands.add_parser("overlap", help="steps that reduce gradients during the backward pass")
    names = ", ".join(verify.OVERLAP_SETS)
    overlap.add_argument("--set", dest="sets", default="resnet50", help=f"of {names}; default %(default)s")
    overlap.add_argument("--progress", choices=["thread", "caller"], default="thread", help="as ALLRED_PROGRESS")
    ps = commands.add_parser("ps", help="steps with parameter servers; the first ranks are the servers")
    ps.add_argument("--set", default="resnet50", help=f"one of {', '.join(verify.PS_SETS)}; default %(default)s")
    ps.add_argument("--servers", type=int, default=1, help="number of servers; default 1")
    ps.add_argument("--consistency", choices=["async", "bounded", "sync"], help="default: ALLRED_CONSISTENCY")
    ps.add_argument("--against", choices=["mpi"], help="also time raw MPI on the same arrays, interleaved")
    torch = commands.add_parser("torch", help="training steps of torch, against DistributedDataParallel over gloo")
    against = "horovod: allred.torch, and Horovod where it is installed; default %(default)s"
    torch.add_argument("--against", choices=["ddp", "horovod"], default="ddp", help=against)
    torch.add_argument(
        "--batches", default="4,32,128", help="batch sizes of the MLP; the middle one is also the ResNet's"
    )
    torch.add_argument("--width", type=int, default=2048, help="of the MLP's layers; default %(default)s")
    torch.add_argument("--tensors", default="resnet50", help=f"one of {', '.join(verify.PS_SETS)}; default %(default)s")
    help_text = "records per second of each reader, of shuffled and of prefetch"
    reader = commands.add_parser("data", help=help_text, description=data.__doc__, **text)
    step = commands.add_parser("step", help="steps of an optimizer, with and without the check for NaN")
    step.add_argument(
        "--set", dest="sets", default="resnet50", help=f"of {', '.join(verify.SETS)}; default %(default)s"
    )
    step.add_argument("--momentum", type=float, default=0.0, help="of SGD, from 0 to less than 1; default 0")
    step.add_argument("--sharded", action="store_true", help="also time sharded=True, without and with opt.share")
    help_text = "save and restore, against raw files and torch"
    files = commands.add_parser("checkpoint", help=help_text, description=save_restore.__doc__, **text)
    files.add_argument("--tensors", type=int, default=64, help="of 1024 x 1024 float32 each; default %(default)s")
    files.add_argument("--directory", help="visible to all ranks; default: that of temporary files")
    starts = commands.add_parser(
        "start", help="complete jobs, and the parts of their start", description=job_start.__doc__, **text
    )
    starts.add_argument("--ranks", type=int, default=2, help="default %(default)s")
    starts.add_argument("--runs", type=int, default=10, help="jobs of each program; default %(default)s")
    for command in (allreduce, fused, step):
        command.add_argument("--arena", help="on, off, or on,off: with and without reductions in place, interleaved")
    for command in (allreduce, fused, overlap, step):
        command.add_argument("--backend", help="as in allred.init(); default: ALLRED_BACKEND")
    for command in (allreduce, fused, overlap):
        command.add_argument(
            "--compression",
            choices=[each.name for each in Compression],
            help="wire dtype of float32 and float64; other than none: also timed without compression, interleaved",
        )
    for command in (allreduce, fused):
        command.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: arrays on each rank's GPU")
        command.add_argument(
            "--against", choices=["mpi", "nccl"], help="also time raw MPI, or raw NCCL on GPUs, on the same arrays"
        )
    for command in (allreduce, fused, overlap, ps, step):
        command.add_argument("--dtype", default="float32", help=f"one of {', '.join(DTYPES)}; default float32")
        command.add_argument("--malloc-tuned", action="store_true", help="glibc keeps freed memory and uses huge pages")
    for command in (allreduce, fused, overlap, ps, torch, reader, step, files):
        command.add_argument("--seconds", type=float, default=3.0, help="measuring time per line; default 3")
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print one JSON object per line and nothing else")
    return parser, commands.choices  # type: ignore[return-value]


def _check(options: argparse.Namespace) -> None:
    """Convert and check the options of one command. Raises ValueError."""
    if options.bench not in ("data", "torch", "checkpoint", "start"):
        options.dtype = _dtype(options.dtype, options.against)
    if options.bench == "ps":
        _check_ps(options)
    elif options.bench == "torch":
        _check_torch(options)
    elif options.bench == "checkpoint":
        if options.tensors < 1:
            raise ValueError(f"--tensors must be at least 1, got {options.tensors}")
        if options.directory and not os.path.isdir(options.directory):
            raise ValueError(f"--directory {options.directory} is not a directory")
    elif options.bench == "start":
        if min(options.ranks, options.runs) < 1:
            raise ValueError(f"--ranks and --runs must be at least 1, got {options.ranks} and {options.runs}")
    elif options.bench != "data":
        _check_device(options)
        _check_arena(options)
        options.compression = Compression[options.compression or "none"]
        if options.compression.value and not narrows(options.dtype, options.compression.value):
            raise ValueError(f"--compression needs --dtype float32 or float64, got {options.dtype}")
        if options.bench == "allreduce":
            options.items = _sizes(options.sizes, options.dtype)
        else:
            options.items = options.sets.split(",")
            _check_sets(options.items, verify.OVERLAP_SETS if options.bench == "overlap" else verify.SETS)
    if not 0 <= options.seconds < float("inf"):
        raise ValueError(f"--seconds must be a finite number of at least 0, got {options.seconds:g}")


def _dtype(name: str, against: str | None) -> np.dtype[Any]:
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


def _check_device(options: argparse.Namespace) -> None:
    if options.device == "cpu" and options.against == "nccl":
        raise ValueError("--against nccl needs arrays on GPUs: --device cuda")
    if options.device == "cuda":
        if options.against == "mpi":
            raise ValueError("--against mpi needs host arrays, and --device is cuda; compare with --against nccl")
        if options.backend not in (None, "nccl"):
            raise ValueError(f"--device cuda needs backend nccl, got --backend {options.backend}")
        options.backend = "nccl"


def _check_arena(options: argparse.Namespace) -> None:
    if options.bench == "step" and options.dtype not in (np.float32, np.float64):
        raise ValueError("bench step needs --dtype float32 or float64")
    if options.bench == "step" and not 0 <= options.momentum < 1:
        raise ValueError(f"--momentum must be at least 0 and less than 1, got {options.momentum:g}")
    options.arena = arenas.parse(options.arena) if options.arena is not None else []
    if options.arena and (options.device == "cuda" or options.compression):
        raise ValueError("--arena is for arrays of the host without --compression; others are not reduced in place")


def _check_ps(options: argparse.Namespace) -> None:
    _check_sets([options.set], verify.PS_SETS)
    if options.dtype not in (np.float32, np.float64):
        raise ValueError("bench ps needs --dtype float32 or float64")  # it verifies exact sums after many steps
    if options.servers < 1:
        raise ValueError(f"--servers must be at least 1, got {options.servers}")


def _check_torch(options: argparse.Namespace) -> None:
    _check_sets([options.tensors], verify.PS_SETS)
    sizes = options.batches.split(",")
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise ValueError(f"--batches: expected numbers of at least 1, such as 4,32, got {options.batches!r}")
    options.batches = [int(size) for size in sizes]
    if options.width < 1:
        raise ValueError(f"--width must be at least 1, got {options.width}")
    if importlib.util.find_spec("torch") is None:
        raise ValueError("bench torch needs PyTorch: pip install 'allred[torch]'")


def _check_sets(names: Iterable[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"unknown set {name!r}; choose from {', '.join(known)}")


def _sizes(text: str | None, dtype: np.dtype[Any]) -> list[int]:
    if text is None:
        return [max(config.parse_bytes(word), dtype.itemsize) for word in SIZES.split(",")]
    found = [config.parse_bytes(word) for word in text.split(",")]
    for nbytes in found:
        if nbytes == 0 or nbytes % dtype.itemsize:
            name = arrays.name_of(dtype)
            raise ValueError(f"--sizes: expected a positive multiple of {dtype.itemsize} bytes ({name}), got {nbytes}")
    return found
