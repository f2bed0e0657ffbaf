"""Benchmarks of developers: `mpirun -np 2 python benchmarks/bench.py overlap|checkpoint|hooks|horovod|ps|...`.

They have the options and the output of `python -m allred bench`, whose benchmarks are here too. In addition:

allreduce, fused    --device cuda --against nccl: raw NCCL (raw_nccl.py)
ps                  --against mpi: a parameter server in raw MPI (ps_raw_mpi.py)
overlap             steps that reduce gradients during a synthetic backward pass (overlap.py)
checkpoint          save and restore, against raw files and torch (save_restore.py)
hooks               hooked optimizers of torch without a model (torch_hooks.py)
horovod             allred.torch, and Horovod where it is installed (torch_horovod.py)
groups              process groups of two ranks at the same time (torch_groups.py)
"""

import argparse
import os
import sys

import overlap
import raw_nccl
import save_restore

from allred.bench import allreduce, command
from allred.bench.command import BENCHMARKS, Benchmark
from allred.cluster import launcher


def _add_overlap(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(overlap.SETS)
    parser.add_argument("--set", dest="sets", default="resnet50", help=f"of {names}; default %(default)s")
    parser.add_argument("--progress", choices=["thread", "caller"], default="thread", help="as ALLRED_PROGRESS")
    command.add_backend(parser)
    command.add_arrays(parser)


def _check_overlap(options: argparse.Namespace) -> None:
    options.dtype = command.dtype_of(options.dtype, None)
    options.items = options.sets.split(",")
    command.check_sets(options.items, overlap.SETS)
    os.environ["ALLRED_PROGRESS"] = options.progress
    options.init = {"backend": options.backend, "check_steps": 0}


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tensors", type=int, default=64, help="of 1024 x 1024 float32 each; default %(default)s")
    parser.add_argument("--directory", help="visible to all ranks; default: that of temporary files")
    command.add_seconds(parser)


def _check_checkpoint(options: argparse.Namespace) -> None:
    if options.tensors < 1:
        raise ValueError(f"--tensors must be at least 1, got {options.tensors}")
    if options.directory and not os.path.isdir(options.directory):
        raise ValueError(f"--directory {options.directory} is not a directory")
    options.init = {"mode": "sync", "backend": None, "check_steps": 0}


def _add_ps(parser: argparse.ArgumentParser) -> None:
    command.add_ps(parser)
    parser.add_argument("--against", choices=["mpi"], help="also time raw MPI on the same arrays, interleaved")


def _check_ps(options: argparse.Namespace) -> None:
    if options.against and (options.servers, launcher.launched_size(os.environ)) != (1, 2):
        raise ValueError("--against mpi compares one server and one worker: mpirun -np 2, and --servers 1")
    command.check_ps(options)


allreduce.BASELINES["nccl"] = raw_nccl.NcclBaseline
BENCHMARKS["ps"] = BENCHMARKS["ps"]._replace(module="ps_raw_mpi", add=_add_ps, check=_check_ps)
BENCHMARKS["overlap"] = Benchmark("overlap", "reduce during the backward pass", _add_overlap, _check_overlap)
BENCHMARKS["checkpoint"] = Benchmark(
    "save_restore",
    "save and restore, against raw files and torch",
    _add_checkpoint,
    _check_checkpoint,
    description=save_restore.__doc__,
)
BENCHMARKS["hooks"] = Benchmark(
    "torch_hooks",
    "hooked optimizers of torch without a model",
    command.add_models,
    command.check_models,
)
BENCHMARKS["horovod"] = Benchmark(
    "torch_horovod", "allred.torch, and Horovod", command.add_models, command.check_models
)
BENCHMARKS["groups"] = Benchmark(
    "torch_groups", "process groups of two ranks", command.add_seconds, lambda options: None
)

if __name__ == "__main__":
    sys.exit(command.main(sys.argv[1:], "python benchmarks/bench.py"))
