"""The arguments of `python -m allred bench`, checked: a wrong one is one line that says what would be right."""

import argparse
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np

from allred import arrays, config
from allred.bench import data, measure, sets
from allred.comm.backends.nccl_types import TYPES
from allred.compression import Compression, narrows

SIZES = "4,1KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB,256MiB"
DTYPES = [name for name in arrays.DTYPES if name != "bool"]  # it has no sum
_NOT_IN_MPI = ("float16", "bfloat16")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help lists what there is\n")


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options, checked. Raises SystemExit, after a line about what is wrong."""
    parser = _Parser(
        prog="python -m allred bench",
        description="Time collectives on all ranks that mpirun started, with verified results.",
        epilog=measure.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_subparsers(dest="bench", required=True, metavar="allreduce|fused|overlap|ps|data")
    one = what.add_parser("allreduce", help="one array in place, at several sizes")
    one.add_argument("--sizes", default=None, help=f"bytes an array, for example 4,64KiB,1MiB; default {SIZES}")
    many = what.add_parser("fused", help="many tensors of a real model in one call")
    many.add_argument("--set", dest="sets", default=",".join(sets.SETS), help="%(default)s (default: all)")
    hidden = what.add_parser("overlap", help="steps whose gradients are reduced while others are computed")
    hidden.add_argument("--set", dest="sets", default="resnet50", help=f"of {', '.join(sets.OVERLAPPED)}; %(default)s")
    hidden.add_argument("--progress", choices=["thread", "caller"], default="thread", help="as ALLRED_PROGRESS")
    served = what.add_parser("ps", help="steps with parameter servers, which are the first ranks")
    served.add_argument("--set", default="resnet50", help=f"one of {', '.join(sets.SERVED)}; default resnet50")
    served.add_argument("--servers", type=int, default=1, help="how many ranks serve; default 1")
    served.add_argument("--consistency", choices=["async", "bounded", "sync"], help="default: ALLRED_CONSISTENCY")
    read = what.add_parser(
        "data",
        help="records per second of each reader, shuffled and prefetch",
        description=data.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    read.set_defaults(malloc_tuned=False)
    for sub in (one, many, hidden):
        sub.add_argument("--backend", default=None, help="as in allred.init(); default: the setting ALLRED_BACKEND")
        sub.add_argument(
            "--compression",
            choices=[each.name for each in Compression],
            help="what wide floats travel as; another than none is timed beside none, in turns",
        )
    for sub in (one, many):
        sub.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: arrays on each rank's GPU")
        sub.add_argument(
            "--against", choices=["mpi", "nccl"], help="time raw MPI, or raw NCCL on GPUs, on the same arrays, in turns"
        )
    served.add_argument("--against", choices=["mpi"], help="time raw MPI too, on the same arrays, in turns")
    for sub in (one, many, hidden, served):
        sub.add_argument("--dtype", default="float32", help="float32 (default), or another that allred sums")
        sub.add_argument("--malloc-tuned", action="store_true", help="glibc keeps freed memory, in huge pages")
    for sub in (one, many, hidden, served, read):
        sub.add_argument("--seconds", type=float, default=3.0, help="how long to measure for a line; default 3")
        sub.add_argument("--json", action="store_true", help="one JSON object a line, and nothing else, on stdout")
    options = parser.parse_args(arguments)
    sub = {"allreduce": one, "fused": many, "overlap": hidden, "ps": served, "data": read}[options.bench]
    try:
        if sub is not read:
            options.dtype = _dtype(options.dtype, getattr(options, "against", None))
        if sub is served:
            _check_served(options)
        elif sub is not read:
            options.device = getattr(options, "device", "cpu")
            _check_device(options)
            options.compression = Compression[options.compression or "none"]
            if options.compression.value and not narrows(options.dtype, options.compression.value):
                raise ValueError(f"--compression is of float32 and float64, and --dtype is {options.dtype}")
            known = sets.OVERLAPPED if sub is hidden else sets.SETS
            options.items = _sizes(options.sizes, options.dtype) if sub is one else _sets(options.sets, known)
        if not 0 <= options.seconds < float("inf"):
            raise ValueError(f"--seconds {options.seconds:g} is not a time")
    except ValueError as error:
        sub.error(str(error))
    return options


def _dtype(name: str, against: str | None) -> np.dtype[Any]:
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}; choose one of {', '.join(DTYPES)}")
    if against == "nccl" and name not in TYPES:
        raise ValueError(f"cupy's NCCL has no {name}; leave --against out, or choose another dtype")
    if against == "mpi" and name in _NOT_IN_MPI:
        raise ValueError(f"MPI has no {name}; leave --against out, or choose another dtype")
    if name == "bfloat16":
        try:
            import ml_dtypes
        except ImportError:
            raise ValueError("bfloat16 needs ml_dtypes: pip install ml_dtypes") from None
        return np.dtype(ml_dtypes.bfloat16)  # type: ignore[no-any-return]
    return np.dtype(name)


def _check_device(options: argparse.Namespace) -> None:
    against = getattr(options, "against", None)
    if options.device == "cpu" and against == "nccl":
        raise ValueError("--against nccl is of arrays on GPUs: --device cuda")
    if options.device == "cuda":
        if against == "mpi":
            raise ValueError("--against mpi is of host arrays, and --device is cuda; compare with --against nccl")
        if options.backend not in (None, "nccl"):
            raise ValueError(f"--device cuda is of backend nccl, and --backend is {options.backend}")
        options.backend = "nccl"


def _check_served(options: argparse.Namespace) -> None:
    if options.set not in sets.SERVED:
        raise ValueError(f"unknown set {options.set!r}; choose one of {', '.join(sets.SERVED)}")
    if options.dtype not in (np.float32, np.float64):
        raise ValueError("bench ps takes float32 or float64")  # whose sums it can verify after many steps
    if options.servers < 1:
        raise ValueError(f"--servers {options.servers} must be at least 1")


def _sizes(text: str | None, dtype: np.dtype[Any]) -> list[int]:
    if text is None:
        return [max(config.parse_bytes(word), dtype.itemsize) for word in SIZES.split(",")]
    found = [config.parse_bytes(word) for word in text.split(",")]
    for nbytes in found:
        if nbytes == 0 or nbytes % dtype.itemsize:
            what = f"{nbytes} bytes are no whole number of {arrays.name_of(dtype)}"
            raise ValueError(f"{what}; take a multiple of {dtype.itemsize}")
    return found


def _sets(text: str, known: Iterable[str]) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            raise ValueError(f"unknown set {name!r}; choose from {', '.join(known)}")
    return names
