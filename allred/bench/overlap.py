"""`bench overlap`: how much of the communication disappears behind a backward pass, on the user's own path.

A step is a synthetic backward pass that makes the gradients of a model, the last layer first, and `opt.step` of a
distributed optimizer that itself does nothing. The pass takes about as long as the communication alone, where there is
most to gain: between their sum and the longer of the two. Its parts, one for each tensor, are as long as these are
large.

    sleep    the core is free meanwhile, as when a GPU computes
    numpy    the core computes, in numpy: a thread for the communication only takes cycles from it
    python   the same in one call of Python's own at a time, which keeps the GIL

after: step() communicates when all is computed. early: opt.reduce(name, grad) after each part. share: (after - early)
/ (compute + communicate - max of the two): how much of what could disappear has. --progress: who moves the buckets. The
last lines are of a rank's peers: the time of an allreduce of 64 KiB that all ranks have started, while
rank 0 is in one call that keeps the GIL for `busy_ms`, and while it waits.
"""

import argparse
import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import allred
from allred.arrays import Array
from allred.bench import measure, sets, setting, table, ways
from allred.bench.measure import Call
from allred.cluster import mpi
from allred.comm import functions
from allred.errors import ConfigError

Part = Callable[[float], object]
BUSY_S = 0.2
PEER_BYTES = 65536


class _Nothing:
    """An optimizer that leaves the parameters as they are."""

    def step(self, params: Any, grads: Any) -> None:
        pass


def run(options: argparse.Namespace, command: str) -> None:
    """Measure, and print on rank 0."""
    mpi_settings = setting.before_mpi(against=False)
    os.environ["ALLRED_PROGRESS"] = options.progress
    allred.init(backend=options.backend, banner=False, check_steps=0)
    MPI, _ = mpi.load()  # noqa: N806  (mpi4py's spelling)
    if MPI is None:
        raise ConfigError("a benchmark's barriers need an MPI, and none could be loaded; pip install 'allred[mpich]'")
    comm = MPI.COMM_WORLD.Dup()
    where = {
        **setting.describe(comm, mpi_settings),
        "allred": allred.__version__,
        "command": f"mpirun -np {comm.Get_size()} {command}",
    }
    common = {"ranks": comm.Get_size(), "backend": functions.current().name, "progress": options.progress}
    speaks = comm.Get_rank() == 0
    assert not functions.current().queue.engine.has_progress_thread
    if speaks and not options.json:
        print(f"overlap: {common['ranks']} ranks, backend {common['backend']}, progress {common['progress']}")
        print(*setting.lines(where), sep="\n")
    for name in options.items:  # the first step with reduce() starts the thread
        for numbers in _steps(name, options, comm):
            _tell({"bench": "overlap", "set": name, **common, **numbers, **where}, options.json, speaks)
    for numbers in _peers(comm):
        _tell({"bench": "overlap", "set": "peers", **common, **numbers, **where}, options.json, speaks)
    comm.Free()
    allred.shutdown()


def _steps(name: str, options: argparse.Namespace, comm: Any) -> Iterator[dict[str, Any]]:
    """A line for each kind of backward pass."""
    group = ways.allocate(sets.OVERLAPPED[name](), options.dtype)
    grads = {f"{index:04}": array for index, array in enumerate(group)}
    opt = allred.distributed(_Nothing(), name=name)
    for _ in range(2):  # from the second on they go out early
        _step(opt, grads, 0.0, _sleep, early=True)
    alone = measure.measure({"step": lambda: opt.step(grads, grads)}, comm, options.seconds / 2)
    compute_s = float(np.median(alone["step"].seconds))
    for kind, part in (("sleep", _sleep), ("numpy", _numpy()), ("python", _python())):
        calls: dict[str, Call] = {
            "compute": functools.partial(_backward, grads, compute_s, part, None),
            "after": functools.partial(_step, opt, grads, compute_s, part, False),
            "early": functools.partial(_step, opt, grads, compute_s, part, True),
        }
        samples = measure.measure(calls, comm, options.seconds)
        compute, after, early = (samples[way].us(50) for way in calls)
        communicate = compute_s * 1e6
        most = compute + communicate - max(compute, communicate)
        yield {
            "backward": kind,
            "compute_us": table.short(compute),
            "communicate_us": table.short(communicate),
            "after_us": table.short(after),
            "early_us": table.short(early),
            "share": table.short((after - early) / most),
            "samples": len(samples["early"].seconds),
        }


def _step(opt: Any, grads: dict[str, Array], compute_s: float, part: Part, early: bool) -> None:
    _backward(grads, compute_s, part, opt if early else None)
    opt.step(grads, grads)


def _backward(grads: dict[str, Array], compute_s: float, part: Part, opt: Any) -> None:
    """A part for each tensor. They are sliced so that the sleeps come out right: what took too long is taken off."""
    whole, end = sum(grad.size for grad in grads.values()), time.perf_counter()
    for name in reversed(grads):
        end += compute_s * grads[name].size / whole
        if part is not _sleep:
            part(compute_s * grads[name].size / whole)
        elif (left := end - time.perf_counter()) > 0:
            part(left)
        if opt is not None:
            opt.reduce(name, grads[name])


def _sleep(seconds: float) -> None:
    time.sleep(seconds)


def _numpy() -> Part:
    """Work in numpy of a given time, as long as nothing else is on the core."""
    x, y = np.full(8192, 1.1, np.float32), np.empty(8192, np.float32)
    return _repeated(lambda count: [np.sqrt(x, out=y) for _ in range(count)])


def _python() -> Part:
    return _repeated(lambda count: sum(range(100 * count)))


def _repeated(work: Callable[[int], object]) -> Part:
    work(1000)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        work(2000)
        times.append((time.perf_counter() - start) / 2000)
    each_s = min(times)
    return lambda seconds: work(max(1, round(seconds / each_s)))


def _peers(comm: Any) -> list[dict[str, Any]]:
    """How long rank 0's peers wait for each of many allreduces while it is busy, and while it is not."""
    busy, found = _python(), []
    arrays_ = ways.allocate([(PEER_BYTES // 4,)] * 200, np.dtype(np.float32))
    for state in ("waits", "busy"):
        times: list[float] = []
        for _ in range(5):
            comm.Barrier()
            works = [allred.allreduce_async_(array, allred.Sum) for array in arrays_]
            if comm.Get_rank() == 0 and state == "busy":
                busy(BUSY_S)
            for work in works:
                start = time.perf_counter()
                work.wait()
                times.append(time.perf_counter() - start)
        everyone = comm.gather(times)
        if everyone is not None and len(everyone) > 1:
            us = np.array(everyone[1:]).reshape(-1) * 1e6
            found.append(
                {
                    "rank_0": state,
                    "busy_ms": BUSY_S * 1e3,
                    "bytes": PEER_BYTES,
                    "p50_us": table.short(float(np.percentile(us, 50))),
                    "p99_us": table.short(float(np.percentile(us, 99))),
                    "longest_us": table.short(float(us.max())),
                }
            )
    return comm.bcast(found)  # type: ignore[no-any-return]


def _tell(record: dict[str, Any], as_json: bool, speaks: bool) -> None:
    if not speaks:
        return
    if as_json:
        table.Printer(True, True).line(record)
        return
    texts = {key: table.number(value) for key, value in record.items() if key.endswith(("_us", "share"))}
    head = f"{record['set']:>12} {record.get('backward') or 'rank 0 ' + record['rank_0']:>12}"
    print(head + "".join(f"  {key.removesuffix('_us')} {text}" for key, text in texts.items()), flush=True)
