"""benchmarks/bench.py checkpoint: `opt.save` and `opt.restore` of mode sync with SGD and momentum, against raw files.

raw write    rank 0 writes the same number of bytes to a new file, syncs it, and renames it over the previous file
raw read     each rank reads a file of that size into new arrays of 4 MiB
torch.save, torch.load    of the same arrays, on rank 0 and on each rank, with the sync; where torch is installed

The calls are interleaved. The files are in --directory, and usually in the page cache when they are read.
"""

import argparse
import importlib
import importlib.util
import os
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import allred
from allred.bench import measure, output
from allred.bench.verify import WrongResultError
from allred.comm import functions

_SHAPE = (1024, 1024)


def run(options: argparse.Namespace, comm: Any, conditions: dict[str, Any]) -> None:
    """Measure; rank 0 prints. Raises WrongResultError on all ranks. Calls allred.shutdown()."""
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="allred-bench-") as own:
        directory = pathlib.Path(allred.broadcast_object(own))
        params = {f"{index}": np.full(_SHAPE, index, np.float32) for index in range(options.tensors)}
        opt = allred.distributed(allred.optim.SGD(lr=0.5, momentum=0.5))
        opt.step(params, {name: np.ones(_SHAPE, np.float32) for name in params})
        _check(opt, params, directory)
        calls = _calls(opt, params, directory)
        times = _interleave(calls, comm, options.seconds * len(calls))
    nbytes = 2 * sum(param.nbytes for param in params.values())
    writer = output.ResultWriter(options.json, enabled=comm.Get_rank() == 0)
    labels = {"ranks": comm.Get_size(), "dtype": "float32", "backend": functions.current().name}
    writer.header("checkpoint", labels, {"op": f"SGD with momentum, {options.tensors} tensors", **conditions}, "raw")
    for ours, others in (("save", ("raw write", "torch.save")), ("restore", ("raw read", "torch.load"))):
        for other in (name for name in others if name in times):
            result = output.result(times[ours], other, times[other], nbytes)
            writer.line({"bench": "checkpoint", "set": ours, "bytes": nbytes, **labels, **result, **conditions})
    comm.Free()
    allred.shutdown()


def _interleave(calls: dict[str, measure.Call], comm: Any, seconds: float) -> dict[str, measure.CallTimes]:
    """As measure.interleave, for long calls: one sample in a round, and the first round counts as warm-up."""
    begin = time.perf_counter()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in measure.rounds(begin, seconds, comm):
        for name, call in calls.items():
            times[name].append(measure.sample(call, 1, comm, measure.no_synchronize))
    return {name: measure.CallTimes(measure.slowest(each[1:], comm), 1) for name, each in times.items()}


def _check(opt: Any, params: dict[str, Any], directory: pathlib.Path) -> None:
    """Save, change and restore. Raises WrongResultError."""
    expected = {name: param.copy() for name, param in params.items()}
    opt.save(directory, params)
    for param in params.values():
        param[...] = -1
    opt.restore(directory, params)
    wrong = [name for name, param in params.items() if param.tobytes() != expected[name].tobytes()]
    if any(functions.allgather_object(bool(wrong))):
        raise WrongResultError("checkpoint: the restored parameters differ from the saved ones")


def _calls(opt: Any, params: dict[str, Any], directory: pathlib.Path) -> dict[str, Callable[[], object]]:
    """Return the calls. Each ends on all ranks at once, so that no rank reads what another one writes."""
    is_first = functions.current().rank == 0
    nbytes = next(next(directory.glob("step-*")).glob("shard-*")).stat().st_size
    content = np.ones(nbytes if is_first else 0, np.uint8)
    files: dict[str, Callable[[str], None]] = {"raw": lambda name: _write(directory / name, content.tofile)}
    if (save := _torch_save(params)) is not None:
        files["torch"] = lambda name: _write(directory / name, save)
    if is_first:
        for kind, write in files.items():
            write(f"{kind} read")

    def together(call: Callable[[], object], on_all: bool = True) -> Callable[[], None]:
        def both() -> None:
            if on_all or is_first:
                call()
            allred.barrier()

        return both

    calls: dict[str, Callable[[], object]] = {
        "save": together(lambda: opt.save(directory, params)),
        "raw write": together(lambda: files["raw"]("raw written"), on_all=False),
        "restore": together(lambda: opt.restore(directory, params)),
        "raw read": together(lambda: _read(directory / "raw read")),
    }
    if "torch" in files:
        calls["torch.save"] = together(lambda: files["torch"]("torch written"), on_all=False)
        calls["torch.load"] = together(lambda: _torch_load(directory / "torch read"))
    allred.barrier()
    return calls


def _torch_save(params: dict[str, Any]) -> Callable[[Any], object] | None:
    """Return a function that saves parameters and momentum into a file; None without torch."""
    if importlib.util.find_spec("torch") is None:
        return None
    torch: Any = importlib.import_module("torch")
    state = {name: torch.from_numpy(param) for name, param in params.items()}
    both = {"params": state, "momentum": {name: param.clone() for name, param in state.items()}}
    return lambda file: torch.save(both, file)


def _torch_load(path: pathlib.Path) -> object:
    torch: Any = importlib.import_module("torch")
    return torch.load(path)


def _write(path: pathlib.Path, write: Callable[[Any], object]) -> None:
    """Write a file, sync it to disk, and rename it over the previous one."""
    new = path.with_suffix(".new")
    with open(new, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _read(path: pathlib.Path) -> list[Any]:
    with open(path, "rb", buffering=0) as file:
        arrays = [np.empty(_SHAPE, np.float32) for _ in range(os.fstat(file.fileno()).st_size // (4 << 20))]
        for array in arrays:
            file.readinto(array.reshape(-1).view(np.uint8).data)
    return arrays
